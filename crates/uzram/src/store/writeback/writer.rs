//! Writing pages to the backing device, one thread at a time, in a [`Pass`]: the steps 1 to 3 of writeback in
//! ARCHITECTURE.md.
//!
//! Lock order: `writeback`, for the whole pass, then slots, which are only tried: a busy page is not cold.

use crate::backing::{Direction, Ended, Transfer};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, MutexGuard};
use crate::base::units::{PAGE_SIZE, PageNo};

use super::device::{BackingDevice, Entry, Writer};
use super::extents::{BLOCK_BYTES, Purpose};
use super::object::Object;
use crate::store::Store;
use crate::store::slot::{Backed, Contents, SlotGuard};

/// Emptied extents that are discarded at the end of a pass.
const DISCARDS_AT_ONCE: usize = 64;

#[derive(Clone, Debug, Default)]
pub(in crate::store) struct Outcome {
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

    /// Makes room for one more page. It may wait for writes. Fails with `NoSpace` when the device is full of
    /// live objects; `Io` when no more may be written; the device's when it does not answer.
    pub(in crate::store) fn make_room(&mut self) -> Result<()> {
        self.backing.allowance.check()?;
        self.open(Purpose::New)
    }

    /// Copies the object of a page, for which there is room, into the buffer to be written. Unlocks the slot.
    pub(in crate::store) fn add(&mut self, mut slot: SlotGuard<'_>, page: PageNo) -> Result<()> {
        let Contents::Stored { handle, len, checksum, priority } = slot.contents() else { return Ok(()) };
        // SAFETY: the handle is the slot's, which stays locked until the bytes are copied.
        let bytes = unsafe { self.store.pool.read(handle, page.0, usize::from(len)) }?;
        let number = if self.backing.log.compressed {
            self.put(Purpose::New, Object { page, checksum, len, priority }, &bytes, None, len)?
        } else {
            let mut whole = [0; PAGE_SIZE];
            self.store.decode(priority, &bytes, &mut whole)?;
            let object = Object { page, checksum, len: PAGE_SIZE as u16, priority: 0 };
            self.put(Purpose::New, object, &whole, None, len)?
        };
        drop(bytes);
        slot.set_writing(number);
        self.pending_bytes += u64::from(len);
        Ok(())
    }

    pub(super) fn add_moved(&mut self, object: Object, bytes: &[u8], from: u64) -> Result<()> {
        self.open(Purpose::Moved)?;
        self.put(Purpose::Moved, object, bytes, Some(from), 0)?;
        self.backing.log.counts.cleaned_bytes.add(bytes.len() as u64);
        Ok(())
    }

    /// Copies an object into the buffer that is open for that purpose. Returns the number of its write.
    fn put(
        &mut self,
        purpose: Purpose,
        object: Object,
        bytes: &[u8],
        from: Option<u64>,
        pool_bytes: u16,
    ) -> Result<u8> {
        let (writer, BackingDevice { log, allowance, .. }) = (&mut *self.writer, self.backing);
        let open = writer.open[purpose as usize].as_mut();
        let (index, buffer) = open.ok_or_else(|| Error::new(ErrorKind::Busy, "no write is begun"))?;
        let flight = &mut writer.flights[*index];
        let footprint = log.footprint(bytes.len());
        let (start, end) = (flight.fill, flight.fill + footprint);
        let units = (end.div_ceil(BLOCK_BYTES) - start.div_ceil(BLOCK_BYTES)) as u64;
        flight.charge += match purpose {
            Purpose::New => allowance.charge(units)?,
            Purpose::Moved => {
                log.table.fill(flight.extent, footprint);
                allowance.note(units)
            }
        };
        log.put(&mut buffer[start..end], flight.extent, &object, bytes);
        let at = (flight.start + start) as u32;
        flight.entries.push(Entry { object, at, pool_bytes, from });
        flight.fill = end;
        Ok(*index as u8 + 1)
    }

    pub(in crate::store) fn end(mut self) -> Outcome {
        self.flush();
        self.backing.log.table.discard_emptied(DISCARDS_AT_ONCE);
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
        self.writer.begun[purpose as usize].map_or(0, |(_, at)| self.backing.log.table.extent_bytes - at)
    }

    /// Opens a buffer for that purpose, unless one is open that has room for the largest object.
    fn open(&mut self, purpose: Purpose) -> Result<()> {
        let table = &self.backing.log.table;
        if let Some((index, _)) = &self.writer.open[purpose as usize] {
            let flight = &self.writer.flights[*index];
            if flight.start + flight.fill + table.max_footprint <= table.extent_bytes {
                return Ok(());
            }
            self.start(purpose);
        }
        while self.writer.in_flight >= self.backing.batch.get() {
            self.finish_one();
        }
        let (extent, start) = match self.writer.begun[purpose as usize].take() {
            Some(begun) => begun,
            None => (self.take_extent(purpose)?, 0),
        };
        let buffer = self.backing.buffers.take_waiting();
        let free = self.writer.flights.iter().position(|flight| !flight.is_used);
        let index = free.expect("there are more than may be in flight and open");
        let flight = &mut self.writer.flights[index];
        (flight.is_used, flight.extent, flight.start, flight.fill) = (true, extent, start, 0);
        self.writer.open[purpose as usize] = Some((index, buffer));
        Ok(())
    }

    fn take_extent(&mut self, purpose: Purpose) -> Result<u32> {
        let table = &self.backing.log.table;
        if purpose == Purpose::New && !table.has_room() {
            // Cleaning first waits for the writes in flight, which may free extents.
            self.clean();
        }
        table.take(purpose, self.writer.moved_from).ok_or_else(|| {
            if let Some(error) = &self.outcome.unanswered {
                return error.clone();
            }
            if purpose == Purpose::New {
                table.note_full();
            }
            Error::new(ErrorKind::NoSpace, "the backing device is full").with_setting("backing_dev")
        })
    }

    /// Starts to write the open buffer of that purpose. The extent is filled further from the next block on.
    fn start(&mut self, purpose: Purpose) {
        let (writer, BackingDevice { log, allowance, ended, .. }) = (&mut *self.writer, self.backing);
        let Some((index, mut buffer)) = writer.open[purpose as usize].take() else { return };
        let flight = &mut writer.flights[index];
        let (extent, start, fill) = (flight.extent, flight.start, flight.fill);
        if flight.entries.is_empty() {
            flight.is_used = false;
            writer.begun[purpose as usize] = Some((extent, start));
            return;
        }
        let (table, offset) = (&log.table, log.table.place(extent, start));
        let rest_bytes = table.extent_bytes - start;
        let mut len_bytes = fill.next_multiple_of(BLOCK_BYTES);
        if table.written_once {
            // One write is all that the extent gets.
            len_bytes = log.backing.padded_bytes(offset, fill);
            flight.charge += allowance.note(((len_bytes - fill) / BLOCK_BYTES) as u64);
        } else if rest_bytes - len_bytes < table.max_footprint {
            // An extent without room for another object is written to its end, with zeros.
            len_bytes = rest_bytes;
        } else {
            // The write takes over the hold; filling the extent further needs another one.
            table.hold(extent);
            writer.begun[purpose as usize] = Some((extent, start + len_bytes));
        }
        // Leave no old bytes of the buffer on the device.
        buffer[fill..len_bytes].fill(0);
        writer.in_flight += 1;
        log.counts.written_bytes.add(len_bytes as u64);
        (self.backing.start)(Transfer {
            direction: Direction::Write,
            offset,
            len_bytes,
            filling: table.filling(extent),
            buffer,
            token: index as u64,
            completion: Arc::<Ended>::clone(ended),
        });
    }

    /// Waits for a write to end, and publishes its pages.
    fn finish_one(&mut self) {
        let (index, buffer, result) = self.backing.ended.wait();
        drop(buffer);
        let index = index as usize;
        let flight = &mut self.writer.flights[index];
        let (extent, charge) = (flight.extent, std::mem::take(&mut flight.charge));
        let mut entries = std::mem::take(&mut flight.entries);
        self.backing.log.failures.note(Direction::Write, result.as_ref().err());
        if result.is_err() {
            self.backing.log.counts.failed_writes.add(1);
            self.backing.allowance.give_back(charge);
        }
        // In reverse: if a page was added, changed and added again, the last copy is valid.
        for (at, entry) in entries.iter().enumerate().rev() {
            self.store.prefetch_object(|ahead| Some(entries.get(at.checked_sub(ahead)?)?.object.page));
            match entry.from {
                None => self.finish_new(index as u8 + 1, extent, entry, result.is_ok()),
                Some(from) if result.is_ok() => self.finish_moved(extent, entry, from),
                Some(_) => {}
            }
        }
        if let Some(lru) = &self.store.lru {
            lru.remove_dead(&mut self.writer.dead);
        }
        self.writer.dead.clear();
        entries.clear();
        let flight = &mut self.writer.flights[index];
        (flight.entries, flight.is_used) = (entries, false);
        self.writer.in_flight -= 1;
        self.backing.log.table.release(extent);
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
        log.table.lives(extent, log.footprint(usize::from(len)));
        let place = log.table.place(extent, entry.at as usize);
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
        let log = &self.backing.log;
        log.table.lives(extent, log.footprint(usize::from(len)));
        let place = log.table.place(extent, entry.at as usize);
        slot.replace(Contents::Backed(Backed { place, ..old }));
        drop(slot);
        log.died(from, usize::from(len));
    }
}
