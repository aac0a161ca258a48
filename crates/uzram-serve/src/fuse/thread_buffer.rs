//! The memory of a thread that serves the kernel: one buffer for reads, which the thread keeps, and the pages in which
//! requests arrive. Reads and writes allocate nothing.

use std::cell::{Cell, RefCell};

use fuser::{Errno, ReplyData};
use uzram::mem::{ZeroedPages, leave_out_of_cores};

thread_local! {
    /// The buffer for this thread's reads.
    static BUFFER: RefCell<Option<ZeroedPages>> = const { RefCell::new(None) };
    /// Start and end of the pages in which this thread's requests have their data.
    static RECEIVED: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Lends `len` bytes of this thread's buffer to `reply_with`, which replies to a read from them. Replies with an error
/// when there is no memory for them.
pub(super) fn reply_from_buffer(len: usize, reply: ReplyData, reply_with: impl FnOnce(&mut [u8], ReplyData)) {
    BUFFER.with_borrow_mut(|buffer| match room_in(buffer, len) {
        Ok(room) => reply_with(room, reply),
        Err(errno) => reply.error(errno),
    });
}

/// Touches every page of this thread's buffer for reads of `len` bytes, so that no read waits for memory later.
pub(super) fn touch(len: usize) -> Result<(), Errno> {
    BUFFER.with_borrow_mut(|buffer| room_in(buffer, len).map(|room| room.fill(0)))
}

/// Returns the first `len` bytes of a thread's buffer, which is allocated if it is missing or too small.
fn room_in(buffer: &mut Option<ZeroedPages>, len: usize) -> Result<&mut [u8], Errno> {
    if buffer.as_ref().is_none_or(|kept| kept.len() < len) {
        *buffer = Some(allocate(len.next_power_of_two())?);
    }
    Ok(buffer.as_mut().map_or(&mut [][..], |kept| &mut kept[..len]))
}

/// Allocates `len` zeroed bytes.
pub(super) fn allocate(len: usize) -> Result<ZeroedPages, Errno> {
    ZeroedPages::new(len).map_err(|_| Errno::ENOMEM)
}

/// Keeps this thread's received data out of core files. The FUSE library receives all of it into one buffer.
pub(super) fn keep_secret(data: &[u8]) {
    let (start, end) = (data.as_ptr().addr(), data.as_ptr().addr() + data.len());
    let (known_start, known_end) = RECEIVED.get();
    if start < known_start || known_end < end {
        leave_out_of_cores(data);
        RECEIVED.set((start, end));
    }
}
