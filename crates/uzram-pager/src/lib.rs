//! Memory of a program that compresses itself when it is cold: docs/pager.md says how touches are trapped,
//! and **what a program must know**; docs/internals/pager.md says how it works.
//!
//! A [`Pager`] has a limit, and [`Region`]s of any size, which are plain memory. Pages that were not used for
//! long are compressed, in the same engine that stores uzram's disks, and come back when they are touched;
//! what does not fit in memory compressed goes to a spill file.

#![cfg_attr(loom, allow(dead_code))]

#[cfg(not(loom))]
mod areas;
mod bell;
#[cfg(not(loom))]
mod bench;
#[cfg(not(loom))]
mod core;
#[cfg(all(test, not(loom)))]
mod faults;
#[cfg(not(loom))]
mod figures;
mod gate;
#[cfg(not(loom))]
mod high;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod pager;
#[cfg(not(loom))]
mod pressure;
#[cfg(not(loom))]
mod publisher;
mod room;
#[cfg(not(loom))]
mod signals;
mod state;
#[cfg(not(loom))]
mod spill;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod stock;
mod sync;
#[cfg(all(test, loom))]
mod loom_fork_tests;
#[cfg(all(test, loom))]
mod loom_tests;
/// As tests from outside name this crate, whose helpers those inside share.
#[cfg(all(test, not(loom)))]
extern crate self as uzram_pager;
#[cfg(all(test, not(loom)))]
mod tests;
#[cfg(not(loom))]
mod trap;
#[cfg(not(loom))]
mod waiters;
#[cfg(not(loom))]
mod waiting;
#[cfg(not(loom))]
mod waits;
#[cfg(not(loom))]
mod window;

/// The most pages that are moved at once.
pub(crate) const MOST_PAGES: usize = 64;

/// Descriptors that a program does not know of.
#[cfg(not(loom))]
pub mod descriptors {
    pub use crate::high::{ABOVE_ALL, close, is_kept, keep};
}
#[cfg(not(loom))]
pub use figures::Figures;
#[cfg(not(loom))]
pub use memory::{Forking, Memory, Settings, is_address_space_limited};
#[cfg(not(loom))]
pub use pager::{DEFAULT_CAPACITY_BYTES, LEAST_LIMIT_BYTES, Pager, PagerBuilder, Pin, Region, TrapKind};
#[cfg(not(loom))]
pub use signals::Blocked as BlockedSignals;
pub use state::Access;
#[cfg(not(loom))]
pub use stats::{MemoryStats, PagerStats, Stored};

// Doctests of the examples in the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/pager.md")]
struct Documents;
