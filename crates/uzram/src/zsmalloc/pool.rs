//! The pool as a library: byte strings of 1 to 4096 bytes, packed tightly.

use std::fmt;

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, CHUNK_PAGES, Gfp};
use crate::base::sync::{Arc, Counter};
use crate::base::units::{PAGE_SIZE, pages_to_bytes};

use super::compact::{Budget, Effort};
use super::counts::LockCounts;
use super::design::{Pinned, PoolLocks};
use super::raw::{PoolConfig, RawPool};
use super::read::ObjectRead;
use super::stats::ClassStat;

/// Memory for byte strings of 1 to 4096 bytes. The default lock design is the fastest one measured.
///
/// All methods can be called from any number of threads. The pool takes no more memory than its limit; pages
/// that compaction frees go back to the system.
///
/// ```
/// let pool = uzram::Pool::builder("names").limit_bytes(16 << 20).build()?;
/// let object = pool.store(b"some bytes")?;
/// assert_eq!(&*object.read()?, b"some bytes");
/// drop(object); // frees them
/// assert_eq!(pool.pages_used(), 0);
/// # Ok::<_, uzram::Error>(())
/// ```
///
/// The example `compressed_cache` is a cache that evicts its coldest entries at the limit.
pub struct Pool<D: PoolLocks = Pinned> {
    raw: RawPool<D>,
    id: u32,
}

/// A byte string in a [`Pool`]. Dropping it frees the bytes.
#[must_use = "dropping it frees the bytes"]
pub struct Object<'a, D: PoolLocks = Pinned> {
    pool: &'a Pool<D>,
    handle: Handle,
}

/// A byte string in a [`Pool`] that does not borrow the pool. Dropping it does not free the bytes: pass it to
/// [`Pool::free`] or [`Pool::object`]. Dropping the pool frees them too.
#[derive(Debug)]
#[must_use = "dropping a handle leaves its bytes in the pool"]
pub struct Handle {
    pool: u32,
    handle: u32,
    owner: u32,
    len: u16,
}

/// The default memory limit of a pool made by [`PoolBuilder::build`].
const DEFAULT_LIMIT_BYTES: u64 = 1 << 30;
/// Address space of such a pool per byte of its limit: objects and metadata share no chunk, and holes in the
/// chunks of either take address space only.
const RESERVE_FACTOR: u64 = 4;

/// Builds a [`Pool`]; [`Pool::builder`] returns one.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct PoolBuilder {
    config: PoolConfig,
    limit_bytes: u64,
}

impl PoolBuilder {
    /// Sets the memory limit, metadata included; 1 GiB by default. [`PoolBuilder::build_in`] ignores it: the
    /// arena has the limit.
    pub fn limit_bytes(self, bytes: u64) -> Self {
        PoolBuilder { limit_bytes: bytes, ..self }
    }

    /// Sets the most objects that the pool can hold; by default, as many as its memory can.
    pub fn max_objects(mut self, objects: u64) -> Self {
        self.config.max_objects = Some(objects);
        self
    }

    /// Sets the most pages of a zspage, 4 to 16; 16 by default. Longer zspages waste less and are harder to
    /// empty.
    pub fn chain_size(mut self, pages: usize) -> Self {
        self.config.chain_size = pages;
        self
    }

    /// Keeps zspages in LRU order, for [`Pool::reclaim`]. That takes a pool-wide lock for each object
    /// that is stored, and 12 bytes per page.
    pub fn reclaim(mut self, on: bool) -> Self {
        self.config.reclaim = on;
        self
    }

    /// Counts lock operations, for [`Pool::lock_counts`].
    pub fn count_locks(mut self, on: bool) -> Self {
        self.config.count_locks = on;
        self
    }

    /// Makes an empty pool of the default lock design. Fails with `Invalid` for a limit below a page, or a
    /// chain size out of range; `NoMemory` when there is no address space.
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
    /// objects and metadata never share one. Fails as [`PoolBuilder::build`], except for the limit.
    pub fn build_in<D: PoolLocks>(self, arena: Arc<Arena>) -> Result<Pool<D>> {
        // Any number will do as long as pools differ.
        static POOLS: Counter = Counter::new(0);
        Ok(Pool { raw: RawPool::new(arena, &self.config)?, id: POOLS.add(1) as u32 })
    }
}

impl Pool {
    /// Returns a builder for a pool of this name. Statistics show the name.
    pub fn builder(name: impl Into<String>) -> PoolBuilder {
        PoolBuilder { config: PoolConfig::new(name), limit_bytes: DEFAULT_LIMIT_BYTES }
    }
}

impl<D: PoolLocks> Pool<D> {
    /// Stores a copy of `bytes` (1..=4096). Fails with `Invalid` for another length, `NoSpace` when the limit
    /// of memory or of objects is met, `NoMemory` when the system gives no more. Nothing is stored then.
    pub fn store(&self, bytes: &[u8]) -> Result<Object<'_, D>> {
        self.store_for(bytes, 0)
    }

    /// Stores a copy of `bytes` (1..=4096). `owner` identifies them to [`Pool::reclaim`]; each read checks
    /// it. Fails as [`Pool::store`].
    #[inline]
    pub fn store_for(&self, bytes: &[u8], owner: u32) -> Result<Object<'_, D>> {
        let handle = self.raw.store(bytes, owner, Gfp::MayWait)?;
        let handle = Handle { pool: self.id, handle, owner, len: bytes.len() as u16 };
        Ok(Object { pool: self, handle })
    }

    /// Turns a handle back into an object, which frees its bytes when it is dropped. Fails with `Invalid` for
    /// a handle of another pool; its bytes stay there.
    #[inline]
    pub fn object(&self, handle: Handle) -> Result<Object<'_, D>> {
        self.check(&handle)?;
        Ok(Object { pool: self, handle })
    }

    /// Returns the bytes of a handle. Reading waits for no other thread's reading or storing. Fails with
    /// `Invalid` for a handle of another pool, `Corrupt` when the memory was damaged.
    #[inline]
    pub fn read<'a>(&'a self, handle: &'a Handle) -> Result<ObjectRead<'a, D>> {
        self.check(handle)?;
        // SAFETY: the handle is this pool's, in use as long as it exists, and the result borrows it.
        unsafe { self.raw.read(handle.handle, handle.owner, usize::from(handle.len)) }
    }

    /// Frees the bytes of a handle. Fails with `Invalid` for a handle of another pool; its bytes stay there.
    pub fn free(&self, handle: Handle) -> Result<()> {
        self.object(handle).map(drop)
    }

    /// Compacts the pool as far as that frees pages, while other threads store, read and free; returns the
    /// number of pages freed. One thread at a time compacts; other callers wait for it.
    pub fn compact(&self) -> u64 {
        self.raw.compact(Effort::Tight, &mut Budget::unlimited())
    }

    /// Empties the zspages that were stored into longest ago, until `pages` pages are free or all zspages
    /// have been tried; returns the number of pages freed. `evict` is called with the owner of each object in
    /// them and should free the object; one that it does not free stays. No lock is held during the call:
    /// `evict` may use the pool. Fails with `Invalid` for a pool that was made without
    /// [`PoolBuilder::reclaim`].
    pub fn reclaim(&self, pages: u64, evict: impl FnMut(u32)) -> Result<u64> {
        self.raw.reclaim(pages, evict)
    }

    /// Returns the number of pages that compaction would at least free.
    pub fn freeable_pages(&self) -> u64 {
        self.raw.freeable_pages()
    }

    /// Returns the number of pages that objects take.
    pub fn pages_used(&self) -> u64 {
        self.raw.pages_used()
    }

    /// Returns the memory of the pool: objects, metadata, and free pages kept for reuse. The pool's limit
    /// bounds it.
    pub fn charged_bytes(&self) -> u64 {
        pages_to_bytes(self.raw.arena.charged_pages())
    }

    /// Returns the memory limit of the pool; 0 if there is none.
    pub fn limit_bytes(&self) -> u64 {
        pages_to_bytes(self.raw.arena.limit_pages())
    }

    /// Returns the number of pages that compaction has freed so far.
    pub fn pages_compacted(&self) -> u64 {
        self.raw.pages_compacted()
    }

    /// Returns the state of each size class, smallest first.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        self.raw.class_stats()
    }

    /// Returns the counts of lock operations, if the pool was made with [`PoolBuilder::count_locks`].
    pub fn lock_counts(&self) -> LockCounts {
        self.raw.counts.sum()
    }

    fn check(&self, handle: &Handle) -> Result<()> {
        if handle.pool == self.id { Ok(()) } else { Err(Error::invalid("the handle is another pool's")) }
    }
}

impl<'a, D: PoolLocks> Object<'a, D> {
    /// Returns the bytes. Waits and fails as [`Pool::read`].
    pub fn read(&self) -> Result<ObjectRead<'_, D>> {
        self.pool.read(&self.handle)
    }

    /// Returns the number of bytes stored.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.handle.len()
    }

    /// Returns whose they are: the `owner` of [`Pool::store_for`].
    pub fn owner(&self) -> u32 {
        self.handle.owner
    }

    /// Turns the object into a handle: the bytes stay in the pool until [`Pool::free`].
    #[inline]
    pub fn into_handle(self) -> Handle {
        let Handle { pool, handle, owner, len } = self.handle;
        std::mem::forget(self);
        Handle { pool, handle, owner, len }
    }
}

impl<D: PoolLocks> Drop for Object<'_, D> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the handle is this pool's, and this is its last use; no reader exists, as one would borrow
        // it.
        unsafe { self.pool.raw.free(self.handle.handle) };
    }
}

impl Handle {
    /// Returns the number of bytes stored.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Returns whose they are: the `owner` of [`Pool::store_for`].
    pub fn owner(&self) -> u32 {
        self.owner
    }
}

impl<D: PoolLocks> fmt::Debug for Pool<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} of design '{}', {} pages)", self.id, D::NAME, self.pages_used())
    }
}

impl<D: PoolLocks> fmt::Debug for Object<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Object({} of pool {}, {} bytes)", self.handle.handle, self.handle.pool, self.handle.len)
    }
}
