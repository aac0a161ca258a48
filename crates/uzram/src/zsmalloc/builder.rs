//! The settings of a pool.

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, CHUNK_PAGES, Region, Table};
use crate::base::sync::{Arc, AtomicU64};
use crate::base::units::{PAGE_SIZE, pages_to_bytes};

use crate::slab::CacheConfig;

use super::class::CHAIN_SIZES;
use super::design::PoolLocks;
use super::pool::Pool;

/// The default memory limit of a pool made by [`PoolBuilder::build`].
const DEFAULT_LIMIT_BYTES: u64 = 1 << 30;
/// Address space of such a pool per byte of its limit: objects and metadata share no chunk, and holes in the chunks
/// of either take address space only.
const RESERVE_FACTOR: u64 = 4;
/// The most objects that fit into a page: those of the smallest class.
const OBJECTS_A_PAGE: u64 = 128;

/// Builds a [`Pool`]; [`Pool::builder`] returns one.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct PoolBuilder {
    pub(super) name: String,
    pub(super) chain_size: usize,
    pub(super) max_objects: Option<u64>,
    pub(super) max_objects_setting: &'static str,
    pub(super) count_locks: bool,
    pub(super) reclaim: bool,
    pub(super) deferred_limit: Option<u64>,
    pub(super) regions: Option<PoolRegions>,
    limit_bytes: u64,
}

/// The regions, beside the arena's, of the tables by which the objects of a pool that outlives the process are found
/// again.
#[derive(Clone, Debug)]
pub(crate) struct PoolRegions {
    /// The slab table of the handles.
    pub handles: Region,
    /// The page table, with the owners of huge objects.
    pub page_table: Region,
}

impl PoolBuilder {
    /// Returns a builder for a pool of this name. Statistics show the name.
    pub fn new(name: impl Into<String>) -> Self {
        PoolBuilder {
            name: name.into(),
            chain_size: *CHAIN_SIZES.end(),
            max_objects: None,
            max_objects_setting: "max_objects",
            count_locks: false,
            reclaim: false,
            deferred_limit: None,
            regions: None,
            limit_bytes: DEFAULT_LIMIT_BYTES,
        }
    }

    /// Sets the memory limit, metadata included; 1 GiB by default. [`PoolBuilder::build_in`] ignores it: the
    /// arena has the limit.
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.limit_bytes = bytes;
        self
    }

    /// Sets the most objects that the pool can hold; by default, as many as its memory can.
    pub fn max_objects(mut self, objects: u64) -> Self {
        self.max_objects = Some(objects);
        self
    }

    /// Sets the most pages of a zspage, 4 to 16; 16 by default. Longer zspages waste less and are harder to
    /// empty.
    pub fn chain_size(mut self, pages: usize) -> Self {
        self.chain_size = pages;
        self
    }

    /// Keeps zspages in LRU order, for [`Pool::reclaim`]. That takes a pool-wide lock for each object
    /// that is stored, and 12 bytes per page.
    pub fn reclaim(mut self, on: bool) -> Self {
        self.reclaim = on;
        self
    }

    /// Defers frees: they put the object on a list of their CPU, and a thread that calls [`Pool::run_freer`] frees it
    /// later. At most `limit` objects wait for that (which takes four bytes each, when the pool is made); if as many do,
    /// or a store finds no room, threads free them themselves. For research: see `docs/lab/zs-defer.md`.
    pub fn defer_frees(mut self, limit: u64) -> Self {
        self.deferred_limit = Some(limit);
        self
    }

    /// Counts lock operations, for [`Pool::lock_counts`].
    pub fn count_locks(mut self, on: bool) -> Self {
        self.count_locks = on;
        self
    }

    /// Sets the regions, of [`PoolBuilder::region_bytes`], of the tables by which objects are found again.
    pub(crate) fn regions(mut self, regions: Option<PoolRegions>) -> Self {
        self.regions = regions;
        self
    }

    /// Returns the bytes of the regions of a pool in an arena of `arena_pages`: of the handles' slab table and of the
    /// page table.
    ///
    /// # Errors
    /// As [`CacheConfig::slab_table_bytes`].
    pub(crate) fn region_bytes(&self, arena_pages: u64) -> Result<[u64; 2]> {
        // A cell is a word, in every design that can be attached.
        let max_objects = self.max_objects_in(arena_pages as usize);
        let cells = CacheConfig::new(self.name.as_str(), size_of::<u64>(), size_of::<u64>(), max_objects);
        Ok([cells.slab_table_bytes()?, Table::<AtomicU64>::bytes_of(arena_pages as usize)])
    }

    /// Sets the setting that the error names when [`PoolBuilder::max_objects`] is reached.
    pub(crate) fn max_objects_setting(mut self, setting: &'static str) -> Self {
        self.max_objects_setting = setting;
        self
    }

    /// Makes an empty pool of the default lock design.
    ///
    /// # Errors
    /// `Invalid` for a limit below a page, a chain size out of range, or a limit of deferred frees that is not above the
    /// number of CPUs; `NoMemory` when there is no address space.
    pub fn build(self) -> Result<Pool> {
        let limit_pages = self.limit_bytes / PAGE_SIZE as u64;
        if limit_pages == 0 {
            return Err(Error::invalid("the limit must be at least a page").with_setting("limit_bytes"));
        }
        let metadata_bytes = 2 * pages_to_bytes(CHUNK_PAGES.into());
        let arena =
            Arena::new(self.limit_bytes.saturating_mul(RESERVE_FACTOR).saturating_add(metadata_bytes))?;
        arena.set_limit_pages(limit_pages);
        self.build_in(Arc::new(arena))
    }

    /// Makes an empty pool of any lock design in the memory of `arena`. No other pool may use the arena, as
    /// [`Pool::pages_used`] counts all its zspages. It must have room for two chunks of [`CHUNK_PAGES`]:
    /// objects and metadata never share one.
    ///
    /// # Errors
    /// As [`PoolBuilder::build`], except for the limit.
    pub fn build_in<D: PoolLocks>(self, arena: Arc<Arena>) -> Result<Pool<D>> {
        Pool::new(arena, &self)
    }

    /// Returns the most objects that a pool in an arena of `pages` pages can hold.
    pub(super) fn max_objects_in(&self, pages: usize) -> u64 {
        self.max_objects.unwrap_or((pages as u64 * OBJECTS_A_PAGE).min(u32::MAX.into()))
    }
}
