//! Tests of the whole crate from outside, in one program.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

mod allocations;
mod alone;
#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64", not(loom)))]
mod calls;
#[cfg(all(target_os = "linux", not(loom)))]
mod cgroup;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod codec_no_alloc;
#[cfg(target_arch = "x86_64")]
mod crash;
#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64", not(loom)))]
mod hops;
#[cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64", not(loom)))]
mod hot_path;
mod layers;
#[cfg(feature = "lock-stats")]
mod lock_stats;
#[cfg(all(target_arch = "x86_64", not(loom)))]
mod noswap;
#[cfg(all(target_os = "linux", not(loom)))]
mod reserve;

/// Waits until something is so, for a minute at most. Returns whether it is.
fn wait_until(is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}
