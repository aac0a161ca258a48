//! The pool as a library: byte strings of 1 to 4096 bytes, packed tightly.

use std::fmt;
use std::ops::Deref;

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::{Arc, Counter};

use super::compact::{Budget, Effort};
use super::counts::LockCounts;
use super::design::{Design, Pinned};
use super::raw::{Options, RawPool, RawRead};
use super::stats::ClassStat;

/// Memory for byte strings of 1 to 4096 bytes, by default of the design that measured best.
///
/// All methods can be called from any number of threads. Memory comes from an [`Arena`], whose limit
/// bounds it; what compaction frees goes back to the arena, and from there to the system.
///
/// ```
/// use std::sync::Arc;
/// use uzram::base::mem::Arena;
/// use uzram::zsmalloc::{Options, Pool};
///
/// let arena = Arc::new(Arena::new(64 << 20)?); // address space, of which memory is taken as it is needed
/// arena.set_limit_pages(4096);
/// let pool: Pool = Pool::new(arena, &Options::new("names", 100_000))?;
/// let handle = pool.store(b"some bytes", 7)?;
/// assert_eq!(&*pool.read(&handle)?, b"some bytes");
/// pool.free(handle)?;
/// assert_eq!(pool.pages_used(), 0);
/// # Ok::<_, uzram::Error>(())
/// ```
///
/// The example `compressed_cache` is a cache that evicts its coldest entries at the limit.
pub struct Pool<D: Design = Pinned> {
    raw: RawPool<D>,
    id: u32,
}

/// A byte string in a [`Pool`]. It takes no memory of the pool's after [`Pool::free`], or when the pool is
/// dropped; a handle that is merely dropped keeps it.
#[must_use = "a dropped handle keeps its bytes in the pool"]
pub struct Handle {
    pool: u32,
    handle: u32,
    owner: u32,
    len: u16,
}

/// The bytes of a [`Handle`], which neither move nor change until this is dropped.
pub struct Read<'a, D: Design = Pinned>(RawRead<'a, D>);

impl<D: Design> Pool<D> {
    /// An empty pool in the memory of `arena`, which is to be its alone, as [`Pool::pages_used`] counts all
    /// zspages of the arena, and large enough for two chunks of [`CHUNK_PAGES`](crate::base::mem::CHUNK_PAGES):
    /// objects and what the pool keeps beside them never share one.
    ///
    /// # Errors
    /// `Invalid` for a chain size outside [`CHAIN_SIZES`](super::CHAIN_SIZES), or an arena larger than the
    /// design's object words can name; `NoMemory` when there is no address space for the tables.
    pub fn new(arena: Arc<Arena>, options: &Options) -> Result<Self> {
        // It only has to differ.
        static POOLS: Counter = Counter::new(0);
        Ok(Pool { raw: RawPool::new(arena, options)?, id: POOLS.add(1) as u32 })
    }

    /// Stores a copy of `bytes` (1..=4096). `owner` is whatever the caller wants to find again.
    ///
    /// # Errors
    /// `Invalid` for another length, `NoSpace` when the arena's limit or the pool's number of objects is
    /// met, `NoMemory` when the system gives no more. Nothing is stored then.
    pub fn store(&self, bytes: &[u8], owner: u32) -> Result<Handle> {
        let handle = self.raw.store(bytes, owner, Gfp::MayWait)?;
        Ok(Handle { pool: self.id, handle, owner, len: bytes.len() as u16 })
    }

    /// The bytes of a handle. Reading waits for no other thread's reading or storing.
    ///
    /// # Errors
    /// `Invalid` for a handle of another pool, `Corrupt` when the memory was damaged.
    pub fn read<'a>(&'a self, handle: &'a Handle) -> Result<Read<'a, D>> {
        self.check(handle)?;
        // SAFETY: the handle is this pool's, in use as long as it exists, and the answer borrows it.
        unsafe { self.raw.read(handle.handle, handle.owner, usize::from(handle.len)) }.map(Read)
    }

    /// Frees the bytes of a handle.
    ///
    /// # Errors
    /// `Invalid` for a handle of another pool, where its bytes then stay.
    pub fn free(&self, handle: Handle) -> Result<()> {
        self.check(&handle)?;
        // SAFETY: the handle is this pool's and this was its last use; nobody reads, who would borrow it.
        unsafe { self.raw.free(handle.handle) };
        Ok(())
    }

    /// Moves objects together as far as that frees pages, while others store, read and free; answers how
    /// many pages it freed. One thread at a time does, others wait for it.
    pub fn compact(&self) -> u64 {
        self.raw.compact(Effort::Tight, &mut Budget::unlimited())
    }

    /// Empties the zspages that were stored into longest ago, until `pages` pages are free or all have been
    /// tried; answers how many pages that freed. `evict` is told the owner of each object in them, and is
    /// to free its handle; one that it leaves stays. The pool is not locked meanwhile: `evict` may use it.
    ///
    /// # Errors
    /// `Invalid` for a pool that was made without [`Options::reclaim`].
    pub fn reclaim(&self, pages: u64, evict: impl FnMut(u32)) -> Result<u64> {
        self.raw.reclaim(pages, evict)
    }

    /// Pages that compaction would free at least.
    pub fn freeable_pages(&self) -> u64 {
        self.raw.freeable_pages()
    }

    /// Pages that the pool uses now.
    pub fn pages_used(&self) -> u64 {
        self.raw.pages_used()
    }

    /// Pages that compaction has freed so far.
    pub fn pages_compacted(&self) -> u64 {
        self.raw.pages_compacted()
    }

    /// The state of each size class, smallest first.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        self.raw.class_stats()
    }

    /// What the pool did with its locks so far, if its options asked for it.
    pub fn lock_counts(&self) -> LockCounts {
        self.raw.lock_counts()
    }

    fn check(&self, handle: &Handle) -> Result<()> {
        if handle.pool == self.id { Ok(()) } else { Err(Error::invalid("the handle is of another pool")) }
    }
}

impl Handle {
    /// How many bytes were stored.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// For whom they were stored.
    pub fn owner(&self) -> u32 {
        self.owner
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({} of pool {}, {} bytes)", self.handle, self.pool, self.len)
    }
}

impl<D: Design> Deref for Read<'_, D> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
