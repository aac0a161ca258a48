//! An open device: I/O on byte ranges, which are cut into pages.
//!
//! Each request is checked against the disk's size once; after that its page numbers ([`PageNo`]) are valid.
//! No lock is taken here.

use std::ops::Range;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, PageNo, bytes_to_pages, offset_in_page, page_of, pages_to_bytes};
use crate::store::{PageState, Store, Wait};

use super::{Device, State};

/// A device opened for I/O. Threads can share one, and a device can be opened many times.
pub struct OpenDevice {
    // Dropped before `user`: when `reset` finds no users, none holds the store.
    store: Arc<Store>,
    user: User,
    size_bytes: u64,
}

/// A user of a device, counted until it is dropped.
struct User {
    device: Arc<Device>,
}

impl Drop for User {
    fn drop(&mut self) {
        self.device.users.sub(1);
    }
}

/// A range of bytes whose pages are all in the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its length, at least 1.
    pub len_bytes: u64,
    /// The state of its pages.
    pub state: PageState,
}

struct Piece {
    page: PageNo,
    /// Its offset in the page.
    at: usize,
    len: usize,
}

fn pieces(offset: u64, len: u64) -> impl Iterator<Item = Piece> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let in_page = offset_in_page(at);
            let len = (PAGE_SIZE - in_page).min(usize::try_from(end - at).unwrap_or(PAGE_SIZE));
            let piece = Piece { page: PageNo::of_byte(at), at: in_page, len };
            at += len as u64;
            piece
        })
    })
}

fn whole_pages(offset: u64, len: u64) -> Range<u64> {
    let (first, end) = (bytes_to_pages(offset), page_of(offset + len));
    first..end.max(first)
}

fn pages_touched(offset: u64, len: u64) -> u64 {
    bytes_to_pages(offset_in_page(offset) as u64 + len)
}

/// Returns how many of the `len` bytes from `offset` on lie in the first `pages` pages of the range.
fn covered_bytes(offset: u64, len: u64, pages: u64) -> u64 {
    pages_to_bytes(pages).saturating_sub(offset_in_page(offset) as u64).min(len)
}

/// Returns true if an operation was done, and false if it would have had to wait.
#[inline]
fn unless_waiting(done: Result<()>) -> Result<bool> {
    match done {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
        done => done.map(|()| true),
    }
}

impl OpenDevice {
    /// Adds a user of `device`, whose lock the caller holds, so that no reset comes between.
    pub(super) fn new(store: Arc<Store>, device: Arc<Device>, state: &State) -> Self {
        device.users.add(1);
        OpenDevice { store, user: User { device }, size_bytes: state.disksize_bytes }
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.user.device
    }

    /// Returns the size of the disk.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Reads into `buf` from byte `offset` on, with any alignment and length.
    /// Fails with `OutOfRange` beyond the end; `Corrupt` when a page is damaged; `Io` when the backing device
    /// fails. After the latter two `buf` is partly filled.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_some(offset, buf, Wait::Yes).map(drop)
    }

    /// As [`OpenDevice::read`], but stops where it would have to wait and `wait` is `Wait::No`. Returns the
    /// number of bytes read.
    pub fn read_some(&self, offset: u64, buf: &mut [u8], wait: Wait) -> Result<usize> {
        self.fill(offset, buf, wait, false)
    }

    /// As [`OpenDevice::read_some`], but after the first page stops before any page that is known to be zeros
    /// without reading it.
    pub fn read_until_zeros(&self, offset: u64, buf: &mut [u8], wait: Wait) -> Result<usize> {
        self.fill(offset, buf, wait, true)
    }

    #[inline]
    fn fill(&self, offset: u64, buf: &mut [u8], wait: Wait, stops_at_zeros: bool) -> Result<usize> {
        self.check(offset, buf.len() as u64, false)?;
        let mut done = 0;
        for Piece { page, at, len } in pieces(offset, buf.len() as u64) {
            if stops_at_zeros && done > 0 && self.store.zero_pages(page, 1) > 0 {
                break;
            }
            let part = &mut buf[done..done + len];
            let read = match part.try_into() {
                Ok(whole) => self.store.read_wait(page, whole, wait),
                Err(_) => self.store.read_part(page, at, part, wait),
            };
            if !unless_waiting(read)? {
                break;
            }
            done += len;
        }
        Ok(done)
    }

    /// Returns the state of the page at byte `offset`, and how many bytes from there on are in pages of the
    /// same state. `len`, at least 1, bounds the work and the result. No contents are read and no lock is
    /// taken; the state of each page is one that it was in during the call.
    /// Fails with `OutOfRange` beyond the end, and if `len` is 0.
    pub fn extent(&self, offset: u64, len: u64) -> Result<Extent> {
        if len == 0 {
            return Err(Error::new(ErrorKind::OutOfRange, "an extent must have at least one byte"));
        }
        self.check(offset, len, false)?;
        let (state, pages) = self.store.extent(PageNo::of_byte(offset), pages_touched(offset, len));
        Ok(Extent { len_bytes: covered_bytes(offset, len, pages), state })
    }

    /// Returns how many of the `len` bytes from `offset` on are known to be zeros: holes, and pages that were
    /// written with zeros. Otherwise as [`OpenDevice::extent`]. Fails with `OutOfRange` beyond the end.
    pub fn zero_bytes(&self, offset: u64, len: u64) -> Result<u64> {
        self.check(offset, len, false)?;
        if len == 0 {
            return Ok(0);
        }
        let pages = self.store.zero_pages(PageNo::of_byte(offset), pages_touched(offset, len));
        Ok(covered_bytes(offset, len, pages))
    }

    /// Writes `data` from byte `offset` on, with any alignment and length.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `NoSpace` when `mem_limit` is reached; `NoMemory`; for partly written
    /// pages also `Corrupt` and `Io`. The pages before the one that failed hold the new data; that page and
    /// those after it hold the old data.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.write_some(offset, data, Wait::Yes).map(drop)
    }

    /// As [`OpenDevice::write`], but stops where it would have to wait and `wait` is `Wait::No`. Returns the
    /// number of bytes written.
    pub fn write_some(&self, offset: u64, data: &[u8], wait: Wait) -> Result<usize> {
        self.check(offset, data.len() as u64, true)?;
        let mut done = 0;
        for Piece { page, at, len } in pieces(offset, data.len() as u64) {
            let part = &data[done..done + len];
            let written = match part.try_into() {
                Ok(whole) => self.store.write_wait(page, whole, wait),
                Err(_) => self.store.write_part(page, at, part, wait),
            };
            if !unless_waiting(written)? {
                break;
            }
            done += len;
        }
        Ok(done)
    }

    /// Discards the whole pages of the range, which then read as zeros; partly covered pages are unchanged.
    /// Fails with `OutOfRange` beyond the end.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.check(offset, len, true)?;
        self.store.discard_pages(whole_pages(offset, len));
        Ok(())
    }

    /// Zeroes the range: whole pages are discarded, parts of other pages are overwritten.
    /// Fails as [`OpenDevice::write`].
    pub fn write_zeroes(&self, offset: u64, len: u64) -> Result<()> {
        self.zero_some(offset, len, false, Wait::Yes).map(drop)
    }

    /// As [`OpenDevice::write_zeroes`], but stops where it would have to wait and `wait` is `Wait::No`. With
    /// `allocate`, none of the pages is a hole afterwards: a page of zeros takes its slot and no pool memory,
    /// so this does not guarantee that later writes find room below `mem_limit`. Returns the number of bytes
    /// zeroed.
    pub fn zero_some(&self, offset: u64, len: u64, allocate: bool, wait: Wait) -> Result<u64> {
        self.check(offset, len, true)?;
        // In page order: no page is changed after one that could not be.
        let whole = whole_pages(offset, len);
        let mut done = 0;
        while let Some(Piece { page, at, len: piece_len }) = pieces(offset + done, len - done).next() {
            let mut zeroed_len = piece_len as u64;
            if piece_len < PAGE_SIZE {
                if !unless_waiting(self.store.zero_part(page, at, piece_len, allocate, wait))? {
                    break;
                }
            } else if allocate {
                self.store.zero(page);
            } else {
                // All whole pages at once: there may be billions, of which few hold anything.
                self.store.discard_pages(whole.clone());
                zeroed_len = pages_to_bytes(whole.end - whole.start);
            }
            done += zeroed_len;
        }
        Ok(done)
    }

    fn check(&self, offset: u64, len: u64, is_write: bool) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.size_bytes) {
            return Ok(());
        }
        self.store.count_failure(is_write);
        Err(Error::new(ErrorKind::OutOfRange, "the request goes beyond the end of the device"))
    }
}
