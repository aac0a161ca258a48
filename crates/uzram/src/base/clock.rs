//! The time in seconds, which is precise enough for idle tracking.

use rustix::time::{ClockId, clock_gettime};

/// Returns the seconds since boot, without time in suspend; never 0. It takes some ns and no system call, and may
/// lag by a tick of the system's clock, some ms.
#[inline]
pub fn uptime_s() -> u32 {
    u32::try_from(clock_gettime(ClockId::MonotonicCoarse).tv_sec).unwrap_or(u32::MAX).max(1)
}
