//! The space of a backing device: extents, and the live objects in them.
//!
//! The device is divided into *extents*. Each is filled from start to end and then only loses objects, until
//! it is free and can be refilled. Where an extent is one object of the backing ([`Tiers::object_bytes`]), it
//! is filled by a single write, and discarded before it is filled again. An extent's *word* counts the bytes
//! of its live objects, and its holds: by the thread that fills it, by each write in flight, by the thread
//! that cleans it. Dropping the word to 0 frees the extent.
//!
//! A slot that refers to a place in an extent keeps the extent from being refilled, so the extent's
//! generation, read under the slot's lock, is the one that the object was written with.
//!
//! Lock: `backing extents`, a leaf, protects the free extents.

use std::ops::{Range, RangeInclusive};

use crate::backing::{Buffers, Filling, MAX_TIERS, Seal, Tiers};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::failures;
use crate::base::mem::{Entry, Region, Table};
use crate::base::sync::{Arc, AtomicU32, Counter, Mutex, Ordering, Stamp, classes};
use crate::base::units::{PAGE_SIZE, PageNo};

use super::object::{ALIGN_BYTES, HEADER_BYTES, Object};
use super::sealed::{self, OVERHEAD_BYTES, Position, Scratch};
use super::state::Failures;
use super::{BackingCounts, BackingOptions, WritebackLayout};
use crate::store::slot::{Backed, Contents, SlotGuard};

/// The size of packed extents on a large device.
const MAX_EXTENT_BYTES: u64 = 1 << 20;
const MIN_EXTENT_BYTES: u64 = 64 << 10;
/// The number of extents that smaller devices are divided into, down to [`MIN_EXTENT_BYTES`] each.
const MANY_EXTENTS: u64 = 128;
const LEAST_EXTENTS: u64 = if cfg!(loom) { 2 } else { 8 };
pub(super) const RESERVED_EXTENTS: u32 = 2;
/// Bytes read at a time by sequential reads of pages.
pub(super) const READ_AHEAD_BYTES: usize = 64 << 10;
/// Reads of pages that can be in flight; others wait.
const READS: u32 = if cfg!(loom) { 2 } else { 64 };
/// The alignment of transfers, in bytes; a device's blocks must not be larger.
pub(super) const BLOCK_BYTES: usize = PAGE_SIZE;

/// One hold of an extent's word; the bits below count bytes.
pub(super) const HOLD: u32 = 1 << 24;
pub(super) const BYTES_MASK: u32 = HOLD - 1;
const _: () = assert!(MAX_EXTENT_BYTES <= BYTES_MASK as u64);
/// The sizes that an extent may have that is one object of the backing.
const OBJECT_BYTES: RangeInclusive<usize> = 64 << 10..=8 << 20;
const _: () = assert!(*OBJECT_BYTES.end() <= BYTES_MASK as usize);

/// A full device is no longer full when this share of its extents is found, or could be.
const AMPLE_SHARE: u32 = 64;
const DISCARDS_AT_ONCE: usize = 64;

/// No extent.
const NONE: u32 = u32::MAX;
/// Instead of a link: a dead process held the extent.
#[cfg(not(loom))]
const HELD_BY_DEAD: u32 = NONE - 1;

#[derive(Default)]
pub(super) struct Extent {
    /// `[ holds 8 | bytes of live objects 24 ]`; 0 while it is free.
    pub(super) word: AtomicU32,
    /// How often it was filled.
    generation: Stamp,
    /// While free, the next free extent; else not 0 if it could not be cleaned.
    pub(super) link: Stamp,
    /// With the layout `Blocks`, the CRC of its only object, which has no header. Otherwise
    /// [`Filling::home`], where the backing keeps the extent as one object.
    crc: Stamp,
    /// With the layout `Blocks`, the checksum of its only object. Otherwise [`Extent::filled_bytes`].
    checksum: Stamp,
}

impl Extent {
    /// Returns the bytes of live objects that a packed extent was filled with: the others have died.
    fn filled_bytes(&self) -> u32 {
        self.checksum.get()
    }

    fn set_filled_bytes(&self, bytes: usize) {
        self.checksum.set(bytes as u32);
    }

    pub(super) fn gain_bytes(&self, live_bytes: u32) -> u32 {
        self.filled_bytes().saturating_sub(live_bytes)
    }
}

// SAFETY: numbers, all zero by default, without destructors.
unsafe impl Entry for Extent {}

/// The free extents of a tier: those never used, and the others in queues, so that all wear evenly.
pub(super) struct Free {
    /// The tier's extents that were used; all others come after them.
    used: Range<u32>,
    pub(super) end: u32,
    pub(super) count: u32,
    /// Extents that were discarded on the device.
    discarded: Queue,
    /// Extents that were not yet.
    emptied: Queue,
}

impl Free {
    fn of(tiers: &mut [Free], extent: u32) -> &mut Free {
        let at = tiers.partition_point(|tier| tier.end <= extent);
        &mut tiers[at]
    }

    /// Takes an extent, and returns whether something may be left in it.
    fn take(&mut self, extents: &Table<Extent>) -> Option<(u32, bool)> {
        let taken = if self.used.end < self.end {
            self.used.end += 1;
            (self.used.end - 1, false)
        } else {
            // None is between the queues: only a thread that holds `writeback` discards or takes extents.
            let clean = self.discarded.pop(extents).map(|extent| (extent, false));
            clean.or_else(|| Some((self.emptied.pop(extents)?, true)))?
        };
        self.count -= 1;
        Some(taken)
    }

    fn put(&mut self, extents: &Table<Extent>, extent: u32) {
        self.emptied.push(extents, extent);
        self.count += 1;
    }
}

/// A queue of extents, linked by `Extent::link`.
struct Queue {
    first: u32,
    last: u32,
}

impl Queue {
    const EMPTY: Queue = Queue { first: NONE, last: NONE };

    fn push(&mut self, extents: &Table<Extent>, extent: u32) {
        extents[extent as usize].link.set(NONE);
        match self.last {
            NONE => self.first = extent,
            last => extents[last as usize].link.set(extent),
        }
        self.last = extent;
    }

    fn pop(&mut self, extents: &Table<Extent>) -> Option<u32> {
        let first = (self.first != NONE).then_some(self.first)?;
        self.first = extents[first as usize].link.get();
        if self.first == NONE {
            self.last = NONE;
        }
        Some(first)
    }
}

/// A page's object on the device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) page: PageNo,
    pub(super) backed: Backed,
    /// That of the extent, which it was written with.
    pub(super) filling: Filling,
}

/// What an extent is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Pages that leave memory.
    New,
    /// Objects moved by cleaning.
    Moved,
}

/// The space of a backing device, and its statistics.
pub(in crate::store) struct Log {
    pub(in crate::store) backing: Arc<Tiers>,
    pub(super) layout: WritebackLayout,
    pub(super) compressed: bool,
    pub(super) extent_bytes: usize,
    pub(super) written_once: bool,
    /// With which objects are sealed, if they are.
    pub(super) seal: Option<Arc<dyn Seal>>,
    pub(super) extents: Table<Extent>,
    count: u32,
    pub(super) tiers: usize,
    /// Of each tier, in the order in which they are used.
    pub(super) free: Mutex<Vec<Free>>,
    /// The tier whose objects are moved, by its own reserve.
    pub(super) moved_from: Counter,
    /// Not 0 while the device is full: the extents that pages that leave memory have yet to find.
    missing: Counter,
    pub(super) reads: Buffers,
    pub(super) counts: BackingCounts,
    pub(super) failures: Failures,
}

impl Log {
    /// Creates the space of a device, with all extents free.
    /// Fails with `Invalid` for a device that is too small; `Unsupported` for one with blocks larger than
    /// [`BLOCK_BYTES`]; `NoMemory`.
    pub(super) fn new(options: &BackingOptions, region: Option<&Region>) -> Result<Self> {
        let BackingOptions { backing, layout, compressed } = options.clone();
        let (count, extent_bytes) = Log::extents_of(options)?;
        let (written_once, seal) = (backing.object_bytes().is_some(), backing.seal().cloned());
        let extent_at = |offset: u64| u32::try_from(offset / extent_bytes).unwrap_or(count).min(count);
        let starts: Vec<u32> = backing.starts().map(extent_at).collect();
        let ends = starts.iter().skip(1).copied().chain([count]);
        let free = starts.iter().zip(ends).map(|(start, end)| {
            let (discarded, emptied) = (Queue::EMPTY, Queue::EMPTY);
            Free { used: *start..*start, end, count: end - start, discarded, emptied }
        });
        let free: Vec<_> = free.collect();
        Ok(Log {
            backing,
            layout,
            compressed: compressed || layout == WritebackLayout::Packed,
            extent_bytes: extent_bytes as usize,
            written_once,
            seal,
            extents: Table::new_in(region, count as usize)?,
            count,
            tiers: free.len(),
            free: Mutex::new(&classes::BACKING_EXTENTS, free),
            moved_from: Counter::new(0),
            missing: Counter::new(0),
            reads: Buffers::new(READS, READ_AHEAD_BYTES)?,
            counts: BackingCounts::default(),
            failures: Failures::default(),
        })
    }

    #[cfg(not(loom))]
    pub(in crate::store) fn table_bytes_of(options: &BackingOptions) -> Result<u64> {
        Log::extents_of(options).map(|(count, _)| Table::<Extent>::bytes_of(count as usize))
    }

    /// Returns the number of a device's extents, and the bytes of an extent.
    fn extents_of(options: &BackingOptions) -> Result<(u32, u64)> {
        let BackingOptions { backing, layout, .. } = options;
        let len_bytes = backing.len_bytes();
        let block_bytes = backing.block_bytes();
        if block_bytes > BLOCK_BYTES {
            let what = format!(
                "the backing device has blocks of {block_bytes} bytes; at most {BLOCK_BYTES} are possible"
            );
            return Err(Error::new(ErrorKind::Unsupported, what).with_setting("backing_dev"));
        }
        let extent_bytes = match (layout, backing.object_bytes()) {
            (WritebackLayout::Packed, None) => {
                (len_bytes / MANY_EXTENTS).next_power_of_two().clamp(MIN_EXTENT_BYTES, MAX_EXTENT_BYTES)
            }
            (WritebackLayout::Packed, Some(bytes)) if OBJECT_BYTES.contains(&bytes) => bytes as u64,
            (WritebackLayout::Packed, Some(bytes)) => {
                return Err(Error::invalid(format!("a backing of objects of {bytes} bytes")));
            }
            (WritebackLayout::Blocks, None) => BLOCK_BYTES as u64,
            (WritebackLayout::Blocks, Some(_)) => {
                let what = "a store of objects keeps no single blocks: it needs the layout 'packed'";
                return Err(Error::new(ErrorKind::Unsupported, what).with_setting("writeback_layout"));
            }
        };
        let count = len_bytes / extent_bytes;
        if count < LEAST_EXTENTS {
            let least = LEAST_EXTENTS * extent_bytes;
            let what = format!("the backing device has {len_bytes} bytes; it needs at least {least}");
            return Err(Error::invalid(what).with_setting("backing_dev"));
        }
        Ok((u32::try_from(count).unwrap_or(NONE - 1).min(NONE - 1), extent_bytes))
    }

    /// Begins the adoption of the extents that another process left: resets the extents' live bytes and
    /// links. All else stays. Marks the extents that the dead process held: a write to one may still be on
    /// its way to the device.
    #[cfg(not(loom))]
    pub(in crate::store) fn begin_adoption(&self) -> Result<()> {
        self.counts.pages.set(0);
        self.counts.held_bytes.set(0);
        self.extents.for_each_resident(|range| {
            for extent in range {
                let of = &self.extents[extent];
                let was_held = of.word.load(Ordering::Relaxed) >= HOLD || of.link.get() == HELD_BY_DEAD;
                of.word.store(0, Ordering::Relaxed);
                of.link.set(if was_held { HELD_BY_DEAD } else { 0 });
                if self.layout == WritebackLayout::Packed && was_held {
                    // It is filled no further.
                    of.set_filled_bytes(self.usable_bytes(self.extent_bytes));
                }
            }
        })
    }

    /// Adds the object at a place that a slot names to its extent; returns false if no object can be there.
    #[cfg(not(loom))]
    pub(in crate::store) fn adopt(&self, place: u64, len_bytes: usize) -> bool {
        let extent = place / self.extent_bytes as u64;
        let end = (place % self.extent_bytes as u64) as usize + self.footprint(len_bytes);
        if extent >= u64::from(self.count) || end > self.extent_bytes {
            return false;
        }
        let of = &self.extents[extent as usize];
        let footprint = self.footprint(len_bytes) as u32;
        let add = |word: u32| (word + footprint <= self.extent_bytes as u32).then_some(word + footprint);
        let fits = of.generation.get() != 0
            && of.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok();
        if fits {
            self.counts.held_bytes.add(u64::from(footprint));
            self.counts.pages.add(1);
        }
        fits
    }

    /// Ends the adoption, after all objects were adopted: extents without objects are free.
    #[cfg(not(loom))]
    pub(in crate::store) fn end_adoption(&self) -> Result<()> {
        let mut ranges = Vec::new();
        self.extents.for_each_resident(|range| ranges.push(range))?;
        let mut free = self.free.lock();
        for tier in &mut *free {
            let of_tier = tier.used.start as usize..tier.end as usize;
            let used =
                |extent: &usize| of_tier.contains(extent) && self.extents[*extent].generation.get() != 0;
            let last = ranges.iter().rev().find_map(|range| range.clone().rev().find(used));
            // Between those in use there may be some that never were.
            tier.used.end = last.map_or(tier.used.start, |last| last as u32 + 1);
            tier.count = tier.end - tier.used.end;
            // Held extents are reused last: by then, writes of the dead process have ended.
            for was_held in [false, true] {
                for extent in tier.used.clone() {
                    let of = &self.extents[extent as usize];
                    let is_free = of.word.load(Ordering::Relaxed) == 0;
                    if is_free && (of.link.get() == HELD_BY_DEAD) == was_held {
                        tier.put(&self.extents, extent);
                    }
                }
            }
        }
        let all = free.iter().flat_map(|tier| tier.used.clone()).map(|extent| &self.extents[extent as usize]);
        all.filter(|of| of.link.get() == HELD_BY_DEAD).for_each(|of| of.link.set(0));
        Ok(())
    }

    pub(super) fn len_bytes(&self) -> u64 {
        u64::from(self.count) * self.extent_bytes as u64
    }

    pub(super) fn used_bytes(&self) -> u64 {
        let free: u32 = self.free.lock().iter().map(|tier| tier.count).sum();
        u64::from(self.count - free) * self.extent_bytes as u64
    }

    /// Returns the bytes of the free extents, without those of tiers that are down.
    pub(super) fn free_bytes(&self) -> usize {
        let in_use = self.in_use();
        let free = self.free.lock();
        let used = free.iter().zip(in_use).filter(|(_, is_used)| *is_used);
        used.map(|(tier, _)| tier.count as usize * self.extent_bytes).sum()
    }

    /// Returns which tiers are written to now: those that are not down. If all are, it is all of them: then
    /// the writes say why nothing is written.
    pub(super) fn in_use(&self) -> [bool; MAX_TIERS] {
        let is_up = |tier| tier < self.tiers && !self.backing.is_down(tier);
        match std::array::from_fn(is_up) {
            up if up.contains(&true) => up,
            _ => std::array::from_fn(|tier| tier < self.tiers),
        }
    }

    pub(super) fn footprint(&self, len_bytes: usize) -> usize {
        match self.layout {
            WritebackLayout::Packed if self.seal.is_some() => sealed::footprint(len_bytes),
            WritebackLayout::Packed => (HEADER_BYTES + len_bytes).next_multiple_of(ALIGN_BYTES),
            WritebackLayout::Blocks => BLOCK_BYTES,
        }
    }

    pub(super) fn max_footprint(&self) -> usize {
        self.footprint(PAGE_SIZE)
    }

    pub(super) fn place(&self, extent: u32, at: usize) -> u64 {
        u64::from(extent) * self.extent_bytes as u64 + at as u64
    }

    pub(super) fn extent_of(&self, place: u64) -> u32 {
        (place / self.extent_bytes as u64) as u32
    }

    /// Returns the filling of an extent, which the caller holds.
    pub(super) fn filling(&self, extent: u32) -> Filling {
        let of = &self.extents[extent as usize];
        let home = if self.written_once { of.crc.get() } else { 0 };
        Filling { generation: of.generation.get(), home }
    }

    /// Writes an object into `out`, the [`Log::footprint`] bytes from its place on. What is to be sealed is
    /// sealed when the extent is written.
    pub(super) fn put(&self, out: &mut [u8], extent: u32, object: &Object, bytes: &[u8]) {
        let of = &self.extents[extent as usize];
        let generation = of.generation.get();
        if self.seal.is_some() {
            sealed::put(out, object, bytes);
            return out[OVERHEAD_BYTES + bytes.len()..].fill(0);
        }
        let crc = object.crc(generation, bytes);
        let start = match self.layout {
            WritebackLayout::Packed => {
                out[..HEADER_BYTES].copy_from_slice(&object.header(crc));
                HEADER_BYTES
            }
            WritebackLayout::Blocks => {
                of.crc.set(crc);
                of.checksum.set(object.checksum);
                0
            }
        };
        let end = start + bytes.len();
        out[start..end].copy_from_slice(bytes);
        // Leave no bytes of other objects there.
        out[end..].fill(0);
    }

    /// As [`Log::find`], of any packed object, in an extent of that generation.
    pub(super) fn parse<'a>(
        &self,
        bytes: &'a [u8],
        generation: u32,
        place: u64,
        scratch: &'a mut Scratch,
    ) -> Option<(Object, &'a [u8])> {
        let Some(seal) = &self.seal else { return Object::parse(bytes, generation) };
        let at = (place % self.extent_bytes as u64) as u32;
        sealed::parse(&**seal, bytes, Position { extent: self.extent_of(place), generation, at }, scratch)
    }

    /// Returns where a page is, by its slot, which is locked; `None` if it is not on the device. Equal ones
    /// refer to the same object.
    pub(super) fn placed(&self, page: PageNo, slot: &SlotGuard<'_>) -> Option<Placed> {
        let Contents::Backed(backed) = slot.contents() else { return None };
        Some(Placed { page, backed, filling: self.filling(self.extent_of(backed.place)) })
    }

    /// Returns the checksum and the bytes of an object at the start of `bytes`, which were read from its
    /// place. Returns `None` if it is not as it was written.
    pub(super) fn find<'a>(
        &self,
        bytes: &'a [u8],
        Placed { page, backed, filling: Filling { generation, .. } }: Placed,
        scratch: &'a mut Scratch,
    ) -> Option<(u32, &'a [u8])> {
        let Backed { place, len, priority } = backed;
        match self.layout {
            WritebackLayout::Packed => {
                let (object, own) = self.parse(bytes, generation, place, scratch)?;
                (object.page == page && object.len == len && object.priority == priority)
                    .then_some((object.checksum, own))
            }
            WritebackLayout::Blocks => {
                let of = &self.extents[self.extent_of(place) as usize];
                let object = Object { page, checksum: of.checksum.get(), len, priority };
                let own = bytes.get(..usize::from(len))?;
                (object.crc(generation, own) == of.crc.get()).then_some((object.checksum, own))
            }
        }
    }

    /// Takes a free extent to fill, and holds it; `None` if too few are free for that purpose.
    pub(super) fn take(&self, purpose: Purpose) -> Option<u32> {
        loop {
            let extent = self.take_any(purpose)?;
            let of = &self.extents[extent as usize];
            // Its next generation would have the same nonces as its first one: it is never filled again.
            if self.seal.is_some() && of.generation.get() == u32::MAX {
                continue;
            }
            of.link.set(0);
            of.generation.set(of.generation.get().wrapping_add(1));
            if self.layout == WritebackLayout::Packed {
                // Those are counted one by one: what a flush leaves unused would be moved again and again.
                let is_counted = purpose == Purpose::Moved && !self.written_once;
                of.set_filled_bytes(if is_counted { 0 } else { self.usable_bytes(self.extent_bytes) });
            }
            of.word.store(HOLD, Ordering::Relaxed);
            if purpose == Purpose::New {
                self.missing.set(self.missing.get().saturating_sub(1));
            }
            return Some(extent);
        }
    }

    /// Takes a free extent, in which nothing is left on a backing that keeps it as one object.
    fn take_any(&self, purpose: Purpose) -> Option<u32> {
        let (extent, was_emptied) = {
            let in_use = self.in_use();
            let mut free = self.free.lock();
            let with = |more_than: u32, is_used: bool| {
                (0..self.tiers).find(|tier| in_use[*tier] == is_used && free[*tier].count > more_than)
            };
            // Each tier keeps its reserve, by which it can be cleaned while the others are down. Where those
            // in use have no room, one that is down is taken: then the write says why nothing is written.
            let reserved = self.reserved_extents();
            let tier = match purpose {
                Purpose::New => with(reserved, true).or_else(|| with(reserved, false)),
                Purpose::Moved => {
                    let own = self.moved_from.get() as usize;
                    let has_own = in_use[own] && free[own].count > 0;
                    with(RESERVED_EXTENTS, true)
                        .or(has_own.then_some(own))
                        .or_else(|| with(0, true))
                        .or_else(|| with(0, false))
                }
            };
            free[tier?].take(&self.extents)?
        };
        let of = &self.extents[extent as usize];
        if self.written_once {
            if was_emptied {
                self.discard(extent);
            }
            of.crc.set(self.backing.home(self.place(extent, 0)));
        }
        Some(extent)
    }

    /// Returns whether pages that leave memory find an extent without cleaning.
    pub(super) fn has_room(&self) -> bool {
        let in_use = self.in_use();
        let has_more = |tier: &Free| tier.count > RESERVED_EXTENTS;
        self.layout == WritebackLayout::Blocks
            || self.free.lock().iter().zip(in_use).any(|(tier, is_used)| is_used && has_more(tier))
    }

    pub(super) fn hold(&self, extent: u32) {
        self.extents[extent as usize].word.fetch_add(HOLD, Ordering::Relaxed);
    }

    pub(super) fn release(&self, extent: u32) {
        self.lower(extent, HOLD);
    }

    /// Returns how much of `bytes` of an extent objects surely fill.
    pub(super) fn usable_bytes(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.max_footprint())
    }

    /// Counts an object moved to an extent among the bytes that it is full with.
    pub(super) fn fill(&self, extent: u32, len_bytes: usize) {
        let of = &self.extents[extent as usize];
        if !self.written_once {
            of.set_filled_bytes(of.filled_bytes() as usize + self.footprint(len_bytes));
        }
    }

    /// Notes that pages that leave memory find no extent.
    pub(super) fn note_full(&self) {
        let was_full = self.missing.get() > 0;
        self.missing.set(self.ample_extents());
        if !was_full {
            failures::note();
        }
    }

    /// Returns whether the device is full: from the page on that found no extent, until so many are found, or
    /// could be, that it is not full again at once.
    pub(in crate::store) fn is_full(&self) -> bool {
        if self.missing.get() > 0 && self.available_extents() >= self.ample_extents() {
            self.missing.set(0);
        }
        self.missing.get() > 0
    }

    fn ample_extents(&self) -> u64 {
        u64::from(self.count / AMPLE_SHARE).max(u64::from(RESERVED_EXTENTS))
    }

    /// Returns how many extents pages that leave memory would find if all were cleaned that may be.
    fn available_extents(&self) -> u64 {
        let (in_use, reserved) = (self.in_use(), self.reserved_extents());
        let tiers = self.free.lock();
        let used = tiers.iter().zip(in_use).filter(|(_, is_used)| *is_used);
        let free: u64 = used.map(|(tier, _)| u64::from(tier.count.saturating_sub(reserved))).sum();
        drop(tiers);
        let gainable_bytes = match self.layout {
            WritebackLayout::Packed => self.gainable_bytes(|tier| in_use[tier]),
            // An object dies with its extent.
            WritebackLayout::Blocks => 0,
        };
        free + gainable_bytes / self.extent_bytes as u64
    }

    /// Returns the extents of each tier that only cleaning takes.
    fn reserved_extents(&self) -> u32 {
        if self.layout == WritebackLayout::Packed { RESERVED_EXTENTS } else { 0 }
    }

    /// Returns the number of pages that were on the device and no longer are, modulo 2^64.
    pub(in crate::store) fn gone_pages(&self) -> u64 {
        self.counts.pages_written_back.get().wrapping_sub(self.counts.pages.get())
    }

    pub(super) fn lives(&self, extent: u32, len_bytes: usize) {
        let footprint = self.footprint(len_bytes);
        self.extents[extent as usize].word.fetch_add(footprint as u32, Ordering::Relaxed);
        self.counts.held_bytes.add(footprint as u64);
        self.counts.pages.add(1);
    }

    /// Counts the object at a place as dead. No slot refers to it any more.
    pub(in crate::store) fn died(&self, place: u64, len_bytes: usize) {
        let footprint = self.footprint(len_bytes);
        self.counts.held_bytes.sub(footprint as u64);
        self.counts.pages.sub(1);
        self.lower(self.extent_of(place), footprint as u32);
    }

    fn lower(&self, extent: u32, by: u32) {
        // AcqRel orders the next filling of the extent after all earlier accesses.
        let word = self.extents[extent as usize].word.fetch_sub(by, Ordering::AcqRel);
        debug_assert!(word & BYTES_MASK >= by & BYTES_MASK && word >= by, "{word:#x} is lowered by {by:#x}");
        if word != by {
            return;
        }
        Free::of(&mut self.free.lock(), extent).put(&self.extents, extent);
    }

    pub(super) fn discard_emptied(&self) {
        if self.layout == WritebackLayout::Blocks {
            // The kernel does not discard single blocks.
            return;
        }
        for _ in 0..DISCARDS_AT_ONCE {
            let Some(extent) = self.take_emptied() else { return };
            self.discard(extent);
            self.put_discarded(extent);
        }
    }

    pub(super) fn discard_all(&self) {
        while let Some(extent) = self.take_emptied() {
            self.discard(extent);
            self.put_discarded(extent);
        }
        let is_used = |extent: &u32| self.extents[*extent as usize].word.load(Ordering::Relaxed) != 0;
        let used = self.used_extents(|_| true);
        used.into_iter().filter(is_used).for_each(|extent| self.discard(extent));
    }

    /// Takes an emptied extent, which is in no queue then, so that no thread takes it.
    fn take_emptied(&self) -> Option<u32> {
        self.free.lock().iter_mut().find_map(|tier| tier.emptied.pop(&self.extents))
    }

    fn put_discarded(&self, extent: u32) {
        Free::of(&mut self.free.lock(), extent).discarded.push(&self.extents, extent);
    }

    /// Returns the extents of some tiers that were ever filled.
    pub(super) fn used_extents<F: Fn(usize) -> bool>(
        &self,
        of_tier: F,
    ) -> impl IntoIterator<Item = u32> + use<F> {
        let free = self.free.lock();
        let tiers = free.iter().enumerate().filter(|(tier, _)| of_tier(*tier));
        let used: Vec<_> = tiers.map(|(_, tier)| tier.used.clone()).collect();
        used.into_iter().flatten()
    }

    fn discard(&self, extent: u32) {
        self.backing.discard(self.place(extent, 0), self.extent_bytes as u64, self.filling(extent));
    }
}
