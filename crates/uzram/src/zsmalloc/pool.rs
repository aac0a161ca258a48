//! The pool as a library: byte strings of 1 to 4096 bytes, packed tightly.
//!
//! An [`Object`] borrows its pool and frees its bytes when it is dropped. Callers that cannot keep the borrow, for
//! example because one struct holds the pool and its objects, turn it into a [`Handle`].

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

/// Memory for byte strings of 1 to 4096 bytes. The default lock design is the fastest one measured.
///
/// All methods can be called from any number of threads. The pool takes no more memory than its limit; pages that
/// compaction frees go back to the system.
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
    /// Returns a builder for a pool of this name. Statistics show the name.
    pub fn builder(name: impl Into<String>) -> PoolBuilder {
        PoolBuilder::new(name)
    }
}

impl<D: PoolLocks> Pool<D> {
    pub(super) fn new(arena: Arc<Arena>, builder: &PoolBuilder) -> Result<Self> {
        // Any number will do as long as pools differ.
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

    /// Stores a copy of `bytes` (1..=4096). `owner` identifies them to [`Pool::reclaim`]; each read checks it.
    ///
    /// # Errors
    /// As [`Pool::store`].
    #[inline]
    pub fn store_for(&self, bytes: &[u8], owner: u32) -> Result<Object<'_, D>> {
        let handle = self.raw.store(bytes, owner, Gfp::MayWait)?;
        let handle = Handle { pool: self.id, handle, owner, len: bytes.len() as u16 };
        Ok(Object { pool: self, handle })
    }

    /// Turns a handle back into an object, which frees its bytes when it is dropped.
    ///
    /// # Errors
    /// `Invalid` for a handle of another pool; its bytes stay there.
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

    /// Frees the bytes of a handle; later if the pool defers frees ([`PoolBuilder::defer_frees`]).
    ///
    /// # Errors
    /// `Invalid` for a handle of another pool; its bytes stay there.
    #[inline]
    pub fn free(&self, handle: Handle) -> Result<()> {
        self.object(handle).map(drop)
    }

    /// In a pool that defers frees, frees objects on this thread as their frees come, as long as `still_wanted`; then
    /// those that wait. To end it, unpark the thread when `still_wanted` has changed. One thread at a time does this.
    ///
    /// ```
    /// # use std::sync::atomic::{AtomicBool, Ordering};
    /// let pool = uzram::Pool::builder("names").defer_frees(1 << 16).build()?;
    /// let ends = AtomicBool::new(false);
    /// std::thread::scope(|scope| {
    ///     let freer = scope.spawn(|| pool.run_freer(|| !ends.load(Ordering::Relaxed)));
    ///     drop(pool.store(b"some bytes")); // waits to be freed
    ///     ends.store(true, Ordering::Relaxed);
    ///     freer.thread().unpark();
    /// });
    /// assert_eq!((pool.waiting_frees(), pool.pages_used()), (0, 0));
    /// # Ok::<_, uzram::Error>(())
    /// ```
    pub fn run_freer(&self, still_wanted: impl Fn() -> bool) {
        self.raw.run_freer(still_wanted);
    }

    /// Frees all objects whose frees wait, and waits for other threads that are freeing some. Objects that are freed
    /// meanwhile may be left.
    pub fn flush_frees(&self) {
        self.raw.flush_frees();
    }

    /// Returns the number of objects whose frees wait. They count as used until they are freed.
    pub fn waiting_frees(&self) -> u64 {
        self.raw.waiting_frees()
    }

    /// Compacts the pool as far as that frees pages, while other threads store, read and free; returns the number
    /// of pages freed. One thread at a time compacts; other callers wait for it.
    pub fn compact(&self) -> u64 {
        self.raw.compact(Effort::Tight, &mut Budget::unlimited())
    }

    /// Empties the zspages that were stored into longest ago, until `pages` pages are free or all zspages have been
    /// tried; returns the number of pages freed. `evict` is called with the owner of each object in them and should
    /// free the object; one that it does not free stays. No lock is held during the call: `evict` may use the pool.
    ///
    /// # Errors
    /// `Invalid` for a pool that was made without [`PoolBuilder::reclaim`].
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
        self.raw.lock_counts()
    }

    #[inline]
    fn check(&self, handle: &Handle) -> Result<()> {
        if handle.pool == self.id { Ok(()) } else { Err(Error::invalid("the handle is another pool's")) }
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
        // SAFETY: the handle is this pool's, and this is its last use; no reader exists, as one would borrow it.
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
