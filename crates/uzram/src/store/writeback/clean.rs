//! Cleaning: freeing extents whose objects are mostly dead, by rewriting the live ones together elsewhere.
//!
//! The extents with the fewest live bytes are read whole. Each object in them that its page's slot still refers to is
//! written to another extent. Until that write has ended the page is read from the old place, so the old extent is
//! held. An object that cannot be read stays where it is, and its extent is not cleaned again until all objects in it
//! are dead.
//!
//! Extents whose copies on other machines are in danger ([`Backing::is_at_risk`]) are rewritten in the same way.

use crate::backing::{Buffer, Direction, Filling};

use super::log::{BLOCK_BYTES, Purpose};
use super::object::{ALIGN_BYTES, Object};
use super::sealed::SCRATCH;
use super::writer::Pass;
use crate::store::Store;
use crate::store::slot::{Backed, Contents, Tried};

/// Extents that are cleaned together; their live objects fill fewer extents.
const VICTIMS: usize = 8;

/// Rounds of cleaning before it gives up.
const ROUNDS: usize = 64;

impl Store {
    /// Returns whether extents may ever have to be looked at.
    pub(in crate::store) fn may_rescue(&self) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.log.written_once)
    }

    /// Returns whether extents have to be looked at, as the machines with their copies have changed.
    pub(in crate::store) fn must_rescue(&self) -> bool {
        let backing = self.backing.as_ref();
        backing.is_some_and(|backing| backing.rescued.get() != backing.log.backing.placement_generation())
    }

    /// Rewrites extents whose copies are in danger, until there are none, or `goes_on` returns false. Returns whether there
    /// are none any more.
    pub(in crate::store) fn rescue(&self, goes_on: impl Fn() -> bool) -> bool {
        let Some(backing) = &self.backing else { return true };
        let generation = backing.log.backing.placement_generation();
        let mut next = 0;
        while goes_on() {
            let mut pass = Pass::begin(self, backing);
            let endangered = backing.log.endangered(next, VICTIMS);
            pass.move_all(&endangered);
            pass.end();
            match endangered.last() {
                Some(last) => next = last + 1,
                None => break,
            }
        }
        // Some may have had no room, or busy pages.
        let left = backing.log.endangered(0, 1);
        left.iter().for_each(|extent| backing.log.release(*extent));
        if left.is_empty() {
            backing.rescued.set(generation);
        }
        left.is_empty()
    }
}

impl Pass<'_> {
    /// Cleans extents until there is room for pages that leave memory, or cleaning gains nothing.
    pub(super) fn clean(&mut self) {
        for _ in 0..ROUNDS {
            // Writes in flight may free extents.
            self.flush();
            if self.backing.log.has_room() || !self.clean_some() {
                return;
            }
        }
    }

    /// Cleans the extents with the fewest live bytes, and returns whether there were any.
    fn clean_some(&mut self) -> bool {
        let log = &self.backing.log;
        // Leave a margin: parts of blocks and of extents stay unused.
        let room_bytes =
            (log.free_bytes() + self.begun_bytes(Purpose::Moved)).saturating_sub(log.extent_bytes / 4);
        let victims = log.victims(VICTIMS, room_bytes);
        self.move_all(&victims);
        !victims.is_empty()
    }

    /// Rewrites the live objects of extents that are held, and releases them.
    fn move_all(&mut self, extents: &[u32]) {
        let mut readable = Vec::with_capacity(extents.len());
        let mut buffer = self.spare_buffer();
        for extent in extents {
            let is_readable;
            (buffer, is_readable) = self.move_from(*extent, buffer);
            readable.push(is_readable);
        }
        drop(buffer);
        self.flush();
        for (extent, is_readable) in extents.iter().zip(readable) {
            self.backing.log.end_cleaning(*extent, is_readable);
        }
    }

    /// Rewrites the live objects of an extent elsewhere. Returns the buffer, and whether the whole extent was readable.
    fn move_from(&mut self, extent: u32, buffer: Buffer) -> (Buffer, bool) {
        let log = &self.backing.log;
        let filling = log.filling(extent);
        let (buffer, result) =
            log.backing.carry_out(Direction::Read, log.place(extent, 0), log.extent_bytes, filling, buffer);
        log.counts.read_bytes.add(log.extent_bytes as u64);
        if result.is_err() {
            log.counts.failed_reads.add(1);
            return (buffer, false);
        }
        let mut is_readable = true;
        let Filling { generation, .. } = filling;
        let (mut at, mut scratch) = (0, SCRATCH);
        while at < log.extent_bytes {
            let place = log.place(extent, at);
            let Some((object, bytes)) = log.parse(&buffer[at..], generation, place, &mut scratch) else {
                let (next, was_empty) = after_no_object(&buffer, at);
                is_readable &= was_empty;
                at = next;
                continue;
            };
            if self.lives_at(&object, place) && self.add_moved(&object, bytes, place).is_err() {
                break;
            }
            at += log.footprint(bytes.len());
        }
        (buffer, is_readable)
    }

    /// Returns whether an object is live: its page's slot refers to `place`. Returns false if the slot is busy.
    fn lives_at(&self, object: &Object, place: u64) -> bool {
        let backed = Backed { place, len: object.len, priority: object.priority };
        let page = object.page;
        let slot = (page.number() < self.store.pages())
            .then(|| self.store.slots.try_lock(page))
            .and_then(Tried::locked);
        slot.is_some_and(|slot| slot.contents() == Contents::Backed(backed))
    }
}

/// Returns where the next object may begin after a place where none does, and whether the gap is intended: after a
/// flush, filling continues at the next block, and the rest of the last block is zeros.
fn after_no_object(extent: &[u8], at: usize) -> (usize, bool) {
    let block_end = (at + 1).next_multiple_of(BLOCK_BYTES).min(extent.len());
    let is_empty = extent[at..block_end].iter().all(|byte| *byte == 0);
    (if is_empty { block_end } else { at + ALIGN_BYTES }, is_empty)
}

const _: () = assert!(BLOCK_BYTES.is_multiple_of(ALIGN_BYTES));
