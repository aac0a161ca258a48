//! Memory of a program that compresses itself when it is cold: docs/pager.md says how touches are trapped,
//! and **what a program must know**; docs/internals/pager.md says how it works.
//!
//! A [`Pager`] has a limit, and [`Region`]s of any size, which are plain memory. Pages that were not used for
//! long are compressed, in the same engine that stores uzram's disks, and come back when they are touched;
//! what does not fit in memory compressed goes to a spill file.

// What the pager's process alone uses is checked where that is built.
#![cfg_attr(any(loom, not(feature = "image")), allow(dead_code))]

mod bell;
#[cfg(not(loom))]
mod core;
#[cfg(all(test, not(loom)))]
mod faults;
#[cfg(not(loom))]
mod figures;
#[cfg(not(loom))]
mod map;
/// The image's memory: its free ranges are tested here.
#[cfg(all(test, not(loom)))]
#[path = "image/own.rs"]
mod own;
#[cfg(not(loom))]
mod pager;
#[cfg(not(loom))]
mod pressure;
#[cfg(all(feature = "image", not(loom)))]
pub mod process;
#[cfg(not(loom))]
mod room;
#[cfg(not(loom))]
mod sigbus;
#[cfg(not(loom))]
mod signals;
mod state;
#[cfg(not(loom))]
mod spill;
#[cfg(not(loom))]
mod stats;
mod sync;
#[cfg(not(loom))]
mod system;
#[cfg(all(test, loom))]
mod loom_tests;
/// As tests from outside name this crate, whose helpers those inside share.
#[cfg(all(test, not(loom)))]
extern crate self as uzram_pager;
#[cfg(all(test, not(loom)))]
mod tests;
#[cfg(not(loom))]
mod uffd;
#[cfg(not(loom))]
mod waiter;
#[cfg(not(loom))]
mod waiting;
#[cfg(not(loom))]
mod window;

/// The most pages that are moved at once.
pub(crate) const MOST_PAGES: usize = 64;

#[cfg(not(loom))]
pub use figures::Figures;
#[cfg(not(loom))]
pub use pager::{DEFAULT_CAPACITY_BYTES, LEAST_LIMIT_BYTES, Pager, PagerBuilder, Pin, Region, Trap};
pub use state::Access;
#[cfg(not(loom))]
pub use stats::PagerStats;

// Doctests of the examples in the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/pager.md")]
struct Documents;
