//! Memory of a program that compresses itself when it is cold.
//!
//! A [`Pager`] has a limit, and [`Region`]s of any size, which are plain memory. Pages that were not used for
//! long are compressed, in the same engine that stores uzram's disks, and come back when they are touched;
//! what does not fit in memory compressed goes to a spill file.
//!
//! # How touches are trapped
//!
//! | [`TrapKind`] | needs | system calls on memory that is not there |
//! |---|---|---|
//! | `Uffd` | root, CAP_SYS_PTRACE, /dev/userfaultfd, or `vm.unprivileged_userfaultfd=1`; Linux 6.8 | work |
//! | `Guard` | nothing; Linux 6.15 | fail with EFAULT |
//!
//! # What a program must know
//!
//! - A child (fork(2)) has none of this memory: a touch is a SIGSEGV there.
//! - With `Guard`, [pin](Region::pin) memory that you pass to system calls. A call fails with EFAULT
//!   otherwise if a page is not in memory; and **a transfer that goes on by itself** (io_uring, libaio,
//!   vmsplice) **loses what it writes to a page** that leaves meanwhile.
//! - With it, SIGSEGV belongs to the pager: what is not its own goes to the handler that was there before. A
//!   handler that is installed later must call the one before. A thread that blocks the signal must not touch
//!   the memory: the kernel ends the process.
//! - Memory in regions must not be the allocator's of the program itself.

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
pub use memory::{Forking, Memory, Settings};
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
