//! Benchmarks of uzram against alternatives: the in-process benchmark, codecs, NBD, block devices and swap,
//! the pager, programs in less memory and in swap, cold pages on other machines, hit ratios, daemons that
//! outlive the process that serves, and the project's targets.
//!
//! It uses the engine's public API; the engine does not depend on it. Two things that are compared are
//! measured alternately in one run, because machines change their speed from minute to minute. Each benchmark
//! is a function from [`harness::Options`] to a [`harness::Report`]: named figures and notes.
//!
//! An error ends a benchmark, and removes what it added and started. `Unsupported` says what this machine
//! lacks, `Invalid` names an option, `Corrupt` a page that does not read back, and `Busy` is an interruption.

pub mod block;
pub mod codecs;
pub mod engine;
pub mod harness;
pub mod nbd;
pub mod pager;
pub mod programs;
pub mod remote;
pub mod run;
pub mod swap;
pub mod take_over;
pub mod targets;
pub mod user;
mod workload;
