//! The memory of a connection: its two buffers, which keep their size for the whole session, and the rule by
//! which all connections share memory (docs/internals/nbd.md).
//!
//! One `read` receives all requests that have arrived, and one `write` answers them. Payloads go from the
//! receive buffer straight to the device, and data from the device straight into the send buffer.

use std::io::{self, Read, Write};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use uzram::mem::ZeroedPages;
use uzram::units::PAGE_SIZE;

use super::proto::MAX_PAYLOAD_BYTES;
use super::request::Headers;
use crate::device_pool::{Budget, Share, TASK_BYTES};

/// Bytes of each buffer if the budget allows it: sixty requests of a page, a little more than a Unix
/// socket's default buffer holds, and small enough to stay in a core's L2 cache.
pub const BUFFER_BYTES: usize = 256 << 10;
/// Bytes of each buffer otherwise.
pub const MIN_BUFFER_BYTES: usize = 32 << 10;
/// The default memory shared by a server's connections: 40 MiB for requests, and larger buffers for the
/// first ninety clients without TLS.
pub const SHARED_BYTES: usize = TASK_BYTES + (40 << 20);

/// The smallest buffer. A request's header with a page that arrives in pieces always fits, and so do a whole
/// error reply and a chunk of at least one page.
const LEAST_BYTES: usize = 4 * (PAGE_SIZE + Headers::Extended.data_header_bytes());
const _: () = assert!(MIN_BUFFER_BYTES >= LEAST_BYTES);
const _: () =
    assert!(BUFFER_BYTES.is_multiple_of(MIN_BUFFER_BYTES) && MIN_BUFFER_BYTES.is_multiple_of(PAGE_SIZE));

/// Memory of at least this length is a mapping of its own: it costs nothing before it is touched, and returns
/// to the system at once. An allocator might keep as much for each of many threads.
const MIN_MAPPED_BYTES: usize = 32 << 10;

/// The most bytes that a record adds to its contents, with a margin.
const RECORD_OVERHEAD_BYTES: usize = 64;
const RECORD_BYTES: usize = 16 << 10;
/// The smallest receive buffer of a TLS session.
const MIN_RECEIVE_BYTES: usize = 64 << 10;

// An incomplete record must fit, and so must an incomplete handshake message of several records. Certificate
// chains in use are shorter than that.
const _: () = assert!(MIN_RECEIVE_BYTES >= 3 * (RECORD_BYTES + RECORD_OVERHEAD_BYTES));

/// Returns the size of a TLS session's receive buffer, for a whole batch of requests.
pub(super) const fn tls_receive_bytes(buffer_bytes: usize) -> usize {
    if buffer_bytes > MIN_RECEIVE_BYTES { buffer_bytes } else { MIN_RECEIVE_BYTES }
}

/// Returns the size of its send buffer, for a whole batch of replies, and a key update before it.
pub(super) const fn tls_send_bytes(buffer_bytes: usize) -> usize {
    buffer_bytes + (buffer_bytes / RECORD_BYTES + 4) * RECORD_OVERHEAD_BYTES
}

/// Returns the memory of a TLS session, besides connection buffers of `buffer_bytes`.
const fn tls_bytes(buffer_bytes: usize) -> usize {
    2 * tls_receive_bytes(buffer_bytes) + tls_send_bytes(buffer_bytes)
}

/// Both buffers of a connection, which can serve one session after another.
pub struct Buffers {
    received: ReceiveBuffer,
    unsent: SendBuffer,
    budget: Arc<Budget>,
    /// The share of these buffers, and of TLS's, beyond the minimum.
    _share: Option<Share>,
}

impl Buffers {
    /// Allocates buffers of `len_bytes` each, rounded up to whole pages: [`BUFFER_BYTES`] is the fastest,
    /// smaller buffers split messages at more places. The budget has memory for one long reply. Errors:
    /// `OutOfMemory` when the system refuses.
    pub fn new(len_bytes: usize) -> io::Result<Self> {
        let len_bytes = len_bytes.max(LEAST_BYTES).next_multiple_of(PAGE_SIZE);
        Self::with(len_bytes, Budget::new(MAX_PAYLOAD_BYTES as usize), None)
    }

    /// Allocates the buffers of a client, as large as the server's budget allows together with those of its
    /// TLS session.
    pub(super) fn of_client(budget: &Arc<Budget>, tls: bool) -> io::Result<Self> {
        let least_bytes = connection_bytes(MIN_BUFFER_BYTES, tls);
        let mut len_bytes = BUFFER_BYTES;
        while len_bytes > MIN_BUFFER_BYTES {
            let more_bytes = connection_bytes(len_bytes, tls) - least_bytes;
            if let Some(share) = budget.take_leaving(more_bytes, TASK_BYTES.min(budget.total())) {
                return Self::with(len_bytes, Arc::clone(budget), Some(share));
            }
            len_bytes /= 2;
        }
        Self::with(MIN_BUFFER_BYTES, Arc::clone(budget), None)
    }

    fn with(len_bytes: usize, budget: Arc<Budget>, share: Option<Share>) -> io::Result<Self> {
        let received = ReceiveBuffer::new(len_bytes)?;
        Ok(Buffers { received, unsent: SendBuffer::new(len_bytes)?, budget, _share: share })
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.unsent.capacity_bytes()
    }

    /// Empties both buffers and returns them, with the budget for more memory.
    pub(super) fn emptied(&mut self) -> (&mut ReceiveBuffer, &mut SendBuffer, &Arc<Budget>) {
        (self.received.start, self.received.end, self.unsent.len) = (0, 0, 0);
        (&mut self.received, &mut self.unsent, &self.budget)
    }
}

fn connection_bytes(len_bytes: usize, tls: bool) -> usize {
    2 * len_bytes + if tls { tls_bytes(len_bytes) } else { 0 }
}

/// A zero-initialized block of memory of fixed length.
pub(super) enum Memory {
    Heap(Vec<u8>),
    /// A mapping of its own, from [`MIN_MAPPED_BYTES`] on.
    Pages(ZeroedPages),
}

impl Memory {
    pub fn new(len_bytes: usize) -> io::Result<Self> {
        if len_bytes >= MIN_MAPPED_BYTES {
            return ZeroedPages::new(len_bytes)
                .map(Memory::Pages)
                .map_err(|_| io::ErrorKind::OutOfMemory.into());
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        bytes.resize(len_bytes, 0);
        Ok(Memory::Heap(bytes))
    }

    /// Grows to at least this length, keeping its contents.
    pub fn enlarge(&mut self, len_bytes: usize) -> io::Result<()> {
        if self.len() < len_bytes {
            let mut larger = Memory::new(len_bytes)?;
            larger[..self.len()].copy_from_slice(self);
            *self = larger;
        }
        Ok(())
    }
}

impl Deref for Memory {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        match self {
            Memory::Heap(bytes) => bytes,
            Memory::Pages(pages) => pages,
        }
    }
}

impl DerefMut for Memory {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Heap(bytes) => bytes,
            Memory::Pages(pages) => pages,
        }
    }
}

/// Received bytes that are not consumed: `bytes[start..end]`.
pub(super) struct ReceiveBuffer {
    pub bytes: Memory,
    start: usize,
    end: usize,
}

impl ReceiveBuffer {
    pub fn new(len_bytes: usize) -> io::Result<Self> {
        Ok(ReceiveBuffer { bytes: Memory::new(len_bytes)?, start: 0, end: 0 })
    }

    #[inline(always)]
    pub fn available(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub fn available_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    /// Consumes `len_bytes` of [`available`](Self::available), which has at least that many.
    #[inline(always)]
    pub fn consume(&mut self, len_bytes: usize) {
        self.start += len_bytes;
        debug_assert!(self.start <= self.end);
    }

    /// Waits for more bytes; returns their number, 0 at the end of the stream.
    ///
    /// Moves the remaining bytes to the front first: at most an incomplete page or header, because everything
    /// complete is consumed before more is read.
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

/// Replies that are not sent yet: `bytes[..len]`.
pub(super) struct SendBuffer {
    bytes: Memory,
    len: usize,
}

impl SendBuffer {
    pub fn new(capacity_bytes: usize) -> io::Result<Self> {
        Ok(SendBuffer { bytes: Memory::new(capacity_bytes)?, len: 0 })
    }

    pub fn filled(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    #[inline(always)]
    pub fn capacity_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns room for `len_bytes`, which must not exceed the capacity; sends the unsent bytes first if
    /// necessary. The room counts as filled; [`retract`](Self::retract) gives it back.
    pub fn room(&mut self, stream: &mut impl Write, len_bytes: usize) -> io::Result<&mut [u8]> {
        if len_bytes > self.bytes.len() - self.len {
            self.flush(stream)?;
        }
        let start = self.len;
        self.len += len_bytes;
        Ok(&mut self.bytes[start..self.len])
    }

    #[inline(always)]
    pub fn retract(&mut self, len_bytes: usize) {
        self.len -= len_bytes;
    }

    /// Adds `bytes`; if they exceed the capacity, sends the unsent bytes, then `bytes`.
    pub fn put(&mut self, stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.capacity_bytes() {
            self.flush(stream)?;
            return stream.write_all(bytes);
        }
        self.room(stream, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    pub fn flush(&mut self, stream: &mut impl Write) -> io::Result<()> {
        if self.len > 0 {
            stream.write_all(&self.bytes[..self.len])?;
            self.len = 0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The first clients get the largest buffers, later ones smaller ones, and the memory for requests is
    /// left; a client that leaves makes room.
    #[test]
    fn buffers_get_smaller_and_leave_memory_for_requests() {
        for tls in [false, true] {
            let budget = Budget::new(SHARED_BYTES);
            let mut clients: Vec<_> = (0..1000).map(|_| Buffers::of_client(&budget, tls).unwrap()).collect();
            let sizes: Vec<usize> = clients.iter().map(Buffers::len_bytes).collect();
            assert!(sizes.is_sorted_by(|one, next| one >= next), "{sizes:?}");
            assert_eq!((sizes[0], sizes[999]), (BUFFER_BYTES, MIN_BUFFER_BYTES));
            let large = sizes.iter().filter(|size| **size == BUFFER_BYTES).count();
            assert_eq!(large, if tls { 38 } else { 91 });
            assert!(budget.take(TASK_BYTES).is_some());
            clients.remove(0);
            assert_eq!(Buffers::of_client(&budget, tls).unwrap().len_bytes(), BUFFER_BYTES);
        }
        let nothing = Budget::new(0);
        assert_eq!(Buffers::of_client(&nothing, true).unwrap().len_bytes(), MIN_BUFFER_BYTES);
    }

    #[test]
    fn memory_is_zeros_whatever_its_length() {
        for len_bytes in [0, 1, MIN_MAPPED_BYTES - 1, MIN_MAPPED_BYTES, MIN_MAPPED_BYTES + 1, 1 << 20] {
            let mut memory = Memory::new(len_bytes).unwrap();
            assert!(memory.len() == len_bytes && memory.iter().all(|byte| *byte == 0));
            memory.fill(1);
        }
        assert!(Memory::new(usize::MAX / 4).is_err());
    }
}
