//! `uzram bench`: fio's six patterns on 4 KiB pages, in process, on a device filled with a
//! corpus, beside the bare codec, the kernel's zram, and a device without an LRU or with another algorithm.
//!
//! How it measures:
//! * Page p of the device is filled with corpus page p (modulo the corpus's size). Before a pattern that
//!   reads, a device that was written is filled again.
//! * All targets run the same operations in the same order: a round's seed gives each job its own sequence.
//!   The targets are measured in interleaved rounds ([`crate::harness::rounds`]). Figures are medians over
//!   the rounds; ratios are medians of each round's ratio.
//! * A random write stores a corpus page drawn at random, and a sequential pass the corpus shifted by one
//!   page more than the last: contents and sizes change as they do in use, while the mix on the device stays
//!   the corpus's.

pub mod backing;
mod codec_loop;
pub mod compaction;
mod compare;
pub mod device;
pub mod hit_ratio;
mod kernel_zram;
mod measure;
mod packed;
mod pattern;
pub mod recompression;
pub mod survive;
mod target;
#[cfg(test)]
mod tests;
mod uzram_device;
pub(crate) mod zipf;

pub use compare::Comparison;
pub(crate) use compare::ROUNDS;
pub use kernel_zram::KernelZram;
pub use measure::{Measurement, Plan, Until, mb_per_s, measure};
pub use packed::Packed;
pub use pattern::Pattern;
pub use target::{Target, Worker, verify};
pub use uzram_device::UzramDevice;
