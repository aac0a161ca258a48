//! zsmalloc: memory for compressed pages, packed tightly whatever their sizes.
//!
//! Objects of similar size share *zspages*: runs of one to sixteen pages, cut into equal objects.
//!
//! ```text
//! handle ──► object word [page | class | index | design bits]       (slab "zs_handle")
//!                           │
//!            page table [page] ──► descriptor of the zspage          (slab "zspage")
//!                           │
//!            arena [page + index * size] ──► [handle u32][owner u32][contents …]
//! ```
//!
//! A huge object fills a page and has no header: its owner is in the page table, its handle in the
//! descriptor. Every read checks handle and owner (for a huge object, the owner only), so that
//! corruption never returns another page's bytes.
//!
//! Objects move (`compact`, `evacuate`). The table at [`design`] says which locks each operation takes.
//!
//! Lock order: compaction, pool, size class, LRU of zspages, then the arena's `commit` only. Zspages, runs
//! and descriptors are allocated with no pool lock held; most designs also free them without one.

mod alloc;
#[cfg(feature = "designs")]
mod any;
mod attach;
mod class;
mod compact;
mod counts;
#[cfg(feature = "designs")]
pub mod deferred;
pub mod design;
mod evacuate;
#[cfg(test)]
#[macro_use]
mod every_design;
mod free;
mod lru;
mod pool;
mod raw;
mod read;
mod reclaim;
mod stats;
mod store;
mod word;
mod zspage;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(feature = "designs")]
pub(crate) use any::AnyPool;
#[cfg(feature = "designs")]
pub use any::PoolDesign;
pub(crate) use attach::{Attach, Settled};
pub use class::{CHAIN_SIZES, SizeClass};
pub(crate) use compact::{Budget, Effort};
pub use counts::LockCounts;
pub use design::{Pinned, PoolLocks};
pub use pool::{Handle, Object, Pool, PoolBuilder};
pub(crate) use raw::{PoolConfig, PoolRegions, RawPool};
pub use read::ObjectRead;
pub use stats::ClassStat;
pub(crate) use word::Location;
pub use zspage::FULLNESS_GROUPS;

/// Returns the length from which contents take a whole page in a pool of this chain size.
pub fn huge_threshold(chain_size: usize) -> usize {
    class::ClassTable::new(chain_size).huge_threshold
}
