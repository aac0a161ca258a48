//! Where pages are on a backing device: two logs over one table of extents (`extents.rs`).
//!
//! One is for blocks: an extent is filled by several writes, and what is in it may be overwritten. Its
//! objects are packed, or each is a block of its own. The other is for objects of the backing, each of which
//! is an extent ([`ExtentTable::written_once`]): an extent is filled by one write, and what lies in it is
//! sealed if the backing asks for that.

use crate::backing::{Buffers, Direction, Filling, Seal, Tiers};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Region;
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, PageNo};

use super::extents::{BLOCK_BYTES, ExtentTable};
use super::object::{ALIGN_BYTES, HEADER_BYTES, Object};
use super::sealed::{self, OVERHEAD_BYTES, Position, Scratch};
use super::state::Failures;
use super::{BackingCounts, BackingOptions, WritebackLayout};
use crate::store::slot::{Backed, Contents, SlotGuard};

/// Bytes read at a time by sequential reads of pages.
pub(super) const READ_AHEAD_BYTES: usize = 64 << 10;
/// Reads of pages that can be in flight; others wait.
const READS: u32 = if cfg!(loom) { 2 } else { 64 };

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) page: PageNo,
    pub(super) backed: Backed,
    /// That of the extent, which it was written with.
    pub(super) filling: Filling,
}

pub(super) enum Format {
    /// Alone, without a header.
    Block,
    /// Behind a header.
    Packed,
    /// Behind a header, and encrypted.
    Sealed(Arc<dyn Seal>),
}

pub(in crate::store) struct Log {
    pub(in crate::store) backing: Arc<Tiers>,
    pub(in crate::store) table: ExtentTable,
    pub(super) format: Format,
    pub(super) compressed: bool,
    pub(super) reads: Buffers,
    pub(super) counts: Arc<BackingCounts>,
    pub(super) failures: Failures,
}

impl Format {
    fn footprint(&self, len_bytes: usize) -> usize {
        match self {
            Format::Block => BLOCK_BYTES,
            Format::Packed => (HEADER_BYTES + len_bytes).next_multiple_of(ALIGN_BYTES),
            Format::Sealed(_) => sealed::footprint(len_bytes),
        }
    }
}

impl Log {
    /// Creates the log of a device that holds nothing. Fails as [`ExtentTable::new`].
    pub(super) fn new(options: &BackingOptions, region: Option<&Region>) -> Result<Self> {
        let (backing, counts) = (Arc::clone(&options.backing), Arc::<BackingCounts>::default());
        let format = match (options.layout, backing.seal()) {
            (WritebackLayout::Blocks, _) => Format::Block,
            (WritebackLayout::Packed, None) => Format::Packed,
            (WritebackLayout::Packed, Some(seal)) => Format::Sealed(Arc::clone(seal)),
        };
        Ok(Log {
            table: ExtentTable::new(options, region, format.footprint(PAGE_SIZE), Arc::clone(&counts))?,
            backing,
            compressed: options.compressed || options.layout == WritebackLayout::Packed,
            format,
            reads: Buffers::new(READS, READ_AHEAD_BYTES)?,
            counts,
            failures: Failures::default(),
        })
    }

    pub(in crate::store) fn footprint(&self, len_bytes: usize) -> usize {
        self.format.footprint(len_bytes)
    }

    pub(in crate::store) fn died(&self, place: u64, len_bytes: usize) {
        self.table.died(self.table.extent_of(place), self.footprint(len_bytes));
    }

    /// Writes an object into `out`, the [`Log::footprint`] bytes from its place on. What is to be sealed is
    /// sealed when the extent is written.
    pub(super) fn put(&self, out: &mut [u8], extent: u32, object: &Object, bytes: &[u8]) {
        let of = &self.table.entries[extent as usize];
        let crc = || object.crc(of.generation.get(), bytes);
        let start = match self.format {
            Format::Block => {
                of.crc.set(crc());
                of.checksum.set(object.checksum);
                0
            }
            Format::Packed => {
                out[..HEADER_BYTES].copy_from_slice(&object.header(crc()));
                HEADER_BYTES
            }
            Format::Sealed(_) => {
                sealed::put(out, object);
                OVERHEAD_BYTES
            }
        };
        let end = start + bytes.len();
        out[start..end].copy_from_slice(bytes);
        // Leave no bytes of other objects there.
        out[end..].fill(0);
    }

    /// Returns any packed object at the start of `bytes`, which were read from `place` in an extent of that
    /// generation, and its own bytes. Returns `None` if there is none, or it is not as it was written.
    pub(super) fn parse<'a>(
        &self,
        bytes: &'a [u8],
        generation: u32,
        place: u64,
        scratch: &'a mut Scratch,
    ) -> Option<(Object, &'a [u8])> {
        let Format::Sealed(seal) = &self.format else { return Object::parse(bytes, generation) };
        let at = (place % self.table.extent_bytes as u64) as u32;
        let extent = self.table.extent_of(place);
        sealed::parse(&**seal, bytes, Position { extent, generation, at }, scratch)
    }

    /// Returns where a page is, by its slot, which is locked; `None` if it is not on the device. Equal ones
    /// refer to the same object.
    pub(super) fn placed(&self, page: PageNo, slot: &SlotGuard<'_>) -> Option<Placed> {
        let Contents::Backed(backed) = slot.contents() else { return None };
        Some(Placed { page, backed, filling: self.table.filling(self.table.extent_of(backed.place)) })
    }

    /// Returns the checksum and the bytes of an object at the start of `bytes`, which were read from its
    /// place. Returns `None` if it is not as it was written.
    pub(super) fn find<'a>(
        &self,
        bytes: &'a [u8],
        Placed { page, backed: Backed { place, len, priority }, filling }: Placed,
        scratch: &'a mut Scratch,
    ) -> Option<(u32, &'a [u8])> {
        if let Format::Block = self.format {
            let of = &self.table.entries[self.table.extent_of(place) as usize];
            let object = Object { page, checksum: of.checksum.get(), len, priority };
            let own = bytes.get(..usize::from(len))?;
            return (object.crc(filling.generation, own) == of.crc.get()).then_some((object.checksum, own));
        }
        let (object, own) = self.parse(bytes, filling.generation, place, scratch)?;
        let is_it = (object.page, object.len, object.priority) == (page, len, priority);
        is_it.then_some((object.checksum, own))
    }

    /// Notes a read that failed. Whatever the backing calls it, for whoever wants the page it is an error of
    /// the device.
    pub(super) fn failed_read(&self, error: Error) -> Error {
        self.counts.failed_reads.add(1);
        match error.kind() {
            ErrorKind::NotFound => _ = self.counts.lost_reads.add(1),
            _ => self.failures.note(Direction::Read, Some(&error)),
        }
        error.with_kind(ErrorKind::Io)
    }
}
