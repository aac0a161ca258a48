//! What everything else stands on.

pub mod clock;
pub mod cpu;
pub mod error;
pub mod mem;
pub mod random;
pub mod sync;
pub mod units;
