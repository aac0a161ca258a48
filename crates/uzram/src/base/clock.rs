//! Clocks: the time in seconds, which is precise enough for idle tracking, and the CPU time of a thread.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the seconds since boot, without suspend; never 0. Makes no system call, and may lag by some ms.
#[inline]
pub fn uptime_s() -> u32 {
    u32::try_from(clock_gettime(ClockId::MonotonicCoarse).tv_sec).unwrap_or(u32::MAX).max(1)
}

/// Returns the CPU time that the calling thread has taken so far.
pub fn thread_cpu_time() -> Duration {
    // It is never negative.
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}
