//! The engine's own threads. Loom models start none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle, ScopedJoinHandle};

use super::error::{Error, ErrorKind, Result};
use super::sync::{AtomicU64, Ordering};

/// Starts a thread.
///
/// # Errors
/// `NoMemory` when the system gives none.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    Builder::new().name(name.into()).spawn(run).map_err(|error| {
        Error::new(ErrorKind::NoMemory, format!("cannot start the thread '{name}': {error}"))
    })
}

/// Starts a thread that other threads wait for. If `run` panics, calls `died` with the reason, so that they do not wait
/// for ever. The panic hook has reported the panic by then.
///
/// # Errors
/// As [`spawn`].
pub(crate) fn spawn_relied_on<S: Send + 'static>(
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

/// Has the calling thread run only when a CPU would be idle otherwise (`SCHED_IDLE`, sched(7)), if the system allows it. A
/// user without privileges cannot take that back, so it is for threads that do nothing else, and hold no lock that others
/// wait for.
pub(crate) fn run_when_idle() {
    let attr = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_IDLE.cast_unsigned(),
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the call reads the struct, whose length is in it. 0 is the calling thread.
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

/// Calls `work` on as many threads as CPUs are available, this one included, with an iterator over the units that the
/// thread is to work on: each below `units` comes once. Returns what the calls returned. Where no other thread can be
/// started this one works alone.
pub(crate) fn share_out<T: Send>(
    units: usize,
    work: impl Fn(&mut dyn Iterator<Item = usize>) -> T + Sync,
) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(units).max(1);
    let next = AtomicU64::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed) as usize).filter(|unit| *unit < units);
    let work = || work(&mut std::iter::from_fn(take));
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..threads).filter_map(|_| Builder::new().spawn_scoped(scope, work).ok()).collect();
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
    fn each_unit_comes_once() {
        for units in [0, 1, 2, 1000] {
            let mut seen: Vec<_> = share_out(units, |units| units.collect::<Vec<_>>()).concat();
            seen.sort_unstable();
            assert_eq!(seen, (0..units).collect::<Vec<_>>());
        }
    }
}
