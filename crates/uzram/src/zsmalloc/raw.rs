//! The pool itself: its parts, and how they refer to each other. Handles are plain numbers here; callers guarantee
//! their validity. Each operation has a file: `store`, `read`, `free` (`deferred`), `compact`, `evacuate`, `reclaim`, `stats`.

use std::ops::Range;

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, Table};
use crate::base::sync::{Arc, AtomicU64, Counter, Mutex, Ordering, Timed, classes};
use crate::slab::{self, TypedCache};

use super::access::ObjectAccess;
use super::builder::PoolBuilder;
use super::class::{CHAIN_SIZES, ClassTable, HEADER_BYTES};
use super::counts::Counts;
use super::deferred::DeferredLists;
use super::design::PoolLocks;
use super::lru::Lru;
use super::word::Location;
use super::zspage::{Descriptor, Descriptors};

/// Bytes of a cache line.
pub(super) const LINE_BYTES: usize = 64;

/// See the [module's documentation](super). Handles are numbers here.
pub struct RawPool<D: PoolLocks> {
    pub(super) arena: Arc<Arena>,
    pub(super) classes: ClassTable,
    pub(super) locks: D,
    pub(super) handles: TypedCache<D::Cell>,
    pub(super) zspages: Descriptors,
    /// For the first page of each zspage [owner of a huge object u32, inverted | descriptor u32]. An entry
    /// belongs to the zspage, and is written before any of its objects is published. The owner is inverted so
    /// that an entry of zeros names no page as the owner.
    pub(super) page_table: Table<AtomicU64>,
    /// Objects whose header did not name their handle when they were freed.
    pub(super) corrupted: Counter,
    pub(super) counts: Counts,
    /// Held by the thread that moves objects.
    pub(super) compaction: Mutex<()>,
    pub(super) pages_compacted: Counter,
    /// `None` unless the pool is built with `reclaim`.
    pub(super) lru: Option<Lru>,
    /// The frees that wait. `None` unless the pool is built with `defer_frees`.
    pub(super) deferred: Option<DeferredLists>,
    contents: ObjectAccess,
}

impl<D: PoolLocks> RawPool<D> {
    /// Makes a pool in the memory of `arena`.
    ///
    /// # Errors
    /// `Invalid` for a chain size outside [`CHAIN_SIZES`], or too small a limit of deferred frees; `NoMemory` when
    /// there is no address space for the tables.
    pub fn new(arena: Arc<Arena>, builder: &PoolBuilder) -> Result<Self> {
        let (name, max_objects) = (&builder.name, builder.max_objects_in(arena.reserved_pages()));
        if !CHAIN_SIZES.contains(&builder.chain_size) && !cfg!(loom) {
            let range = format!("zspages have {} to {} pages", CHAIN_SIZES.start(), CHAIN_SIZES.end());
            return Err(Error::invalid(range).with_setting("chain_size"));
        }
        let classes = ClassTable::new(builder.chain_size);
        let locks = D::new(classes.iter().len());
        let handles = TypedCache::<D::Cell>::options(format!("zs_handle-{name}"), max_objects);
        // Dropping the pool frees its objects.
        let max_objects_setting = builder.max_objects_setting;
        let slab_table = builder.regions.as_ref().map(|regions| regions.handles.clone());
        let handles =
            slab::CacheConfig { free_objects_on_drop: true, max_objects_setting, slab_table, ..handles };
        let page_table = builder.regions.as_ref().map(|regions| &regions.page_table);
        Ok(RawPool {
            locks,
            handles: TypedCache::new(Arc::clone(&arena), handles)?,
            zspages: Descriptors::new(name, Arc::clone(&arena), max_objects)?,
            page_table: Table::new_in(page_table, arena.reserved_pages())?,
            corrupted: Counter::new(0),
            counts: Counts::new(builder.count_locks),
            compaction: Mutex::new(&classes::COMPACTION, ()),
            pages_compacted: Counter::new(0),
            lru: builder.reclaim.then(|| Lru::new(arena.reserved_pages())).transpose()?,
            // More objects than there are never wait.
            deferred: builder
                .deferred_limit
                .map(|limit| DeferredLists::new(limit.min(max_objects)))
                .transpose()?,
            contents: ObjectAccess::new(arena.reserved_pages()),
            classes,
            arena,
        })
    }

    /// Populates the tables whose size does not depend on the arena's.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.handles.populate()?;
        self.zspages.populate()
    }

    /// Populates the table entries of these pages of the arena.
    ///
    /// # Errors
    /// As [`RawPool::populate`].
    pub fn populate_for(&self, pages: Range<u32>) -> Result<()> {
        let pages = pages.start as usize..pages.end as usize;
        self.lru.as_ref().map_or(Ok(()), |lru| lru.populate(pages.clone()))?;
        self.page_table.populate_range(pages)
    }

    /// Returns the object size, in bytes, of the class for `len` bytes (1..=4096).
    pub fn class_bytes(&self, len: usize) -> usize {
        usize::from(self.classes.get(self.classes.index_for(len)).size_bytes)
    }

    /// Returns the length from which contents take a whole page, so that compressing them has no use.
    pub fn huge_threshold(&self) -> usize {
        self.classes.huge_threshold()
    }

    /// Locks the lists of a class.
    #[inline]
    pub(super) fn lists(&self, class: u8) -> Timed<'_, D::Lists<'_>> {
        Timed::new(self.locks.lists(class, &self.counts), self.counts.lists_hold_ns())
    }

    /// Returns an object's address and the size of its header.
    #[inline]
    pub(super) fn place(&self, object: Location) -> (*mut u8, usize) {
        let class = self.classes.get(object.class);
        let offset = usize::from(object.index) * usize::from(class.size_bytes);
        let header_bytes = if class.is_huge() { 0 } else { HEADER_BYTES };
        (self.arena.address(object.page).wrapping_add(offset), header_bytes)
    }

    /// Returns the cell of a handle that is not freed meanwhile; for an invalid number, any other bytes or `None`.
    pub(super) fn cell(&self, handle: u32) -> Option<&D::Cell> {
        #[cfg(loom)]
        // SAFETY: models corrupt nothing: the number is a valid handle.
        return Some(unsafe { self.handles.get(handle) });
        #[cfg(not(loom))]
        // SAFETY: a hint is mapped and aligned; a cell is an atomic integer, for which any bytes are valid.
        self.handles.hint(handle).map(|cell| unsafe { &*cell })
    }

    /// Copies a huge object's owner and handle to the page table entry and descriptor of its new location.
    pub(super) fn copy_huge_names(&self, from: Location, to: Location, to_zspage: u32) {
        self.set_huge_owner(to.page, self.huge_owner(from.page), to_zspage);
        // SAFETY: the caller moves the object from one to the other, so both zspages are in use.
        let (from, to) = unsafe { (self.zspage_at(from.page), self.zspage_at(to.page)) };
        to.set_huge_handle(from.huge_handle());
    }

    /// Returns the owner of the huge object that starts at `page`.
    #[inline]
    pub(super) fn huge_owner(&self, page: u32) -> u32 {
        !(self.page_table[page as usize].load(Ordering::Relaxed) >> u32::BITS) as u32
    }

    /// Sets the owner of the huge object that starts at `page`, whose descriptor has the number `zspage`.
    #[inline]
    pub(super) fn set_huge_owner(&self, page: u32, owner: u32, zspage: u32) {
        let entry = u64::from(!owner) << u32::BITS | u64::from(zspage);
        self.page_table[page as usize].store(entry, Ordering::Relaxed);
    }

    /// Returns the number of the descriptor of the zspage that starts at `page`.
    #[inline]
    pub(super) fn zspage_id_at(&self, page: u32) -> u32 {
        self.page_table[page as usize].load(Ordering::Relaxed) as u32
    }

    /// Returns the descriptor of the zspage that starts at `page`.
    ///
    /// # Safety
    /// An object of that zspage is in use and stays in place as long as the result lives.
    #[inline]
    pub(super) unsafe fn zspage_at(&self, page: u32) -> &Descriptor {
        // SAFETY: the caller's promise.
        unsafe { self.zspages.get(self.zspage_id_at(page)) }
    }

    /// Returns the reporter of accesses to objects' bytes, for loom.
    #[inline]
    pub(super) fn contents(&self) -> &ObjectAccess {
        &self.contents
    }
}
