//! The table of a backing device's extents: which are free, and how much lives in the others.
//!
//! The device is divided into *extents*. Each is filled from start to end and then only loses objects, until
//! it is free and can be refilled. Where an extent is one object of the backing ([`Tiers::object_bytes`]), it
//! is filled by a single write, and discarded before it is filled again. An extent's *word* counts the bytes
//! of its live objects, and its holds: by the thread that fills it, by each write in flight, by the thread
//! that cleans it. Dropping the word to 0 frees the extent. Extents are taken, cleaned and discarded only by
//! the thread that holds `writeback`.
//!
//! A slot that refers to a place in an extent keeps the extent from being refilled, so the extent's
//! generation, read under the slot's lock, is the one that the object was written with.
//!
//! Lock: `backing extents`, a leaf, protects the free extents.

use std::ops::{Range, RangeInclusive};

use crate::backing::{Filling, MAX_TIERS, Tiers};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::failures;
use crate::base::mem::{Entry, Region, Table};
use crate::base::sync::{Arc, AtomicU32, Counter, Mutex, Ordering, Stamp, classes};
use crate::base::units::PAGE_SIZE;

use super::{BackingCounts, BackingOptions, WritebackLayout};

/// The size of packed extents on a large device.
const MAX_EXTENT_BYTES: u64 = 1 << 20;
const MIN_EXTENT_BYTES: u64 = 64 << 10;
/// The number of extents that smaller devices are divided into, down to [`MIN_EXTENT_BYTES`] each.
const MANY_EXTENTS: u64 = 128;
const LEAST_EXTENTS: u64 = if cfg!(loom) { 2 } else { 8 };
/// Extents of each tier that only cleaning takes.
const RESERVED_EXTENTS: u32 = 2;
/// The alignment of transfers, in bytes; a device's blocks must not be larger.
pub(super) const BLOCK_BYTES: usize = PAGE_SIZE;

/// One hold of an extent's word; the bits below count bytes.
const HOLD: u32 = 1 << 24;
const _: () = assert!(MAX_EXTENT_BYTES < HOLD as u64);
/// The sizes that an extent may have that is one object of the backing.
const OBJECT_BYTES: RangeInclusive<usize> = 64 << 10..=8 << 20;
const _: () = assert!(*OBJECT_BYTES.end() < HOLD as usize);

/// A full device is no longer full when this share of its extents is found, or could be.
const AMPLE_SHARE: u32 = 64;

const NONE: u32 = u32::MAX;
/// Instead of a link: a dead process held the extent.
#[cfg(not(loom))]
const HELD_BY_DEAD: u32 = NONE - 1;

#[derive(Default)]
pub(super) struct Extent {
    /// `[ holds 8 | bytes of live objects 24 ]`; 0 while it is free.
    word: AtomicU32,
    /// How often it was filled.
    pub(super) generation: Stamp,
    /// While free, the next free extent; else not 0 if it could not be cleaned.
    pub(super) link: Stamp,
    /// With the layout `Blocks`, the CRC of its only object, which has no header. Otherwise
    /// [`Filling::home`], where the backing keeps the extent as one object.
    pub(super) crc: Stamp,
    /// With the layout `Blocks`, the checksum of its only object. Otherwise the bytes of live objects that it
    /// was filled with: the others have died.
    pub(super) checksum: Stamp,
}

// SAFETY: numbers, all zero by default, without destructors.
unsafe impl Entry for Extent {}

impl Extent {
    /// Returns the bytes of live objects, if there are some and no hold.
    pub(super) fn unheld_bytes(&self) -> Option<u32> {
        Some(self.word.load(Ordering::Relaxed)).filter(|word| is_unheld(*word))
    }

    /// Holds an extent, though it may have lost objects meanwhile, unless it became free or held.
    pub(super) fn hold_if_unheld(&self) -> bool {
        let hold = |word: u32| is_unheld(word).then_some(word + HOLD);
        self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, hold).is_ok()
    }
}

fn is_unheld(word: u32) -> bool {
    (1..HOLD).contains(&word)
}

/// The extents of a tier. The free ones were never used, or are in a queue, so that all wear evenly.
pub(super) struct Tier {
    /// Those that were used; all others come after them.
    used: Range<u32>,
    end: u32,
    pub(super) free: u32,
    /// The queue, linked by [`Extent::link`].
    first: u32,
    last: u32,
    /// The first in the queue that was not discarded on the device.
    emptied: u32,
}

impl Tier {
    /// Returns the number of an extent's tier.
    fn of(tiers: &[Tier], extent: u32) -> usize {
        tiers.partition_point(|tier| tier.end <= extent)
    }

    fn put(&mut self, entries: &Table<Extent>, extent: u32) {
        entries[extent as usize].link.set(NONE);
        match self.first {
            NONE => self.first = extent,
            _ => entries[self.last as usize].link.set(extent),
        }
        self.last = extent;
        self.emptied = if self.emptied == NONE { extent } else { self.emptied };
        self.free += 1;
    }

    /// Takes an extent, and returns whether something may be left in it.
    fn take(&mut self, entries: &Table<Extent>) -> Option<(u32, bool)> {
        let taken = if self.used.end < self.end {
            self.used.end += 1;
            (self.used.end - 1, false)
        } else {
            let extent = (self.first != NONE).then_some(self.first)?;
            let was_emptied = self.emptied == extent;
            if was_emptied {
                self.note_discarded(entries);
            }
            self.first = entries[extent as usize].link.get();
            (extent, was_emptied)
        };
        self.free -= 1;
        Some(taken)
    }

    /// Notes that the first emptied extent is no longer to be discarded.
    fn note_discarded(&mut self, entries: &Table<Extent>) {
        self.emptied = entries[self.emptied as usize].link.get();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Pages that leave memory.
    New,
    /// Objects moved by cleaning.
    Moved,
}

pub(in crate::store) struct ExtentTable {
    backing: Arc<Tiers>,
    pub(super) entries: Table<Extent>,
    count: u32,
    pub(super) extent_bytes: usize,
    pub(super) written_once: bool,
    /// The extents of each tier that only cleaning takes; 0 for single blocks, which are not cleaned.
    reserved: u32,
    pub(super) max_footprint: usize,
    /// In the order in which they are used.
    pub(super) tiers: Mutex<Vec<Tier>>,
    /// Not 0 while the device is full: the extents that pages that leave memory have yet to find.
    missing: Counter,
    counts: Arc<BackingCounts>,
}

impl ExtentTable {
    /// Creates the table of a device, with all extents free. Fails with `Invalid` for a device that is too
    /// small; `Unsupported` for one with blocks larger than [`BLOCK_BYTES`]; `NoMemory`.
    pub(super) fn new(
        BackingOptions { backing, layout, .. }: &BackingOptions,
        region: Option<&Region>,
        max_footprint: usize,
        counts: Arc<BackingCounts>,
    ) -> Result<Self> {
        let (count, extent_bytes) = Self::extents_of(backing, *layout)?;
        let extent_at = |offset: u64| u32::try_from(offset / extent_bytes).unwrap_or(count).min(count);
        let starts: Vec<u32> = backing.starts().map(extent_at).collect();
        let ends = starts.iter().skip(1).copied().chain([count]);
        let tiers = starts.iter().zip(ends).map(|(start, end)| {
            let (first, last, emptied) = (NONE, NONE, NONE);
            Tier { used: *start..*start, end, free: end - start, first, last, emptied }
        });
        Ok(ExtentTable {
            entries: Table::new_in(region, count as usize)?,
            count,
            extent_bytes: extent_bytes as usize,
            written_once: backing.object_bytes().is_some(),
            reserved: if *layout == WritebackLayout::Packed { RESERVED_EXTENTS } else { 0 },
            max_footprint,
            tiers: Mutex::new(&classes::BACKING_EXTENTS, tiers.collect()),
            missing: Counter::new(0),
            counts,
            backing: Arc::clone(backing),
        })
    }

    #[cfg(not(loom))]
    pub(in crate::store) fn bytes_of(options: &BackingOptions) -> Result<u64> {
        let (count, _) = Self::extents_of(&options.backing, options.layout)?;
        Ok(Table::<Extent>::bytes_of(count as usize))
    }

    fn extents_of(backing: &Tiers, layout: WritebackLayout) -> Result<(u32, u64)> {
        let (len_bytes, block_bytes) = (backing.len_bytes(), backing.block_bytes());
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
        let mut tiers = self.tiers.lock();
        self.entries.for_each_resident(|range| {
            for extent in range {
                let of = &self.entries[extent];
                if of.generation.get() > 0 {
                    // Between those in use there may be some that never were.
                    let tier = Tier::of(&tiers, extent as u32);
                    tiers[tier].used.end = extent as u32 + 1;
                }
                let was_held = of.word.load(Ordering::Relaxed) >= HOLD || of.link.get() == HELD_BY_DEAD;
                of.word.store(0, Ordering::Relaxed);
                of.link.set(if was_held { HELD_BY_DEAD } else { 0 });
                if self.reserved > 0 && was_held {
                    // It is filled no further.
                    of.checksum.set(self.usable_bytes(self.extent_bytes) as u32);
                }
            }
        })
    }

    /// Adds the object at a place that a slot names to its extent; returns false if no object can be there.
    #[cfg(not(loom))]
    pub(in crate::store) fn adopt(&self, place: u64, footprint: usize) -> bool {
        let extent = place / self.extent_bytes as u64;
        let end = (place % self.extent_bytes as u64) as usize + footprint;
        if extent >= u64::from(self.count) || end > self.extent_bytes {
            return false;
        }
        let of = &self.entries[extent as usize];
        let add = |word: u32| Some(word + footprint as u32).filter(|word| *word <= self.extent_bytes as u32);
        let fits = of.generation.get() != 0
            && of.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok();
        if fits {
            self.counts.held_bytes.add(footprint as u64);
            self.counts.pages.add(1);
        }
        fits
    }

    /// Ends the adoption, after all objects were adopted: extents without objects are free.
    #[cfg(not(loom))]
    pub(in crate::store) fn end_adoption(&self) {
        let mut tiers = self.tiers.lock();
        for tier in &mut *tiers {
            tier.free = tier.end - tier.used.end;
            // Held extents are reused last: by then, writes of the dead process have ended.
            for was_held in [false, true] {
                for extent in tier.used.clone() {
                    let of = &self.entries[extent as usize];
                    let is_free = of.word.load(Ordering::Relaxed) == 0;
                    if is_free && (of.link.get() == HELD_BY_DEAD) == was_held {
                        tier.put(&self.entries, extent);
                    }
                }
            }
        }
        let all =
            tiers.iter().flat_map(|tier| tier.used.clone()).map(|extent| &self.entries[extent as usize]);
        all.filter(|of| of.link.get() == HELD_BY_DEAD).for_each(|of| of.link.set(0));
    }

    pub(super) fn len_bytes(&self) -> u64 {
        u64::from(self.count) * self.extent_bytes as u64
    }

    pub(super) fn used_bytes(&self) -> u64 {
        let free: u32 = self.tiers.lock().iter().map(|tier| tier.free).sum();
        u64::from(self.count - free) * self.extent_bytes as u64
    }

    /// Returns the number of free extents but for the last `kept` of each tier, without tiers that are down.
    pub(super) fn free_beyond(&self, kept: u32) -> u64 {
        let in_use = self.in_use();
        let tiers = self.tiers.lock();
        let used = tiers.iter().zip(in_use).filter(|(_, is_used)| *is_used);
        used.map(|(tier, _)| u64::from(tier.free.saturating_sub(kept))).sum()
    }

    /// Returns which tiers are written to now: those that are not down. If all are, it is all of them: then
    /// the writes say why nothing is written.
    pub(super) fn in_use(&self) -> [bool; MAX_TIERS] {
        let count = self.backing.starts().count();
        let is_up = |tier| tier < count && !self.backing.is_down(tier);
        match std::array::from_fn(is_up) {
            up if up.contains(&true) => up,
            _ => std::array::from_fn(|tier| tier < count),
        }
    }

    pub(super) fn place(&self, extent: u32, at: usize) -> u64 {
        u64::from(extent) * self.extent_bytes as u64 + at as u64
    }

    pub(super) fn extent_of(&self, place: u64) -> u32 {
        (place / self.extent_bytes as u64) as u32
    }

    /// Returns the filling of an extent, which the caller holds.
    pub(super) fn filling(&self, extent: u32) -> Filling {
        let of = &self.entries[extent as usize];
        let home = if self.written_once { of.crc.get() } else { 0 };
        Filling { generation: of.generation.get(), home }
    }

    /// Takes a free extent and holds it. Objects are moved from the extent `moved_from`.
    pub(super) fn take(&self, purpose: Purpose, moved_from: u32) -> Option<u32> {
        loop {
            let (extent, was_emptied) = self.take_any(purpose, moved_from)?;
            let of = &self.entries[extent as usize];
            if self.written_once {
                if was_emptied {
                    self.discard(extent);
                }
                // Its next generation would have the same nonces as its first one: it is never filled again.
                if of.generation.get() == u32::MAX {
                    continue;
                }
                of.crc.set(self.backing.home(self.place(extent, 0)));
            }
            of.link.set(0);
            of.generation.set(of.generation.get().wrapping_add(1));
            if self.reserved > 0 {
                // Those are counted one by one: what a flush leaves unused would be moved again and again.
                let is_counted = purpose == Purpose::Moved && !self.written_once;
                let filled_bytes = if is_counted { 0 } else { self.usable_bytes(self.extent_bytes) };
                of.checksum.set(filled_bytes as u32);
            }
            of.word.store(HOLD, Ordering::Relaxed);
            if purpose == Purpose::New {
                self.missing.set(self.missing.get().saturating_sub(1));
            }
            return Some(extent);
        }
    }

    fn take_any(&self, purpose: Purpose, moved_from: u32) -> Option<(u32, bool)> {
        let in_use = self.in_use();
        let mut tiers = self.tiers.lock();
        let with = |more_than: u32, is_used: bool| {
            (0..tiers.len()).find(|tier| in_use[*tier] == is_used && tiers[*tier].free > more_than)
        };
        // Each tier keeps its reserve, by which it can be cleaned while the others are down. Where those in
        // use have no room, one that is down is taken: then the write says why nothing is written.
        let tier = match purpose {
            Purpose::New => with(self.reserved, true).or_else(|| with(self.reserved, false)),
            Purpose::Moved => {
                let own = Tier::of(&tiers, moved_from);
                let has_own = in_use[own] && tiers[own].free > 0;
                with(self.reserved, true)
                    .or(has_own.then_some(own))
                    .or_else(|| with(0, true))
                    .or_else(|| with(0, false))
            }
        };
        tiers[tier?].take(&self.entries)
    }

    /// Returns whether pages that leave memory find an extent without cleaning.
    pub(super) fn has_room(&self) -> bool {
        self.reserved == 0 || self.free_beyond(self.reserved) > 0
    }

    pub(super) fn hold(&self, extent: u32) {
        self.entries[extent as usize].word.fetch_add(HOLD, Ordering::Relaxed);
    }

    pub(super) fn release(&self, extent: u32) {
        self.lower(extent, HOLD);
    }

    /// Returns how much of `bytes` of an extent objects surely fill.
    pub(super) fn usable_bytes(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.max_footprint)
    }

    /// Counts an object moved to an extent among the bytes that it is full with.
    pub(super) fn fill(&self, extent: u32, footprint: usize) {
        let of = &self.entries[extent as usize];
        if !self.written_once {
            of.checksum.set(of.checksum.get() + footprint as u32);
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
    /// could be if all were cleaned that may be, that it is not full again at once.
    pub(super) fn is_full(&self) -> bool {
        let available = || {
            let gainable_bytes = if self.reserved > 0 { self.gainable_bytes() } else { 0 };
            self.free_beyond(self.reserved) + gainable_bytes / self.extent_bytes as u64
        };
        if self.missing.get() > 0 && available() >= self.ample_extents() {
            self.missing.set(0);
        }
        self.missing.get() > 0
    }

    fn ample_extents(&self) -> u64 {
        (self.count / AMPLE_SHARE).max(RESERVED_EXTENTS).into()
    }

    pub(super) fn lives(&self, extent: u32, footprint: usize) {
        self.entries[extent as usize].word.fetch_add(footprint as u32, Ordering::Relaxed);
        self.counts.held_bytes.add(footprint as u64);
        self.counts.pages.add(1);
    }

    /// Counts an object as dead. No slot refers to it any more.
    pub(super) fn died(&self, extent: u32, footprint: usize) {
        self.counts.held_bytes.sub(footprint as u64);
        self.counts.pages.sub(1);
        self.lower(extent, footprint as u32);
    }

    fn lower(&self, extent: u32, by: u32) {
        // AcqRel orders the next filling of the extent after all earlier accesses.
        let word = self.entries[extent as usize].word.fetch_sub(by, Ordering::AcqRel);
        debug_assert!(word % HOLD >= by % HOLD && word >= by, "{word:#x} is lowered by {by:#x}");
        if word == by {
            let mut tiers = self.tiers.lock();
            let tier = Tier::of(&tiers, extent);
            tiers[tier].put(&self.entries, extent);
        }
    }

    /// Discards up to `most` emptied extents. The kernel does not discard single blocks.
    pub(super) fn discard_emptied(&self, most: usize) {
        let next = |tier: &Tier| (self.reserved > 0 && tier.emptied != NONE).then_some(tier.emptied);
        for _ in 0..most {
            let Some(extent) = self.tiers.lock().iter().find_map(next) else { return };
            // It stays in the queue meanwhile.
            self.discard(extent);
            let mut tiers = self.tiers.lock();
            let tier = Tier::of(&tiers, extent);
            tiers[tier].note_discarded(&self.entries);
        }
    }

    pub(super) fn discard_all(&self) {
        self.discard_emptied(usize::MAX);
        let is_used = |extent: &u32| self.entries[*extent as usize].word.load(Ordering::Relaxed) != 0;
        self.used(|_| true).into_iter().filter(is_used).for_each(|extent| self.discard(extent));
    }

    pub(super) fn is_at_risk(&self, extent: u32) -> bool {
        self.backing.is_at_risk(self.place(extent, 0), self.filling(extent))
    }

    fn discard(&self, extent: u32) {
        self.backing.discard(self.place(extent, 0), self.extent_bytes as u64, self.filling(extent));
    }

    /// Returns the extents of some tiers that were ever filled.
    pub(super) fn used<F: Fn(usize) -> bool>(&self, of_tier: F) -> impl IntoIterator<Item = u32> + use<F> {
        let tiers = self.tiers.lock();
        let some = tiers.iter().enumerate().filter(|(tier, _)| of_tier(*tier));
        let used: Vec<_> = some.map(|(_, tier)| tier.used.clone()).collect();
        used.into_iter().flatten()
    }
}
