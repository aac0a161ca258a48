//! Reading pages from the backing device, and returning some of them to memory.
//!
//! A page's place and the generation of its extent are read under the slot's lock, which is then released:
//! the read of the device holds no lock. If the page is changed meanwhile, its extent may even be refilled;
//! then the bytes read have the wrong generation, and the read starts over from the slot. Bytes that do not
//! match are damaged only if the slot still refers to the same place and generation.
//!
//! Pages that are probably read next are read ahead (`ahead/`), and verified like those that come from the
//! device.
//!
//! A page returns to memory if the LRU says that it was used soon after it left (a refault), or if there is
//! room below the policy's low watermark, unless the reader says that it is about to discard it. Other pages
//! stay on the device and are read from it again the next time.
//!
//! Locks: a slot's, briefly; under it, `backing extents`, a leaf, to find what was read ahead.

use crate::backing::Filling;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Gfp;
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, Page, PageNo};

use super::BackingDevice;
use super::ahead::{Extents, ReadAhead, Window};
use super::log::{BLOCK_BYTES, Log, READ_AHEAD_BYTES};
use super::object::ALIGN_BYTES;
use super::sealed::SCRATCH;
use crate::store::Store;
use crate::store::read::Then;
use crate::store::slot::{Backed, Contents, SlotGuard};

const EXTENTS_AHEAD: usize = if cfg!(loom) { 1 } else { 2 };
/// Pages that are looked at to find them.
const PAGES_AHEAD: i64 = if cfg!(loom) { 2 } else { 1024 };

/// The result of one read of the device.
enum Found {
    /// The page was read.
    Page,
    /// The page was changed meanwhile.
    Changed,
}

impl Store {
    pub(in crate::store) fn read_from_backing(
        &self,
        backing: &BackingDevice,
        page: PageNo,
        out: &mut Page,
        then: Then,
    ) -> Result<()> {
        loop {
            let slot = self.slots.lock(page);
            let Contents::Backed(backed) = slot.contents() else { return self.read_locked(slot, page, out) };
            let filling = backing.log.filling_at(backed.place);
            drop(slot);
            if let Found::Page = self.read_object(backing, page, backed, filling, out, then)? {
                return Ok(());
            }
        }
    }

    /// Locks a page's slot and reads the page. The slot is not locked during a read of the backing device.
    pub(in crate::store) fn lock_and_read_from_backing(
        &self,
        backing: &BackingDevice,
        page: PageNo,
        out: &mut Page,
    ) -> Result<SlotGuard<'_>> {
        loop {
            let slot = self.slots.lock(page);
            let Contents::Backed(backed) = slot.contents() else {
                self.read_locked(&slot, page, out)?;
                return Ok(slot);
            };
            let filling = backing.log.filling_at(backed.place);
            drop(slot);
            if let Found::Page = self.read_object(backing, page, backed, filling, out, Then::Return)? {
                let slot = self.slots.lock(page);
                if is_there(&slot, backed, filling, &backing.log) {
                    return Ok(slot);
                }
            }
        }
    }

    fn read_object(
        &self,
        backing: &BackingDevice,
        page: PageNo,
        backed: Backed,
        filling: Filling,
        out: &mut Page,
        then: Then,
    ) -> Result<Found> {
        let log = &backing.log;
        let mut scratch = SCRATCH;
        let (ahead, least_bytes) = backing.ahead.find(log, page, backed.place, filling);
        let ahead = ahead.filter(|window| window.find(log, page, backed, filling, &mut scratch).is_some());
        let (window, result) = match ahead {
            Some(window) => {
                log.counts.pages_read_ahead.add(1);
                (window, Ok(()))
            }
            None => {
                let (window, result) = self.read_window(log, backed, filling, least_bytes);
                (Arc::new(window), result)
            }
        };
        let (checksum, bytes) = match (result, window.find(log, page, backed, filling, &mut scratch)) {
            (Ok(()), Some(found)) => found,
            _ if !self.is_at(page, backed, filling, log) => return Ok(Found::Changed),
            (Err(error), _) => return Err(log.failed_read(error)),
            (Ok(()), None) => {
                log.counts.corrupted.add(1);
                let what = "the backing device did not keep the page as it was written";
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        };
        self.decode(backed.priority, bytes, out)?;
        self.verify(checksum, out)?;
        if then == Then::Return && self.should_return(page) {
            // Without room the page stays on the device.
            let _ = self.return_to_memory(log, page, backed, filling, bytes, checksum);
        }
        match &backing.ahead {
            ReadAhead::Streams(streams) => {
                let next_place = backed.place + log.footprint(usize::from(backed.len)) as u64;
                streams.note(page, backed.place, next_place, window);
            }
            ReadAhead::Extents(extents) => {
                drop(window);
                if let Some(step) = extents.note(page, log.extent_of(backed.place)) {
                    self.read_extents_ahead(log, extents, page, step);
                }
            }
        }
        Ok(Found::Page)
    }

    fn read_extents_ahead(&self, log: &Log, extents: &Extents, page: PageNo, step: i64) {
        let (mut last, mut left) = (None, EXTENTS_AHEAD);
        // The extent of the page itself does not count.
        for distance in 0..PAGES_AHEAD {
            let next = step.checked_mul(distance).and_then(|ahead| page.number().checked_add_signed(ahead));
            let Some(next) = next.filter(|next| *next < self.pages()) else { return };
            let Some(slot) = self.slots.try_lock(PageNo::from_number(next)).locked() else { continue };
            let Contents::Backed(Backed { place, .. }) = slot.contents() else { continue };
            let extent = log.extent_of(place);
            if last == Some(extent) {
                continue;
            }
            last = Some(extent);
            let filling = log.filling(extent);
            drop(slot);
            if let Some(buffer) = extents.make_room(page, extent, filling) {
                log.counts.reads.add(1);
                log.counts.read_bytes.add(log.extent_bytes as u64);
                extents.start(&log.backing, extent, log.place(extent, 0), filling, buffer);
            }
            if distance > 0 {
                left -= 1;
            }
            if left == 0 {
                return;
            }
        }
    }

    /// Reads the blocks in which an object lies, and those after them up to `least_bytes`.
    fn read_window(
        &self,
        log: &Log,
        backed: Backed,
        filling: Filling,
        least_bytes: usize,
    ) -> (Window, Result<()>) {
        // A part of an object of the backing can begin and end anywhere.
        let block_bytes = if log.written_once { ALIGN_BYTES } else { BLOCK_BYTES } as u64;
        let start = backed.place / block_bytes * block_bytes;
        let end =
            (backed.place + log.footprint(usize::from(backed.len)) as u64).next_multiple_of(block_bytes);
        let end = end.max(start + least_bytes as u64);
        let extent_end = log.place(log.extent_of(backed.place) + 1, 0);
        let len_bytes = (end.min(extent_end) - start) as usize;
        let (buffer, result) = log.backing.read(start, len_bytes, filling, log.reads.take_waiting());
        log.counts.reads.add(1);
        log.counts.read_bytes.add(len_bytes as u64);
        (Window { filling, start, len_bytes, buffer }, result)
    }

    /// Returns whether a page still is at that place.
    fn is_at(&self, page: PageNo, backed: Backed, filling: Filling, log: &Log) -> bool {
        is_there(&self.slots.lock(page), backed, filling, log)
    }

    fn should_return(&self, page: PageNo) -> bool {
        let is_recent = self.lru.as_ref().is_none_or(|lru| lru.refault(page.0));
        // The page would take memory that is kept free for writes.
        let takes_reserve = self.arena.may_lack_reserve();
        !takes_reserve && (is_recent || self.watermarks.has_room(&self.arena, &self.pool))
    }

    /// Stores the object that was read in the pool, and publishes it if the page still is at that place.
    fn return_to_memory(
        &self,
        log: &Log,
        page: PageNo,
        backed: Backed,
        filling: Filling,
        bytes: &[u8],
        checksum: u32,
    ) -> Result<()> {
        let Backed { len, priority, .. } = backed;
        let handle = if log.compressed {
            self.pool.store(bytes, page.0, Gfp::MayWait).map(|handle| (handle, len, priority))
        } else {
            let Ok(whole) = <&Page>::try_from(bytes) else { return Ok(()) };
            match self.store_page(page, whole) {
                Ok(Contents::Stored { handle, len, priority, .. }) => Ok((handle, len, priority)),
                Ok(_) => return Ok(()),
                Err(error) => Err(error),
            }
        };
        let (handle, len, priority) = handle?;
        let new = Contents::Stored { handle, len, checksum, priority };
        let slot = self.slots.lock(page);
        if is_there(&slot, backed, filling, log) {
            log.counts.pages_returned.add(1);
            self.replace(slot, page, new);
        } else {
            drop(slot);
            self.free(new);
        }
        Ok(())
    }
}

/// Returns whether a slot refers to that place, in an extent that was not refilled since.
fn is_there(slot: &SlotGuard<'_>, backed: Backed, filling: Filling, log: &Log) -> bool {
    slot.contents() == Contents::Backed(backed) && log.filling_at(backed.place) == filling
}

const _: () = assert!(READ_AHEAD_BYTES >= 3 * PAGE_SIZE);
