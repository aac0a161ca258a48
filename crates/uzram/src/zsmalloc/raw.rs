//! The pool itself: its parts, and how they refer to each other. Handles are plain numbers here, whose
//! validity the callers guarantee.

use std::ops::{DerefMut, Range};

use crate::base::error::{Error, Result};
use crate::base::mem::{Arena, Region, Table};
use crate::base::sync::{Access, Arc, AtomicU64, Counter, Mutex, Ordering, Timed, classes};
use crate::slab::{CacheConfig, TypedCache};

use super::class::{CHAIN_SIZES, ClassTable, HEADER_BYTES};
use super::counts::Counts;
use super::lru::Lru;
use super::word::{Cell, Location};
use super::zspage::{Descriptor, Descriptors, Lists};

pub(super) const LINE_BYTES: usize = 64;

/// The most objects that fit into a page: those of the smallest class.
const OBJECTS_A_PAGE: u64 = 128;

/// The most objects of a page in models, which store large ones.
const MODEL_OBJECTS: usize = 4;

/// The parts of a pool that are chosen.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// The name in statistics.
    pub name: String,
    /// The most pages of a zspage.
    pub chain_size: usize,
    /// The most objects; `None` for as many as its memory can hold.
    pub max_objects: Option<u64>,
    /// The setting that an error names when there are as many.
    pub max_objects_setting: &'static str,
    /// Whether lock operations are counted.
    pub count_locks: bool,
    /// Whether zspages are kept in LRU order, for [`RawPool::reclaim`].
    pub reclaim: bool,
    /// The regions, of [`PoolConfig::region_bytes`], of the tables by which the objects of a pool that
    /// outlives the process are found again.
    pub regions: Option<PoolRegions>,
}

/// See [`PoolConfig::regions`].
#[derive(Clone, Debug)]
pub struct PoolRegions {
    /// The slab table of the handles.
    pub handles: Region,
    /// The page table, with the owners of huge objects.
    pub page_table: Region,
}

impl PoolConfig {
    /// Returns the defaults.
    pub fn new(name: impl Into<String>) -> Self {
        PoolConfig {
            name: name.into(),
            chain_size: *CHAIN_SIZES.end(),
            max_objects: None,
            max_objects_setting: "max_objects",
            count_locks: false,
            reclaim: false,
            regions: None,
        }
    }

    fn max_objects_in(&self, pages: usize) -> u64 {
        self.max_objects.unwrap_or((pages as u64 * OBJECTS_A_PAGE).min(u32::MAX.into()))
    }

    fn handles_in(&self, pages: usize) -> CacheConfig {
        // A cell is a word, in every design.
        TypedCache::<AtomicU64>::options(format!("zs_handle-{}", self.name), self.max_objects_in(pages))
    }

    /// Returns the bytes of the regions of a pool in an arena of `arena_pages`: of the handles' slab table
    /// and of the page table. Fails as [`CacheConfig::slab_table_bytes`].
    pub fn region_bytes(&self, arena_pages: u64) -> Result<[u64; 2]> {
        let handles = self.handles_in(arena_pages as usize).slab_table_bytes()?;
        Ok([handles, Table::<AtomicU64>::bytes_of(arena_pages as usize)])
    }
}

/// The locks of a design, and the operations under them.
pub trait PoolLocks: Sized + Send + Sync + 'static {
    /// The name in settings and tables.
    const NAME: &'static str;
    /// Whether a reader may go on reading when its object is freed; the last reader then releases it.
    /// If not, the caller keeps the object from being freed while it is read.
    const READS_OUTLIVE_FREES: bool;
    /// Whether the pages of an emptied zspage are freed while its class's lists are still locked.
    const FREES_PAGES_LOCKED: bool;
    type Cell: Cell;
    /// The locked lists of a class.
    type Lists<'a>: DerefMut<Target = Lists>;
    /// The locked lists of a class whose objects no thread can look up, and whose zspages no thread can hold,
    /// meanwhile.
    type MigrationGuard<'a>: DerefMut<Target = Lists>;

    /// Makes the locks for `classes` classes.
    fn new(classes: usize) -> Self;

    fn lists(&self, class: u8, counts: &Counts) -> Self::Lists<'_>;

    /// Locks the lists of a class to move its objects.
    fn lock_for_migration(&self, class: u8, counts: &Counts) -> Self::MigrationGuard<'_>;

    /// Returns whether other threads wait for the locks of a guard: a hint.
    fn is_contended(guard: &Self::MigrationGuard<'_>) -> bool;

    /// Finds a handle's object, and keeps it in place until [`PoolLocks::unpin`].
    ///
    /// # Safety
    /// The handle is in use and not being freed.
    unsafe fn pin(pool: &RawPool<Self>, handle: u32) -> Location;

    /// Ends a pin; by default, a hold of the zspage. If the object was freed meanwhile and the caller must
    /// release it, returns it with the lists of its class.
    ///
    /// # Safety
    /// The handle is pinned.
    #[inline]
    unsafe fn unpin(pool: &RawPool<Self>, handle: u32, object: Location) -> Option<Released<'_, Self>> {
        let _ = handle;
        // SAFETY: the object is in use (the caller's promise) and stays in place, as its zspage is held.
        unsafe { pool.zspage_at(object.page) }.let_go();
        None
    }

    /// Finds a handle's object to free it: returns the object to release with the lists of its class,
    /// unless a reader will release it.
    ///
    /// # Safety
    /// The handle is in use, and only this call frees it.
    unsafe fn free(pool: &RawPool<Self>, handle: u32) -> Option<Released<'_, Self>>;
}

/// An object that is no longer used, and the locked lists of its class.
pub type Released<'a, D> = (Location, Timed<'a, <D as PoolLocks>::Lists<'a>>);

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
    /// `None` unless the pool is configured with `reclaim`.
    pub(super) lru: Option<Lru>,
    /// For loom, which does not model the memory of objects' bytes, the accesses to each place; else empty.
    contents: Box<[Access]>,
}

impl<D: PoolLocks> RawPool<D> {
    /// Makes a pool in the memory of `arena`. Fails with `Invalid` for a chain size outside [`CHAIN_SIZES`];
    /// `NoMemory` when there is no address space for the tables.
    pub fn new(arena: Arc<Arena>, config: &PoolConfig) -> Result<Self> {
        let pages = arena.reserved_pages();
        if !CHAIN_SIZES.contains(&config.chain_size) && !cfg!(loom) {
            let range = format!("zspages have {} to {} pages", CHAIN_SIZES.start(), CHAIN_SIZES.end());
            return Err(Error::invalid(range).with_setting("chain_size"));
        }
        let classes = ClassTable::new(config.chain_size);
        let locks = D::new(classes.iter().len());
        let handles = CacheConfig {
            max_objects_setting: config.max_objects_setting,
            slab_table: config.regions.as_ref().map(|regions| regions.handles.clone()),
            ..config.handles_in(pages)
        };
        let name = format!("zspage-{}", config.name);
        let zspages = Descriptors::options(name, config.max_objects_in(pages));
        let page_table = config.regions.as_ref().map(|regions| &regions.page_table);
        Ok(RawPool {
            locks,
            handles: TypedCache::new(Arc::clone(&arena), handles)?,
            zspages: TypedCache::new(Arc::clone(&arena), zspages)?,
            page_table: Table::new_in(page_table, pages)?,
            corrupted: Counter::new(0),
            counts: Counts::new(config.count_locks),
            compaction: Mutex::new(&classes::COMPACTION, ()),
            pages_compacted: Counter::new(0),
            lru: config.reclaim.then(|| Lru::new(pages)).transpose()?,
            contents: (0..if cfg!(loom) { pages * MODEL_OBJECTS } else { 0 })
                .map(|_| Access::default())
                .collect(),
            classes,
            arena,
        })
    }

    /// Populates the tables whose size does not depend on the arena's. Fails with `NoMemory` when the system
    /// gives none.
    pub fn populate(&self) -> Result<()> {
        self.handles.cache().populate()?;
        self.zspages.cache().populate()
    }

    /// Populates the table entries of these pages of the arena. Fails as [`RawPool::populate`].
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
        self.classes.huge_threshold
    }

    /// Returns [`PoolLocks::READS_OUTLIVE_FREES`] of the design.
    #[inline]
    pub fn reads_outlive_frees(&self) -> bool {
        D::READS_OUTLIVE_FREES
    }

    #[inline]
    pub(super) fn lists(&self, class: u8) -> Timed<'_, D::Lists<'_>> {
        Timed::new(self.locks.lists(class, &self.counts), self.counts.lists_hold_ns())
    }

    /// Reports an access to an object's bytes to loom.
    #[inline]
    pub(super) fn note_access(&self, object: Location, note: fn(&Access)) {
        if cfg!(loom) {
            assert!(usize::from(object.index) < MODEL_OBJECTS, "models store large objects");
            note(&self.contents[object.page as usize * MODEL_OBJECTS + usize::from(object.index)]);
        }
    }

    #[inline]
    pub(super) fn place(&self, object: Location) -> (*mut u8, usize) {
        let class = self.classes.get(object.class);
        let offset = usize::from(object.index) * usize::from(class.size_bytes);
        let header_bytes = if class.is_huge() { 0 } else { HEADER_BYTES };
        (self.arena.address(object.page).wrapping_add(offset), header_bytes)
    }

    /// Returns the cell of a handle that is not freed meanwhile; for an invalid number, any other bytes or
    /// `None`.
    pub(super) fn cell(&self, handle: u32) -> Option<&D::Cell> {
        #[cfg(loom)]
        // SAFETY: models corrupt nothing: the number is a valid handle.
        return Some(unsafe { self.handles.get(handle) });
        #[cfg(not(loom))]
        // SAFETY: a hint is mapped and aligned; a cell is an atomic integer, for which any bytes are valid.
        self.handles.hint(handle).map(|cell| unsafe { &*cell })
    }

    #[inline]
    pub(super) fn huge_owner(&self, page: u32) -> u32 {
        !(self.page_table[page as usize].load(Ordering::Relaxed) >> u32::BITS) as u32
    }

    #[inline]
    pub(super) fn set_huge_owner(&self, page: u32, owner: u32, zspage: u32) {
        let entry = u64::from(!owner) << u32::BITS | u64::from(zspage);
        self.page_table[page as usize].store(entry, Ordering::Relaxed);
    }

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
}
