//! Requests that outlive the process that received them, where the kernel cannot send them again (before
//! Linux 6.9).
//!
//! A file of shared memory has for each thread a buffer, in which its requests arrive, and a word for the
//! outcome of the request there: 0, or [`DECIDED`] and the errno of the reply. A thread has one request at a
//! time, which stays in its buffer until it was answered:
//!
//! 1. The thread clears the length in the buffer's first bytes, then the outcome: nothing is there.
//! 2. The kernel copies a request to the buffer, length and all. It copies all of it or nothing: the buffer
//!    is resident.
//! 3. The request is carried out.
//! 4. The outcome is stored, then the reply is sent, and all begins anew.
//!
//! If the process dies, the next one looks into each buffer. A request without an outcome was not answered,
//! so nobody could have changed what it changes and rely on it: it is carried out, again if need be. One with
//! an outcome may have been answered, and its pages may have been written to since: it is only answered. If
//! it was already, the kernel does not know it any more, and refuses the reply.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;

use uzram::mem::{MemoryFile, Table, ZeroedPages};
use uzram::sync::{Arc, AtomicU64, Ordering, fence};
use uzram::{Error, Result};

use super::proto::{FUSE_MIN_READ_BUFFER, WRITE_HEADERS_BYTES, fuse_in_header};

/// The name of the file, which `/proc/PID/maps` shows.
const NAME: &str = "uzram-requests";
/// The bit of an outcome that says that there is one.
const DECIDED: u64 = 1 << 32;
/// Words from one thread's outcome to the next: a cache line.
const LINE_WORDS: usize = 8;

#[derive(Debug)]
pub(super) struct Received {
    file: Arc<MemoryFile>,
    threads: usize,
    buffer_bytes: usize,
}

impl Received {
    /// Makes memory for requests of `max_io_bytes`.
    pub fn new(threads: usize, max_io_bytes: usize) -> Result<Self> {
        let len = outcomes_bytes(threads) + threads * buffer_bytes(max_io_bytes);
        Received::of(MemoryFile::create(NAME, len as u64)?, threads, max_io_bytes)
    }

    /// Opens memory that [`Received::new`] made, with the same numbers, in this process or another. Errors:
    /// `Invalid` for any other file.
    pub fn from_fd(fd: OwnedFd, threads: usize, max_io_bytes: usize) -> Result<Self> {
        Received::of(MemoryFile::from_fd(fd)?, threads, max_io_bytes)
    }

    fn of(file: Arc<MemoryFile>, threads: usize, max_io_bytes: usize) -> Result<Self> {
        let buffer_bytes = buffer_bytes(max_io_bytes);
        if file.len_bytes() != (outcomes_bytes(threads) + threads * buffer_bytes) as u64 {
            return Err(Error::invalid("the descriptor is not of the requests of this connection"));
        }
        Ok(Received { file, threads, buffer_bytes })
    }

    pub fn outcomes(&self) -> Result<Outcomes> {
        let region = self.file.region(0, outcomes_bytes(self.threads) as u64)?;
        let words = Table::<AtomicU64>::new_in(Some(&region), self.threads * LINE_WORDS)?;
        words.populate()?;
        lock(ptr::from_ref(&words[0]).cast(), words.max_bytes());
        Ok(Outcomes { words })
    }

    /// Maps a thread's buffer, resident and locked.
    ///
    /// # Safety
    /// `thread` has no other buffer in any process that runs: the process before is dead.
    pub unsafe fn buffer(&self, thread: usize) -> Result<ZeroedPages> {
        let start = outcomes_bytes(self.threads) + thread * self.buffer_bytes;
        let region = self.file.region(start as u64, self.buffer_bytes as u64)?;
        // SAFETY: nobody else writes to it (the caller's promise).
        let buffer = unsafe { ZeroedPages::of_region(&region)? };
        buffer.populate()?;
        lock(buffer.as_ptr(), buffer.len());
        Ok(buffer)
    }
}

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

pub(super) fn buffer_bytes(max_io_bytes: usize) -> usize {
    let page = rustix::param::page_size();
    page + max_io_bytes.next_multiple_of(page).max(FUSE_MIN_READ_BUFFER)
}

/// Returns where requests begin in a buffer: so that the data of a write begin a page.
pub(super) fn request_start() -> usize {
    rustix::param::page_size() - WRITE_HEADERS_BYTES
}

fn outcomes_bytes(threads: usize) -> usize {
    let bytes = threads * LINE_WORDS * size_of::<AtomicU64>();
    bytes.next_multiple_of(rustix::param::page_size())
}

pub(super) struct Outcomes {
    words: Table<AtomicU64>,
}

impl Outcomes {
    /// Stores the errno of the reply that is about to be sent; 0 for success.
    pub fn decide(&self, thread: usize, errno: i32) {
        self.words[thread * LINE_WORDS].store(DECIDED | u64::from(errno as u32), Ordering::Release);
    }

    /// Returns the errno of a reply that may have been sent; `None` if none was.
    pub fn decided(&self, thread: usize) -> Option<i32> {
        let word = self.words[thread * LINE_WORDS].load(Ordering::Acquire);
        (word & DECIDED != 0).then_some(word as u32 as i32)
    }

    /// Clears the request in `room` and its outcome.
    pub fn clear(&self, thread: usize, room: &mut [u8]) {
        for byte in room.iter_mut().take(size_of::<u32>()) {
            // SAFETY: a reference to the byte. The store must not be left out, although the kernel overwrites
            // it.
            unsafe { ptr::write_volatile(byte, 0) };
        }
        fence(Ordering::Release);
        self.words[thread * LINE_WORDS].store(0, Ordering::Release);
    }
}

/// Returns the length of the request in a thread's room; `None` if there is none.
pub(super) fn request_len(room: &[u8]) -> Option<usize> {
    let len = u32::from_ne_bytes(*room.first_chunk()?) as usize;
    (size_of::<fuse_in_header>()..=room.len()).contains(&len).then_some(len)
}

pub(super) fn lock(start: *const u8, len: usize) {
    // SAFETY: locking changes no contents. The system refuses addresses where nothing is mapped, and more
    // memory than a user may lock; it then stays as it is.
    let _ = unsafe { rustix::mm::mlock(start.cast_mut().cast(), len) };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const MAX_IO_BYTES: usize = 16 << 10;

    #[test]
    fn a_request_and_its_outcome_are_found_again() {
        let received = Received::new(2, MAX_IO_BYTES).unwrap();
        let of = |fd: BorrowedFd<'_>, threads| {
            Received::from_fd(fd.try_clone_to_owned().unwrap(), threads, MAX_IO_BYTES)
        };
        assert!(of(received.as_fd(), 3).is_err());
        let outcomes = received.outcomes().unwrap();
        // SAFETY: each buffer is mapped once at a time.
        let mut buffer = unsafe { received.buffer(1).unwrap() };
        let room = &mut buffer[request_start()..];
        assert_eq!((request_len(room), outcomes.decided(1)), (None, None));
        room[..4].copy_from_slice(&80u32.to_ne_bytes());
        room[79] = 7;
        outcomes.decide(1, libc::ENOSPC);
        drop((buffer, outcomes));

        let again = of(received.as_fd(), 2).unwrap();
        let outcomes = again.outcomes().unwrap();
        // SAFETY: as above.
        let mut buffer = unsafe { again.buffer(1).unwrap() };
        let room = &mut buffer[request_start()..];
        assert_eq!((request_len(room), room[79]), (Some(80), 7));
        assert_eq!((outcomes.decided(0), outcomes.decided(1)), (None, Some(libc::ENOSPC)));
        outcomes.clear(1, room);
        assert_eq!((request_len(room), outcomes.decided(1)), (None, None));
        outcomes.decide(1, 0);
        assert_eq!(outcomes.decided(1), Some(0));
    }

    #[test]
    fn no_length_leads_out_of_the_buffer() {
        let mut room = vec![0; 100];
        for (len, wanted) in
            [(0, None), (39, None), (40, Some(40)), (100, Some(100)), (101, None), (u32::MAX, None)]
        {
            room[..4].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(request_len(&room), wanted, "{len}");
        }
        assert_eq!(request_len(&room[..3]), None);
    }
}
