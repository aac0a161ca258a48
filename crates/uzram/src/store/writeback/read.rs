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
use super::extents::BLOCK_BYTES;
use super::log::{Log, Placed, READ_AHEAD_BYTES};
use super::object::ALIGN_BYTES;
use super::sealed::SCRATCH;
use crate::store::Store;
use crate::store::read::Then;
use crate::store::slot::{Backed, Contents, SlotGuard};

const EXTENTS_AHEAD: usize = if cfg!(loom) { 1 } else { 2 };
/// Pages that are looked at to find them.
const PAGES_AHEAD: i64 = if cfg!(loom) { 2 } else { 1024 };

impl Store {
    /// Reads a page whose slot is locked, but not during a read of the backing device.
    pub(in crate::store) fn read_from_backing<'a>(
        &'a self,
        backing: &BackingDevice,
        mut slot: SlotGuard<'a>,
        page: PageNo,
        out: &mut Page,
        then: Then,
    ) -> Result<()> {
        while let Some(at) = backing.log.placed(page, &slot) {
            drop(slot);
            if self.read_object(backing, at, out, then)? {
                return Ok(());
            }
            slot = self.slots.lock(page);
        }
        self.read_locked(slot, page, out)
    }

    /// Locks a page's slot and reads the page. The slot is not locked during a read of the backing device.
    pub(in crate::store) fn lock_and_read_from_backing(
        &self,
        backing: &BackingDevice,
        page: PageNo,
        out: &mut Page,
    ) -> Result<SlotGuard<'_>> {
        let mut slot = self.slots.lock(page);
        while let Some(at) = backing.log.placed(page, &slot) {
            drop(slot);
            let is_read = self.read_object(backing, at, out, Then::Return)?;
            slot = self.slots.lock(page);
            if is_read && backing.log.placed(page, &slot) == Some(at) {
                return Ok(slot);
            }
        }
        self.read_locked(&slot, page, out)?;
        Ok(slot)
    }

    /// Reads a page from the device once. Returns false if it was changed meanwhile.
    fn read_object(&self, backing: &BackingDevice, at: Placed, out: &mut Page, then: Then) -> Result<bool> {
        let (log, mut scratch) = (&backing.log, SCRATCH);
        let (mut ahead, least_bytes) = backing.ahead.find(log, at);
        loop {
            let is_ahead = ahead.is_some();
            let (window, result) = match ahead.take() {
                Some(window) => (window, Ok(())),
                None => read_window(log, at, least_bytes),
            };
            let (checksum, bytes) = match (result, window.find(log, at, &mut scratch)) {
                (Ok(()), Some(found)) => found,
                // It is not in what was read ahead.
                _ if is_ahead => continue,
                _ if log.placed(at.page, &self.slots.lock(at.page)) != Some(at) => return Ok(false),
                (Err(error), _) => return Err(log.failed_read(error)),
                (Ok(()), None) => {
                    log.counts.corrupted.add(1);
                    let what = "the backing device did not keep the page as it was written";
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
            };
            log.counts.pages_read_ahead.add(is_ahead.into());
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
                    if let Some(step) = extents.note(at.page, log.table.extent_of(at.backed.place)) {
                        self.read_extents_ahead(log, extents, at.page, step);
                    }
                }
            }
            return Ok(true);
        }
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
            let extent = log.table.extent_of(place);
            if last == Some(extent) {
                continue;
            }
            last = Some(extent);
            let filling = log.table.filling(extent);
            drop(slot);
            if extents.fetch(&log.backing, page, (extent, filling), log.table.place(extent, 0)) {
                log.counts.reads.add(1);
                log.counts.read_bytes.add(log.table.extent_bytes as u64);
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
fn read_window(log: &Log, object: Placed, least_bytes: usize) -> (Arc<Window>, Result<()>) {
    let (Placed { backed: Backed { place, len, .. }, filling, .. }, table) = (object, &log.table);
    // A part of an object of the backing can begin and end anywhere.
    let block_bytes = if table.written_once { ALIGN_BYTES } else { BLOCK_BYTES } as u64;
    let start = place / block_bytes * block_bytes;
    let end = (place + log.footprint(usize::from(len)) as u64).next_multiple_of(block_bytes);
    let extent_end = table.place(table.extent_of(place) + 1, 0);
    let len_bytes = (end.max(start + least_bytes as u64).min(extent_end) - start) as usize;
    let (buffer, result) = log.backing.read(start, len_bytes, filling, log.reads.take_waiting());
    log.counts.reads.add(1);
    log.counts.read_bytes.add(len_bytes as u64);
    (Arc::new(Window { filling, start, len_bytes, buffer }), result)
}

const _: () = assert!(READ_AHEAD_BYTES >= 3 * PAGE_SIZE);
