//! The CPU time and context switches of a thread so far, as the kernel counts them.

use std::mem::MaybeUninit;
use std::ops::{AddAssign, Sub};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use uzram::{Error, ErrorKind, Result};

/// Returns the CPU time of the calling thread.
#[inline]
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Processor time and context switches (getrusage(2)).
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// In user space.
    pub user: Duration,
    /// In the kernel.
    pub system: Duration,
    /// How often the thread gave up its CPU to sleep.
    pub voluntary_switches: u64,
    /// How often it was preempted.
    pub involuntary_switches: u64,
}

impl Usage {
    /// Returns the usage of the calling thread since it started.
    pub fn of_this_thread() -> Result<Usage> {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // The kernel brings the thread's running time up to date for this clock only; without it, getrusage
        // misses what ran since the last tick, some ms.
        let _ = thread_time();
        // SAFETY: the pointer is to memory for one `rusage`, which the call fills; one of zeros is valid.
        let (answer, usage) =
            unsafe { (libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()), usage.assume_init()) };
        if answer != 0 {
            let error = std::io::Error::last_os_error();
            return Err(Error::new(ErrorKind::Io, format!("cannot read the CPU time used: {error}")));
        }
        // None of them is ever negative.
        let micros =
            |time: libc::timeval| time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs();
        Ok(Usage {
            user: Duration::from_micros(micros(usage.ru_utime)),
            system: Duration::from_micros(micros(usage.ru_stime)),
            voluntary_switches: usage.ru_nvcsw.unsigned_abs(),
            involuntary_switches: usage.ru_nivcsw.unsigned_abs(),
        })
    }
}

impl Sub for Usage {
    type Output = Usage;

    fn sub(self, earlier: Usage) -> Usage {
        Usage {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
            voluntary_switches: self.voluntary_switches - earlier.voluntary_switches,
            involuntary_switches: self.involuntary_switches - earlier.involuntary_switches,
        }
    }
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Usage) {
        self.user += other.user;
        self.system += other.system;
        self.voluntary_switches += other.voluntary_switches;
        self.involuntary_switches += other.involuntary_switches;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_and_works_is_seen_to() {
        let start = Usage::of_this_thread().unwrap();
        (0..3).for_each(|_| std::thread::sleep(Duration::from_millis(1)));
        let began = std::time::Instant::now();
        let mut used = Usage::default();
        while used.user + used.system < Duration::from_millis(5) {
            assert!(began.elapsed() < Duration::from_secs(10), "{used:?}");
            used = Usage::of_this_thread().unwrap() - start;
        }
        assert!(used.voluntary_switches >= 3, "{used:?}");
        let mut twice = used;
        twice += used;
        assert_eq!(twice.user, 2 * used.user);
    }
}
