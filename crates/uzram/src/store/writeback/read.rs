//! Reading pages from the backing device, and returning some of them to memory.
//!
//! A page's place and the generation of its extent are read under the slot's lock, which is then released: the read of
//! the device holds no lock. If the page is changed meanwhile, its extent may even be refilled; then the bytes read
//! have the wrong generation, and the read starts over from the slot. Bytes that do not match are damaged only if the
//! slot still refers to the same place and generation.
//!
//! Sequential reads of pages that were written together read ahead. The bytes read ahead are kept until they are no
//! longer useful, and verified like those that come from the device.
//!
//! A page returns to memory if the LRU says that it was used soon after it left (a refault), or if there is room below
//! the policy's low watermark, unless the reader says that it is about to discard it. Other pages stay on the device and
//! are read from it again the next time.
//!
//! Locks: a slot's, briefly; `backing extents`, a leaf, to take and put a read-ahead window.

use crate::backing::{Buffer, Direction, Filling};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Gfp;
use crate::base::sync::{Counter, Mutex, classes};
use crate::base::units::{PAGE_SIZE, Page, PageNo};

use super::BackingDevice;
use super::log::{BLOCK_BYTES, Log, READ_AHEAD_BYTES};
use super::object::ALIGN_BYTES;
use crate::store::Store;
use crate::store::read::Then;
use crate::store::slot::{Backed, Contents, SlotGuard};

/// Sequential readers tracked at a time.
const STREAMS: usize = 16;

/// The sequential readers. Consecutive pages were mostly written together, so they are read ahead.
pub(super) struct Streams {
    streams: [Stream; STREAMS],
    turn: Counter,
}

struct Stream {
    /// The page expected next, and its expected place.
    next_page: Counter,
    next_place: Counter,
    /// The bytes read ahead.
    window: Mutex<Option<Window>>,
}

/// Bytes read from an extent.
struct Window {
    filling: Filling,
    start: u64,
    len_bytes: usize,
    buffer: Buffer,
}

impl Default for Streams {
    fn default() -> Self {
        let stream = || Stream {
            next_page: Counter::new(0),
            next_place: Counter::new(0),
            window: Mutex::new(&classes::BACKING_EXTENTS, None),
        };
        Streams { streams: std::array::from_fn(|_| stream()), turn: Counter::new(0) }
    }
}

impl Streams {
    /// Returns the reader that expects `page` at `place` next, if any.
    fn find(&self, page: PageNo, place: u64) -> Option<&Stream> {
        let is_next =
            |stream: &&Stream| stream.next_page.get() == page.number() && stream.next_place.get() == place;
        self.streams.iter().find(is_next).filter(|_| page.0 > 0)
    }

    /// Tracks a new reader, which may read `next_page` next.
    fn begin(&self, next_page: u64, next_place: u64) {
        let at = self.turn.add(1) as usize % STREAMS;
        self.streams[at].go_on(next_page, next_place);
    }
}

impl Stream {
    fn go_on(&self, next_page: u64, next_place: u64) {
        self.next_page.set(next_page);
        self.next_place.set(next_place);
    }
}

impl Window {
    /// Returns the checksum and the bytes of the object of a page, if the window has it as it was written; `scratch` is for
    /// those that were sealed.
    fn find<'a>(
        &'a self,
        log: &Log,
        page: PageNo,
        backed: Backed,
        filling: Filling,
        scratch: &'a mut Vec<u8>,
    ) -> Option<(u32, &'a [u8])> {
        let at = usize::try_from(backed.place.checked_sub(self.start)?).ok()?;
        let bytes = self.buffer[..self.len_bytes].get(at..)?;
        let is_right = self.filling == filling && log.extent_of(self.start) == log.extent_of(backed.place);
        log.find(bytes, filling, page, backed, scratch).filter(|_| is_right)
    }
}

/// The result of one read of the device.
enum Found {
    /// The page was read.
    Page,
    /// The page was changed meanwhile.
    Changed,
}

impl Store {
    /// Reads a page; from the backing device, if it still is there.
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

    /// Reads the object of a page, and may return the page to memory.
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
        let stream = backing.streams.find(page, backed.place);
        // Takes memory only for what was sealed.
        let mut scratch = Vec::new();
        let ahead = stream.and_then(|stream| stream.window.lock().take());
        let ahead = ahead.filter(|window| window.find(log, page, backed, filling, &mut scratch).is_some());
        let (window, result) = match ahead {
            Some(window) => (window, Ok(())),
            None => self.read_window(log, backed, filling, stream.is_some()),
        };
        let (checksum, bytes) = match (result, window.find(log, page, backed, filling, &mut scratch)) {
            (Ok(()), Some(found)) => found,
            _ if !self.is_at(page, backed, filling, log) => return Ok(Found::Changed),
            (Err(error), _) => {
                log.counts.failed_reads.add(1);
                return Err(error);
            }
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
        let next_place = backed.place + log.footprint(usize::from(backed.len)) as u64;
        match stream {
            Some(stream) => {
                *stream.window.lock() = Some(window);
                stream.go_on(page.number() + 1, next_place);
            }
            None => backing.streams.begin(page.number() + 1, next_place),
        }
        Ok(Found::Page)
    }

    /// Reads the blocks in which an object lies, and with `ahead` the blocks after them.
    fn read_window(&self, log: &Log, backed: Backed, filling: Filling, ahead: bool) -> (Window, Result<()>) {
        // A part of an object of the backing can begin and end anywhere.
        let block_bytes = if log.written_once { ALIGN_BYTES } else { BLOCK_BYTES } as u64;
        let start = backed.place / block_bytes * block_bytes;
        let end =
            (backed.place + log.footprint(usize::from(backed.len)) as u64).next_multiple_of(block_bytes);
        let end = if ahead { end.max(start + READ_AHEAD_BYTES as u64) } else { end };
        let extent_end = log.place(log.extent_of(backed.place) + 1, 0);
        let len_bytes = (end.min(extent_end) - start) as usize;
        let (buffer, result) =
            log.backing.carry_out(Direction::Read, start, len_bytes, filling, log.reads.take_waiting());
        log.counts.reads.add(1);
        log.counts.read_bytes.add(len_bytes as u64);
        (Window { filling, start, len_bytes, buffer }, result)
    }

    /// Returns whether a page still is at that place.
    fn is_at(&self, page: PageNo, backed: Backed, filling: Filling, log: &Log) -> bool {
        is_there(&self.slots.lock(page), backed, filling, log)
    }

    /// Returns whether a page that was read should return to memory.
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
