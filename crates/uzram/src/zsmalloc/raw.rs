//! The pool itself: its parts, and how one leads to another. Handles are numbers here, for whose use the caller
//! vouches. Each operation has a file: `store`, `read`, `free`, `compact`, `evacuate`, `reclaim`, `stats`.

use std::ops::Range;

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, Table};
use crate::base::sync::{Arc, AtomicU64, Counter, Mutex, Ordering, Timed, classes};
use crate::slab::{self, TypedCache};

use super::access::ObjectAccess;
use super::builder::PoolBuilder;
use super::class::{CHAIN_SIZES, ClassTable, HEADER_BYTES};
use super::counts::Counts;
use super::design::PoolLocks;
use super::lru::Lru;
use super::word::Location;
use super::zspage::{Descriptor, Descriptors};

/// A cache line.
pub(super) const LINE_BYTES: usize = 64;

/// See the [module's documentation](super). Handles are numbers here.
pub struct RawPool<D: PoolLocks> {
    pub(super) arena: Arc<Arena>,
    pub(super) classes: ClassTable,
    pub(super) locks: D,
    pub(super) handles: TypedCache<D::Cell>,
    pub(super) zspages: Descriptors,
    /// For the first page of each zspage [owner of a huge object u32 | descriptor u32]. An entry
    /// belongs to the zspage, and is written before any of its objects is known to others.
    pub(super) page_table: Table<AtomicU64>,
    /// Objects whose header was not theirs when they were freed.
    pub(super) corrupted: Counter,
    pub(super) counts: Counts,
    /// Held by who moves objects.
    pub(super) compaction: Mutex<()>,
    pub(super) pages_compacted: Counter,
    /// Only of a pool that reclaims.
    pub(super) lru: Option<Lru>,
    contents: ObjectAccess,
}

impl<D: PoolLocks> RawPool<D> {
    /// A pool in the memory of `arena`.
    ///
    /// # Errors
    /// `Invalid` for a chain size outside [`CHAIN_SIZES`]; `NoMemory` when there is no address space for the
    /// tables.
    pub fn new(arena: Arc<Arena>, builder: &PoolBuilder) -> Result<Self> {
        let (name, max_objects) = (&builder.name, builder.max_objects_in(arena.reserved_pages()));
        if !CHAIN_SIZES.contains(&builder.chain_size) && !cfg!(loom) {
            let range = format!("zspages have {} to {} pages", CHAIN_SIZES.start(), CHAIN_SIZES.end());
            return Err(Error::invalid(range).with_setting("chain_size"));
        }
        let classes = ClassTable::new(builder.chain_size);
        let locks = D::new(classes.iter().len());
        let handles = TypedCache::<D::Cell>::options(format!("zs_handle-{name}"), max_objects);
        // A pool ends with what is stored in it.
        let max_objects_setting = builder.max_objects_setting;
        let handles = slab::CacheConfig { free_objects_on_drop: true, max_objects_setting, ..handles };
        Ok(RawPool {
            locks,
            handles: TypedCache::new(Arc::clone(&arena), handles)?,
            zspages: Descriptors::new(name, Arc::clone(&arena), max_objects)?,
            page_table: Table::new(arena.reserved_pages())?,
            corrupted: Counter::new(0),
            counts: Counts::new(builder.count_locks),
            compaction: Mutex::new(&classes::COMPACTION, ()),
            pages_compacted: Counter::new(0),
            lru: builder.reclaim.then(|| Lru::new(arena.reserved_pages())).transpose()?,
            contents: ObjectAccess::new(arena.reserved_pages()),
            classes,
            arena,
        })
    }

    /// Has the tables in memory from now on whose size does not depend on the arena's.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.handles.populate()?;
        self.zspages.populate()
    }

    /// Has what belongs to these pages of the arena in memory from now on.
    ///
    /// # Errors
    /// As [`RawPool::populate`].
    pub fn populate_for(&self, pages: Range<u32>) -> Result<()> {
        let pages = pages.start as usize..pages.end as usize;
        self.lru.as_ref().map_or(Ok(()), |lru| lru.populate(pages.clone()))?;
        self.page_table.populate_range(pages)
    }

    /// What an object of `len` bytes, 1 to 4096, takes: its size class's size, in bytes.
    pub fn class_bytes(&self, len: usize) -> usize {
        usize::from(self.classes.get(self.classes.index_for(len)).size_bytes)
    }

    /// Contents of this length or more take a whole page: compressing them further than to it has
    /// no use.
    pub fn huge_threshold(&self) -> usize {
        self.classes.huge_threshold()
    }

    /// Locks the lists of a class.
    #[inline]
    pub(super) fn lists(&self, class: u8) -> Timed<'_, D::Lists<'_>> {
        Timed::new(self.locks.lists(class, &self.counts), self.counts.lists_hold_ns())
    }

    /// Where an object starts, and how many bytes its header has.
    #[inline]
    pub(super) fn place(&self, object: Location) -> (*mut u8, usize) {
        let class = self.classes.get(object.class);
        let offset = usize::from(object.index) * usize::from(class.size_bytes);
        let header_bytes = if class.is_huge() { 0 } else { HEADER_BYTES };
        (self.arena.address(object.page).wrapping_add(offset), header_bytes)
    }

    /// The cell of a handle that nobody frees meanwhile, or, for a number that is none, whatever else is in memory there.
    pub(super) fn cell(&self, handle: u32) -> Option<&D::Cell> {
        #[cfg(loom)]
        // SAFETY: models damage nothing: the number is a handle's.
        return Some(unsafe { self.handles.get(handle) });
        #[cfg(not(loom))]
        // SAFETY: a hint is mapped, and aligned; a cell is an atomic integer, which any bytes are.
        self.handles.hint(handle).map(|cell| unsafe { &*cell })
    }

    /// Moves what a page table entry says of a huge object to the one of its new place, and its handle.
    pub(super) fn copy_huge_names(&self, from: Location, to: Location, to_zspage: u32) {
        let owner = self.page_table[from.page as usize].load(Ordering::Relaxed) >> 32;
        let entry = owner << 32 | u64::from(to_zspage);
        self.page_table[to.page as usize].store(entry, Ordering::Relaxed);
        // SAFETY: both are the caller's to move, so their zspages are in use.
        let (from, to) = unsafe { (self.zspage_at(from.page), self.zspage_at(to.page)) };
        to.set_huge_handle(from.huge_handle());
    }

    /// The number of the descriptor of the zspage that starts at `page`.
    #[inline]
    pub(super) fn zspage_id_at(&self, page: u32) -> u32 {
        self.page_table[page as usize].load(Ordering::Relaxed) as u32
    }

    /// The descriptor of the zspage that starts at `page`.
    ///
    /// # Safety
    /// An object of that zspage is in use, and stays where it is, as long as the result lives.
    #[inline]
    pub(super) unsafe fn zspage_at(&self, page: u32) -> &Descriptor {
        // SAFETY: the caller's promise.
        unsafe { self.zspages.get(self.zspage_id_at(page)) }
    }

    /// Tells loom of uses of objects' bytes, which it cannot see.
    #[inline]
    pub(super) fn contents(&self) -> &ObjectAccess {
        &self.contents
    }
}
