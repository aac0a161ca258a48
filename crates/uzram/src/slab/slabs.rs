//! The slabs of a cache: the addresses of their objects, and the links between free ones.
//!
//! A slab is a run of the arena, cut into objects. Slabs are numbered; an object's name is `[slab's number |
//! place in the slab]`, the place counted in units of 8 bytes. 512 names form a page of names. A table holds
//! the *origin* of each page of names: the address that the name 0 would have if the mapping of the page
//! extended to it. So an object's address takes one table lookup and one addition. A discarded slab's number
//! is reused. For slabs that outlive the process a second table, the *slab table* in a file, holds the first
//! page of each slab in the arena.
//!
//! A free object holds the link to the next one in its middle, where an overflow of its neighbour does not
//! reach. The link is the next object's place, encoded with the object's own place and a secret of the cache:
//! any other value decodes to a place at most once in 65536 times, and is otherwise found as corruption.
//!
//! Lock: the table of free numbers has its own, a leaf. Everything else here is used by the owner of the
//! slab or the object.

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Account, Arena, Entry, Gfp, Region, Run, Table};
use crate::base::sync::{Arc, AtomicU32, AtomicU64, Counter, Guarded, Mutex, Ordering, classes};
use crate::base::units::PAGE_SIZE;

use super::config::{CacheConfig, Layout, UNIT_BYTES};
use super::word::{NONE, SlabWord, State};

/// The number of bits of a name that are its index in its page of names.
const PAGE_PLACE_BITS: u32 = (PAGE_SIZE / UNIT_BYTES).ilog2();
/// A flag beside the origin of a page of names, which is a multiple of 8: the slab exists.
const THERE: u64 = 1;
/// Whether objects are checked (`checked`): in debug builds, but not in models, whose arena holds none.
pub(super) const CHECKS: bool = cfg!(all(debug_assertions, not(loom)));
/// The byte that free objects are then filled with: the kernel's POISON_FREE.
pub(super) const POISON: u8 = 0x6b;
pub(super) const NO_SLAB: u32 = u32::MAX;
/// As the previous slab: the slab is not on the node partial list (the kernel's flag on_partial).
pub(super) const OFF_LIST: u32 = NO_SLAB - 1;

#[derive(Debug, Default)]
pub(super) struct Slab {
    pub(super) word: SlabWord,
    /// The previous slab on the node partial list, or [`OFF_LIST`]. Protected by `list_lock`.
    pub(super) prev: Guarded<u32>,
    /// The next slab on the list that it is on. Protected by that list's lock: `list_lock`, a CPU's lock,
    /// or the table's.
    pub(super) next: Guarded<u32>,
}

// SAFETY: the fields are integers, which are zero by default and have no destructors.
unsafe impl Entry for Slab {}

/// Numbers of slabs that are not in use. Protected by the table's lock.
struct Numbers {
    /// The first of a list that is linked through `next`.
    free: u32,
    /// Numbers from this one on were never used.
    fresh: u32,
}

/// A chain of free objects of one slab, ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) len: u16,
}

/// See the [module's documentation](self).
pub(super) struct Slabs {
    arena: Arc<Arena>,
    pub(super) layout: Layout,
    /// The secret that links are encoded with; 0 if the cache is not hardened.
    pub(super) secret: u32,
    pub(super) max_slabs: u32,
    slabs: Table<Slab>,
    /// The origin of each possible page of names, with [`THERE`]; 0 if its slab does not exist.
    origins: Table<AtomicU64>,
    /// The slab table: one more than the first page of each slab, 0 if the slab does not exist. `None` unless
    /// the arena outlives the process.
    pages: Option<Table<AtomicU32>>,
    place_mask: u32,
    /// Bits that are 0 in every object's name.
    misplaced: u32,
    numbers: Mutex<Numbers>,
    /// The upper bound of all objects' names, those of discarded slabs included.
    names_end: AtomicU32,
    pub(super) live: Counter,
    gone: Counter,
    /// loom's atomics cannot lie in an arena: its links are in a table.
    #[cfg(loom)]
    links: Table<AtomicU32>,
}

impl Slabs {
    /// Makes the tables for `max_slabs` slabs, or as many as names can address.
    pub(super) fn new(
        arena: Arc<Arena>,
        layout: Layout,
        max_slabs: u64,
        hardened: bool,
        table: Option<&Region>,
    ) -> Result<Self> {
        // The highest numbers are no object's name: `sheaves` uses them.
        let most = (1u64 << (u32::BITS - layout.place_bits)) - 1;
        let max_slabs = max_slabs.clamp(1, most) as u32;
        let pages_of_names = match cfg!(loom) {
            true => (max_slabs as usize) << (layout.place_bits - PAGE_PLACE_BITS),
            false => 1 << (u32::BITS - PAGE_PLACE_BITS),
        };
        Ok(Slabs {
            arena,
            layout,
            secret: if hardened { secret() } else { 0 },
            max_slabs,
            slabs: Table::new(max_slabs as usize)?,
            origins: Table::new(pages_of_names)?,
            pages: table.map(|region| Table::new_in(Some(region), max_slabs as usize)).transpose()?,
            place_mask: (1 << layout.place_bits) - 1,
            misplaced: (1 << layout.stride().trailing_zeros()) - 1,
            numbers: Mutex::new(&classes::SLAB_TABLE, Numbers { free: NO_SLAB, fresh: 0 }),
            names_end: AtomicU32::new(0),
            live: Counter::default(),
            gone: Counter::default(),
            #[cfg(loom)]
            links: Table::new(
                max_slabs as usize * usize::from(layout.objects) * usize::from(layout.stride()),
            )?,
        })
    }

    /// Makes the tables resident, up to the entries of the last possible slab.
    pub(super) fn populate(&self) -> Result<()> {
        self.slabs.populate()?;
        self.origins.populate_range(0..self.first_page_of_names(self.max_slabs).min(self.origins.len()))
    }

    /// Returns the number of pages of slabs that were discarded since the cache was made.
    pub(super) fn pages_gone(&self) -> u64 {
        self.gone.get() * self.layout.pages as u64
    }

    pub(super) fn table_resident_bytes(&self) -> usize {
        self.slabs.resident_bytes() + self.origins.resident_bytes()
    }

    #[inline]
    pub(super) fn get(&self, slab: u32) -> &Slab {
        &self.slabs[slab as usize]
    }

    #[inline]
    pub(super) fn split(&self, object: u32) -> (u32, u16) {
        (object >> self.layout.place_bits, (object & self.place_mask) as u16)
    }

    #[inline]
    pub(super) fn name(&self, slab: u32, at: u16) -> u32 {
        slab << self.layout.place_bits | u32::from(at)
    }

    pub(super) fn is_object(&self, object: u32) -> bool {
        let (slab, at) = self.split(object);
        self.exists(slab) && self.is_place(at)
    }

    fn is_place(&self, at: u16) -> bool {
        let stride = self.layout.stride();
        at.is_multiple_of(stride) && at / stride < self.layout.objects
    }

    /// Returns the address of an object; any address for a name that is no object's.
    #[inline]
    pub(super) fn address(&self, object: u32) -> *mut u8 {
        let page = (object >> PAGE_PLACE_BITS) as usize;
        #[cfg(loom)]
        let origin = &self.origins[page];
        // SAFETY: the table has an entry for each page of names.
        #[cfg(not(loom))]
        let origin = unsafe { self.origins.get_unchecked(page) };
        at_origin(origin.load(Ordering::Acquire), object)
    }

    #[inline]
    pub(super) fn hint(&self, object: u32) -> Option<*const u8> {
        let (slab, at) = self.split(object);
        let offset_bytes = usize::from(at) * UNIT_BYTES;
        let start = self.start_if_there(slab).filter(|_| offset_bytes < self.layout.pages * PAGE_SIZE)?;
        // Under loom the arena holds no objects.
        (!cfg!(loom)).then(|| start.wrapping_add(offset_bytes).cast_const())
    }

    /// Returns whether `object` may be an object's name: a cheap check. It does not detect discarded slabs,
    /// nor, unless the stride is a power of two, all places between objects.
    #[inline]
    pub(super) fn may_be_object(&self, object: u32) -> bool {
        object & self.misplaced == 0 && object < self.names_end.load(Ordering::Relaxed)
    }

    #[inline]
    fn exists(&self, slab: u32) -> bool {
        self.start_if_there(slab).is_some()
    }

    /// Returns the address of a slab, if it exists. If the slab is discarded concurrently, the memory at the
    /// address stays mapped.
    #[inline]
    fn start_if_there(&self, slab: u32) -> Option<*mut u8> {
        if slab >= self.max_slabs {
            return None;
        }
        // Read once: discarding the slab clears it.
        let origin = self.origin(slab).load(Ordering::Acquire);
        (origin != 0).then(|| at_origin(origin, self.name(slab, 0)))
    }

    #[inline]
    pub(super) fn start(&self, slab: u32) -> *mut u8 {
        at_origin(self.origin(slab).load(Ordering::Acquire), self.name(slab, 0))
    }

    /// Returns the origin of a slab's first page of names, which all its pages of names share.
    #[inline]
    fn origin(&self, slab: u32) -> &AtomicU64 {
        &self.origins[self.first_page_of_names(slab)]
    }

    #[inline]
    fn first_page_of_names(&self, slab: u32) -> usize {
        (self.name(slab, 0) >> PAGE_PLACE_BITS) as usize
    }

    /// Sets the origin of a slab's names; 0 if it does not exist.
    fn set_origin(&self, slab: u32, origin: u64) {
        let first = self.first_page_of_names(slab);
        for page in (first..first + self.layout.pages).rev() {
            self.origins[page].store(origin, Ordering::Release);
        }
    }

    #[inline]
    pub(super) fn key(&self, at: u16) -> u32 {
        self.secret ^ u32::from(at) << 16
    }

    /// Returns the object after `at` in a chain of free objects that the caller owns. If another thread
    /// takes the chain meanwhile, the result may be anything. `None` if the bytes are no valid link.
    #[inline]
    pub(super) fn next(&self, slab: u32, at: u16) -> Option<u16> {
        self.next_in(self.start(slab), slab, at)
    }

    /// As [`Slabs::next`], for a slab that may be discarded concurrently.
    #[cfg(feature = "designs")]
    #[inline]
    pub(super) fn next_if_there(&self, slab: u32, at: u16) -> Option<u16> {
        self.next_in(self.start_if_there(slab)?, slab, at)
    }

    #[inline]
    fn next_in(&self, start: *mut u8, slab: u32, at: u16) -> Option<u16> {
        let link = self.link(start, slab, at).load(Ordering::Relaxed) ^ self.key(at);
        let end = u32::from(self.layout.objects) * u32::from(self.layout.stride());
        let is_place = link & self.misplaced == 0 && link < end;
        (is_place || link == u32::from(NONE)).then_some(link as u16)
    }

    /// Makes `next` the object after `at`, which is free and belongs to the caller.
    #[inline]
    pub(super) fn set_next(&self, slab: u32, at: u16, next: u16) {
        let link = u32::from(next) ^ self.key(at);
        self.link(self.start(slab), slab, at).store(link, Ordering::Relaxed);
    }

    /// Returns the link at a place of a slab that starts, or started until a moment ago, at `start`.
    #[cfg(not(loom))]
    #[inline]
    fn link(&self, start: *mut u8, _slab: u32, at: u16) -> &AtomicU32 {
        let link = start.wrapping_add(usize::from(at) * UNIT_BYTES + self.layout.link_offset_bytes);
        // SAFETY: the object lies in a run of the arena that belongs to this cache while the slab
        // exists, its memory stays mapped after that, and the offset is a multiple of 4 within
        // the object. While the object is free only this function's results touch these bytes. (An
        // object that another thread may have taken meanwhile is only read, by `next_if_there`, and
        // the caller discards the result: a data race to the language, harmless on the machine.)
        unsafe { AtomicU32::from_ptr(link.cast()) }
    }

    #[cfg(loom)]
    fn link(&self, _start: *mut u8, slab: u32, at: u16) -> &AtomicU32 {
        let per_slab = usize::from(self.layout.objects) * usize::from(self.layout.stride());
        &self.links[slab as usize * per_slab + usize::from(at)]
    }

    /// Returns the last object of a chain of `len` (at least 1) from `first`; `None` if it is damaged.
    pub(super) fn last_of(&self, slab: u32, first: u16, len: u16) -> Option<u16> {
        (1..len).try_fold(first, |at, _| self.next(slab, at).filter(|next| *next != NONE))
    }

    /// Makes a slab, which no other thread knows yet; returns its number. All its objects count as taken and
    /// form one chain from place 0. Fails as the arena, and `NoSpace` when the cache has its most slabs.
    #[cold]
    pub(super) fn make(&self, options: &CacheConfig, gfp: Gfp) -> Result<u32> {
        let run = self.arena.alloc_run(self.layout.pages, Account::Slab, gfp)?;
        if let Err(full) = self.arena.commit(Account::Slab, run.page, u32::from(run.pages)) {
            self.arena.free_run(run, Account::Slab, 0);
            return Err(full.into());
        }
        let Some(slab) = self.take_number() else {
            self.arena.free_run(run, Account::Slab, u64::from(run.pages));
            let what = format!("the slab cache '{}' is full", options.name);
            return Err(Error::new(ErrorKind::NoSpace, what).with_setting(options.max_objects_setting));
        };
        self.begin(slab, run.page);
        if let Some(pages) = &self.pages {
            pages[slab as usize].store(run.page + 1, Ordering::Release);
        }
        if CHECKS {
            // SAFETY: the run belongs to this slab, none of whose objects is in use, and its pages are
            // committed.
            unsafe { self.start(slab).write_bytes(POISON, self.layout.pages * PAGE_SIZE) };
        }
        let stride = self.layout.stride();
        for object in 0..self.layout.objects {
            let next = if object + 1 < self.layout.objects { (object + 1) * stride } else { NONE };
            self.set_next(slab, object * stride, next);
        }
        self.get(slab).word.store(State::full(self.layout.objects, false));
        Ok(slab)
    }

    /// Makes a slab of the run that starts at `page`. No other thread may have access to it yet.
    fn begin(&self, slab: u32, page: u32) {
        let start = self.arena.address(page).expose_provenance() as u64;
        let offset_bytes = u64::from(self.name(slab, 0)) * UNIT_BYTES as u64;
        self.set_origin(slab, start.wrapping_sub(offset_bytes) | THERE);
        // SAFETY: the caller's: no other thread knows this slab.
        unsafe { self.get(slab).prev.with_mut(|prev| *prev = OFF_LIST) };
        self.live.add(1);
    }

    /// Gives an empty slab, which is on no list, back to the arena.
    pub(super) fn discard(&self, slab: u32) {
        let page = self.arena.page_at(self.start(slab));
        self.set_origin(slab, 0);
        if let Some(pages) = &self.pages {
            pages[slab as usize].store(0, Ordering::Release);
        }
        let pages = self.layout.pages as u64;
        self.live.sub(1);
        self.gone.add(1);
        self.put_number(&mut self.numbers.lock(), slab);
        self.arena.free_run(Run { page, pages: pages as u8 }, Account::Slab, pages);
    }

    pub(super) fn discard_all(&self) {
        if self.pages.is_some() {
            // The slabs stay, for another process.
            return;
        }
        let fresh = self.numbers.lock().fresh;
        for slab in 0..fresh {
            if self.exists(slab) {
                self.discard(slab);
            }
        }
    }

    /// Returns the address of an object of another process's slab, if `object` can be one: its slab is in the
    /// slab table and in memory. Call it after [`Arena::find_resident`], before the slab is adopted.
    pub(super) fn find(&self, object: u32) -> Option<*mut u8> {
        let (slab, at) = self.split(object);
        let page = self.page_of(slab).filter(|_| self.is_place(at))?;
        Some(self.arena.address(page).wrapping_add(usize::from(at) * UNIT_BYTES))
    }

    /// Returns the first page of another process's slab, if the slab is in memory.
    fn page_of(&self, slab: u32) -> Option<u32> {
        let pages = self.pages.as_ref().filter(|_| slab < self.max_slabs)?;
        let page = pages[slab as usize].load(Ordering::Relaxed).checked_sub(1)?;
        self.arena.is_resident(page, self.layout.pages as u32).then_some(page)
    }

    pub(super) fn found_slabs(&self) -> Result<u32> {
        let mut end = 0;
        if let Some(pages) = &self.pages {
            pages.for_each_resident(|range| end = range.end as u32)?;
        }
        Ok(end)
    }

    /// Takes the run of another process's slab; returns whether it did. If the run cannot be taken, or if the
    /// slab has no objects in use, removes the slab from the slab table.
    pub(super) fn claim(&self, slab: u32, has_objects: bool) -> bool {
        let pages = self.layout.pages as u8;
        let run = self.page_of(slab).filter(|_| has_objects).map(|page| Run { page, pages });
        let is_taken = run.is_some_and(|run| self.arena.adopt_run(run, Account::Slab, pages.into()));
        if let (false, Some(table)) = (is_taken, &self.pages) {
            table[slab as usize].store(0, Ordering::Relaxed);
        }
        is_taken
    }

    /// Makes a claimed slab one of this cache. `is_used` returns whether the object of an index is in use.
    /// Returns whether the slab has free objects.
    pub(super) fn adopt(&self, slab: u32, is_used: impl Fn(u16) -> bool) -> bool {
        let Some(page) = self.page_of(slab) else { return false };
        self.begin(slab, page);
        let (stride, objects) = (self.layout.stride(), self.layout.objects);
        let mut state = State { inuse: objects, ..State::full(objects, false) };
        for index in (0..objects).rev().filter(|index| !is_used(*index)) {
            if CHECKS {
                let start = self.address(self.name(slab, index * stride));
                // SAFETY: the object is free, and no other thread knows its slab.
                unsafe { start.write_bytes(POISON, self.layout.stride_bytes) };
            }
            self.set_next(slab, index * stride, state.free);
            (state.free, state.inuse) = (index * stride, state.inuse - 1);
        }
        self.get(slab).word.store(state);
        !state.is_full()
    }

    /// Continues the numbering of slabs at `end`; unused numbers below it are free.
    pub(super) fn end_adoption(&self, end: u32) {
        let mut numbers = self.numbers.lock();
        numbers.fresh = end;
        for slab in (0..end).rev().filter(|slab| !self.exists(*slab)) {
            self.put_number(&mut numbers, slab);
        }
        self.names_end.store(end << self.layout.place_bits, Ordering::Relaxed);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let fresh = self.numbers.lock().fresh;
        (0..fresh).filter(|slab| self.exists(*slab))
    }

    /// Frees the number of a slab that is on no list, or does not exist.
    fn put_number(&self, numbers: &mut Numbers, slab: u32) {
        let next = std::mem::replace(&mut numbers.free, slab);
        // SAFETY: the caller's: the slab is on no list. The table's lock, which guards `numbers`, is held.
        unsafe { self.get(slab).next.with_mut(|own| *own = next) };
    }

    fn take_number(&self) -> Option<u32> {
        let mut numbers = self.numbers.lock();
        let slab = numbers.free;
        if slab != NO_SLAB {
            // SAFETY: the slab does not exist, and the table's lock is held.
            numbers.free = unsafe { self.get(slab).next.with_mut(|next| *next) };
            return Some(slab);
        }
        (numbers.fresh < self.max_slabs).then(|| {
            numbers.fresh += 1;
            self.names_end.store(numbers.fresh << self.layout.place_bits, Ordering::Relaxed);
            numbers.fresh - 1
        })
    }
}

#[inline]
fn at_origin(origin: u64, object: u32) -> *mut u8 {
    let offset_bytes = u64::from(object) * UNIT_BYTES as u64;
    std::ptr::with_exposed_provenance_mut(origin.wrapping_add(offset_bytes).wrapping_sub(THERE) as usize)
}

/// Returns a secret that differs from cache to cache and from process to process.
fn secret() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one("slab") as u32
}
