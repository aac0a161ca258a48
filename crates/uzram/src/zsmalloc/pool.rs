//! The pool as a library: byte strings of 1 to 4096 bytes, packed tightly.
//!
//! An [`Object`] borrows its pool and frees its bytes when it is dropped. Whoever keeps the pool and what is in it
//! side by side, where a borrow cannot be kept, turns it into a [`Handle`].

use std::fmt;
use std::ops::Deref;

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::{Arc, Counter};
use crate::base::units::pages_to_bytes;

use super::builder::PoolBuilder;
use super::compact::{Budget, Effort};
use super::counts::LockCounts;
use super::design::{Pinned, PoolLocks};
use super::raw::RawPool;
use super::read::RawRead;
use super::stats::ClassStat;

/// Memory for byte strings of 1 to 4096 bytes, by default of the lock design that measured best.
///
/// All methods can be called from any number of threads. The pool takes no more memory than its limit; what
/// compaction frees goes back to the system.
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

/// A byte string in a [`Pool`] that no borrow ties to it. Dropping it does not free the bytes: give it to
/// [`Pool::free`] or [`Pool::object`]. They go with the pool at the latest.
#[must_use = "dropping a handle leaves its bytes in the pool"]
pub struct Handle {
    pool: u32,
    handle: u32,
    owner: u32,
    len: u16,
}

/// The bytes of an [`Object`] or [`Handle`], which neither move nor change until this is dropped.
pub struct ObjectRead<'a, D: PoolLocks = Pinned>(RawRead<'a, D>);

impl Pool {
    /// Begins a pool with that name in statistics.
    pub fn builder(name: impl Into<String>) -> PoolBuilder {
        PoolBuilder::new(name)
    }
}

impl<D: PoolLocks> Pool<D> {
    pub(super) fn new(arena: Arc<Arena>, builder: &PoolBuilder) -> Result<Self> {
        // It only has to differ.
        static POOLS: Counter = Counter::new(0);
        Ok(Pool { raw: RawPool::new(arena, builder)?, id: POOLS.add(1) as u32 })
    }

    /// Stores a copy of `bytes` (1..=4096).
    ///
    /// # Errors
    /// `Invalid` for another length, `NoSpace` when the limit of memory or of objects is met, `NoMemory` when the
    /// system gives no more. Nothing is stored then.
    #[inline]
    pub fn store(&self, bytes: &[u8]) -> Result<Object<'_, D>> {
        self.store_for(bytes, 0)
    }

    /// Stores a copy of `bytes` (1..=4096). `owner` is what [`Pool::reclaim`] calls them by, and what a read
    /// checks.
    ///
    /// # Errors
    /// As [`Pool::store`].
    #[inline]
    pub fn store_for(&self, bytes: &[u8], owner: u32) -> Result<Object<'_, D>> {
        let handle = self.raw.store(bytes, owner, Gfp::MayWait)?;
        let handle = Handle { pool: self.id, handle, owner, len: bytes.len() as u16 };
        Ok(Object { pool: self, handle })
    }

    /// Returns the object of a handle, which dropping it frees.
    ///
    /// # Errors
    /// `Invalid` for a handle of another pool, where its bytes then stay.
    #[inline]
    pub fn object(&self, handle: Handle) -> Result<Object<'_, D>> {
        self.check(&handle)?;
        Ok(Object { pool: self, handle })
    }

    /// Returns the bytes of a handle. Reading waits for no other thread's reading or storing.
    ///
    /// # Errors
    /// `Invalid` for a handle of another pool, `Corrupt` when the memory was damaged.
    #[inline]
    pub fn read<'a>(&'a self, handle: &'a Handle) -> Result<ObjectRead<'a, D>> {
        self.check(handle)?;
        // SAFETY: the handle is this pool's, in use as long as it exists, and the result borrows it.
        unsafe { self.raw.read(handle.handle, handle.owner, usize::from(handle.len)) }.map(ObjectRead)
    }

    /// Frees the bytes of a handle.
    ///
    /// # Errors
    /// `Invalid` for a handle of another pool, where its bytes then stay.
    #[inline]
    pub fn free(&self, handle: Handle) -> Result<()> {
        self.object(handle).map(drop)
    }

    /// Moves objects together as far as that frees pages, while others store, read and free; returns the number
    /// of pages freed. One thread at a time does, others wait for it.
    pub fn compact(&self) -> u64 {
        self.raw.compact(Effort::Tight, &mut Budget::unlimited())
    }

    /// Empties the zspages that were stored into longest ago, until `pages` pages are free or all have been
    /// tried; returns the number of pages freed. `evict` is told the owner of each object in them, and is to
    /// free it; one that it leaves stays. The pool is not locked meanwhile: `evict` may use it.
    ///
    /// # Errors
    /// `Invalid` for a pool that was made without [`PoolBuilder::reclaim`].
    pub fn reclaim(&self, pages: u64, evict: impl FnMut(u32)) -> Result<u64> {
        self.raw.reclaim(pages, evict)
    }

    /// Returns the number of pages that compaction would free at least.
    pub fn freeable_pages(&self) -> u64 {
        self.raw.freeable_pages()
    }

    /// Returns the number of pages that objects take now.
    pub fn pages_used(&self) -> u64 {
        self.raw.pages_used()
    }

    /// Returns how much memory the pool takes: objects, metadata, and what it keeps for reuse. This is what its
    /// limit bounds.
    pub fn charged_bytes(&self) -> u64 {
        pages_to_bytes(self.raw.arena.charged_pages())
    }

    /// Returns how much memory the pool may take; 0 if there is no limit.
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

    /// Returns what the pool did with its locks so far, if it was made with [`PoolBuilder::count_locks`].
    pub fn lock_counts(&self) -> LockCounts {
        self.raw.lock_counts()
    }

    #[inline]
    fn check(&self, handle: &Handle) -> Result<()> {
        if handle.pool == self.id { Ok(()) } else { Err(Error::invalid("the handle is of another pool")) }
    }
}

impl<'a, D: PoolLocks> Object<'a, D> {
    /// Returns the bytes. Reading waits for no other thread's reading or storing.
    ///
    /// # Errors
    /// `Corrupt` when the memory was damaged.
    #[inline]
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

    /// Keeps the bytes in the pool until [`Pool::free`].
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
        // SAFETY: the handle is this pool's, and this was its last use; nobody reads, who would borrow it.
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

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({} of pool {}, {} bytes)", self.handle, self.pool, self.len)
    }
}

impl<D: PoolLocks> Deref for ObjectRead<'_, D> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl<D: PoolLocks> fmt::Debug for ObjectRead<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectRead({} bytes)", self.len())
    }
}
