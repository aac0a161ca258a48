//! Making extents free whose objects have mostly died: the living ones are written elsewhere, together.
//!
//! The extents with the fewest living bytes are read whole, and each object in them whose page still says that it
//! lies there is written anew. Until that has ended the page is read from the old place, which is why the extent is
//! held. What nobody can read stays where it is, and its extent is left alone until all of it has died.

use crate::backing::{Buffer, Direction};

use super::log::{BLOCK_BYTES, Purpose};
use super::object::{ALIGN_BYTES, Object};
use super::writer::Pass;
use crate::store::slot::{Backed, Contents, Tried};

/// Extents that are cleaned together: what is left of them fills fewer.
const VICTIMS: usize = 8;

/// Times that some are cleaned before it is given up.
const ROUNDS: usize = 64;

impl Pass<'_> {
    /// Cleans extents, until there is room for pages that leave memory or nothing is won by it.
    pub(super) fn clean(&mut self) {
        for _ in 0..ROUNDS {
            // What was begun before may be about to free some.
            self.flush();
            if self.backing.log.has_room() || !self.clean_some() {
                return;
            }
        }
    }

    /// Cleans the extents with the fewest living bytes, and returns whether there are any.
    fn clean_some(&mut self) -> bool {
        let log = &self.backing.log;
        // Parts of blocks and of extents stay unused.
        let room_bytes =
            (log.free_bytes() + self.begun_bytes(Purpose::Moved)).saturating_sub(log.extent_bytes / 4);
        let victims = log.victims(VICTIMS, room_bytes);
        let mut readable = Vec::with_capacity(victims.len());
        let mut buffer = self.spare_buffer();
        for extent in &victims {
            let is_readable;
            (buffer, is_readable) = self.move_from(*extent, buffer);
            readable.push(is_readable);
        }
        drop(buffer);
        self.flush();
        for (extent, is_readable) in victims.iter().zip(readable) {
            log.end_cleaning(*extent, is_readable);
        }
        !victims.is_empty()
    }

    /// Writes the living objects of an extent anew, and returns the buffer and whether all could be read.
    fn move_from(&mut self, extent: u32, buffer: Buffer) -> (Buffer, bool) {
        let log = &self.backing.log;
        let (buffer, result) =
            log.backing.carry_out(Direction::Read, log.place(extent, 0), log.extent_bytes, buffer);
        log.counts.read_bytes.add(log.extent_bytes as u64);
        if result.is_err() {
            log.counts.failed_reads.add(1);
            return (buffer, false);
        }
        let mut is_readable = true;
        let generation = log.generation(extent);
        let mut at = 0;
        while at < log.extent_bytes {
            let Some((object, bytes)) = Object::parse(&buffer[at..], generation) else {
                let (next, was_empty) = after_no_object(&buffer, at);
                is_readable &= was_empty;
                at = next;
                continue;
            };
            let place = log.place(extent, at);
            if self.lives_at(&object, place) && self.add_moved(&object, bytes, place).is_err() {
                break;
            }
            at += log.footprint(bytes.len());
        }
        (buffer, is_readable)
    }

    /// Whether an object is its page's still. Who is busy with the page is about to change that, or is not asked.
    fn lives_at(&self, object: &Object, place: u64) -> bool {
        let backed = Backed { place, len: object.len, priority: object.priority };
        let page = object.page;
        let slot = (page.number() < self.store.pages())
            .then(|| self.store.slots.try_lock(page))
            .and_then(Tried::locked);
        slot.is_some_and(|slot| slot.contents() == Contents::Backed(backed))
    }
}

/// Where the next object may begin after a place where none does, and whether that is as it was written: filling
/// goes on with a block after each flush, before which there are zeros.
fn after_no_object(extent: &[u8], at: usize) -> (usize, bool) {
    let block_end = (at + 1).next_multiple_of(BLOCK_BYTES).min(extent.len());
    let is_empty = extent[at..block_end].iter().all(|byte| *byte == 0);
    (if is_empty { block_end } else { at + ALIGN_BYTES }, is_empty)
}

const _: () = assert!(BLOCK_BYTES.is_multiple_of(ALIGN_BYTES));
