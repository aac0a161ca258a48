//! The time in seconds, which is enough to tell what is idle.

use rustix::time::{ClockId, clock_gettime};

/// Seconds since the system started, suspended ones left out; never 0. It takes some ns and no system call, and
/// may be behind by a tick of the system's clock, some ms.
#[inline]
pub fn uptime_s() -> u32 {
    u32::try_from(clock_gettime(ClockId::MonotonicCoarse).tv_sec).unwrap_or(u32::MAX).max(1)
}
