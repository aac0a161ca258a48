//! The lowest layer: used by all others. A module imports only from those declared before it.

pub mod error;
pub mod clock;
pub mod units;
pub mod file_size;
pub mod named;
pub mod random;
pub mod trusted_path;
pub mod mountinfo;
pub mod machine_memory;
pub mod cpu;
pub mod sync;
#[cfg(not(loom))]
pub mod failures;
/// Models have no thread that reports failures.
#[cfg(loom)]
pub mod failures {
    /// Wakes nobody.
    pub fn note() {}
}
pub mod thread;
pub mod counters;
pub mod mem;
pub mod work;
