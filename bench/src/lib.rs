//! Measures uzram beside what it is compared with: the in-process benchmark, NBD, block devices and swap,
//! hit ratios, and the targets that the project is judged by.
//!
//! It uses the engine's public API; the engine knows nothing of it. Two things that are compared are
//! measured in turn in one run, because machines change their speed from minute to minute.

pub mod block;
pub mod engine;
pub mod harness;
pub mod nbd;
pub mod targets;
