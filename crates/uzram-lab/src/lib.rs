//! Measures uzram: page corpora out of what the machine has, the in-process benchmark, the NBD
//! benchmark, that of block devices and swap, hit ratios, the targets they are judged by, and experiments that repeat kernel patch series.
//!
//! Everything here stands on the engine's public API; nothing of the engine knows about it.
//! Measurements of two things are always interleaved in one run, because the machines they run
//! on change their speed from minute to minute.

pub mod bench;
pub mod block_bench;
pub mod corpus;
pub mod experiment;
mod fio;
pub mod hit_ratio;
pub mod lru_batch;
pub mod nbd_bench;
mod process;
pub mod slab_freeze;
pub mod stats;
pub mod streams;
pub mod targets;
pub mod zs_free;
pub mod zs_lock;
