//! The engine's own threads. Loom models start none.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle, ScopedJoinHandle};

use libc::sched_attr;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

use super::error::{Error, ErrorKind, Result};
use super::sync::{AtomicU64, Ordering};

/// Starts a thread. Fails with `NoMemory` when the system gives none.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    Builder::new().name(name.into()).spawn(run).map_err(|error| {
        Error::new(ErrorKind::NoMemory, format!("cannot start the thread '{name}': {error}"))
    })
}

/// Starts a thread that other threads wait for. If `run` panics, calls `died` with the reason, so that they
/// do not wait for ever. The panic hook has reported the panic by then. Errors: `NoMemory`.
pub fn spawn_relied_on<S: Send + 'static>(
    name: &str,
    mut state: S,
    run: impl FnOnce(&mut S) + Send + 'static,
    died: impl FnOnce(&mut S, &str) + Send + 'static,
) -> Result<JoinHandle<()>> {
    let named = name.to_owned();
    spawn(name, move || {
        // After a panic, data of `run` is unused, protected by its own locks, or what `died` expects.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&mut state))) {
            let what = panic.downcast_ref::<String>().map(String::as_str);
            let what = what.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            died(&mut state, &format!("the thread '{named}' has panicked, a defect of uzram: {what}"));
        }
    })
}

/// Returns how a thread, 0 for the calling one, is scheduled. Fails with the system's error, for example when
/// a sandbox forbids the call, or there is no such thread.
pub fn scheduling(thread: u32) -> io::Result<sched_attr> {
    let size = size_of::<sched_attr>() as u32;
    // SAFETY: all fields of the structure are integers: zeros are valid.
    let mut attr: sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the attributes are valid for writes of `size` bytes.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attr, size, 0) };
    if result == 0 { Ok(attr) } else { Err(io::Error::last_os_error()) }
}

/// Sets how a thread, 0 for the calling one, is scheduled. Fails as [`scheduling`], or when the user lacks
/// the privilege.
pub fn set_scheduling(thread: u32, attr: &sched_attr) -> io::Result<()> {
    // SAFETY: the call reads the struct, whose length is in it.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const *attr, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Has a thread, 0 for the calling one, run only when a CPU would be idle otherwise (`SCHED_IDLE`, sched(7)),
/// if the system allows it. A user without privileges cannot take that back, so it is for threads that do
/// nothing else, and hold no lock that others wait for.
pub fn run_when_idle(thread: u32) {
    let _ = scheduling(thread).and_then(|mut attr| {
        (attr.sched_policy, attr.sched_nice, attr.sched_runtime) = (libc::SCHED_IDLE.cast_unsigned(), 0, 0);
        set_scheduling(thread, &attr)
    });
}

/// Other CPUs than a thread's, for the threads that it starts.
///
/// The kernel starts a thread where its parent is if no CPU is idle, and leaves it there for as long as such
/// threads live: also if a CPU runs nothing but a thread that is to leave it to others ([`run_when_idle`]).
pub(crate) struct OtherCpus {
    allowed: CpuSet,
    here: usize,
}

impl OtherCpus {
    /// Returns the CPUs other than the calling thread's; `None` if the system does not tell.
    pub(crate) fn new() -> Option<OtherCpus> {
        let allowed = sched_getaffinity(None).ok()?;
        Some(OtherCpus { allowed, here: sched_getcpu() })
    }

    /// Moves the calling thread to the `n`th of these CPUs, or another if there are fewer. From there the
    /// kernel may move it to any that it may use.
    pub(crate) fn move_to(&self, n: usize) {
        let others = (0..CpuSet::MAX_CPU).filter(|cpu| *cpu != self.here && self.allowed.is_set(*cpu));
        let count = others.clone().count();
        let Some(other) = n.checked_rem(count).and_then(|n| others.clone().nth(n)) else { return };
        // Where it is refused, the thread stays where it is.
        if sched_setaffinity(None, &only(other)).is_ok() {
            let _ = sched_setaffinity(None, &self.allowed);
        }
    }
}

fn only(cpu: usize) -> CpuSet {
    let mut only = CpuSet::new();
    only.set(cpu);
    only
}

/// Pins the calling thread to its CPU, so that what a test does with per-CPU lists is the same each time.
#[cfg(test)]
pub(crate) fn pin_to_current_cpu() {
    sched_setaffinity(None, &only(sched_getcpu())).expect("it runs there");
}

/// Returns each CPU that this thread may use, alone. Call it before binding the thread to one of them.
#[cfg(all(test, not(loom)))]
pub(crate) fn allowed_cpus() -> Vec<CpuSet> {
    let allowed = sched_getaffinity(None).expect("the system tells");
    (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(only).collect()
}

/// Calls `work` on as many threads as CPUs are available, this one included, with an iterator over the units
/// that the thread is to work on: each below `units` comes once. Returns what the calls returned. Where no
/// other thread can be started this one works alone.
pub(crate) fn share_out<T: Send>(
    units: usize,
    work: impl Fn(&mut dyn Iterator<Item = usize>) -> T + Sync,
) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(units).max(1);
    let next = AtomicU64::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed) as usize).filter(|unit| *unit < units);
    let work = || work(&mut std::iter::from_fn(take));
    let cpus = &OtherCpus::new();
    std::thread::scope(|scope| {
        let other = |nth| {
            move || {
                cpus.iter().for_each(|cpus| cpus.move_to(nth));
                work()
            }
        };
        let others: Vec<_> =
            (0..threads - 1).filter_map(|nth| Builder::new().spawn_scoped(scope, other(nth)).ok()).collect();
        let mut done = vec![work()];
        let join = |thread: ScopedJoinHandle<'_, T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        done.extend(others.into_iter().map(join));
        done
    })
}

/// Faults in enough of this thread's stack that it takes no page fault while other threads wait for it.
#[inline(never)]
pub(crate) fn touch_stack() {
    std::hint::black_box(&mut [0u8; 128 << 10]);
}

/// Waits for a thread that was told to end, unless it is the calling thread itself.
pub(crate) fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        thread.thread().unpark();
        // The panic hook has reported a panic already.
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_moves_to_another_cpu_and_may_leave_it() {
        let Some(cpus) = OtherCpus::new() else {
            return println!("skipped: the system does not tell the CPUs");
        };
        let others =
            (0..CpuSet::MAX_CPU).filter(|cpu| *cpu != cpus.here && cpus.allowed.is_set(*cpu)).count();
        for nth in 0..3 {
            let cpus = &cpus;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let moved = (0..100).any(|_| {
                        cpus.move_to(nth);
                        sched_getcpu() != cpus.here
                    });
                    assert!(moved || others == 0);
                    assert_eq!(sched_getaffinity(None).expect("as before"), cpus.allowed);
                });
            });
        }
    }

    #[test]
    fn each_unit_comes_once() {
        for units in [0, 1, 2, 1000] {
            let mut seen: Vec<_> = share_out(units, |units| units.collect::<Vec<_>>()).concat();
            seen.sort_unstable();
            assert_eq!(seen, (0..units).collect::<Vec<_>>());
        }
    }
}
