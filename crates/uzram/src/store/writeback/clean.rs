//! Cleaning: freeing extents whose objects are mostly dead, by rewriting the live ones together elsewhere.
//!
//! The extents with the fewest live bytes are read whole. Each object in them that its page's slot still
//! refers to is written to another extent. Until that write has ended the page is read from the old place, so
//! the old extent is held. An object that cannot be read stays where it is, and its extent is not cleaned
//! again until all objects in it are dead.
//!
//! # The rule
//!
//! Cleaning gains a free extent for each [`MOVED_PER_GAIN`] that it moves, or it moves none. An extent is
//! moved only if the bytes in it that are not live are 1 / [`MOVED_PER_GAIN`] of it, and a block more, which
//! a flush may leave unused. In an extent that was filled with moved objects, only those bytes count whose
//! objects have died since: moving it again for bytes that were never filled gains nothing. So the bytes
//! moved are bounded by the bytes that died. When no object dies, cleaning ends; it goes on when objects have
//! died. Pages that find no room stay in memory: the device is *full* ([`ExtentTable::is_full`]).
//!
//! # What a page costs
//!
//! Let a share u of the device be live, and pages be overwritten at random. If the extents are cleaned in
//! turn, each has a share s that is live, with u = (s - 1) / ln s (J. Menon, A Performance Comparison of
//! RAID-5 and Log-Structured Arrays, HPDC 1995; P. Desnoyers, Analytic Modeling of SSD Write Performance,
//! SYSTOR 2012). A byte of a page that leaves then costs 1 / (1 - s) bytes written; to take the emptiest
//! extents first costs no more. That is 2.7 bytes at 80 % live, 5.2 at 90 %, 10.2 at 95 %, and 16.8 at 97 %.
//! The rule bounds it by [`MOVED_PER_GAIN`], which the theory reaches at 98.4 %. The reserve, extents that
//! are being filled and ends of extents are neither live nor free, so a device of 1 GiB gets there at 98 %,
//! and one of 24 MiB at 93 %. A smaller [`MOVED_PER_GAIN`] would end cleaning too early: a device of 1 GiB
//! that is filled to 97 % in order, and then overwritten at random, has lost the same 3 % of each extent when
//! the first one is moved.
//!
//! Extents whose copies on other machines are in danger ([`Tiers::is_at_risk`]) are rewritten in the same
//! way.

use crate::backing::Buffer;

use super::extents::{BLOCK_BYTES, ExtentTable, Purpose};
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

/// The most extents moved for each that is gained, and bytes written for each of a page that leaves.
const MOVED_PER_GAIN: usize = 32;

impl Store {
    pub(in crate::store) fn may_rescue(&self) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.log.backing.has_objects())
    }

    /// Returns whether extents have to be looked at, as the machines with their copies have changed.
    pub(in crate::store) fn must_rescue(&self) -> bool {
        let backing = self.backing.as_ref();
        backing.is_some_and(|backing| backing.rescued.get() != backing.log.backing.placement())
    }

    /// Rewrites extents whose copies are in danger, while `goes_on`, from where it ended before: extents that
    /// cannot be read hold up no others. Returns whether there are none any more.
    pub(in crate::store) fn rescue(&self, goes_on: impl Fn() -> bool) -> bool {
        let Some(backing) = &self.backing else { return true };
        let (table, generation) = (&backing.log.table, backing.log.backing.placement());
        let (mut began_at, mut unanswered) = (backing.rescue_from.get(), 0);
        while goes_on() && !backing.log.backing.is_one_down() && unanswered < UNANSWERED {
            let mut pass = Pass::begin(self, backing);
            let hold = |extent: &u32| table.entries[*extent as usize].hold_if_unheld();
            let endangered = table.endangered(backing.rescue_from.get() as u32).filter(hold);
            let endangered: Vec<u32> = endangered.take(ENDANGERED).collect();
            let Some(last) = endangered.last() else {
                backing.rescue_from.set(0);
                // Some may have busy pages, or have had no room.
                let is_over = began_at == 0 && table.endangered(0).next().is_none();
                pass.end();
                if is_over {
                    backing.rescued.set(generation);
                }
                if began_at == 0 {
                    return is_over;
                }
                began_at = 0;
                continue;
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
    /// Cleans extents until there is room for pages that leave memory, or none may be moved.
    pub(super) fn clean(&mut self) {
        let table = &self.backing.log.table;
        // Writes in flight may free extents.
        self.flush();
        while !table.has_room() && !self.has_failed() {
            let victims = table.victims(VICTIMS, self.begun_bytes(Purpose::Moved));
            if victims.is_empty() || self.move_all(&victims).is_some() {
                return;
            }
        }
    }

    /// Rewrites the live objects of extents that are held, and releases them. Returns the extent for which
    /// the backing has not answered, if any: those behind it stay as they are.
    fn move_all(&mut self, extents: &[u32]) -> Option<u32> {
        let mut buffer = None;
        let unanswered = extents.iter().copied().find(|extent| !self.move_from(*extent, &mut buffer));
        drop(buffer);
        self.flush();
        extents.iter().for_each(|extent| self.backing.log.table.release(*extent));
        unanswered
    }

    /// Rewrites the live objects of an extent elsewhere. Returns false if the backing did not answer: it may
    /// be tried again, but not if some objects are lost or damaged.
    fn move_from(&mut self, extent: u32, buffer: &mut Option<Buffer>) -> bool {
        let log = &self.backing.log;
        let table = &log.table;
        let (of, filling) = (&table.entries[extent as usize], table.filling(extent));
        self.writer.moved_from = extent;
        let own = buffer.take().unwrap_or_else(|| self.backing.buffers.take_waiting());
        let (read, result) = log.backing.read(table.place(extent, 0), table.extent_bytes, filling, own);
        let read = buffer.insert(read);
        log.counts.read_bytes.add(table.extent_bytes as u64);
        if let Err(error) = result {
            // A store on other machines may answer later.
            let is_lost = !table.written_once || error.kind() == ErrorKind::NotFound;
            let error = log.failed_read(error);
            if is_lost {
                of.link.set(1);
            } else {
                self.outcome.unanswered.get_or_insert(error);
            }
            return is_lost;
        }
        let (mut at, mut scratch) = (0, SCRATCH);
        while at < table.extent_bytes {
            let place = table.place(extent, at);
            let Some((object, bytes)) = log.parse(&read[at..], filling.generation, place, &mut scratch)
            else {
                let (next, was_empty) = after_no_object(read, at);
                if !was_empty {
                    of.link.set(1);
                } else if table.written_once {
                    // It was filled without gaps. What is behind its end may be older.
                    break;
                }
                at = next;
                continue;
            };
            if self.lives_at(&object, place) && self.add_moved(object, bytes, place).is_err() {
                break;
            }
            at += log.footprint(bytes.len());
        }
        true
    }

    /// Returns whether its page's slot, if that is not busy, refers to an object at `place`.
    fn lives_at(&self, object: &Object, place: u64) -> bool {
        let backed = Backed { place, len: object.len, priority: object.priority };
        let page = object.page;
        let slot = (page.number() < self.store.pages())
            .then(|| self.store.slots.try_lock(page))
            .and_then(Tried::locked);
        slot.is_some_and(|slot| slot.contents() == Contents::Backed(backed))
    }
}

impl ExtentTable {
    /// Returns the live bytes of an extent, and those that cleaning gains, if it may be moved: it is not
    /// held, has live objects, and enough of it is dead.
    fn may_move(&self, extent: u32) -> Option<(u32, u32)> {
        let of = &self.entries[extent as usize];
        let live_bytes = of.unheld_bytes().filter(|_| of.link.get() == 0)?;
        let gain_bytes = of.checksum.get().saturating_sub(live_bytes);
        let least_bytes = self.extent_bytes / MOVED_PER_GAIN + BLOCK_BYTES;
        (gain_bytes as usize >= least_bytes).then_some((live_bytes, gain_bytes))
    }

    /// Returns the bytes that would be gained if all extents were cleaned that may be, but for tiers that are
    /// down.
    pub(super) fn gainable_bytes(&self) -> u64 {
        let in_use = self.in_use();
        let movable = self.used(|tier| in_use[tier]).into_iter().filter_map(|extent| self.may_move(extent));
        // Those written once are gained whole, of few that fit into fewer: surely of two half empty ones.
        let gained =
            movable.filter(|(live_bytes, gain_bytes)| !self.written_once || gain_bytes >= live_bytes);
        gained.map(|(_, gain_bytes)| u64::from(gain_bytes)).sum()
    }

    /// Selects up to `most` extents that may be moved, with the fewest live bytes, that together fit into
    /// what is free, and `begun_bytes` besides, and holds them for cleaning. They are of one tier, which is
    /// not down, so that each keeps its reserve.
    fn victims(&self, most: usize, begun_bytes: usize) -> Vec<u32> {
        let in_use = self.in_use().into_iter().enumerate().filter(|(_, is_used)| *is_used);
        let mut tiers: Vec<_> = in_use.map(|(tier, _)| (self.emptiest(tier, most), tier)).collect();
        // The one with the emptiest extent first.
        tiers.sort_unstable();
        let mut victims = tiers.into_iter().map(|(best, tier)| self.hold_victims(best, tier, begun_bytes));
        victims.find(|victims| !victims.is_empty()).unwrap_or_default()
    }

    /// Returns live bytes and numbers of the extents of a tier that may be moved and have the fewest.
    fn emptiest(&self, tier: usize, most: usize) -> Vec<(u32, u32)> {
        let mut best: Vec<(u32, u32)> = Vec::with_capacity(most + 1);
        for extent in self.used(|other| other == tier) {
            let Some((live_bytes, _)) = self.may_move(extent) else { continue };
            let at = best.partition_point(|(other, _)| *other <= live_bytes);
            if at < most {
                best.insert(at, (live_bytes, extent));
                best.truncate(most);
            }
        }
        best
    }

    /// Holds as many of a tier's extents as fit into what is free there.
    fn hold_victims(&self, best: Vec<(u32, u32)>, tier: usize, begun_bytes: usize) -> Vec<u32> {
        let free_extents = self.tiers.lock()[tier].free as usize;
        let usable_bytes = self.usable_bytes(self.extent_bytes);
        // Where an extent is written once, what does not fit into one begins another.
        let begun_bytes = if self.written_once { 0 } else { self.usable_bytes(begun_bytes) };
        let room_bytes = free_extents * usable_bytes + begun_bytes;
        let mut left_bytes = room_bytes;
        let chosen = best.into_iter().filter(|(live_bytes, extent)| {
            let fits = left_bytes >= *live_bytes as usize;
            let held = fits && self.entries[*extent as usize].hold_if_unheld();
            left_bytes -= if held { *live_bytes as usize } else { 0 };
            held
        });
        let victims: Vec<u32> = chosen.map(|(_, extent)| extent).collect();
        if self.written_once && (room_bytes - left_bytes).div_ceil(usable_bytes) >= victims.len() {
            victims.iter().for_each(|extent| self.release(*extent));
            return Vec::new();
        }
        victims
    }

    fn endangered(&self, from: u32) -> impl Iterator<Item = u32> {
        let is_one = move |extent: &u32| {
            let of = &self.entries[*extent as usize];
            *extent >= from && of.unheld_bytes().is_some() && of.link.get() == 0 && self.is_at_risk(*extent)
        };
        self.used(|_| true).into_iter().filter(is_one)
    }
}

/// Returns where the next object may begin after a place where none does, and whether the gap is intended:
/// after a flush, filling continues at the next block, and the rest of the last block is zeros.
fn after_no_object(extent: &[u8], at: usize) -> (usize, bool) {
    let block_end = (at + 1).next_multiple_of(BLOCK_BYTES).min(extent.len());
    let is_empty = extent[at..block_end].iter().all(|byte| *byte == 0);
    (if is_empty { block_end } else { at + ALIGN_BYTES }, is_empty)
}

const _: () = assert!(BLOCK_BYTES.is_multiple_of(ALIGN_BYTES));
