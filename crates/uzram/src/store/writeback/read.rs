//! Reading pages from the backing device, and returning some of them to memory: step 4 of writeback in
//! ARCHITECTURE.md.
//!
//! Bytes that do not match are damaged only if the slot still refers to the same place and generation. Those
//! that were read ahead (`ahead/`) are verified like those that come from the device.
//!
//! A page returns to memory if the LRU says that it was used soon after it left (a refault), or if there is
//! room below the policy's low watermark, unless the reader says that it is about to discard it.
//!
//! Locks: a slot's, briefly; under it, `backing extents`, a leaf, to find what was read ahead.

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Gfp;
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, Page, PageNo};

use super::BackingDevice;
use super::ahead::{Extents, ReadAhead, Window};
use super::log::{BLOCK_BYTES, Log, Placed, READ_AHEAD_BYTES};
use super::object::ALIGN_BYTES;
use super::sealed::SCRATCH;
use crate::store::Store;
use crate::store::read::Then;
use crate::store::slot::{Backed, Contents, SlotGuard};

const EXTENTS_AHEAD: usize = if cfg!(loom) { 1 } else { 2 };
/// Pages that are looked at to find them.
const PAGES_AHEAD: i64 = if cfg!(loom) { 2 } else { 1024 };

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
            let Some(at) = backing.log.placed(page, &slot) else { return self.read_locked(slot, page, out) };
            drop(slot);
            if self.read_object(backing, at, out, then)? {
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
            let Some(at) = backing.log.placed(page, &slot) else {
                self.read_locked(&slot, page, out)?;
                return Ok(slot);
            };
            drop(slot);
            if self.read_object(backing, at, out, Then::Return)? {
                let slot = self.slots.lock(page);
                if backing.log.placed(page, &slot) == Some(at) {
                    return Ok(slot);
                }
            }
        }
    }

    /// Reads a page from the device once. Returns false if it was changed meanwhile.
    fn read_object(&self, backing: &BackingDevice, at: Placed, out: &mut Page, then: Then) -> Result<bool> {
        let log = &backing.log;
        let mut scratch = SCRATCH;
        let (ahead, least_bytes) = backing.ahead.find(log, at);
        let ahead = ahead.filter(|window| window.find(log, at, &mut scratch).is_some());
        let (window, result) = match ahead {
            Some(window) => {
                log.counts.pages_read_ahead.add(1);
                (window, Ok(()))
            }
            None => {
                let (window, result) = read_window(log, at, least_bytes);
                (Arc::new(window), result)
            }
        };
        let (checksum, bytes) = match (result, window.find(log, at, &mut scratch)) {
            (Ok(()), Some(found)) => found,
            _ if log.placed(at.page, &self.slots.lock(at.page)) != Some(at) => return Ok(false),
            (Err(error), _) => return Err(log.failed_read(error)),
            (Ok(()), None) => {
                log.counts.corrupted.add(1);
                let what = "the backing device did not keep the page as it was written";
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        };
        self.decode(at.backed.priority, bytes, out)?;
        self.verify(checksum, out)?;
        if then == Then::Return && self.should_return(at.page) {
            // Without room the page stays on the device.
            let _ = self.return_to_memory(log, at, bytes, checksum);
        }
        match &backing.ahead {
            ReadAhead::Streams(streams) => {
                let next_place = at.backed.place + log.footprint(usize::from(at.backed.len)) as u64;
                streams.note(at.page, at.backed.place, next_place, window);
            }
            ReadAhead::Extents(extents) => {
                drop(window);
                if let Some(step) = extents.note(at.page, log.extent_of(at.backed.place)) {
                    self.read_extents_ahead(log, extents, at.page, step);
                }
            }
        }
        Ok(true)
    }

    /// Starts to read the extents of the pages that come next after `page`, each `step` after the last one.
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
            left -= usize::from(distance > 0);
            if left == 0 {
                return;
            }
        }
    }

    fn should_return(&self, page: PageNo) -> bool {
        let is_recent = self.lru.as_ref().is_none_or(|lru| lru.refault(page.0));
        // The page would take memory that is kept free for writes.
        let takes_reserve = self.arena.may_lack_reserve();
        !takes_reserve && (is_recent || self.watermarks.has_room(&self.arena, &self.pool))
    }

    /// Stores the object that was read in the pool, and publishes it if the page still is at that place.
    fn return_to_memory(&self, log: &Log, at: Placed, bytes: &[u8], checksum: u32) -> Result<()> {
        let Placed { page, backed: Backed { len, priority, .. }, .. } = at;
        let new = if log.compressed {
            let handle = self.pool.store(bytes, page.0, Gfp::MayWait)?;
            Contents::Stored { handle, len, checksum, priority }
        } else {
            let Ok(whole) = <&Page>::try_from(bytes) else { return Ok(()) };
            match self.store_page(page, whole)? {
                Contents::Stored { handle, len, priority, .. } => {
                    Contents::Stored { handle, len, checksum, priority }
                }
                _ => return Ok(()),
            }
        };
        let slot = self.slots.lock(page);
        if log.placed(page, &slot) == Some(at) {
            log.counts.pages_returned.add(1);
            self.replace(slot, page, new);
        } else {
            drop(slot);
            self.free(new);
        }
        Ok(())
    }
}

/// Reads the blocks in which an object lies, and those after them up to `least_bytes`.
fn read_window(
    log: &Log,
    Placed { backed, filling, .. }: Placed,
    least_bytes: usize,
) -> (Window, Result<()>) {
    // A part of an object of the backing can begin and end anywhere.
    let block_bytes = if log.written_once { ALIGN_BYTES } else { BLOCK_BYTES } as u64;
    let start = backed.place / block_bytes * block_bytes;
    let end = (backed.place + log.footprint(usize::from(backed.len)) as u64).next_multiple_of(block_bytes);
    let end = end.max(start + least_bytes as u64);
    let extent_end = log.place(log.extent_of(backed.place) + 1, 0);
    let len_bytes = (end.min(extent_end) - start) as usize;
    let (buffer, result) = log.backing.read(start, len_bytes, filling, log.reads.take_waiting());
    log.counts.reads.add(1);
    log.counts.read_bytes.add(len_bytes as u64);
    (Window { filling, start, len_bytes, buffer }, result)
}

const _: () = assert!(READ_AHEAD_BYTES >= 3 * PAGE_SIZE);
