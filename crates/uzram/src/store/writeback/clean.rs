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
use crate::base::error::ErrorKind;
use crate::store::Store;
use crate::store::slot::{Backed, Contents, Tried};

/// Extents that are cleaned together; their live objects fill fewer extents.
const VICTIMS: usize = 8;

/// Extents in danger that are rewritten before more urgent work is looked for.
const ENDANGERED: usize = 2;

/// Extents in danger that could not be read, after which something else is done for a while.
const UNANSWERED: usize = 4;

/// Rounds of cleaning before it gives up.
const ROUNDS: usize = 64;

/// What became of an extent whose objects were to be rewritten.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    /// Those that could be read, which were all.
    All,
    /// Some are lost or damaged: it is not tried again.
    NotAll,
    /// The backing did not answer: it may be tried again.
    NoAnswer,
}

impl Store {
    /// Returns whether extents may ever have to be looked at.
    pub(in crate::store) fn may_rescue(&self) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.log.backing.health().is_some())
    }

    /// Returns whether extents have to be looked at, as the machines with their copies have changed.
    pub(in crate::store) fn must_rescue(&self) -> bool {
        let backing = self.backing.as_ref();
        backing.is_some_and(|backing| backing.rescued.get() != backing.log.backing.placement_generation())
    }

    /// Rewrites extents whose copies are in danger, until there are none, or `goes_on` returns false. Returns whether there
    /// are none any more. Goes on where it ended before: extents that cannot be read hold up no others.
    pub(in crate::store) fn rescue(&self, goes_on: impl Fn() -> bool) -> bool {
        let Some(backing) = &self.backing else { return true };
        let generation = backing.log.backing.placement_generation();
        let (mut began_at, mut unanswered) = (backing.rescue_from.get(), 0);
        let is_stopped = || backing.log.backing.health().is_some_and(|health| health.stopped.is_some());
        while goes_on() && !is_stopped() && unanswered < UNANSWERED {
            let mut pass = Pass::begin(self, backing);
            let endangered = backing.log.endangered(backing.rescue_from.get() as u32, ENDANGERED);
            let Some(last) = endangered.last() else {
                backing.rescue_from.set(0);
                if began_at > 0 {
                    began_at = 0;
                    pass.end();
                    continue;
                }
                // Some may have busy pages, or have had no room.
                let left = backing.log.endangered(0, 1);
                left.iter().for_each(|extent| backing.log.release(*extent));
                pass.end();
                if left.is_empty() {
                    backing.rescued.set(generation);
                }
                return left.is_empty();
            };
            let stopped_at = pass.move_all(&endangered);
            unanswered += usize::from(stopped_at.is_some());
            backing.rescue_from.set(u64::from(stopped_at.unwrap_or(*last)) + 1);
            if pass.end().error.is_some() {
                return false;
            }
        }
        false
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

    /// Cleans the extents with the fewest live bytes. Returns whether there were any, and the backing has answered.
    fn clean_some(&mut self) -> bool {
        let victims = self.backing.log.victims(VICTIMS, self.begun_bytes(Purpose::Moved));
        self.move_all(&victims).is_none() && !victims.is_empty()
    }

    /// Rewrites the live objects of extents that are held, and releases them. Returns the extent for which the backing has not
    /// answered, if any: those behind it stay as they are.
    fn move_all(&mut self, extents: &[u32]) -> Option<u32> {
        let mut moved = Vec::with_capacity(extents.len());
        let mut buffer = self.spare_buffer();
        for extent in extents {
            let result;
            (buffer, result) = self.move_from(*extent, buffer);
            moved.push(result);
            if result == Moved::NoAnswer {
                break;
            }
        }
        drop(buffer);
        self.flush();
        for (at, extent) in extents.iter().enumerate() {
            self.backing.log.end_cleaning(*extent, moved.get(at) != Some(&Moved::NotAll));
        }
        moved.iter().position(|result| *result == Moved::NoAnswer).map(|at| extents[at])
    }

    /// Rewrites the live objects of an extent elsewhere. Returns the buffer.
    fn move_from(&mut self, extent: u32, buffer: Buffer) -> (Buffer, Moved) {
        let log = &self.backing.log;
        let filling = log.filling(extent);
        let (buffer, result) =
            log.backing.carry_out(Direction::Read, log.place(extent, 0), log.extent_bytes, filling, buffer);
        log.counts.read_bytes.add(log.extent_bytes as u64);
        if let Err(error) = result {
            log.counts.failed_reads.add(1);
            // A store on other machines may answer later.
            let is_lost = !log.written_once || error.kind() == ErrorKind::NotFound;
            return (buffer, if is_lost { Moved::NotAll } else { Moved::NoAnswer });
        }
        let mut moved = Moved::All;
        let Filling { generation, .. } = filling;
        let (mut at, mut scratch) = (0, SCRATCH);
        while at < log.extent_bytes {
            let place = log.place(extent, at);
            let Some((object, bytes)) = log.parse(&buffer[at..], generation, place, &mut scratch) else {
                let (next, was_empty) = after_no_object(&buffer, at);
                if !was_empty {
                    moved = Moved::NotAll;
                } else if log.written_once {
                    // It was filled without gaps. What is behind its end may be older.
                    break;
                }
                at = next;
                continue;
            };
            if self.lives_at(&object, place) && self.add_moved(&object, bytes, place).is_err() {
                break;
            }
            at += log.footprint(bytes.len());
        }
        (buffer, moved)
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
