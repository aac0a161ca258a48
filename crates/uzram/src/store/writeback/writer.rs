//! Writing pages to the backing device, one thread at a time, in a [`Pass`]: the steps 1 to 3 of writeback in
//! ARCHITECTURE.md.
//!
//! Lock order: `writeback`, for the whole pass, then slots, which are only tried: a busy page is not cold.

use crate::backing::{Direction, Transfer};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, MutexGuard};
use crate::base::units::{PAGE_SIZE, PageNo};

use super::device::{BackingDevice, Entry, Finished, Flight, Open, Writer};
use super::log::{BLOCK_BYTES, Log, Purpose};
use super::object::Object;
use crate::store::Store;
use crate::store::slot::{Backed, Contents, SlotGuard};

#[derive(Clone, Debug, Default)]
pub(in crate::store) struct Outcome {
    /// Pages that left memory.
    pub(in crate::store) written: u64,
    /// Pages that were written, or should have been, and stayed in memory.
    pub(in crate::store) kept: u64,
    pub(in crate::store) error: Option<Error>,
    /// Why the device did not answer when an extent was to be cleaned: there may be no room because of that.
    pub(in crate::store) unanswered: Option<Error>,
}

/// A thread's turn to write pages back. [`Pass::end`] ends it.
pub(in crate::store) struct Pass<'a> {
    pub(super) store: &'a Store,
    pub(super) backing: &'a BackingDevice,
    pub(super) writer: MutexGuard<'a, Writer>,
    pub(super) outcome: Outcome,
    /// Bytes of the objects that are being written and may leave memory.
    pub(in crate::store) pending_bytes: u64,
}

impl<'a> Pass<'a> {
    /// Begins a pass; waits for the thread whose turn it is.
    pub(in crate::store) fn begin(store: &'a Store, backing: &'a BackingDevice) -> Self {
        let writer = backing.writer.lock();
        Pass { store, backing, writer, outcome: Outcome::default(), pending_bytes: 0 }
    }

    pub(in crate::store) fn has_failed(&self) -> bool {
        self.outcome.error.is_some()
    }

    /// Makes room for one more page. It may wait for writes.
    /// Fails with `NoSpace` when the device is full of live objects; `Io` when no more may be written; the
    /// device's when it does not answer.
    pub(in crate::store) fn make_room(&mut self) -> Result<()> {
        self.backing.allowance.check()?;
        self.open(Purpose::New)
    }

    /// Copies the object of a page, for which there is room, into the buffer to be written. Unlocks the slot.
    pub(in crate::store) fn add(&mut self, mut slot: SlotGuard<'_>, page: PageNo) -> Result<()> {
        let Contents::Stored { handle, len, checksum, priority } = slot.contents() else { return Ok(()) };
        let mut object = Object { page, checksum, len, priority };
        let writer = &mut *self.writer;
        let Some(open) = &mut writer.open[Purpose::New as usize] else { return Ok(()) };
        let flight = &mut writer.flights[usize::from(open.number) - 1];
        let log = &self.backing.log;
        // SAFETY: the handle is the slot's, which stays locked until the bytes are copied.
        let bytes = unsafe { self.store.pool.read(handle, page.0, usize::from(len)) }?;
        if log.compressed {
            flight.charge += self.backing.allowance.charge(open.units_for(log.footprint(bytes.len())))?;
            open.put(log, flight, &object, &bytes, None, len);
        } else {
            let whole = &mut writer.whole;
            self.store.decode(priority, &bytes, whole)?;
            (object.len, object.priority) = (PAGE_SIZE as u16, 0);
            flight.charge += self.backing.allowance.charge(open.units_for(log.footprint(PAGE_SIZE)))?;
            open.put(log, flight, &object, &whole[..], None, len);
        }
        drop(bytes);
        slot.set_writing(open.number);
        self.pending_bytes += u64::from(len);
        Ok(())
    }

    /// Copies an object of an extent that is being cleaned into the buffer to be written.
    pub(super) fn add_moved(&mut self, object: &Object, bytes: &[u8], from: u64) -> Result<()> {
        self.open(Purpose::Moved)?;
        let writer = &mut *self.writer;
        let Some(open) = &mut writer.open[Purpose::Moved as usize] else { return Ok(()) };
        let (log, flight) = (&self.backing.log, &mut writer.flights[usize::from(open.number) - 1]);
        flight.charge += self.backing.allowance.note(open.units_for(log.footprint(bytes.len())));
        log.fill(open.extent, bytes.len());
        open.put(log, flight, object, bytes, Some(from), 0);
        log.counts.cleaned_bytes.add(bytes.len() as u64);
        Ok(())
    }

    /// Writes the pages that were added, waits for all writes, and ends the pass.
    pub(in crate::store) fn end(mut self) -> Outcome {
        self.flush();
        self.backing.log.discard_emptied();
        self.outcome
    }

    /// Writes the pages that were added, and waits for all writes.
    pub(in crate::store) fn flush(&mut self) {
        self.start(Purpose::New);
        self.start(Purpose::Moved);
        while self.writer.in_flight > 0 {
            self.finish_one();
        }
    }

    /// Returns the unfilled bytes of the partly filled extent of that purpose; 0 if there is none.
    pub(super) fn begun_bytes(&self, purpose: Purpose) -> usize {
        self.writer.begun[purpose as usize].map_or(0, |(_, at)| self.backing.log.extent_bytes - at)
    }

    /// Opens a buffer for that purpose, unless one is open that has room for the largest object.
    fn open(&mut self, purpose: Purpose) -> Result<()> {
        let log = &self.backing.log;
        let room_bytes = |at: usize| log.extent_bytes.saturating_sub(at);
        if let Some(open) = &self.writer.open[purpose as usize] {
            if room_bytes(open.start + open.fill) >= log.max_footprint() {
                return Ok(());
            }
            self.start(purpose);
        }
        while self.writer.in_flight >= self.backing.batch.get() {
            self.finish_one();
        }
        let begun = self.writer.begun[purpose as usize].take();
        let (extent, start) = match begun {
            Some(begun) => begun,
            None => (self.take_extent(purpose)?, 0),
        };
        let buffer = self.backing.buffers.take_waiting();
        let free = self.writer.flights.iter_mut().enumerate().find(|(_, flight)| !flight.is_used);
        let Some((at, flight)) = free else {
            log.release(extent);
            return Err(Error::new(ErrorKind::Busy, "too many writes are in flight"));
        };
        flight.is_used = true;
        let open = Open { number: at as u8 + 1, buffer, extent, start, fill: 0 };
        self.writer.open[purpose as usize] = Some(open);
        Ok(())
    }

    fn take_extent(&mut self, purpose: Purpose) -> Result<u32> {
        let log = &self.backing.log;
        if purpose == Purpose::New && !log.has_room() {
            // Cleaning first waits for the writes in flight, which may free extents.
            self.clean();
        }
        log.take(purpose).ok_or_else(|| {
            if let Some(error) = &self.outcome.unanswered {
                return error.clone();
            }
            if purpose == Purpose::New {
                log.note_full();
            }
            Error::new(ErrorKind::NoSpace, "the backing device is full").with_setting("backing_dev")
        })
    }

    /// Starts to write the open buffer of that purpose. The extent is filled further from the next block on.
    fn start(&mut self, purpose: Purpose) {
        let writer = &mut *self.writer;
        let Some(mut open) = writer.open[purpose as usize].take() else { return };
        let flight = &mut writer.flights[usize::from(open.number) - 1];
        if flight.entries.is_empty() {
            flight.is_used = false;
            writer.begun[purpose as usize] = Some((open.extent, open.start));
            return;
        }
        let log = &self.backing.log;
        let rest_bytes = log.extent_bytes - open.start;
        let blocks_bytes = open.fill.next_multiple_of(BLOCK_BYTES);
        let is_full = log.written_once || rest_bytes - blocks_bytes < log.max_footprint();
        let len_bytes = match is_full {
            // One write is all that the extent gets.
            true if log.written_once => open.fill,
            // An extent without room for another object is written to its end, with zeros.
            true => rest_bytes,
            false => blocks_bytes,
        };
        // Leave no old bytes of the buffer on the device.
        open.buffer[open.fill..len_bytes].fill(0);
        flight.extent = open.extent;
        // The write takes over the hold; filling the extent further needs another one.
        if !is_full {
            log.hold(open.extent);
            writer.begun[purpose as usize] = Some((open.extent, open.start + len_bytes));
        }
        writer.in_flight += 1;
        let written_bytes = log.backing.padded_bytes(log.place(open.extent, open.start), len_bytes);
        log.counts.written_bytes.add(written_bytes as u64);
        flight.charge += self.backing.allowance.note(((written_bytes - len_bytes) / BLOCK_BYTES) as u64);
        let transfer = Transfer {
            direction: Direction::Write,
            offset: log.place(open.extent, open.start),
            len_bytes,
            filling: log.filling(open.extent),
            buffer: open.buffer,
            token: u64::from(open.number),
            completion: Arc::<Finished>::clone(&self.backing.finished),
        };
        (self.backing.start)(transfer);
    }

    /// Waits for a write to end, and publishes its pages.
    fn finish_one(&mut self) {
        let finished = &self.backing.finished;
        let mut writes = finished.writes.lock();
        let (number, buffer, result) = loop {
            match writes.pop_front() {
                Some(write) => break write,
                None => writes = writes.wait(&finished.arrived),
            }
        };
        drop(writes);
        drop(buffer);
        let flight = &mut self.writer.flights[number as usize - 1];
        let (extent, charge) = (flight.extent, std::mem::take(&mut flight.charge));
        let mut entries = std::mem::take(&mut flight.entries);
        self.backing.log.note_write(&result);
        if result.is_err() {
            self.backing.allowance.give_back(charge);
        }
        // In reverse: if a page was added, changed and added again, the last copy is valid.
        for (at, entry) in entries.iter().enumerate().rev() {
            self.store.prefetch_object(|ahead| Some(entries.get(at.checked_sub(ahead)?)?.object.page));
            match entry.from {
                None => self.finish_new(number as u8, extent, entry, result.is_ok()),
                Some(from) if result.is_ok() => self.finish_moved(extent, entry, from),
                Some(_) => {}
            }
        }
        if let Some(lru) = &self.store.lru {
            lru.remove_dead(&mut self.writer.dead);
        }
        self.writer.dead.clear();
        entries.clear();
        let flight = &mut self.writer.flights[number as usize - 1];
        (flight.entries, flight.is_used) = (entries, false);
        self.writer.in_flight -= 1;
        self.backing.log.release(extent);
        match result {
            // Writers that wait for memory need not wait for the end of the pass.
            Ok(()) => self.store.watermarks.notify_waiters(None),
            Err(error) => self.outcome.error = Some(error),
        }
    }

    /// Publishes the place of a page that was written, unless the write failed or the page is in use.
    fn finish_new(&mut self, number: u8, extent: u32, entry: &Entry, is_written: bool) {
        let (store, log) = (self.store, &self.backing.log);
        let Object { page, len, priority, .. } = entry.object;
        self.pending_bytes = self.pending_bytes.saturating_sub(u64::from(entry.pool_bytes));
        let slot = store.slots.try_lock(page).locked().filter(|slot| slot.writing() == number);
        let Some(mut slot) = slot.filter(|_| is_written) else {
            self.outcome.kept += 1;
            log.counts.pages_kept.add(u64::from(is_written));
            store.lru.iter().for_each(|lru| lru.put_back(&[page.0]));
            return;
        };
        log.lives(extent, usize::from(len));
        let place = log.place(extent, entry.at as usize);
        let old = store.publish(&mut slot, Contents::Backed(Backed { place, len, priority }));
        let is_listed = store.lru.as_ref().is_some_and(|lru| lru.leave(page.0));
        drop(slot);
        store.free(old);
        self.writer.dead.extend(is_listed.then_some(page.0));
        self.outcome.written += 1;
        log.counts.pages_written_back.add(1);
        log.counts.object_bytes.add(u64::from(entry.pool_bytes));
    }

    /// Publishes the new place of a moved object, if the old one is still live.
    fn finish_moved(&mut self, extent: u32, entry: &Entry, from: u64) {
        let Object { page, len, priority, .. } = entry.object;
        let Some(mut slot) = self.store.slots.try_lock(page).locked() else { return };
        let old = Backed { place: from, len, priority };
        if slot.contents() != Contents::Backed(old) {
            return;
        }
        self.backing.log.lives(extent, usize::from(len));
        let place = self.backing.log.place(extent, entry.at as usize);
        slot.replace(Contents::Backed(Backed { place, ..old }));
        drop(slot);
        self.backing.log.died(from, usize::from(len));
    }
}

impl Open {
    /// Returns how many more units of 4 KiB an object of that footprint needs.
    fn units_for(&self, footprint: usize) -> u64 {
        ((self.fill + footprint).div_ceil(BLOCK_BYTES) - self.fill.div_ceil(BLOCK_BYTES)) as u64
    }

    fn put(
        &mut self,
        log: &Log,
        flight: &mut Flight,
        object: &Object,
        bytes: &[u8],
        from: Option<u64>,
        pool_bytes: u16,
    ) {
        let end = self.fill + log.footprint(bytes.len());
        let at = self.start + self.fill;
        log.put(&mut self.buffer[self.fill..end], self.extent, object, bytes);
        let at = at as u32;
        flight.entries.push(Entry { object: *object, at, pool_bytes, from });
        self.fill = end;
    }
}
