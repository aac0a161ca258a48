//! The memory of a thread that serves the kernel: one buffer in which requests arrive, and one for the data
//! of replies, which the thread keeps. Reads and writes allocate nothing.
//!
//! Before swap depends on the threads, they are warmed up: each touches all memory that it will ever use.
//! There are as many files for that as threads, for writes of the longest request. Each write waits in its
//! thread for the others, so that every thread gets one: the write fills the thread's request buffer, and the
//! thread touches all other memory that it needs. A separate process writes to the files, as a process that
//! waits for itself in a system call cannot be killed.

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use uzram::mem::ZeroedPages;
use uzram::sync::{Condvar, Mutex};

use super::channel::Reply;
use super::received::{self, Outcomes, Received};

thread_local! {
    static BUFFER: RefCell<Option<ZeroedPages>> = const { RefCell::new(None) };
}

/// The buffers of a thread, resident before it has its first request. They are left out of core files.
pub(super) struct ThreadBuffers {
    requests: RequestBuffer,
    reads: ZeroedPages,
}

impl ThreadBuffers {
    /// Allocates buffers for requests of `max_io_bytes`.
    pub fn new(max_io_bytes: usize) -> Result<Self, Errno> {
        let pages = allocate(received::buffer_bytes(max_io_bytes))?;
        ThreadBuffers::of(RequestBuffer { pages, kept: None }, max_io_bytes)
    }

    /// As [`ThreadBuffers::new`], with the buffer for requests that outlives the process.
    ///
    /// # Safety
    /// As [`Received::buffer`].
    pub unsafe fn kept(
        received: &Received,
        outcomes: Arc<Outcomes>,
        thread: usize,
        max_io_bytes: usize,
    ) -> Result<Self, Errno> {
        // SAFETY: the caller's promise.
        let pages = unsafe { received.buffer(thread) }.map_err(|_| Errno::NOMEM)?;
        ThreadBuffers::of(RequestBuffer { pages, kept: Some((outcomes, thread)) }, max_io_bytes)
    }

    fn of(requests: RequestBuffer, max_io_bytes: usize) -> Result<Self, Errno> {
        Ok(ThreadBuffers { requests, reads: allocate(room_bytes(max_io_bytes))? })
    }

    /// Makes the buffer for reads this thread's own; returns the one for requests.
    pub fn enter(self) -> RequestBuffer {
        BUFFER.set(Some(self.reads));
        self.requests
    }
}

pub(super) struct RequestBuffer {
    pages: ZeroedPages,
    /// Where the outcome of the request is noted, and for which thread, if both outlive the process.
    kept: Option<(Arc<Outcomes>, usize)>,
}

impl RequestBuffer {
    /// Returns the request that a dead process left here, and its errno if it may have been answered.
    pub fn left(&self) -> Option<(&[u8], Option<i32>)> {
        let (outcomes, thread) = self.kept.as_ref()?;
        let room = &self.pages[received::request_start()..];
        Some((&room[..received::request_len(room)?], outcomes.decided(*thread)))
    }

    pub fn room(&mut self) -> &mut [u8] {
        let room = &mut self.pages[received::request_start()..];
        if let Some((outcomes, thread)) = &self.kept {
            outcomes.clear(*thread, room);
        }
        room
    }
}

fn room_bytes(len: usize) -> usize {
    len.next_power_of_two()
}

/// Lends `len` bytes of this thread's buffer to `reply_with`, which replies to a read from them. Replies with
/// an error when there is no memory for them.
pub(super) fn reply_from_buffer(len: usize, reply: Reply, reply_with: impl FnOnce(&mut [u8], Reply)) {
    BUFFER.with_borrow_mut(|buffer| match room_in(buffer, len) {
        Ok(room) => reply_with(room, reply),
        Err(errno) => reply.error(errno),
    });
}

/// Touches every page of this thread's buffer for reads of `len` bytes, so that no read waits for memory
/// later.
pub(super) fn touch(len: usize) -> Result<(), Errno> {
    BUFFER.with_borrow_mut(|buffer| room_in(buffer, len).map(|room| room.fill(0)))
}

/// Returns the first `len` bytes of a thread's buffer, which is allocated if it is missing or too small, as
/// that of a thread of a pool may be.
fn room_in(buffer: &mut Option<ZeroedPages>, len: usize) -> Result<&mut [u8], Errno> {
    if buffer.as_ref().is_none_or(|kept| kept.len() < len) {
        *buffer = Some(allocate(room_bytes(len))?);
    }
    Ok(buffer.as_mut().map_or(&mut [][..], |kept| &mut kept[..len]))
}

/// Allocates `len` bytes that stay resident: touches all of them, and locks them in memory if the system
/// allows it. A process killed during a page fault in the kernel's copy of a request would fail it.
fn allocate(len: usize) -> Result<ZeroedPages, Errno> {
    let mut pages = ZeroedPages::new(len).map_err(|_| Errno::NOMEM)?;
    pages.fill(0);
    received::lock(pages.as_ptr(), len);
    Ok(pages)
}

/// The most stack that a thread uses; compressors use the most.
const STACK_BYTES: usize = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct WarmUp {
    threads: usize,
    arrived: Mutex<usize>,
    all_arrived: Condvar,
}

impl WarmUp {
    pub fn new(threads: usize) -> Self {
        WarmUp { threads, arrived: Mutex::default(), all_arrived: Condvar::new() }
    }

    /// Touches the thread's stack and waits for the others; returns whether all arrived.
    pub fn arrive(&self) -> bool {
        touch_stack();
        let mut arrived = self.arrived.lock();
        *arrived += 1;
        if arrived.is_multiple_of(self.threads) {
            self.all_arrived.notify_all();
            return true;
        }
        let round = *arrived / self.threads;
        let is_alone = |arrived: &mut usize| *arrived / self.threads == round;
        let mut arrived = arrived.wait_while_for(&self.all_arrived, PATIENCE, is_alone);
        let is_left = is_alone(&mut arrived);
        *arrived -= usize::from(is_left);
        !is_left
    }
}

#[inline(never)]
pub(super) fn touch_stack() {
    let mut stack = [0u8; STACK_BYTES];
    black_box(&mut stack);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_arrive_or_none() {
        let warm_up = WarmUp::new(3);
        for _ in 0..2 {
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| warm_up.arrive())).collect();
                assert!(threads.into_iter().all(|thread| thread.join().unwrap_or(false)));
            });
        }
        assert!(!warm_up.arrive(), "the others never come");
        assert_eq!(*warm_up.arrived.lock(), 6);
    }
}
