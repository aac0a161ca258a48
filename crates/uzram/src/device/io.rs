//! Byte ranges of an open device, cut into pages.

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, offset_in_page, page_of};
use crate::store::Store;

use super::Device;

/// A device opened for I/O. Many threads may use one, and many may be open.
pub struct OpenDevice {
    store: Arc<Store>,
    device: Arc<Device>,
    size_bytes: u64,
}

/// The part of one page that a byte range covers.
struct Piece {
    page: u64,
    /// Where it starts in the page.
    at: usize,
    len: usize,
}

/// The pieces of a byte range, first page first.
fn pieces(offset: u64, len: u64) -> impl Iterator<Item = Piece> {
    let end = offset + len;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let in_page = offset_in_page(at);
            let len = (PAGE_SIZE - in_page).min(usize::try_from(end - at).unwrap_or(PAGE_SIZE));
            let piece = Piece { page: page_of(at), at: in_page, len };
            at += len as u64;
            piece
        })
    })
}

impl OpenDevice {
    pub(super) fn new(store: Arc<Store>, device: Arc<Device>, size_bytes: u64) -> Self {
        OpenDevice { store, device, size_bytes }
    }

    /// The device this opens.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Fills `buf` from byte `offset` on. Any alignment and length.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Corrupt` when a stored page is damaged, and `buf` is then
    /// partly filled.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.check(offset, buf.len() as u64, false)?;
        let mut rest = buf;
        for piece in pieces(offset, rest.len() as u64) {
            let (part, after) = rest.split_at_mut(piece.len);
            match part.try_into() {
                Ok(whole) => self.store.read(piece.page, whole)?,
                Err(_) => self.store.read_part(piece.page, piece.at, part)?,
            }
            rest = after;
        }
        Ok(())
    }

    /// Stores `data` from byte `offset` on. Any alignment and length.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `NoSpace` when `mem_limit` is met; `NoMemory`. The pages
    /// before the one that failed hold the new data, that one and those after it the old.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check(offset, data.len() as u64, true)?;
        let mut rest = data;
        for piece in pieces(offset, data.len() as u64) {
            let (part, after) = rest.split_at(piece.len);
            match part.try_into() {
                Ok(whole) => self.store.write(piece.page, whole)?,
                Err(_) => self.store.write_part(piece.page, piece.at, part)?,
            }
            rest = after;
        }
        Ok(())
    }

    /// Frees the whole pages of the range, which read as zeros afterwards; what it covers of other
    /// pages stays as it is.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.check(offset, len, true)?;
        for piece in pieces(offset, len) {
            if piece.len == PAGE_SIZE {
                self.store.discard(piece.page);
            }
        }
        Ok(())
    }

    /// Makes the range read as zeros: whole pages are freed, parts of others overwritten.
    ///
    /// # Errors
    /// As [`OpenDevice::write`].
    pub fn write_zeroes(&self, offset: u64, len: u64) -> Result<()> {
        self.check(offset, len, true)?;
        for piece in pieces(offset, len) {
            if piece.len == PAGE_SIZE {
                self.store.discard(piece.page);
            } else {
                self.store.zero_part(piece.page, piece.at, piece.len)?;
            }
        }
        Ok(())
    }

    fn check(&self, offset: u64, len: u64, is_write: bool) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.size_bytes) {
            return Ok(());
        }
        self.store.count_failure(is_write);
        Err(Error::new(ErrorKind::OutOfRange, "the request goes beyond the end of the device"))
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        self.device.users.sub(1);
    }
}
