//! The slabs of a cache: where their objects are, and the links between free ones.
//!
//! A slab is a run of the arena, cut into objects. Slabs are numbered; an object's name is
//! `[slab's number | place in the slab]`, the place counted in units of 8 bytes. 512 names are a page of
//! them, and a table says for each page of names where the object with the name 0 would be if all were
//! as far apart as these: finding an object is one look and one addition. A slab that goes back to the
//! arena gives its number back too.
//!
//! A free object that is linked holds the place of the next one in its middle, where running over
//! its neighbour's end does not reach, mixed with its own place and a secret of the cache: what else is
//! found there comes out as a place once in 65536 times at most, and is taken for damage otherwise.
//!
//! Lock: the table of free numbers has its own, a leaf. Everything else here is for whoever owns
//! the slab or the object.

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Account, Arena, Entry, Gfp, MAX_RUN_PAGES, Run, Table};
use crate::base::sync::{Arc, AtomicU32, AtomicU64, Counter, Guarded, Mutex, Ordering, classes};
use crate::base::units::PAGE_SIZE;

use super::CacheConfig;
use super::word::{NONE, SlabWord, State};

/// Places are counted in units of so many bytes.
pub(super) const UNIT_BYTES: usize = 8;
/// Names of a page: so many bits of a name are a place in it.
const PAGE_PLACE_BITS: u32 = (PAGE_SIZE / UNIT_BYTES).ilog2();
/// Beside the origin of a page of names, which is a multiple of 8: that there is one.
const THERE: u64 = 1;
/// What debug builds fill free objects with: the kernel's POISON_FREE.
#[cfg(all(debug_assertions, not(loom)))]
pub(super) const POISON: u8 = 0x6b;
/// No slab.
pub(super) const NO_SLAB: u32 = u32::MAX;
/// Instead of the slab before it: that a slab is not on the node partial list. The kernel has a flag for
/// that, on_partial.
pub(super) const OFF_LIST: u32 = NO_SLAB - 1;
/// The kernel's `slub_max_order` of 3.
const MAX_SLAB_PAGES: usize = 8;
/// A slab should have so many objects: the kernel's rule, 4 * (fls(CPUs) + 1), for 4 to 7 CPUs.
const MIN_OBJECTS: usize = 16;
/// A page of so many objects is hardly ever empty by itself: of those with one object in ten in use, one
/// in a thousand.
const MANY_OBJECTS: usize = 64;
/// What may be left over at a slab's end: a sixteenth, as the kernel tries first.
const WASTE_FRACTION: usize = 16;

const _: () = assert!(MAX_SLAB_PAGES <= MAX_RUN_PAGES);
const _: () = assert!(MAX_SLAB_PAGES * PAGE_SIZE / UNIT_BYTES < 1 << 15, "places and counts fit the words");

/// How a slab is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes from one object to the next.
    pub(super) stride_bytes: usize,
    /// Pages of a slab.
    pub(super) pages: usize,
    /// Objects of a slab.
    pub(super) objects: u16,
    /// Bits of a place.
    pub(super) place_bits: u32,
    /// Where an object's link is, in bytes from its start.
    pub(super) link_offset_bytes: usize,
}

impl Layout {
    /// For objects of `size_bytes` aligned to `align_bytes`.
    ///
    /// # Errors
    /// `Invalid` for what cannot be an object of a slab.
    pub(super) fn new(size_bytes: usize, align_bytes: usize) -> Result<Self> {
        if !(1..=PAGE_SIZE).contains(&size_bytes) || !align_bytes.is_power_of_two() || align_bytes > PAGE_SIZE
        {
            let what = "an object of a slab has 1 to 4096 bytes, aligned to a power of two up to that";
            return Err(Error::invalid(what));
        }
        let stride_bytes = size_bytes.next_multiple_of(align_bytes.max(UNIT_BYTES));
        let (pages, objects) = if cfg!(loom) { (1, LOOM_OBJECTS) } else { slab_of(stride_bytes) };
        Ok(Layout {
            stride_bytes,
            pages,
            objects: objects as u16,
            place_bits: (pages * PAGE_SIZE / UNIT_BYTES).next_power_of_two().ilog2(),
            link_offset_bytes: (stride_bytes / 2) & !(size_of::<u32>() - 1),
        })
    }

    /// Units from one object to the next.
    pub(super) fn stride(self) -> u16 {
        (self.stride_bytes / UNIT_BYTES) as u16
    }
}

/// Models have slabs of two objects: enough to be empty, partial and full.
const LOOM_OBJECTS: usize = 2;

/// The pages and objects of a slab: as few pages as hold enough objects with little left over, but two
/// where a page would hardly ever be empty by itself, to have half as many slabs to keep account of.
fn slab_of(stride_bytes: usize) -> (usize, usize) {
    let fits = |pages: usize| pages * PAGE_SIZE / stride_bytes;
    let is_good = |pages: &usize| {
        let bytes = pages * PAGE_SIZE;
        fits(*pages) >= MIN_OBJECTS && (bytes % stride_bytes) * WASTE_FRACTION <= bytes
    };
    let fewest = if fits(1) >= MANY_OBJECTS { 2 } else { 1 };
    let pages = (fewest..=MAX_SLAB_PAGES).find(is_good).unwrap_or(MAX_SLAB_PAGES);
    (pages, fits(pages))
}

/// What is kept of a slab.
#[derive(Debug, Default)]
pub(super) struct Slab {
    pub(super) word: SlabWord,
    /// The slab before it on the node partial list, or [`OFF_LIST`]; `list_lock` protects it.
    pub(super) prev: Guarded<u32>,
    /// The slab after it on the list that it is on. Belongs to whoever owns that: the holder of
    /// `list_lock`, of a CPU's lock, or of the table's.
    pub(super) next: Guarded<u32>,
}

// SAFETY: numbers, all zero by default, and without destructors.
unsafe impl Entry for Slab {}

/// Numbers of slabs that are not in use. Protected by the table's lock.
struct Numbers {
    /// The first of a list through `next`.
    free: u32,
    /// Numbers from here on were never used.
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
    /// What links are mixed with; 0 if the cache is not hardened.
    secret: u32,
    max_slabs: u32,
    slabs: Table<Slab>,
    /// The origin of each page of names there can be, with [`THERE`]; 0 where there is no slab.
    origins: Table<AtomicU64>,
    /// The bits of a name that are the place.
    place_mask: u32,
    /// Bits that are 0 in every object's name.
    misplaced: u32,
    numbers: Mutex<Numbers>,
    /// All names of objects are below: those of slabs that ever were.
    names_end: AtomicU32,
    /// Slabs that exist.
    live: Counter,
    /// Slabs that were given back.
    gone: Counter,
    /// loom's atomics cannot be made of an arena's bytes: its links stand in a table.
    #[cfg(loom)]
    links: Table<AtomicU32>,
}

impl Slabs {
    /// No slabs yet, and room for `max_slabs` (at most as many as names can tell).
    ///
    /// # Errors
    /// `NoMemory` when there is no address space for the tables.
    pub(super) fn new(arena: Arc<Arena>, layout: Layout, max_slabs: u64, hardened: bool) -> Result<Self> {
        // No object's name is one of the highest numbers.
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

    /// Has the tables in memory from now on, as far as slabs are numbered.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub(super) fn populate(&self) -> Result<()> {
        self.slabs.populate()?;
        self.origins.populate_range(0..self.first_page_of_names(self.max_slabs).min(self.origins.len()))
    }

    /// How many slabs there may be.
    #[cfg(all(debug_assertions, not(loom)))]
    pub(super) fn max_slabs(&self) -> u64 {
        self.max_slabs.into()
    }

    /// Slabs that exist.
    pub(super) fn live(&self) -> u64 {
        self.live.get()
    }

    /// Pages that were given back since the cache was made.
    pub(super) fn pages_gone(&self) -> u64 {
        self.gone.get() * self.layout.pages as u64
    }

    /// What the tables take now.
    #[cfg(not(loom))]
    pub(super) fn table_resident_bytes(&self) -> usize {
        self.slabs.resident_bytes() + self.origins.resident_bytes()
    }

    #[inline]
    pub(super) fn get(&self, slab: u32) -> &Slab {
        &self.slabs[slab as usize]
    }

    /// The slab and the place in it of an object.
    #[inline]
    pub(super) fn split(&self, object: u32) -> (u32, u16) {
        (object >> self.layout.place_bits, (object & self.place_mask) as u16)
    }

    /// The name of the object at a place.
    #[inline]
    pub(super) fn name(&self, slab: u32, at: u16) -> u32 {
        slab << self.layout.place_bits | u32::from(at)
    }

    /// Whether `object` is the beginning of an object of a slab that exists.
    pub(super) fn is_object(&self, object: u32) -> bool {
        let (slab, at) = self.split(object);
        let stride = self.layout.stride();
        self.exists(slab) && at.is_multiple_of(stride) && at / stride < self.layout.objects
    }

    /// Where an object is; nonsense for a name that never was one.
    #[inline]
    pub(super) fn address(&self, object: u32) -> *mut u8 {
        let page = (object >> PAGE_PLACE_BITS) as usize;
        #[cfg(loom)]
        let origin = &self.origins[page];
        // SAFETY: there is an entry for each page of names.
        #[cfg(not(loom))]
        let origin = unsafe { self.origins.get_unchecked(page) };
        at_origin(origin.load(Ordering::Acquire), object)
    }

    /// Where an object is, if it may be one.
    #[inline]
    pub(super) fn hint(&self, object: u32) -> Option<*const u8> {
        let (slab, at) = self.split(object);
        let offset_bytes = usize::from(at) * UNIT_BYTES;
        let start = self.start_if_there(slab).filter(|_| offset_bytes < self.layout.pages * PAGE_SIZE)?;
        // Under loom there is nothing there.
        (!cfg!(loom)).then(|| start.wrapping_add(offset_bytes).cast_const())
    }

    /// Whether `object` may be one: a cheap look that lets others pass whose slab is gone, or whose place
    /// is between those of objects that are not a power of two apart.
    #[inline]
    pub(super) fn may_be_object(&self, object: u32) -> bool {
        object & self.misplaced == 0 && object < self.names_end.load(Ordering::Relaxed)
    }

    /// Whether there is a slab of that number.
    #[inline]
    fn exists(&self, slab: u32) -> bool {
        self.start_if_there(slab).is_some()
    }

    /// Where a slab starts that may not exist, or not much longer: then this is where it was, and its
    /// memory stays mapped.
    #[inline]
    fn start_if_there(&self, slab: u32) -> Option<*mut u8> {
        if slab >= self.max_slabs {
            return None;
        }
        // Read once: it is forgotten when the slab goes.
        let origin = self.origin(slab).load(Ordering::Acquire);
        (origin != 0).then(|| at_origin(origin, self.name(slab, 0)))
    }

    /// Where a slab starts.
    #[inline]
    pub(super) fn start(&self, slab: u32) -> *mut u8 {
        at_origin(self.origin(slab).load(Ordering::Acquire), self.name(slab, 0))
    }

    /// The origin of a slab's first page of names, which has the others'.
    #[inline]
    fn origin(&self, slab: u32) -> &AtomicU64 {
        &self.origins[self.first_page_of_names(slab)]
    }

    #[inline]
    fn first_page_of_names(&self, slab: u32) -> usize {
        (self.name(slab, 0) >> PAGE_PLACE_BITS) as usize
    }

    /// Says where the objects of a slab are, by the origin of their names; 0: nowhere.
    fn set_origin(&self, slab: u32, origin: u64) {
        let first = self.first_page_of_names(slab);
        for page in (first..first + self.layout.pages).rev() {
            self.origins[page].store(origin, Ordering::Release);
        }
    }

    /// What the link at a place is mixed with.
    #[inline]
    pub(super) fn key(&self, at: u16) -> u32 {
        self.secret ^ u32::from(at) << 16
    }

    /// The cache's secret, for code that mixes links itself.
    #[inline]
    pub(super) fn secret(&self) -> u32 {
        self.secret
    }

    /// The object after `at` in a chain of free objects that the caller owns, or may lose to
    /// another thread meanwhile (the result is then anything). `None` if what is there is no link.
    #[inline]
    pub(super) fn next(&self, slab: u32, at: u16) -> Option<u16> {
        self.next_in(self.start(slab), slab, at)
    }

    /// [`Slabs::next`], of a slab that may not exist any more, or not much longer.
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

    /// Makes `next` the object after `at`, which is free and the caller's.
    #[inline]
    pub(super) fn set_next(&self, slab: u32, at: u16, next: u16) {
        let link = u32::from(next) ^ self.key(at);
        self.link(self.start(slab), slab, at).store(link, Ordering::Relaxed);
    }

    /// The link at a place of a slab that starts, or did a moment ago, at `start`.
    #[cfg(not(loom))]
    #[inline]
    fn link(&self, start: *mut u8, _slab: u32, at: u16) -> &AtomicU32 {
        let link = start.wrapping_add(usize::from(at) * UNIT_BYTES + self.layout.link_offset_bytes);
        // SAFETY: the object lies in a run of the arena that belongs to this cache while the slab
        // exists, its memory stays mapped after that, and the offset is a multiple of 4 within
        // the object. While the object is free only this function's results touch these bytes. (An
        // object that another thread may have taken meanwhile is only read, by `next_if_there`, and
        // what was read forgotten: the language calls that a race, the machine does not mind.)
        unsafe { AtomicU32::from_ptr(link.cast()) }
    }

    #[cfg(loom)]
    fn link(&self, _start: *mut u8, slab: u32, at: u16) -> &AtomicU32 {
        let per_slab = usize::from(self.layout.objects) * usize::from(self.layout.stride());
        &self.links[slab as usize * per_slab + usize::from(at)]
    }

    /// Walks a chain of `len` objects (at least 1) from `first`, and returns its last one. `None`
    /// when it is damaged on the way.
    pub(super) fn last_of(&self, slab: u32, first: u16, len: u16) -> Option<u16> {
        (1..len).try_fold(first, |at, _| self.next(slab, at).filter(|next| *next != NONE))
    }

    /// Makes a slab, and returns its number; all its objects are taken and form one chain from
    /// place 0. Nobody else knows it.
    ///
    /// # Errors
    /// As the arena, and `NoSpace` when there are as many slabs as there may be.
    #[cold]
    pub(super) fn make(&self, options: &CacheConfig, gfp: Gfp) -> Result<u32> {
        let run = self.arena.alloc_run(self.layout.pages, Account::Slab, gfp)?;
        if let Err(full) = self.arena.commit(Account::Slab, run.page, u32::from(run.pages)) {
            self.arena.free_run(run, Account::Slab, 0);
            return Err(full.into());
        }
        let Some(slab) = self.take_number() else {
            self.arena.free_run(run, Account::Slab, u64::from(run.pages));
            let what = format!("the cache '{}' holds as many objects as it can", options.name);
            return Err(Error::new(ErrorKind::NoSpace, what).with_setting(options.max_objects_setting));
        };
        let start = self.arena.address(run.page).expose_provenance() as u64;
        let offset_bytes = u64::from(self.name(slab, 0)) * UNIT_BYTES as u64;
        self.set_origin(slab, start.wrapping_sub(offset_bytes) | THERE);
        // SAFETY: nobody else knows this slab.
        unsafe { self.get(slab).prev.with_mut(|prev| *prev = OFF_LIST) };
        self.live.add(1);
        #[cfg(all(debug_assertions, not(loom)))]
        // SAFETY: the run is this slab's, whose objects are all free, and its pages are committed.
        unsafe {
            self.start(slab).write_bytes(POISON, self.layout.pages * PAGE_SIZE)
        };
        let stride = self.layout.stride();
        for object in 0..self.layout.objects {
            let next = if object + 1 < self.layout.objects { (object + 1) * stride } else { NONE };
            self.set_next(slab, object * stride, next);
        }
        self.get(slab).word.store(State::full(self.layout.objects, false));
        Ok(slab)
    }

    /// Gives an empty slab back that is on no list.
    pub(super) fn discard(&self, slab: u32) {
        let page = self.arena.page_at(self.start(slab));
        self.set_origin(slab, 0);
        let pages = self.layout.pages as u64;
        self.live.sub(1);
        self.gone.add(1);
        {
            let mut numbers = self.numbers.lock();
            let next = std::mem::replace(&mut numbers.free, slab);
            // SAFETY: the slab is on no list, and the table's lock is held.
            unsafe { self.get(slab).next.with_mut(|own| *own = next) };
        }
        self.arena.free_run(Run { page, pages: pages as u8 }, Account::Slab, pages);
    }

    /// Gives all slabs back, whatever is in them.
    pub(super) fn discard_all(&self) {
        let fresh = self.numbers.lock().fresh;
        for slab in 0..fresh {
            if self.exists(slab) {
                self.discard(slab);
            }
        }
    }

    /// The slabs that exist now.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        let fresh = self.numbers.lock().fresh;
        (0..fresh).filter(|slab| self.exists(*slab))
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

/// Where an object is by the origin of its page of names.
#[inline]
fn at_origin(origin: u64, object: u32) -> *mut u8 {
    let offset_bytes = u64::from(object) * UNIT_BYTES as u64;
    std::ptr::with_exposed_provenance_mut(origin.wrapping_add(offset_bytes).wrapping_sub(THERE) as usize)
}

/// A secret that differs from cache to cache and from process to process.
fn secret() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one("slab") as u32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slabs_hold_enough_objects_and_waste_little() {
        let shape = |size, align| {
            let layout = Layout::new(size, align).expect("an object");
            (layout.stride_bytes, layout.pages, layout.objects)
        };
        assert_eq!(shape(8, 8), (8, 2, 1024));
        assert_eq!(shape(32, 32), (32, 2, 256));
        assert_eq!(shape(64, 64), (64, 2, 128));
        assert_eq!(shape(100, 8), (104, 1, 39));
        assert_eq!(shape(256, 8), (256, 1, 16));
        assert_eq!(shape(704, 64), (704, 3, 17));
        assert_eq!(shape(2048, 8), (2048, 8, 16));
        assert_eq!(shape(4096, 4096), (4096, 8, 8));
        assert_eq!(shape(1, 1), (8, 2, 1024));
        for size in 1..=PAGE_SIZE {
            let layout = Layout::new(size, 8).expect("an object");
            let bytes = layout.pages * PAGE_SIZE;
            assert!(usize::from(layout.objects) * layout.stride_bytes <= bytes);
            assert!(layout.link_offset_bytes + 4 <= layout.stride_bytes);
            assert!(1 << layout.place_bits >= bytes / UNIT_BYTES);
        }
        for (size, align) in [(0, 8), (4097, 8), (8, 3), (8, 0), (8, 8192)] {
            assert!(Layout::new(size, align).is_err(), "{size} {align}");
        }
    }
}
