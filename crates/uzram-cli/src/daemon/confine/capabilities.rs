//! Giving up capabilities, in all threads.
//!
//! Linux keeps them for each thread, and a thread can change its own alone (capset(2)). So each is sent a signal, in
//! whose handler it does; glibc does the same for setuid(2).

use std::ffi::c_int;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::system::process_status::status_field;

/// How long threads may take.
const PATIENCE: Duration = Duration::from_secs(30);
const PERIOD: Duration = Duration::from_millis(1);
/// What the names of the kernel's own threads for io_uring begin with, which take no signals and run no code of ours.
const KERNELS_THREADS: &str = "iou-";

/// The capabilities that a thread which is sent the signal keeps.
static KEPT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Has all threads keep these capabilities at most, for good.
///
/// # Errors
/// The kernel refuses; a thread did not give them up in time.
pub fn keep(kept: CapabilitySet) -> io::Result<()> {
    KEPT.store(kept.bits(), Ordering::SeqCst);
    lower()?;
    let signal = libc::SIGRTMAX();
    install(signal)?;
    let own = rustix::thread::gettid();
    let deadline = Instant::now() + PATIENCE;
    // While it is looked, a thread may be started by one that still has them, and be missed: the second look finds it.
    let mut clean_looks = 0;
    while clean_looks < 2 {
        let left: Vec<Thread> = threads()?.into_iter().filter(|thread| thread.has_more_than(kept)).collect();
        let Some(first) = left.first() else {
            clean_looks += 1;
            continue;
        };
        clean_looks = 0;
        if Instant::now() >= deadline {
            return Err(io::Error::other(format!("thread '{}' did not answer", first.name)));
        }
        for thread in left.iter().filter(|thread| thread.id != own.as_raw_nonzero().get()) {
            // SAFETY: the call takes numbers only; the handler is installed. A thread that is gone is no failure.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread.id, signal) };
        }
        thread::sleep(PERIOD);
    }
    Ok(())
}

/// Gives up the calling thread's.
fn lower() -> rustix::io::Result<()> {
    let kept = CapabilitySet::from_bits_retain(KEPT.load(Ordering::SeqCst));
    let CapabilitySets { effective, permitted, .. } = rustix::thread::capabilities(None)?;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: effective & kept,
            permitted: permitted & kept,
            inheritable: CapabilitySet::empty(),
        },
    )
}

/// Has the signal do it in the thread that it is sent to, which then goes on with what it was doing.
fn install(signal: c_int) -> io::Result<()> {
    extern "C" fn on_signal(_: c_int) {
        // SAFETY: errno is the thread's own.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        let saved = unsafe { *errno };
        // Two system calls and nothing else, as in any handler. Whether they worked is seen from outside.
        let _ = lower();
        // SAFETY: as above.
        unsafe { *errno = saved };
    }
    // SAFETY: a structure of numbers, a set of bits and an address that may be null.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as extern "C" fn(c_int) as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: `action` is whole, and its handler calls nothing that a handler may not.
    match unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A thread of this process.
struct Thread {
    id: i32,
    name: String,
    permitted: CapabilitySet,
}

impl Thread {
    fn has_more_than(&self, kept: CapabilitySet) -> bool {
        !self.name.starts_with(KERNELS_THREADS) && !kept.contains(self.permitted)
    }

    /// What proc_pid_status(5) says of it.
    fn parse(id: i32, status: &str) -> Option<Thread> {
        let permitted = u64::from_str_radix(status_field(status, "CapPrm")?, 16).ok()?;
        let permitted = CapabilitySet::from_bits_retain(permitted);
        Some(Thread { id, name: status_field(status, "Name")?.to_owned(), permitted })
    }
}

fn threads() -> io::Result<Vec<Thread>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir("/proc/self/task")? {
        let entry = entry?;
        let id = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // One that has ended meanwhile has none.
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
        threads.extend(id.and_then(|id| Thread::parse(id, &status)));
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_threads_capabilities_are_read() {
        let status = "Name:\tnbd\nUmask:\t0022\nCapInh:\t0000000000000000\nCapPrm:\t0000000000200001\n";
        let thread = Thread::parse(7, status).unwrap();
        assert_eq!((thread.id, thread.name.as_str()), (7, "nbd"));
        assert_eq!(thread.permitted, CapabilitySet::CHOWN | CapabilitySet::SYS_ADMIN);
        assert!(
            thread.has_more_than(CapabilitySet::SYS_ADMIN) && thread.has_more_than(CapabilitySet::empty())
        );
        assert!(!thread.has_more_than(CapabilitySet::all()));
        assert!(Thread::parse(7, "Name:\tnbd\n").is_none());
    }

    #[test]
    fn all_threads_give_up_one_and_go_on() {
        // The process that runs the tests has others in its threads: one that none of them needs.
        let kept = CapabilitySet::from_bits_retain(u64::MAX) - CapabilitySet::WAKE_ALARM;
        let (sender, wakes) = mpsc::channel::<()>();
        let waits = thread::spawn(move || {
            let woken = wakes.recv();
            (woken, rustix::thread::capabilities(None).unwrap())
        });
        keep(kept).unwrap();
        sender.send(()).unwrap();
        let (woken, sets) = waits.join().unwrap();
        assert_eq!(woken, Ok(()));
        assert!(!sets.permitted.contains(CapabilitySet::WAKE_ALARM));
        assert!(threads().unwrap().iter().all(|thread| !thread.has_more_than(kept)));
    }
}
