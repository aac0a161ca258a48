//! The space of a backing device: extents, and who lives in them.
//!
//! The device is cut into *extents*, each of which is filled from its start to its end and then only loses
//! objects, until it is free and filled anew. An extent's *word* counts the bytes of its living objects, and holds:
//! who fills it, each write in flight, who cleans it. Whoever brings it to 0 frees it.
//!
//! A slot that says where its object lies keeps the extent from being filled anew; so its generation, read under
//! the slot's lock, is the one that the object was written with.
//!
//! Lock: `backing extents`, a leaf, for the free ones.

use crate::backing::{Backing, Buffers};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Entry, Table};
use crate::base::sync::{Arc, AtomicU32, Mutex, Ordering, Stamp, classes};
use crate::base::units::{PAGE_SIZE, PageNo};

use super::object::{ALIGN_BYTES, HEADER_BYTES, Object};
use super::{BackingCounts, BackingOptions, WritebackLayout};
use crate::store::slot::Backed;

/// What packed extents take, on a device that has room for many.
const MAX_EXTENT_BYTES: u64 = 1 << 20;
const MIN_EXTENT_BYTES: u64 = 64 << 10;
/// As many extents there are at least, as long as they need not be smaller than the smallest.
const MANY_EXTENTS: u64 = 128;
/// As many there must be.
const LEAST_EXTENTS: u64 = if cfg!(loom) { 2 } else { 8 };
/// Free extents that only cleaning may fill.
const RESERVED_EXTENTS: u32 = 2;
/// What is read at once where one page after another is wanted.
pub(super) const READ_AHEAD_BYTES: usize = 64 << 10;
/// Reads of pages that can be under way at once. Others wait.
const READS: u32 = if cfg!(loom) { 2 } else { 64 };
/// What a block of a transfer is a multiple of, if the device asks for no more.
pub(super) const BLOCK_BYTES: usize = PAGE_SIZE;

/// One hold, above the bytes.
const HOLD: u32 = 1 << 24;
const BYTES_MASK: u32 = HOLD - 1;
const _: () = assert!(MAX_EXTENT_BYTES <= BYTES_MASK as u64);

/// Extents that the device is told of at a time.
const DISCARDS_AT_ONCE: usize = 64;

/// Not the number of an extent.
const NONE: u32 = u32::MAX;

#[derive(Default)]
struct Extent {
    /// Holds and bytes of living objects; 0 while it is free.
    word: AtomicU32,
    /// How often it was filled.
    generation: Stamp,
    /// The free one after it; or, not 0, that it could not be cleaned.
    link: Stamp,
    /// Of the object in it, where there is only one and no header.
    crc: Stamp,
    checksum: Stamp,
}

// SAFETY: numbers, all zero by default, without destructors.
unsafe impl Entry for Extent {}

/// The free extents: those that were never used, and the others in queues, so that all wear alike.
struct Free {
    fresh: u32,
    count: u32,
    /// The device was told that nothing is in them.
    discarded: Queue,
    /// It was not yet.
    emptied: Queue,
}

/// Extents, by their links.
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

/// Who takes an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Pages that leave memory.
    New,
    /// Objects that are moved out of an extent which is to be free.
    Moved,
}

/// The space of a backing device, and what was counted about it.
pub(in crate::store) struct Log {
    pub(super) backing: Arc<dyn Backing>,
    pub(super) layout: WritebackLayout,
    pub(super) compressed: bool,
    pub(super) extent_bytes: usize,
    extents: Table<Extent>,
    count: u32,
    free: Mutex<Free>,
    /// For reads of pages.
    pub(super) reads: Buffers,
    pub(super) counts: BackingCounts,
}

impl Log {
    /// The space of a device, all of it free.
    ///
    /// # Errors
    /// `Invalid` for a device that is too small; `Unsupported` for one of larger blocks than the layout's;
    /// `NoMemory`.
    pub(super) fn new(options: &BackingOptions) -> Result<Self> {
        let BackingOptions { backing, layout, compressed } = options.clone();
        let len_bytes = backing.len_bytes();
        let block_bytes = backing.block_bytes();
        if block_bytes > BLOCK_BYTES {
            let what =
                format!("the backing device has blocks of {block_bytes} bytes, and {BLOCK_BYTES} are needed");
            return Err(Error::new(ErrorKind::Unsupported, what).with_setting("backing_dev"));
        }
        let extent_bytes = match layout {
            WritebackLayout::Packed => {
                (len_bytes / MANY_EXTENTS).next_power_of_two().clamp(MIN_EXTENT_BYTES, MAX_EXTENT_BYTES)
            }
            WritebackLayout::Blocks => BLOCK_BYTES as u64,
        };
        let count = len_bytes / extent_bytes;
        if count < LEAST_EXTENTS {
            let least = LEAST_EXTENTS * extent_bytes;
            let what = format!("the backing device has {len_bytes} bytes, and {least} are the least");
            return Err(Error::invalid(what).with_setting("backing_dev"));
        }
        let count = u32::try_from(count).unwrap_or(NONE - 1).min(NONE - 1);
        let free = Free { fresh: 0, count, discarded: Queue::EMPTY, emptied: Queue::EMPTY };
        Ok(Log {
            backing,
            layout,
            compressed: compressed || layout == WritebackLayout::Packed,
            extent_bytes: extent_bytes as usize,
            extents: Table::new(count as usize)?,
            count,
            free: Mutex::new(&classes::BACKING_EXTENTS, free),
            reads: Buffers::new(READS, READ_AHEAD_BYTES)?,
            counts: BackingCounts::default(),
        })
    }

    /// The memory of its tables at most.
    pub(super) fn table_bytes(&self) -> usize {
        self.extents.max_bytes()
    }

    /// Bytes that it can hold.
    pub(super) fn len_bytes(&self) -> u64 {
        u64::from(self.count) * self.extent_bytes as u64
    }

    /// Bytes of the extents that are not free.
    pub(super) fn used_bytes(&self) -> u64 {
        u64::from(self.count - self.free.lock().count) * self.extent_bytes as u64
    }

    /// Bytes of those that are.
    pub(super) fn free_bytes(&self) -> usize {
        self.free.lock().count as usize * self.extent_bytes
    }

    /// What an object of so many bytes takes of an extent.
    pub(super) fn footprint(&self, len_bytes: usize) -> usize {
        match self.layout {
            WritebackLayout::Packed => (HEADER_BYTES + len_bytes).next_multiple_of(ALIGN_BYTES),
            WritebackLayout::Blocks => BLOCK_BYTES,
        }
    }

    /// What the largest object takes.
    pub(super) fn max_footprint(&self) -> usize {
        self.footprint(PAGE_SIZE)
    }

    /// Where the place `at` bytes into an extent is.
    pub(super) fn place(&self, extent: u32, at: usize) -> u64 {
        u64::from(extent) * self.extent_bytes as u64 + at as u64
    }

    /// The extent of a place.
    pub(super) fn extent_of(&self, place: u64) -> u32 {
        (place / self.extent_bytes as u64) as u32
    }

    /// How often an extent was filled. The caller holds it.
    pub(super) fn generation(&self, extent: u32) -> u32 {
        self.extents[extent as usize].generation.get()
    }

    /// How often the extent of a place was filled. The caller knows of a living object there.
    pub(super) fn generation_at(&self, place: u64) -> u32 {
        self.generation(self.extent_of(place))
    }

    /// Writes an object into `out`, which is for the place where it begins: [`Log::footprint`] bytes.
    pub(super) fn put(&self, out: &mut [u8], extent: u32, object: &Object, bytes: &[u8]) {
        let of = &self.extents[extent as usize];
        let crc = object.crc(of.generation.get(), bytes);
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
        // Nothing of others stays there.
        out[end..].fill(0);
    }

    /// The object of `page` that begins `bytes`, read from where it lies, in an extent of that generation: its
    /// checksum and its own bytes. None if it is not as it was written.
    pub(super) fn find<'a>(
        &self,
        bytes: &'a [u8],
        generation: u32,
        page: PageNo,
        backed: Backed,
    ) -> Option<(u32, &'a [u8])> {
        let Backed { place, len, priority } = backed;
        match self.layout {
            WritebackLayout::Packed => {
                let (object, own) = Object::parse(bytes, generation)?;
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

    /// An extent to fill, which the caller holds; none while there are too few for that purpose.
    pub(super) fn take(&self, purpose: Purpose) -> Option<u32> {
        let extent = {
            let mut free = self.free.lock();
            let kept = match purpose {
                Purpose::New if self.layout == WritebackLayout::Packed => RESERVED_EXTENTS,
                _ => 0,
            };
            if free.count <= kept {
                return None;
            }
            let Free { fresh, discarded, emptied, .. } = &mut *free;
            let extent = if *fresh < self.count {
                *fresh += 1;
                *fresh - 1
            } else {
                // One that is about to be discarded is in neither: that is done in the turn of who takes, too.
                discarded.pop(&self.extents).or_else(|| emptied.pop(&self.extents))?
            };
            free.count -= 1;
            extent
        };
        let of = &self.extents[extent as usize];
        of.link.set(0);
        of.generation.set(of.generation.get().wrapping_add(1));
        of.word.store(HOLD, Ordering::Relaxed);
        Some(extent)
    }

    /// Whether pages that leave memory find an extent without cleaning.
    pub(super) fn has_room(&self) -> bool {
        self.layout == WritebackLayout::Blocks || self.free.lock().count > RESERVED_EXTENTS
    }

    /// One more holds an extent, as somebody does already.
    pub(super) fn hold(&self, extent: u32) {
        self.extents[extent as usize].word.fetch_add(HOLD, Ordering::Relaxed);
    }

    /// Lets an extent go.
    pub(super) fn release(&self, extent: u32) {
        self.lower(extent, HOLD);
    }

    /// An object came to live in an extent that somebody holds.
    pub(super) fn lives(&self, extent: u32, len_bytes: usize) {
        let footprint = self.footprint(len_bytes);
        self.extents[extent as usize].word.fetch_add(footprint as u32, Ordering::Relaxed);
        self.counts.held_bytes.add(footprint as u64);
        self.counts.pages.add(1);
    }

    /// An object lives there no more, and no slot says so.
    pub(in crate::store) fn died(&self, place: u64, len_bytes: usize) {
        let footprint = self.footprint(len_bytes);
        self.counts.held_bytes.sub(footprint as u64);
        self.counts.pages.sub(1);
        self.lower(self.extent_of(place), footprint as u32);
    }

    fn lower(&self, extent: u32, by: u32) {
        // Whoever fills it next does that after all that was done with it before.
        let word = self.extents[extent as usize].word.fetch_sub(by, Ordering::AcqRel);
        debug_assert!(word & BYTES_MASK >= by & BYTES_MASK && word >= by, "{word:#x} is lowered by {by:#x}");
        if word != by {
            return;
        }
        let mut free = self.free.lock();
        free.emptied.push(&self.extents, extent);
        free.count += 1;
    }

    /// Tells the device of extents that nothing is in them.
    pub(super) fn discard_emptied(&self) {
        if self.layout == WritebackLayout::Blocks {
            // The kernel does not, one block at a time.
            return;
        }
        for _ in 0..DISCARDS_AT_ONCE {
            // Nobody else takes it meanwhile.
            let Some(extent) = self.free.lock().emptied.pop(&self.extents) else { return };
            self.backing.discard(self.place(extent, 0), self.extent_bytes as u64);
            self.free.lock().discarded.push(&self.extents, extent);
        }
    }

    /// Up to `most` extents with the fewest living bytes, all of which fit into `room_bytes`, held for cleaning.
    /// Those that would win nothing are left out.
    pub(super) fn victims(&self, most: usize, room_bytes: usize) -> Vec<u32> {
        let fresh = self.free.lock().fresh;
        let mut best: Vec<(u32, u32)> = Vec::with_capacity(most + 1);
        for number in 0..fresh {
            let of = &self.extents[number as usize];
            let word = of.word.load(Ordering::Relaxed);
            let wins =
                word & !BYTES_MASK == 0 && word != 0 && (word as usize) < self.extent_bytes - BLOCK_BYTES;
            if !wins || of.link.get() != 0 || best.len() == most && best[most - 1].0 <= word {
                continue;
            }
            let at = best.partition_point(|(other, _)| *other <= word);
            best.insert(at, (word, number));
            best.truncate(most);
        }
        let mut left_bytes = room_bytes;
        let chosen = best.into_iter().filter(|(word, number)| {
            // Each flush may leave a part of a block unused.
            let fits = left_bytes >= *word as usize + BLOCK_BYTES;
            let of = &self.extents[*number as usize].word;
            // It may have lost more meanwhile, but only if it is neither free nor held.
            let hold = |word: u32| (word != 0 && word & !BYTES_MASK == 0).then_some(word + HOLD);
            let held = fits && of.fetch_update(Ordering::AcqRel, Ordering::Relaxed, hold).is_ok();
            left_bytes -= if held { *word as usize + BLOCK_BYTES } else { 0 };
            held
        });
        chosen.map(|(_, number)| number).collect()
    }

    /// Lets an extent go that was to be cleaned; it is not tried again if some of it can not be read.
    pub(super) fn end_cleaning(&self, extent: u32, is_readable: bool) {
        if !is_readable {
            self.extents[extent as usize].link.set(1);
        }
        self.release(extent);
    }
}
