//! Reads of pages and of parts of pages.
//!
//! The slot's lock is held only to pin the object, where the pool's lock design allows that; the page is then
//! decoded from its zspage straight into the caller's memory. A hole is read without a lock. Pages on the
//! backing device are read by `writeback/read.rs`.

use std::borrow::Borrow;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::{PAGE_SIZE, Page, PageNo, fill_with_word};

use super::slot::{Contents, SlotGuard};
use super::stream::Codec;
use super::{Store, Wait};

/// What happens to a page that was read from the backing device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// It returns to memory, if it is used often or there is room.
    Return,
    Stay,
}

impl Store {
    /// Reads a page; waits for the backing device if the page is there. Fails as [`Store::read_wait`].
    ///
    /// # Panics
    /// If the page is beyond the end, as all methods that take a page.
    #[inline]
    pub fn read(&self, page: PageNo, out: &mut Page) -> Result<()> {
        self.read_wait(page, out, Wait::Yes)
    }

    /// Reads a page.
    ///
    /// # Errors
    /// - `Corrupt` when the stored page is damaged
    /// - `Io` when the backing device fails
    /// - `WouldBlock` when the page is on the backing device and `wait` is `Wait::No`; not counted as a read
    ///
    /// `out` is undefined after each of these.
    #[inline]
    pub fn read_wait(&self, page: PageNo, out: &mut Page, wait: Wait) -> Result<()> {
        self.read_then(page, out, wait, Then::Return)
    }

    /// Reads a page that the caller is going to discard or to replace: from the backing device it does not
    /// return to memory. Fails as [`Store::read_wait`].
    #[inline]
    pub fn read_once(&self, page: PageNo, out: &mut Page) -> Result<()> {
        self.read_then(page, out, Wait::Yes, Then::Stay)
    }

    #[inline]
    fn read_then(&self, page: PageNo, out: &mut Page, wait: Wait, then: Then) -> Result<()> {
        let read = if self.slots.is_empty(page) {
            out.fill(0);
            Ok(())
        } else {
            if let Some(lru) = &self.lru {
                lru.prefetch(page.0);
            }
            let mut slot = self.slots.lock(page);
            slot.touch();
            let is_listed = slot.peek().is_object();
            let read = match &self.backing {
                Some(backing) if wait == Wait::Yes && slot.peek().is_backed() => {
                    self.read_from_backing(backing, slot, page, out, then)
                }
                _ => self.read_locked(slot, page, out),
            };
            if let Some(lru) = self.lru.as_ref().filter(|_| is_listed) {
                lru.mark(page.0);
            }
            read
        };
        self.counters.local().read(&read);
        read
    }

    /// Reads the part of a page from byte `at` on. Fails as [`Store::read_wait`].
    pub fn read_part(&self, page: PageNo, at: usize, out: &mut [u8], wait: Wait) -> Result<()> {
        let mut whole = [0; PAGE_SIZE];
        self.read_wait(page, &mut whole, wait)?;
        out.copy_from_slice(&whole[at..at + out.len()]);
        Ok(())
    }

    /// As [`Store::read_wait`], and locks the slot, but not while this waits for the backing device.
    pub(super) fn lock_and_read(&self, page: PageNo, out: &mut Page, wait: Wait) -> Result<SlotGuard<'_>> {
        match &self.backing {
            Some(backing) if wait == Wait::Yes => self.lock_and_read_from_backing(backing, page, out),
            _ => {
                let slot = self.slots.lock(page);
                self.read_locked(&slot, page, out)?;
                Ok(slot)
            }
        }
    }

    /// Reads the contents of a locked slot; given the guard, it unlocks the slot as soon as the pool allows.
    #[inline]
    pub(super) fn read_locked<'a>(
        &self,
        slot: impl Borrow<SlotGuard<'a>>,
        page: PageNo,
        out: &mut Page,
    ) -> Result<()> {
        match slot.borrow().contents() {
            Contents::Empty => out.fill(0),
            Contents::Same(word) => fill_with_word(out, word),
            Contents::Lost => {
                let what = "the page was found damaged when its store was attached, and not written since";
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
            Contents::Backed(_) => {
                return Err(Error::new(ErrorKind::WouldBlock, "the page is on the backing device"));
            }
            Contents::Stored { handle, len, checksum, priority } => {
                // SAFETY: the handle is the locked slot's. A thread that replaces the slot's contents frees
                // the handle only after it has locked and unlocked the slot. The slot stays locked here until
                // the bytes are no longer used, unless the pool lets reads outlive frees.
                let bytes = unsafe { self.pool.read(handle, page.0, usize::from(len)) }?;
                let kept = if self.pool.reads_outlive_frees() {
                    drop(slot);
                    None
                } else {
                    Some(slot)
                };
                self.decode(priority, &bytes, out)?;
                drop(bytes);
                drop(kept);
                self.verify(checksum, out)?;
            }
        }
        Ok(())
    }

    #[inline]
    pub(super) fn decode(&self, priority: u8, bytes: &[u8], out: &mut Page) -> Result<()> {
        if bytes.len() == PAGE_SIZE {
            out.copy_from_slice(bytes);
            return Ok(());
        }
        match self.codec_of(priority) {
            Some(codec) => codec.decode(bytes, out),
            None => {
                Err(Error::new(ErrorKind::Corrupt, "the stored page is damaged: no algorithm has its number"))
            }
        }
    }

    #[inline]
    pub(super) fn verify(&self, checksum: u32, page: &Page) -> Result<()> {
        if self.checksum && crc32fast::hash(page) != checksum {
            return Err(Error::new(ErrorKind::Corrupt, "the stored page is damaged: its checksum is wrong"));
        }
        Ok(())
    }

    /// Returns the codec of a priority; 0 is that of writes.
    #[inline]
    pub(super) fn codec_of(&self, priority: u8) -> Option<&Codec> {
        match usize::from(priority).checked_sub(1) {
            None => Some(&self.codec),
            Some(at) => self.recompression.get(at)?.as_ref(),
        }
    }
}
