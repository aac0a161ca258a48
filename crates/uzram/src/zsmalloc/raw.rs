//! The pool itself, its handles being numbers: who uses one vouches for it.

use std::ops::{Deref, Range};
use std::ptr::NonNull;

use crate::base::cpu::prefetch;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Account, Arena, Table};
use crate::base::sync::{Access, Arc, AtomicU64, Counter, Mutex, Ordering, Timed, classes};
use crate::slab::{self, Typed};

use super::class::{CHAIN_SIZES, ClassTable, HEADER_BYTES};
use super::counts::{Counts, LockCounts};
use super::design::Design;
use super::lru::Lru;
use super::word::{Cell, Object};
use super::zspage::{Descriptor, Descriptors};

/// A cache line.
pub(super) const LINE_BYTES: usize = 64;

/// How a pool is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its name in statistics.
    pub name: String,
    /// The most pages of a zspage, one of [`CHAIN_SIZES`].
    pub chain_size: usize,
    /// How many objects it can hold.
    pub max_objects: u64,
    /// The setting that an error names when there are so many.
    pub max_objects_setting: &'static str,
    /// Whether it counts what it does with its locks ([`LockCounts`]).
    pub count_locks: bool,
    /// Whether it keeps the order in which its zspages were stored into, to empty the coldest
    /// ([`Pool::reclaim`](super::Pool::reclaim)). That takes a lock of the whole pool for each object that
    /// is stored, and 12 bytes a page.
    pub reclaim: bool,
}

impl Options {
    /// A pool for so many objects, with zspages of up to 16 pages, and nothing beyond that.
    pub fn new(name: impl Into<String>, max_objects: u64) -> Self {
        let (name, chain_size) = (name.into(), *CHAIN_SIZES.end());
        Options {
            name,
            chain_size,
            max_objects,
            max_objects_setting: "max_objects",
            count_locks: false,
            reclaim: false,
        }
    }
}

/// See the [module's documentation](super). Handles are numbers here.
pub struct RawPool<D: Design> {
    pub(super) arena: Arc<Arena>,
    pub(super) classes: ClassTable,
    pub(super) locks: D,
    pub(super) handles: Typed<D::Cell>,
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
    /// Where the options ask for it.
    pub(super) lru: Option<Lru>,
    contents: Contents,
}

impl<D: Design> RawPool<D> {
    /// A pool in the memory of `arena`.
    ///
    /// # Errors
    /// `Invalid` for a chain size outside [`CHAIN_SIZES`]; `NoMemory` when there is no address space for the
    /// tables.
    pub fn new(arena: Arc<Arena>, options: &Options) -> Result<Self> {
        let Options { name, max_objects, .. } = options;
        if !CHAIN_SIZES.contains(&options.chain_size) && !cfg!(loom) {
            let range = format!("zspages have {} to {} pages", CHAIN_SIZES.start(), CHAIN_SIZES.end());
            return Err(Error::invalid(range).with_setting("chain_size"));
        }
        let classes = ClassTable::new(options.chain_size);
        let locks = D::new(classes.iter().len());
        let handles = Typed::<D::Cell>::options(format!("zs_handle-{name}"), *max_objects);
        // A pool ends with what is stored in it.
        let max_objects_setting = options.max_objects_setting;
        let handles = slab::Options { dropped_whole: true, max_objects_setting, ..handles };
        Ok(RawPool {
            locks,
            handles: Typed::new(Arc::clone(&arena), handles)?,
            zspages: Descriptors::new(name, Arc::clone(&arena), *max_objects)?,
            page_table: Table::new(arena.reserved_pages())?,
            corrupted: Counter::new(0),
            counts: Counts::new(options.count_locks),
            compaction: Mutex::new(&classes::COMPACTION, ()),
            pages_compacted: Counter::new(0),
            lru: options.reclaim.then(|| Lru::new(arena.reserved_pages())).transpose()?,
            contents: Contents::new(arena.reserved_pages()),
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

    /// Protects the first `len` bytes of an object for reading.
    ///
    /// # Errors
    /// `Corrupt` when what is there does not belong to this handle and owner.
    ///
    /// # Safety
    /// The handle is in use and is not being freed; unless [`READS_OUTLIVE_FREES`], it is not freed
    /// before the answer is dropped.
    ///
    /// [`READS_OUTLIVE_FREES`]: super::design::Locks::READS_OUTLIVE_FREES
    #[inline]
    pub unsafe fn read(&self, handle: u32, owner: u32, len: usize) -> Result<RawRead<'_, D>> {
        // SAFETY: the caller's promise.
        let object = unsafe { D::pin(self, handle) };
        self.contents.read(object);
        let (start, header_bytes) = self.place(object);
        let bytes = NonNull::new(start.wrapping_add(header_bytes)).unwrap_or(NonNull::dangling());
        // Unpins on every way out.
        let read = RawRead { pool: self, handle, object, bytes, len };
        // The processor's own prefetcher starts after some misses, which is late for so short a run.
        (0..len).step_by(LINE_BYTES).for_each(|at| prefetch(start.wrapping_add(at)));
        let room = usize::from(self.classes.get(object.class).size_bytes) - header_bytes;
        let named = if header_bytes == 0 {
            [handle, (self.page_table[object.page as usize].load(Ordering::Relaxed) >> 32) as u32]
        } else {
            // SAFETY: the pin keeps the object where it is, and its header was written before its handle
            // was known.
            unsafe { start.cast::<[u32; 2]>().read() }
        };
        if named != [handle, owner] || len > room {
            return Err(Error::new(ErrorKind::Corrupt, "the stored page is damaged: it belongs to another"));
        }
        Ok(read)
    }

    /// Brings nearer what [`RawPool::free`] will touch: a hint, for a number that need not be a
    /// handle at all.
    #[inline]
    pub fn prefetch(&self, handle: u32) {
        // Models have no caches, and need not explore what a hint finds.
        if cfg!(loom) {
            return;
        }
        let Some(cell) = self.handles.hint(handle) else { return };
        // The handle may be freed meanwhile, and its memory be used for anything.
        // SAFETY: a hint is aligned, and stays mapped.
        let Some(object) = (unsafe { D::Cell::hint(cell) }) else { return };
        let (page, class) = (object.page as usize, usize::from(object.class));
        if page < self.page_table.len() && class < self.classes.iter().len() {
            prefetch(&raw const self.page_table[page]);
            prefetch(self.place(object).0);
        }
    }

    /// Pages committed to zspages: the kernel's `mem_used_total` in pages.
    pub fn pages_used(&self) -> u64 {
        self.arena.used_pages(Account::Pool)
    }

    /// Objects found damaged when they were freed; their memory is not used again.
    pub fn corrupted(&self) -> u64 {
        self.corrupted.get()
    }

    /// Pages that compaction has freed.
    pub fn pages_compacted(&self) -> u64 {
        self.pages_compacted.get()
    }

    /// What the pool did with its locks, if its options asked for it.
    pub fn lock_counts(&self) -> LockCounts {
        self.counts.sum()
    }

    /// The memory that the pool's tables take now; it grows with the pool.
    #[cfg(not(loom))]
    pub fn table_resident_bytes(&self) -> usize {
        self.page_table.resident_bytes()
            + self.handles.table_resident_bytes()
            + self.zspages.table_resident_bytes()
    }

    /// Locks the lists of a class.
    #[inline]
    pub(super) fn lists(&self, class: u8) -> Timed<'_, D::Lists<'_>> {
        Timed::new(self.locks.lists(class, &self.counts), self.counts.lists_hold_ns())
    }

    /// Where an object starts, and how many bytes its header has.
    #[inline]
    pub(super) fn place(&self, object: Object) -> (*mut u8, usize) {
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
    pub(super) fn copy_huge_names(&self, from: Object, to: Object, to_zspage: u32) {
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
    /// An object of that zspage is in use, and stays where it is, as long as the answer lives.
    #[inline]
    pub(super) unsafe fn zspage_at(&self, page: u32) -> &Descriptor {
        // SAFETY: the caller's promise.
        unsafe { self.zspages.get(self.zspage_id_at(page)) }
    }

    /// The bytes of objects are used: loom is told, which cannot see it.
    pub(super) fn contents(&self) -> &Contents {
        &self.contents
    }
}

/// The bytes of an object, protected until this is dropped.
pub struct RawRead<'a, D: Design> {
    pool: &'a RawPool<D>,
    handle: u32,
    object: Object,
    bytes: NonNull<u8>,
    len: usize,
}

impl<D: Design> Deref for RawRead<'_, D> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `read` found that the object has room for `len` bytes from `bytes` on, which were
        // written with it; the pin keeps it where it is, and nobody writes to an object that is stored.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

impl<D: Design> Drop for RawRead<'_, D> {
    #[inline]
    fn drop(&mut self) {
        self.pool.contents.read(self.object);
        // SAFETY: this pinned the handle.
        if let Some(released) = unsafe { D::unpin(self.pool, self.handle, self.object) } {
            self.pool.release(self.handle, released);
        }
    }
}

/// Tells loom of the bytes of objects, by place; otherwise empty.
pub(super) struct Contents {
    #[cfg(loom)]
    places: Box<[Access]>,
    #[cfg(not(loom))]
    _places: Access,
}

#[cfg(loom)]
impl Contents {
    /// Objects of a page, at most: models store large ones.
    const OBJECTS: usize = 4;

    fn new(pages: usize) -> Self {
        Contents { places: (0..pages * Self::OBJECTS).map(|_| Access::default()).collect() }
    }

    fn place(&self, object: Object) -> &Access {
        assert!(usize::from(object.index) < Self::OBJECTS, "models store large objects");
        &self.places[object.page as usize * Self::OBJECTS + usize::from(object.index)]
    }

    pub(super) fn read(&self, object: Object) {
        self.place(object).read();
    }

    pub(super) fn write(&self, object: Object) {
        self.place(object).write();
    }
}

#[cfg(not(loom))]
impl Contents {
    fn new(_: usize) -> Self {
        Contents { _places: Access::default() }
    }

    #[inline]
    pub(super) fn read(&self, _: Object) {}

    #[inline]
    pub(super) fn write(&self, _: Object) {}
}
