//! zsmalloc: memory for compressed pages, packed tightly whatever their sizes.
//!
//! Objects of similar size share *zspages*, runs of one to sixteen pages cut into equal objects. A
//! new object goes into the fullest zspage of its class that has room, so that the emptier ones
//! can run empty and be given back.
//!
//! ```text
//! Handle ──► handle cell [page | class | index | freed | pins]      (slab "handle")
//!                           │
//!            page table [page] ──► descriptor of the zspage          (slab "zspage")
//!                           │
//!            arena [page + index * size] ──► [handle u32][owner u32][contents …]
//! ```
//!
//! A huge object is a page of its own without room for a header; its owner stands in the page
//! table. Every read checks handle and owner (of a huge object, the owner), so that damage cannot
//! hand out another page's bytes.
//!
//! Lock design: each class has a lock for its zspages. There is no lock for the pool: the handle
//! cell names the class, so a free goes straight to it ("mm/zsmalloc: reduce lock contention in
//! zs_free()", W. Hao, 2026), and readers pin the handle cell instead of locking the zspage.
//! Lock order: size class, then the arena's `commit` only; zspages, runs and descriptors are
//! allocated and freed without a class lock.

mod class;
mod handle;
mod reserved;
mod zspage;

#[cfg(all(test, not(feature = "loom")))]
mod tests;

pub use class::{CHAIN_SIZES, SizeClass};
pub(crate) use reserved::Reserved;
pub use zspage::FULLNESS_GROUPS;

use std::ops::Deref;
use std::ptr::NonNull;

use crate::base::cpu::{Padded, prefetch};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Account, Arena, Full, Gfp, Table};
use crate::base::sync::{Arc, AtomicU64, Counter, Mutex, Ordering, classes};
use crate::base::units::PAGE_SIZE;
use crate::slab::{Options, Typed};
use class::{ClassTable, HEADER_BYTES};
use handle::{HandleCell, Object};
use zspage::{Descriptors, Lists, NONE_INDEX, Zspage, fullness_group};

/// What stands in the header of a free object instead of a handle.
const FREE_TAG: u32 = u32::MAX;
/// A cache line.
const LINE_BYTES: usize = 64;
/// Zspages of a group that are looked at for a freed object when nothing may grow.
const HOLE_SEARCH: usize = 32;

/// Contents of this length or more take a page of their own in a pool of that chain size.
pub fn huge_threshold(chain_size: usize) -> usize {
    ClassTable::new(chain_size).huge_threshold()
}

/// Names an object of a [`Pool`]. A copy is no second object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(u32);

impl Handle {
    /// As a number, to be kept in four bytes.
    pub fn to_bits(self) -> u32 {
        self.0
    }

    /// From the number of a handle.
    pub fn from_bits(bits: u32) -> Self {
        Handle(bits)
    }
}

/// See the [module's documentation](self).
pub(crate) struct Pool {
    arena: Arc<Arena>,
    classes: ClassTable,
    /// The zspages of each class; its lock protects the lists and the descriptors in them.
    lists: Box<[Padded<Mutex<Lists>>]>,
    handles: Typed<HandleCell>,
    zspages: Descriptors,
    /// For the first page of each zspage [owner of a huge object u32 | descriptor u32]. An entry
    /// belongs to the zspage, and is written before any of its objects is known to others.
    page_table: Table<AtomicU64>,
    /// Objects whose header was not theirs when they were freed.
    corrupted: Counter,
}

/// One class in the columns of the kernel's `classes` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassStat {
    /// Its shape.
    pub class: SizeClass,
    /// Zspages by fullness group.
    pub zspages: [u32; FULLNESS_GROUPS],
    /// Objects that its zspages have room for.
    pub obj_allocated: u64,
    /// Objects in use.
    pub obj_used: u64,
    /// Pages committed to its zspages.
    pub pages_used: u64,
}

impl ClassStat {
    /// Pages that packing the class's objects together would free, the kernel's `freeable`.
    pub fn freeable_pages(&self) -> u64 {
        let spare = (self.obj_allocated - self.obj_used) / u64::from(self.class.objs_per_zspage);
        spare * u64::from(self.class.pages_per_zspage)
    }
}

impl Pool {
    /// A pool, called `name` in statistics, of at most `max_objects` objects in the memory of `arena`, whose zspages have up to
    /// `chain_size` pages.
    ///
    /// # Errors
    /// `Invalid` for a chain size outside [`CHAIN_SIZES`], `NoMemory` when there is no address
    /// space for the tables.
    pub fn new(name: &str, arena: Arc<Arena>, chain_size: usize, max_objects: u64) -> Result<Self> {
        if !CHAIN_SIZES.contains(&chain_size) && !cfg!(feature = "loom") {
            let range = format!("zspages have {} to {} pages", CHAIN_SIZES.start(), CHAIN_SIZES.end());
            return Err(Error::invalid(range).with_setting("chain_size"));
        }
        let classes = ClassTable::new(chain_size);
        let lists = || Padded(Mutex::new(&classes::SIZE_CLASS, Lists::new()));
        let handles = Typed::<HandleCell>::options(format!("zs_handle-{name}"), max_objects);
        // A pool ends with what is stored in it.
        let handles = Options { dropped_whole: true, ..handles };
        Ok(Pool {
            lists: classes.iter().map(|_| lists()).collect(),
            handles: Typed::new(Arc::clone(&arena), handles)?,
            zspages: Descriptors::new(name, Arc::clone(&arena), max_objects)?,
            page_table: Table::new(arena.reserved_pages())?,
            corrupted: Counter::new(0),
            classes,
            arena,
        })
    }

    /// Contents of this length or more take a whole page: compressing them further than to it has
    /// no use.
    pub fn huge_threshold(&self) -> usize {
        self.classes.huge_threshold()
    }

    /// Stores a copy of `bytes` (1..=4096) for `owner`.
    ///
    /// # Errors
    /// As [`Pool::reserve`]. Nothing is stored then.
    #[inline]
    pub fn store(&self, bytes: &[u8], owner: u32, gfp: Gfp) -> Result<Handle> {
        self.reserve(bytes.len(), gfp)?.write(bytes, owner)
    }

    /// Takes an object with room for `len` bytes (1..=4096), to be written later.
    ///
    /// # Errors
    /// `Invalid` for another length, `NoSpace` when the arena's limit is met, `NoMemory` when the
    /// system gives no more. If `gfp` forbids waiting, any of the latter two means no more than
    /// that it takes waiting to know.
    #[inline]
    pub fn reserve(&self, len: usize, gfp: Gfp) -> Result<Reserved<'_>> {
        if len == 0 || len > PAGE_SIZE {
            return Err(Error::invalid("an object has 1 to 4096 bytes"));
        }
        let handle = self.with_memory(gfp, || self.handles.insert(HandleCell::default(), gfp))?;
        match self.with_memory(gfp, || self.alloc(self.classes.index_for(len), gfp)) {
            Ok(object) => Ok(Reserved::new(self, handle, object)),
            Err(error) => {
                // SAFETY: the handle is new, and known here only.
                unsafe { self.free_handle(handle) };
                Err(error)
            }
        }
    }

    /// Protects the first `len` bytes of an object for reading. A free from now on takes effect
    /// when the last reader is done.
    ///
    /// The caller knows that the handle has not been freed (it holds the lock of the slot that the
    /// handle is in).
    ///
    /// # Errors
    /// `Corrupt` when what is there does not belong to this handle and owner.
    #[inline]
    pub fn pin(&self, handle: Handle, owner: u32, len: usize) -> Result<Pinned<'_>> {
        // SAFETY: the handle is in use (the caller knows).
        let object = unsafe { self.handles.get(handle.0) }.pin();
        let (start, header_bytes) = self.place(object);
        let bytes = NonNull::new(start.wrapping_add(header_bytes)).unwrap_or(NonNull::dangling());
        // Unpins on every way out.
        let pinned = Pinned { pool: self, handle, bytes, len };
        // The processor's own prefetcher starts after some misses, which is late for so short a run.
        (0..len).step_by(LINE_BYTES).for_each(|at| prefetch(start.wrapping_add(at)));
        let room = usize::from(self.classes.get(object.class).size_bytes) - header_bytes;
        let named = if header_bytes == 0 {
            [handle.0, (self.page_table[object.page as usize].load(Ordering::Relaxed) >> 32) as u32]
        } else {
            // SAFETY: the pin keeps the object allocated, and `store` wrote its header.
            unsafe { start.cast::<[u32; 2]>().read() }
        };
        if named != [handle.0, owner] || len > room {
            return Err(Error::new(ErrorKind::Corrupt, "the stored page is damaged: it belongs to another"));
        }
        Ok(pinned)
    }

    /// Frees an object, at once or when its last reader is done. The handle is not to be used
    /// again.
    pub fn free(&self, handle: Handle) {
        // SAFETY: the handle is in use: the caller frees it, once.
        if let Some(object) = unsafe { self.handles.get(handle.0) }.free() {
            self.release(handle, object);
        }
    }

    /// Brings nearer what [`Pool::free`] will touch: a hint, for a number that need not be a
    /// handle at all.
    #[inline]
    pub fn prefetch(&self, handle_bits: u32) {
        let Some(cell) = self.handles.hint(handle_bits) else { return };
        // SAFETY: a hint is mapped, and aligned.
        let object = unsafe { HandleCell::peek(cell) };
        let (page, class) = (object.page as usize, usize::from(object.class));
        if page < self.page_table.len() && class < self.lists.len() {
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

    /// The memory that the pool's tables take now; it grows with the pool.
    #[cfg(not(feature = "loom"))]
    pub fn table_resident_bytes(&self) -> usize {
        self.page_table.resident_bytes()
            + self.handles.table_resident_bytes()
            + self.zspages.table_resident_bytes()
    }

    /// The state of each class, smallest first.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        let stat = |(class, lists): (&SizeClass, &Padded<Mutex<Lists>>)| {
            let lists = lists.lock();
            let zspages: u64 = lists.zspages.iter().map(|count| u64::from(*count)).sum();
            ClassStat {
                class: *class,
                zspages: lists.zspages,
                obj_allocated: zspages * u64::from(class.objs_per_zspage),
                obj_used: lists.objs_used,
                pages_used: lists.pages_used,
            }
        };
        self.classes.iter().zip(&self.lists).rev().map(stat).collect()
    }

    /// Where an object starts, and how many bytes its header has.
    #[inline]
    fn place(&self, object: Object) -> (*mut u8, usize) {
        let class = self.classes.get(object.class);
        let offset = usize::from(object.index) * usize::from(class.size_bytes);
        let header_bytes = if class.is_huge() { 0 } else { HEADER_BYTES };
        (self.arena.address(object.page).wrapping_add(offset), header_bytes)
    }

    /// Runs `f`; if it meets the limit and `gfp` allows it, once more after giving free memory back.
    #[inline]
    fn with_memory<R>(&self, gfp: Gfp, f: impl Fn() -> Result<R>) -> Result<R> {
        match f() {
            Err(error) if gfp == Gfp::MayWait && self.may_help(&error) => {
                self.arena.release_free();
                f()
            }
            done => done,
        }
    }

    /// Whether giving free memory back may mend `error`: not if a limit is met by what is in use.
    #[cold]
    fn may_help(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::NoMemory => true,
            ErrorKind::NoSpace => error.setting() != Some("mem_limit") || self.arena.keeps_free(),
            _ => false,
        }
    }

    fn alloc(&self, class: u8, gfp: Gfp) -> Result<Object> {
        if let Some(object) = self.alloc_in_existing(&mut self.lists[usize::from(class)].lock(), class)? {
            return Ok(object);
        }
        let (id, object) = self.alloc_zspage(class, gfp)?;
        let mut lists = self.lists[usize::from(class)].lock();
        let group = fullness_group(1, self.classes.get(class).objs_per_zspage);
        lists.insert(&self.zspages, id, group);
        lists.objs_used += 1;
        lists.pages_used += self.zspages.with(&mut lists, id, |zspage| u64::from(zspage.committed));
        Ok(object)
    }

    /// Takes an object of the fullest zspage with room, if there is any.
    fn alloc_in_existing(&self, lists: &mut Lists, class: u8) -> Result<Option<Object>, Full> {
        let Some(id) = lists.fullest_with_room() else { return Ok(None) };
        if let Ok(object) = self.take(lists, id, class, true) {
            return Ok(Some(object));
        }
        // The fullest may not grow, but another zspage may have room in pages it has already.
        let hole = |lists: &mut Lists, id| self.take(lists, id, class, false).ok();
        lists.find_with_room(&self.zspages, HOLE_SEARCH, hole).map(Some).ok_or(Full)
    }

    /// Takes an object of a zspage that has room, growing it by pages only if it `may_grow`.
    fn take(&self, lists: &mut Lists, id: u32, class: u8, may_grow: bool) -> Result<Object, Full> {
        let shape = self.classes.get(class);
        let arena = &self.arena;
        let taken = self.zspages.with(lists, id, |zspage| {
            debug_assert_eq!(zspage.class, class, "the lists hold zspages of their class");
            let mut grown = 0;
            let index = zspage.free;
            let index = if index != NONE_INDEX {
                let offset = usize::from(index) * usize::from(shape.size_bytes);
                let start = arena.address(zspage.page).wrapping_add(offset);
                // SAFETY: a freed object's first bytes hold the tag and the next freed object;
                // the class's lock is held, and the object belongs to nobody.
                let [_, next] = unsafe { start.cast::<[u32; 2]>().read() };
                zspage.free = next as u16;
                index
            } else {
                let pages = shape.pages_for(usize::from(zspage.fresh) + 1) as u8;
                grown = pages.saturating_sub(zspage.committed);
                if grown > 0 {
                    if !may_grow {
                        return Err(Full);
                    }
                    let first = zspage.page + u32::from(zspage.committed);
                    arena.commit(Account::Pool, first, u32::from(grown))?;
                    zspage.committed = pages;
                }
                zspage.fresh += 1;
                zspage.fresh - 1
            };
            zspage.inuse += 1;
            let group = fullness_group(zspage.inuse, shape.objs_per_zspage);
            let moves = group != usize::from(zspage.group);
            Ok((Object { page: zspage.page, class, index }, grown, moves.then_some(group)))
        });
        let (object, grown, group) = taken?;
        lists.objs_used += 1;
        lists.pages_used += u64::from(grown);
        self.regroup(lists, id, group);
        Ok(object)
    }

    fn regroup(&self, lists: &mut Lists, id: u32, group: Option<usize>) {
        if let Some(group) = group {
            lists.remove(&self.zspages, id);
            lists.insert(&self.zspages, id, group);
        }
    }

    /// Makes a zspage with its first object taken, in no list yet. No class lock is held.
    #[cold]
    fn alloc_zspage(&self, class: u8, gfp: Gfp) -> Result<(u32, Object)> {
        let shape = self.classes.get(class);
        let run = self.arena.alloc_run(usize::from(shape.pages_per_zspage), Account::Pool, gfp)?;
        let committed = shape.pages_for(1);
        let zspage = Zspage {
            page: run.page,
            pages: run.pages,
            committed: committed as u8,
            class,
            free: NONE_INDEX,
            fresh: 1,
            inuse: 1,
            ..Zspage::default()
        };
        let no_run = |_: &Error| self.arena.free_run(run, Account::Pool, 0);
        let id = self.zspages.alloc(zspage, gfp).inspect_err(no_run)?;
        // Last: giving committed pages back may take a system call.
        if let Err(full) = self.arena.commit(Account::Pool, run.page, committed as u32) {
            // SAFETY: the descriptor is new, and known here only.
            self.note(unsafe { self.zspages.free(id) });
            self.arena.free_run(run, Account::Pool, 0);
            return Err(full.into());
        }
        self.page_table[run.page as usize].store(u64::from(id), Ordering::Relaxed);
        Ok((id, Object { page: run.page, class, index: 0 }))
    }

    /// Takes back a freed object that nobody reads.
    #[inline(never)]
    fn release(&self, handle: Handle, object: Object) {
        let (start, header_bytes) = self.place(object);
        if header_bytes > 0 {
            // SAFETY: the object is no longer read, and not yet free: it is this call's.
            let [named, _] = unsafe { start.cast::<[u32; 2]>().read() };
            if named != handle.0 {
                // Its neighbours may be damaged as well: better lose the memory than reuse it.
                self.corrupted.add(1);
                return;
            }
        }
        // SAFETY: the handle was freed, and its last reader is gone.
        unsafe { self.free_handle(handle.0) };
        self.put(object);
    }

    /// Gives a handle back.
    ///
    /// # Safety
    /// The handle is in use, and nobody uses it any more.
    unsafe fn free_handle(&self, handle: u32) {
        // SAFETY: the caller's promise.
        self.note(unsafe { self.handles.remove(handle) });
    }

    /// Counts damage that a cache found.
    fn note(&self, freed: Result<()>) {
        if freed.is_err() {
            self.corrupted.add(1);
        }
    }

    /// Puts an object that is in no use back into its zspage, and gives an empty zspage back once
    /// the class's lock is let go.
    fn put(&self, object: Object) {
        let (start, _) = self.place(object);
        let id = self.page_table[object.page as usize].load(Ordering::Relaxed) as u32;
        let mut lists = self.lists[usize::from(object.class)].lock();
        let objs_per_zspage = self.classes.get(object.class).objs_per_zspage;
        let group = self.zspages.with(&mut lists, id, |zspage| {
            // SAFETY: the object is the caller's; the class's lock is held from here until it is on
            // the list.
            unsafe { start.cast::<[u32; 2]>().write([FREE_TAG, u32::from(zspage.free)]) };
            zspage.free = object.index;
            zspage.inuse -= 1;
            let group = fullness_group(zspage.inuse, objs_per_zspage);
            (group != usize::from(zspage.group)).then_some(group)
        });
        lists.objs_used -= 1;
        if group != Some(0) {
            self.regroup(&mut lists, id, group);
            return;
        }
        lists.remove(&self.zspages, id);
        let (run, committed) = self.zspages.with(&mut lists, id, |zspage| (zspage.run(), zspage.committed));
        lists.pages_used -= u64::from(committed);
        drop(lists);
        // SAFETY: the zspage is empty and on no list.
        self.note(unsafe { self.zspages.free(id) });
        self.arena.free_run(run, Account::Pool, u64::from(committed));
    }
}

/// The bytes of an object, protected until this is dropped.
pub(crate) struct Pinned<'a> {
    pool: &'a Pool,
    handle: Handle,
    bytes: NonNull<u8>,
    len: usize,
}

impl Deref for Pinned<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `pin` found that the object has room for `len` bytes from `bytes` on, which
        // `store` wrote; the pin keeps it allocated, and nobody writes to an allocated object.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

impl Drop for Pinned<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the pin keeps the handle in use.
        if let Some(object) = unsafe { self.pool.handles.get(self.handle.0) }.unpin() {
            self.pool.release(self.handle, object);
        }
    }
}
