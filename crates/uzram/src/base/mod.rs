//! The lowest layer: used by all others. A module imports only from those declared before it.

pub mod error;
pub mod clock;
pub mod units;
pub mod file_size;
pub mod named;
pub mod random;
pub mod trusted_path;
#[cfg(not(loom))]
pub mod mountinfo;
#[cfg(not(loom))]
pub mod machine_memory;
pub mod cpu;
pub mod sync;
pub mod failures;
#[cfg(not(loom))]
pub mod thread;
pub mod counters;
pub mod mem;
pub mod work;
