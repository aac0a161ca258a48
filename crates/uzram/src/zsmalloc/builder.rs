//! What a pool is made with.

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, CHUNK_PAGES};
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, pages_to_bytes};

use super::class::CHAIN_SIZES;
use super::design::PoolLocks;
use super::pool::Pool;

/// Bytes that a pool of [`PoolBuilder::build`] may take unless told otherwise.
const DEFAULT_LIMIT_BYTES: u64 = 1 << 30;
/// Address space of such a pool for each byte of its limit: objects and metadata lie in chunks of their own, and
/// holes in either take address space only.
const RESERVE_FACTOR: u64 = 4;
/// The most objects that fit into a page: those of the smallest class.
const OBJECTS_A_PAGE: u64 = 128;

/// Makes a [`Pool`]; [`Pool::builder`] begins one.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct PoolBuilder {
    pub(super) name: String,
    pub(super) chain_size: usize,
    pub(super) max_objects: Option<u64>,
    pub(super) max_objects_setting: &'static str,
    pub(super) count_locks: bool,
    pub(super) reclaim: bool,
    limit_bytes: u64,
}

impl PoolBuilder {
    /// Begins a pool with that name in statistics.
    pub fn new(name: impl Into<String>) -> Self {
        PoolBuilder {
            name: name.into(),
            chain_size: *CHAIN_SIZES.end(),
            max_objects: None,
            max_objects_setting: "max_objects",
            count_locks: false,
            reclaim: false,
            limit_bytes: DEFAULT_LIMIT_BYTES,
        }
    }

    /// Sets how much memory the pool may take, metadata included; 1 GiB if it is not set. Not for
    /// [`PoolBuilder::build_in`], where the arena has a limit.
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.limit_bytes = bytes;
        self
    }

    /// Sets how many objects the pool can hold; as many as its memory can if it is not set.
    pub fn max_objects(mut self, objects: u64) -> Self {
        self.max_objects = Some(objects);
        self
    }

    /// Sets the most pages of a zspage, 4 to 16: longer ones waste less, and are harder to empty. 16 if it is
    /// not set.
    pub fn chain_size(mut self, pages: usize) -> Self {
        self.chain_size = pages;
        self
    }

    /// Keeps the order in which zspages were stored into, for [`Pool::reclaim`]. That takes a
    /// lock of the whole pool for each object that is stored, and 12 bytes a page.
    pub fn reclaim(mut self, on: bool) -> Self {
        self.reclaim = on;
        self
    }

    /// Counts what the pool does with its locks, for [`Pool::lock_counts`].
    pub fn count_locks(mut self, on: bool) -> Self {
        self.count_locks = on;
        self
    }

    /// Sets the setting that errors name when [`PoolBuilder::max_objects`] is met.
    pub(crate) fn max_objects_setting(mut self, setting: &'static str) -> Self {
        self.max_objects_setting = setting;
        self
    }

    /// Makes an empty pool, of the lock design that measured best.
    ///
    /// # Errors
    /// `Invalid` for a limit below a page, or a chain size out of range; `NoMemory` when there is no address space.
    pub fn build(self) -> Result<Pool> {
        let limit_pages = self.limit_bytes / PAGE_SIZE as u64;
        if limit_pages == 0 {
            return Err(Error::invalid("a pool takes at least a page").with_setting("limit_bytes"));
        }
        let metadata_bytes = 2 * pages_to_bytes(CHUNK_PAGES.into());
        let arena =
            Arena::new(self.limit_bytes.saturating_mul(RESERVE_FACTOR).saturating_add(metadata_bytes))?;
        arena.set_limit_pages(limit_pages);
        self.build_in(Arc::new(arena))
    }

    /// Makes an empty pool of any lock design in the memory of `arena`, which is to be its alone, as
    /// [`Pool::pages_used`] counts all zspages of the arena, and large enough for two chunks of
    /// [`CHUNK_PAGES`]: objects and what the pool keeps beside them never share one.
    ///
    /// # Errors
    /// As [`PoolBuilder::build`], but for the limit.
    pub fn build_in<D: PoolLocks>(self, arena: Arc<Arena>) -> Result<Pool<D>> {
        Pool::new(arena, &self)
    }

    /// Returns how many objects a pool in an arena of so many pages can hold.
    pub(super) fn max_objects_in(&self, pages: usize) -> u64 {
        self.max_objects.unwrap_or((pages as u64 * OBJECTS_A_PAGE).min(u32::MAX.into()))
    }
}
