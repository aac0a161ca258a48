//! Dropping capabilities in all threads.
//!
//! Linux keeps capabilities per thread, and a thread can change only its own (capset(2)). So each thread gets
//! a signal, whose handler drops them; glibc does the same for setuid(2).

use std::ffi::c_int;
use std::fs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::system::process_status::status_field;

/// How long all threads together may take.
const PATIENCE: Duration = Duration::from_secs(30);
const PERIOD: Duration = Duration::from_millis(1);
/// Name prefix of the kernel's io_uring threads, which take no signals and run no user code.
const KERNELS_THREADS: &str = "iou-";

static KEPT: AtomicU64 = AtomicU64::new(u64::MAX);

/// Drops all capabilities but `kept` in all threads, irrevocably.
pub fn keep(kept: CapabilitySet) -> io::Result<()> {
    KEPT.store(kept.bits(), Ordering::SeqCst);
    lower()?;
    let signal = libc::SIGRTMAX();
    install(signal)?;
    let own = rustix::thread::gettid();
    let deadline = Instant::now() + PATIENCE;
    // During a scan, a thread with capabilities may start another one, which the scan misses; a second scan
    // finds it.
    let mut clean_looks = 0;
    while clean_looks < 2 {
        let left: Vec<Thread> = threads()?.into_iter().filter(|thread| thread.has_more_than(kept)).collect();
        let Some(first) = left.first() else {
            clean_looks += 1;
            continue;
        };
        clean_looks = 0;
        if Instant::now() >= deadline {
            return Err(io::Error::other(format!("thread '{}' did not respond", first.name)));
        }
        for thread in left.iter().filter(|thread| thread.id != own.as_raw_nonzero().get()) {
            // SAFETY: the call takes only numbers, and the handler is installed above. If the thread has
            // ended, the call fails, which is fine.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread.id, signal) };
        }
        thread::sleep(PERIOD);
    }
    Ok(())
}

fn lower() -> rustix::io::Result<()> {
    let kept = CapabilitySet::from_bits_retain(KEPT.load(Ordering::SeqCst));
    let CapabilitySets { effective, permitted, .. } = rustix::thread::capabilities(None)?;
    let (effective, permitted) = (effective & kept, permitted & kept);
    let inheritable = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective, permitted, inheritable })
}

/// Installs a signal handler that drops the capabilities of the thread that runs it.
fn install(signal: c_int) -> io::Result<()> {
    extern "C" fn on_signal(_: c_int) {
        // SAFETY: errno is the thread's own.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        let saved = unsafe { *errno };
        // Async-signal-safe: two system calls and nothing else. `keep` checks the result.
        let _ = lower();
        // SAFETY: as above.
        unsafe { *errno = saved };
    }
    // SAFETY: all fields of the structure are integers, a bit set and a nullable pointer: zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as extern "C" fn(c_int) as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: `action` is initialized, and its handler makes only async-signal-safe calls.
    match unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

struct Thread {
    id: i32,
    name: String,
    permitted: CapabilitySet,
}

impl Thread {
    fn has_more_than(&self, kept: CapabilitySet) -> bool {
        !self.name.starts_with(KERNELS_THREADS) && !kept.contains(self.permitted)
    }

    fn parse(status: &str) -> Option<Thread> {
        // The last one is that of its own PID namespace; `/proc` may be that of another.
        let id = status_field(status, "NSpid")?.split_ascii_whitespace().next_back()?.parse().ok()?;
        let permitted = u64::from_str_radix(status_field(status, "CapPrm")?, 16).ok()?;
        let permitted = CapabilitySet::from_bits_retain(permitted);
        Some(Thread { id, name: status_field(status, "Name")?.to_owned(), permitted })
    }
}

fn threads() -> io::Result<Vec<Thread>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir("/proc/self/task")? {
        // The thread may have ended meanwhile.
        let Ok(status) = fs::read_to_string(entry?.path().join("status")) else { continue };
        threads.extend(Thread::parse(&status));
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_capabilities_are_read() {
        let status = "Name:\tnbd\nNSpid:\t4711\t7\nUmask:\t0022\nCapInh:\t0000000000000000\nCapPrm:\t0000000000200001\n";
        let thread = Thread::parse(status).unwrap();
        assert_eq!((thread.id, thread.name.as_str()), (7, "nbd"));
        assert_eq!(thread.permitted, CapabilitySet::CHOWN | CapabilitySet::SYS_ADMIN);
        assert!(
            thread.has_more_than(CapabilitySet::SYS_ADMIN) && thread.has_more_than(CapabilitySet::empty())
        );
        assert!(!thread.has_more_than(CapabilitySet::all()));
        assert!(Thread::parse("Name:\tnbd\nNSpid:\t7\n").is_none());
    }
}
