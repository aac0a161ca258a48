//! The lowest layer: used by all others.

pub mod clock;
pub mod counters;
pub mod cpu;
pub mod error;
pub mod failures;
pub mod file_size;
#[cfg(not(loom))]
pub mod machine_memory;
pub mod mem;
#[cfg(not(loom))]
pub mod mountinfo;
pub mod named;
pub mod random;
pub mod sync;
#[cfg(not(loom))]
pub mod thread;
pub mod trusted_path;
pub mod units;
pub mod work;
