//! The two buffers of a connection.
//!
//! One `read` takes as many requests as have arrived, one `write` answers all of them: at a queue
//! depth of sixteen that is, at best, two system calls for sixteen requests. Payloads go to the device
//! straight from the receive buffer, and come from it straight into the send buffer. Both have a
//! fixed size from the start of the session.

use std::io::{self, Read, Write};

use uzram::base::units::PAGE_SIZE;

use super::request::Headers;

/// Bytes of each buffer: sixty requests of a page, a little more than a Unix socket's default
/// buffer holds, and small enough to stay in a core's second-level cache.
pub const BUFFER_BYTES: usize = 256 << 10;

/// The least a buffer can have. A page that arrives in pieces, behind a request's header, always
/// fits; so do a whole error reply and a chunk of at least one page.
const MIN_BUFFER_BYTES: usize = 4 * (PAGE_SIZE + Headers::Extended.data_header_bytes());
const _: () = assert!(BUFFER_BYTES >= MIN_BUFFER_BYTES && BUFFER_BYTES.is_multiple_of(PAGE_SIZE));

/// Both buffers of a connection, which can serve one session after another.
pub struct Buffers {
    received: ReceiveBuffer,
    unsent: SendBuffer,
}

impl Buffers {
    /// Buffers of `len_bytes` each, in whole pages; [`BUFFER_BYTES`] is best, less tries more of the
    /// ways in which messages can be cut.
    ///
    /// # Errors
    /// `OutOfMemory` when the system refuses.
    pub fn new(len_bytes: usize) -> io::Result<Self> {
        let len_bytes = len_bytes.max(MIN_BUFFER_BYTES).next_multiple_of(PAGE_SIZE);
        let received = ReceiveBuffer { bytes: allocate(len_bytes)?, start: 0, end: 0 };
        Ok(Buffers { received, unsent: SendBuffer::new(len_bytes)? })
    }

    /// Both of them, empty.
    pub(super) fn emptied(&mut self) -> (&mut ReceiveBuffer, &mut SendBuffer) {
        (self.received.start, self.received.end, self.unsent.len) = (0, 0, 0);
        (&mut self.received, &mut self.unsent)
    }
}

/// Bytes of a fixed size, or the system's refusal.
pub(super) fn allocate(len_bytes: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len_bytes, 0);
    Ok(bytes)
}

/// Received bytes that are not used up: `bytes[start..end]`.
pub(super) struct ReceiveBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl ReceiveBuffer {
    /// What has arrived and is not consumed.
    pub fn available(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Uses up `len_bytes` of [`available`](Self::available), which has at least that many.
    pub fn consume(&mut self, len_bytes: usize) {
        self.start += len_bytes;
        debug_assert!(self.start <= self.end);
    }

    /// Waits for more bytes; returns how many came, 0 at the end of the stream.
    ///
    /// Whatever is left over moves to the front first. That is never more than an incomplete page
    /// or header, because everything complete is consumed before more is read.
    pub fn fill(&mut self, stream: &mut impl Read) -> io::Result<usize> {
        self.bytes.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        loop {
            match stream.read(&mut self.bytes[self.end..]) {
                Ok(len_bytes) => {
                    self.end += len_bytes;
                    return Ok(len_bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Replies that are not sent: `bytes[..len]`.
pub(super) struct SendBuffer {
    bytes: Vec<u8>,
    len: usize,
}

impl SendBuffer {
    /// A buffer of so many bytes.
    ///
    /// # Errors
    /// `OutOfMemory` when the system refuses.
    pub fn new(capacity_bytes: usize) -> io::Result<Self> {
        Ok(SendBuffer { bytes: allocate(capacity_bytes)?, len: 0 })
    }

    /// What is not sent.
    pub fn filled(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The most it can hold.
    pub fn capacity_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Makes room for `len_bytes`, which are at most its capacity, by sending what is there if
    /// need be, and returns the room. It counts as filled; [`retract`](Self::retract) takes it back.
    pub fn room(&mut self, stream: &mut impl Write, len_bytes: usize) -> io::Result<&mut [u8]> {
        if len_bytes > self.bytes.len() - self.len {
            self.flush(stream)?;
        }
        let start = self.len;
        self.len += len_bytes;
        Ok(&mut self.bytes[start..self.len])
    }

    /// Takes back the last `len_bytes`.
    pub fn retract(&mut self, len_bytes: usize) {
        self.len -= len_bytes;
    }

    /// Adds `bytes`; if they are more than its capacity, sends what is there and them behind it.
    pub fn put(&mut self, stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.capacity_bytes() {
            self.flush(stream)?;
            return stream.write_all(bytes);
        }
        self.room(stream, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    /// Sends everything.
    pub fn flush(&mut self, stream: &mut impl Write) -> io::Result<()> {
        if self.len > 0 {
            stream.write_all(&self.bytes[..self.len])?;
            self.len = 0;
        }
        Ok(())
    }
}
