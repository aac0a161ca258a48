//! Writes of pages and of parts of pages, and the steps by which contents replace others, as ARCHITECTURE.md
//! tells them.
//!
//! Lock order: slot, stream, then the pool's or the LRU's. A whole page is compressed and stored before its
//! slot is locked. A part of a page is read, changed and stored under the slot's lock. No writer waits for a
//! backing device or for reclaim while it holds a slot.

use std::time::Instant;

use crate::backing::MOST_WAIT;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Gfp;
use crate::base::units::{PAGE_SIZE, Page, PageNo, same_word};
use crate::stream::Streams;

use super::slot::{Backed, Contents, SlotGuard};
use super::stream::Stream;
use super::{Store, Wait};

#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    Bytes(&'a [u8]),
    Zeros(usize),
}

impl Part<'_> {
    fn copy_to(self, page: &mut Page, at: usize) {
        match self {
            Part::Bytes(bytes) => page[at..at + bytes.len()].copy_from_slice(bytes),
            Part::Zeros(len) => page[at..at + len].fill(0),
        }
    }
}

impl Store {
    /// Writes a page. At the memory limit it waits for pages to be reclaimed, if any can be.
    /// Fails as [`Store::write_wait`].
    #[inline]
    pub fn write(&self, page: PageNo, contents: &Page) -> Result<()> {
        self.write_wait(page, contents, Wait::Yes)
    }

    /// Writes a page.
    ///
    /// # Errors
    /// - `NoSpace` at the memory limit, when nothing can be reclaimed
    /// - `WouldBlock` at the memory limit, when pages can be reclaimed and `wait` is `Wait::No`; not counted
    ///   as a write
    /// - `NoMemory` when the system gives no memory
    ///
    /// A store with a reserve never waits: it returns `NoSpace` at the limit, even if pages are then
    /// reclaimed for the next write, and `NoMemory` when the reserve is drained. After an error the page
    /// keeps its old contents.
    #[inline]
    pub fn write_wait(&self, page: PageNo, contents: &Page, wait: Wait) -> Result<()> {
        let mut deadline = None;
        let new = loop {
            let error = match self.store_page(page, contents) {
                Ok(new) => break new,
                Err(error) => error,
            };
            self.request_room(error, wait, &mut deadline).map_err(|error| self.count_failed_write(error))?;
        };
        self.replace(self.slots.lock(page), page, new);
        self.count_write();
        Ok(())
    }

    /// Writes the part of a page from byte `at` on; the rest is unchanged.
    /// Fails as [`Store::write_wait`] and [`Store::read_wait`].
    pub fn write_part(&self, page: PageNo, at: usize, bytes: &[u8], wait: Wait) -> Result<()> {
        self.change_part(page, at, Part::Bytes(bytes), wait)
    }

    /// Overwrites a part of a page. One on the backing device is read before its slot is locked, and the slot
    /// is unlocked before the write waits for room: a thread that must not wait never finds it held by one
    /// that waits.
    pub(super) fn change_part(&self, page: PageNo, at: usize, part: Part<'_>, wait: Wait) -> Result<()> {
        let (mut deadline, mut whole) = (None, [0; PAGE_SIZE]);
        let (slot, new) = loop {
            let slot = match self.lock_and_read(page, &mut whole, wait) {
                Ok(slot) => slot,
                Err(error) => return Err(self.count_failed_write(error)),
            };
            part.copy_to(&mut whole, at);
            let error = match self.store_page(page, &whole) {
                Ok(new) => break (slot, new),
                Err(error) => error,
            };
            drop(slot);
            self.request_room(error, wait, &mut deadline).map_err(|error| self.count_failed_write(error))?;
        };
        self.replace(slot, page, new);
        self.count_write();
        Ok(())
    }

    /// Stores a page without publishing it. A same-filled page takes no object.
    #[inline]
    pub(super) fn store_page(&self, page: PageNo, contents: &Page) -> Result<Contents> {
        if let Some(word) = same_word(contents) {
            return Ok(Contents::Same(word));
        }
        let checksum = if self.checksum { crc32fast::hash(contents) } else { 0 };
        self.slots.prefetch(page);
        if let Some(lru) = &self.lru {
            lru.prefetch(page.0);
        }
        let mut stream = self.codec.streams.lend();
        let bytes = self.compress(&mut stream, page, contents);
        let handle = self.pool.store(bytes, page.0, Gfp::MayWait)?;
        Ok(Contents::Stored { handle, len: bytes.len() as u16, checksum, priority: 0 })
    }

    /// Returns the bytes to store for a page: compressed, or the page itself if that is not much shorter.
    #[inline]
    pub(super) fn compress<'a>(&self, stream: &'a mut Stream, page: PageNo, contents: &'a Page) -> &'a [u8] {
        let len = stream.encoder.encode(contents, &mut stream.compressed);
        // The object to be replaced is cold: prefetch it while the new one is stored.
        self.prefetch_held(page);
        match len.filter(|len| *len < self.pool.huge_threshold()) {
            Some(len) => &stream.compressed[..len],
            None => contents,
        }
    }

    #[inline]
    pub(super) fn prefetch_held(&self, page: PageNo) {
        if let Some(handle) = self.slots.peek_handle(page) {
            self.pool.prefetch(handle);
        }
    }

    /// Publishes `new`: the commit point. Returns the old contents, to be freed once the slot is unlocked.
    #[inline]
    pub(super) fn publish(&self, slot: &mut SlotGuard<'_>, new: Contents) -> Contents {
        let old = slot.replace(new);
        // Under the lock, so that the next change of the page is counted after this one.
        self.counters.local().replaced(&old, &new);
        old
    }

    /// Publishes `new` in a locked slot as a use of the page, unlocks the slot, frees the old contents, and
    /// updates the LRU: the page's node under the slot's lock, the lists after it.
    #[inline]
    pub(super) fn replace(&self, mut slot: SlotGuard<'_>, page: PageNo, new: Contents) {
        let old = self.publish(&mut slot, new);
        slot.touch();
        let is_stored = matches!(new, Contents::Stored { .. });
        let arrives = is_stored && self.lru.as_ref().is_some_and(|lru| lru.arrive(page.0));
        let dies = !is_stored && self.mark_dead(page, &old);
        drop(slot);
        self.free(old);
        match &self.lru {
            Some(lru) if arrives => lru.queue(page.0),
            Some(lru) if dies => lru.remove_dead(&mut [page.0]),
            _ => {}
        }
    }

    /// Marks a page that no longer holds an object as dead. Returns whether it is still in the LRU's lists.
    #[inline]
    pub(super) fn mark_dead(&self, page: PageNo, old: &Contents) -> bool {
        // Only these are in the lists. Looking up others would fault in the memory of their nodes.
        let was_listed = matches!(old, Contents::Stored { .. } | Contents::Backed(_));
        was_listed && self.lru.as_ref().is_some_and(|lru| lru.mark_dead(page.0))
    }

    #[inline]
    pub(super) fn free(&self, old: Contents) {
        match old {
            // SAFETY: either `publish` took `old` out of the slot under its lock, so that exactly one caller
            // has it, or it was stored and never published.
            Contents::Stored { handle, .. } => unsafe { self.pool.free(handle) },
            Contents::Backed(Backed { place, len, .. }) => {
                self.backing.iter().for_each(|backing| backing.log.died(place, usize::from(len)));
            }
            Contents::Empty | Contents::Same(_) | Contents::Lost => {}
        }
    }

    /// Makes room for a write that failed with `error`, if it failed at the limit and pages can be reclaimed;
    /// the caller then retries. `deadline` is `None` on the first attempt of a write, and is kept for the
    /// next ones. Fails with `WouldBlock` when memory can be freed, and the write must not wait for that;
    /// else `error`, if it is of another kind or there is no room.
    #[cold]
    pub(super) fn request_room(
        &self,
        error: Error,
        wait: Wait,
        deadline: &mut Option<Instant>,
    ) -> Result<()> {
        if error.kind() != ErrorKind::NoSpace || !self.can_reclaim() {
            return Err(error);
        }
        let (watermarks, gone_pages) = (&self.watermarks, self.gone_pages());
        if self.arena.has_reserve() {
            // The write never waits for memory; pages are reclaimed for later writes.
            watermarks.request_reclaim(gone_pages);
            watermarks.decisions.writers_refused.add(1);
            return Err(error);
        }
        if wait == Wait::No && !watermarks.is_stuck(gone_pages) {
            let what = "the memory limit is reached, and pages can be reclaimed";
            return Err(Error::new(ErrorKind::WouldBlock, what));
        }
        if wait == Wait::Yes {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + MOST_WAIT);
            if watermarks.wait_for_reclaim(deadline, gone_pages) && Instant::now() < deadline {
                return Ok(());
            }
        }
        watermarks.decisions.writers_refused.add(1);
        Err(match watermarks.why_died() {
            None => error,
            Some(why) => {
                let what =
                    format!("{error}; pages are no longer reclaimed: {why}. Reset the device to go on");
                Error::new(error.kind(), what).with_setting("mem_limit")
            }
        })
    }

    #[inline]
    fn count_write(&self) {
        self.watermarks.wake_if_high(&self.arena);
        self.counters.local().pages_written.add(1);
    }

    #[cold]
    fn count_failed_write(&self, error: Error) -> Error {
        self.watermarks.wake_if_high(&self.arena);
        self.counters.local().failed_write(&error);
        error
    }
}
