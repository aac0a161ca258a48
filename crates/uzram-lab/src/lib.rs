//! Measures uzram: page corpora out of what the machine has, the in-process benchmark, the NBD
//! benchmark, and the targets they are judged by.
//!
//! Everything here stands on the engine's public API; nothing of the engine knows about it.
//! Measurements of two things are always interleaved in one run, because the machines they run
//! on change their speed from minute to minute.

pub mod bench;
pub mod corpus;
pub mod nbd_bench;
pub mod stats;
pub mod targets;
