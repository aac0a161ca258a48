//! Restores a pool whose memory another process left, from the handles of its objects.
//!
//! 1. [`RawPool::claim`], for each handle that a slot names: the handle's cell points at the object, whose
//!    header must name that handle and that owner. Many threads do this.
//! 2. [`RawPool::settle`] takes the memory of the handles' slabs and of the zspages that were found. Zspages
//!    that overlap are dropped: the objects claimed in them are lost ([`RawPool::is_lost`]).
//! 3. [`RawPool::rebuild`] rebuilds the state that follows from these objects: zspage descriptors, lists by
//!    fullness, lists of free objects. It clears the pins of the process that ended.
//!
//! No step writes to memory that an earlier one reads, except that pins are cleared, and slabs without an
//! object in use are removed from the slab table. So if the process dies during an attach, the memory can be
//! attached again.

use crate::base::error::{ErrorKind, Result};
use crate::base::mem::{Account, Gfp, Run, Table};
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};

use super::class::{HEADER_BYTES, SizeClass};
use super::design::PoolLocks;
use super::free::FREE_TAG;
use super::lru::End;
use super::raw::RawPool;
use super::word::{Cell, Location};
use super::zspage::{Descriptor, NONE_INDEX, fullness_group};
use crate::base::units::PAGE_SIZE;

/// Words of bits for the objects that begin in a page, as many as of the smallest class.
const PAGE_WORDS: usize = 2;
const PAGE_OBJECTS: usize = PAGE_WORDS * u64::BITS as usize;

/// The claimed objects of another process's pool.
pub struct Attach {
    /// For each page one more than the class of the zspage that begins there, if an object of it is claimed.
    starts: Table<AtomicU32>,
    /// For each page [`PAGE_OBJECTS`] bits. Those of a zspage's pages are one bitmap of its claimed objects,
    /// by index.
    objects: Table<AtomicU64>,
    /// A bit for each handle that is claimed.
    handles: Table<AtomicU64>,
}

/// The zspages and the slabs of handles that were found.
pub struct Settled {
    zspages: Vec<Found>,
    slabs: Vec<u32>,
    /// Whether the runs of some slabs with claimed handles could not be taken.
    lacks_slabs: bool,
    /// The first pages of zspages that overlap with another, or whose run could not be taken.
    lost: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Found {
    page: u32,
    class: u8,
    /// One more than the index of its last claimed object.
    fresh: u16,
    inuse: u16,
}

impl Settled {
    /// Returns whether a claimed object is lost.
    pub fn has_lost(&self) -> bool {
        !self.lost.is_empty() || self.lacks_slabs
    }
}

impl Attach {
    fn set_bit(bits: &Table<AtomicU64>, name: usize) -> bool {
        let bit = 1 << (name % 64);
        bits[name / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    fn has_handle(&self, handle: u32) -> bool {
        let at = handle as usize;
        at / 64 < self.handles.len() && self.handles[at / 64].load(Ordering::Relaxed) >> (at % 64) & 1 != 0
    }

    /// Returns the claimed objects of a zspage: words of bits, each with the index of its first bit.
    fn objects_of(&self, page: u32, class: &SizeClass) -> impl Iterator<Item = (u16, u64)> {
        let words = usize::from(class.objs_per_zspage).div_ceil(u64::BITS as usize);
        let first = page as usize * PAGE_WORDS;
        (0..words).map(move |word| {
            (word as u16 * u64::BITS as u16, self.objects[first + word].load(Ordering::Relaxed))
        })
    }
}

impl<D: PoolLocks> RawPool<D> {
    /// Begins to attach the contents of the regions that this pool was built with. The pool is otherwise
    /// unused. Fails with `NoMemory` when there is no address space; `Io` if the system does not report which
    /// pages are in memory.
    pub fn attach(&self) -> Result<Attach> {
        let pages = self.arena.reserved_pages();
        Ok(Attach {
            starts: Table::new(pages)?,
            objects: Table::new(pages * PAGE_WORDS)?,
            handles: Table::new((self.handles.cache().found_names()? / 64 + 1) as usize)?,
        })
    }

    /// Returns the location that a handle's cell holds, if the cell is in memory and the location's class
    /// exists. Whether the handle's object is there is not checked yet.
    pub fn find(&self, handle: u32) -> Option<Location> {
        let cell = self.handles.find(handle)?;
        // SAFETY: the cell lies in a page in memory, is aligned, and any bit pattern is a valid cell.
        let object = unsafe { &*cell }.object();
        (usize::from(object.class) < self.classes.iter().len()).then_some(object)
    }

    /// Prefetches what [`RawPool::find`] reads.
    pub fn prefetch_handle(&self, handle: u32) {
        if let Some(cell) = self.handles.find(handle) {
            crate::base::cpu::prefetch(cell);
        }
    }

    /// Prefetches the first cache line of an object that [`RawPool::find`] returned.
    pub fn prefetch_found(&self, object: Location) {
        if (object.page as usize) < self.arena.reserved_pages() {
            crate::base::cpu::prefetch(self.place(object).0);
        }
    }

    /// Claims the object of `len` bytes at the location of `handle` for `owner`. Returns false if it is not
    /// all in memory, if it names another handle or owner, or if it or the handle was claimed before.
    pub fn claim(&self, attach: &Attach, object: Location, handle: u32, owner: u32, len: usize) -> bool {
        let class = self.classes.get(object.class);
        if !(1..=PAGE_SIZE).contains(&len)
            || self.classes.index_for(len) != object.class
            || object.index >= class.objs_per_zspage
            || !self.is_in_memory(object, class)
        {
            return false;
        }
        let (start, header_bytes) = self.place(object);
        let named = if header_bytes == 0 {
            [handle, self.huge_owner(object.page)]
        } else {
            debug_assert_eq!(header_bytes, HEADER_BYTES);
            // SAFETY: the page is in memory, objects are aligned to 16 bytes, and any bit pattern is a valid
            // number.
            unsafe { start.cast::<[u32; 2]>().read() }
        };
        if named != [handle, owner] {
            return false;
        }
        let start = &attach.starts[object.page as usize];
        let mark = u32::from(object.class) + 1;
        let found = start.compare_exchange(0, mark, Ordering::Relaxed, Ordering::Relaxed);
        if found.is_err_and(|other| other != mark) {
            return false;
        }
        let at = object.page as usize * PAGE_OBJECTS + usize::from(object.index);
        Attach::set_bit(&attach.handles, handle as usize) && Attach::set_bit(&attach.objects, at)
    }

    /// Returns whether the object is all in memory, and its zspage can be a run of the arena.
    fn is_in_memory(&self, object: Location, class: &SizeClass) -> bool {
        let size = usize::from(class.size_bytes);
        let offset = usize::from(object.index) * size;
        let (first, last) = (offset / PAGE_SIZE, (offset + size - 1) / PAGE_SIZE);
        let fits_group = object.page % 64 + u32::from(class.pages_per_zspage) <= 64;
        let page = object.page.checked_add(first as u32);
        fits_group && page.is_some_and(|page| self.arena.is_resident(page, (last - first + 1) as u32))
    }

    /// Takes the memory of all claimed objects. Fails with `NoMemory` when there is none for the lists; `Io`
    /// if the system does not report which pages are in memory.
    pub fn settle(&self, attach: &Attach) -> Result<Settled> {
        let (slabs, lacks_slabs) = self.handles.cache().claim_slabs(|handle| attach.has_handle(handle))?;
        let mut settled = Settled { zspages: Vec::new(), slabs, lacks_slabs, lost: Vec::new() };
        let no_memory = |_| crate::Error::new(ErrorKind::NoMemory, "no memory to attach a pool");
        let mut end = 0;
        let starts = self.arena.used_end().min(attach.starts.len() as u32);
        for page in 0..starts {
            let Some(class) = attach.starts[page as usize].load(Ordering::Relaxed).checked_sub(1) else {
                continue;
            };
            let (class, shape) = (class as u8, self.classes.get(class as u8));
            let mut found = Found { page, class, fresh: 0, inuse: 0 };
            for (first, word) in attach.objects_of(page, shape) {
                if word != 0 {
                    found.fresh = first + (u64::BITS - word.leading_zeros()) as u16;
                    found.inuse += word.count_ones() as u16;
                }
            }
            settled.zspages.try_reserve(1).map_err(no_memory)?;
            if page < end {
                settled.lost.push(page);
                settled.lost.extend(settled.zspages.last().map(|before| before.page));
            }
            end = end.max(page + u32::from(shape.pages_per_zspage));
            settled.zspages.push(found);
        }
        settled.lost.sort_unstable();
        settled.lost.dedup();
        let Settled { zspages, lost, .. } = &mut settled;
        zspages.retain(|found| {
            let shape = self.classes.get(found.class);
            let run = Run { page: found.page, pages: shape.pages_per_zspage };
            let committed = shape.pages_for(found.fresh.into()) as u64;
            let keeps = lost.binary_search(&found.page).is_err()
                && self.arena.adopt_run(run, Account::Pool, committed);
            if !keeps && let Err(at) = lost.binary_search(&found.page) {
                lost.insert(at, found.page);
            }
            keeps
        });
        Ok(settled)
    }

    /// Returns whether the claimed object of `handle` is lost after all; if so, unclaims the handle.
    pub fn is_lost(&self, attach: &Attach, settled: &Settled, handle: u32) -> bool {
        let is_lost = !self.handles.cache().is_of(handle, &settled.slabs)
            || self.find(handle).is_none_or(|object| settled.lost.binary_search(&object.page).is_ok());
        if is_lost {
            attach.handles[handle as usize / 64].fetch_and(!(1 << (handle % 64)), Ordering::Relaxed);
        }
        is_lost
    }

    /// Rebuilds the pool's descriptors and lists. Calls `grow` when the arena has no memory for them. Fails
    /// with those of the arena and of `grow`.
    pub fn rebuild(&self, attach: &Attach, settled: &Settled, grow: &dyn Fn() -> Result<()>) -> Result<()> {
        self.handles.cache().adopt(&settled.slabs, |handle| {
            let is_claimed = attach.has_handle(handle);
            if let Some(cell) = self.handles.find(handle).filter(|_| is_claimed) {
                // SAFETY: the cell lies in a page in memory, is aligned, and is this handle's. Its pins are
                // void, as the process that set them has ended.
                unsafe { &*cell }.renew();
            }
            is_claimed
        });
        for found in &settled.zspages {
            let descriptor = || Descriptor::new(found.page, found.class);
            let id = match self.zspages.insert(descriptor(), Gfp::MayWait) {
                Err(error) if matches!(error.kind(), ErrorKind::NoMemory | ErrorKind::NoSpace) => {
                    grow()?;
                    self.zspages.insert(descriptor(), Gfp::MayWait)?
                }
                made => made?,
            };
            self.fill(attach, found, id);
        }
        Ok(())
    }

    fn fill(&self, attach: &Attach, found: &Found, id: u32) {
        let shape = self.classes.get(found.class);
        let mut free = NONE_INDEX;
        // From the last gap to the first, so that the first is allocated next.
        let words: Vec<_> = attach.objects_of(found.page, shape).collect();
        for (first, word) in words.iter().rev() {
            let mut gaps = !word;
            while gaps != 0 {
                let bit = u64::BITS - 1 - gaps.leading_zeros();
                gaps &= !(1 << bit);
                let index = first + bit as u16;
                if index >= found.fresh {
                    continue;
                }
                let (start, _) = self.place(Location { page: found.page, class: found.class, index });
                // SAFETY: the object is not claimed, and lies in a committed page of this zspage.
                unsafe { start.cast::<[u32; 2]>().write([FREE_TAG, u32::from(free)]) };
                free = index;
            }
        }
        let committed = shape.pages_for(found.fresh.into()) as u8;
        // The inverse of 0: no owner.
        let owner = if shape.is_huge() { self.huge_owner(found.page) } else { u32::MAX };
        self.set_huge_owner(found.page, owner, id);
        let mut lists = self.lists(found.class);
        lists.with(&self.zspages, id, |zspage| {
            (zspage.free, zspage.fresh, zspage.inuse, zspage.committed) =
                (free, found.fresh, found.inuse, committed);
        });
        lists.insert(&self.zspages, id, fullness_group(found.inuse, shape.objs_per_zspage));
        lists.objs_used += u64::from(found.inuse);
        lists.pages_used += u64::from(committed);
        drop(lists);
        if let Some(lru) = &self.lru {
            lru.insert(found.page, found.class, End::Coldest);
        }
        // SAFETY: the descriptor is new, and known only here and to the lists.
        unsafe { self.zspages.get(id) }.let_go();
    }

    /// Stores a claimed handle in the descriptor of its huge object. Call it after [`RawPool::rebuild`].
    pub fn name_huge(&self, handle: u32) {
        if let Some(object) = self.find(handle) {
            // SAFETY: the handle's object is in use, and no other thread uses the pool yet.
            unsafe { self.zspage_at(object.page) }.set_huge_handle(handle);
        }
    }
}
