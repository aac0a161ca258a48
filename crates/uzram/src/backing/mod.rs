//! Backings, where cold pages are written to: bytes by offset, on a file or a block device (remote stores later).
//! Nothing here knows what the bytes mean: pages, extents, checksums and slots belong to the callers.
//!
//! A [`Transfer`] owns its [`Buffer`]. The backing that carries out the transfer owns the buffer until the kernel no
//! longer accesses it, and then passes it to the transfer's [`Completion`] with the result. No thread can therefore
//! read a partly filled buffer, or free one that the kernel still writes to.
//!
//! - `buffers.rs`: the memory of transfers, allocated in advance
//! - `waiter.rs`: waiting for a transfer
//! - `file/`: a file or block device ([`FileBacking`]), by io_uring or by threads
//! - `faulty.rs`: a backing with injected faults ([`FaultyBacking`])
//!
//! In the steady state, when the queues have grown to the number of transfers in flight, a transfer that succeeds
//! allocates nothing.
//!
//! Locks: `backing queue` (transfers that wait for a thread; the result of a waiter) and `backing buffers` (the free
//! buffers). Both are leaves: no system call is made, no completion called and no other lock taken under them.
//! Buffers may be taken and given back under any lock of the engine but a wait table's.

mod buffers;
#[cfg(not(loom))]
mod faulty;
#[cfg(not(loom))]
mod file;
mod waiter;

#[cfg(all(test, not(loom)))]
mod tests;

pub use buffers::{Buffer, Buffers, MAX_BUFFER_BYTES};
#[cfg(not(loom))]
pub use faulty::{Fault, FaultKind, Faults, FaultyBacking};
#[cfg(not(loom))]
pub use file::{Engine, FileBacking, FileOptions, MARK_BYTES, MAX_QUEUE_DEPTH, Mark};

#[cfg(all(test, not(loom)))]
pub(crate) use file::PanicPoint;

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::AssertUnwindSafe;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;

/// The attribute that errors of this layer name.
const SETTING: &str = "backing_dev";
/// The attribute that errors name if [`FileOptions::force`] would help.
#[cfg(not(loom))]
const FORCE_SETTING: &str = "backing_force";

/// Storage of bytes by offset, outside of memory.
///
/// Transfers in flight together happen in any order, even if they overlap. Dropping a backing waits for all transfers
/// that were started. A completion must therefore not drop the last handle to its backing: it would wait for itself.
pub trait Backing: Send + Sync {
    /// Returns the size in bytes, a multiple of [`Backing::block_bytes`].
    fn len_bytes(&self) -> u64;

    /// Returns the alignment of offsets and lengths, a power of two.
    fn block_bytes(&self) -> usize;

    /// Starts a transfer and returns without waiting for it, or for room in a queue. Its completion is called exactly
    /// once, by another thread and with no lock held, even if the transfer cannot be carried out.
    fn start(&self, transfer: Transfer);

    /// Carries out a transfer and waits for it, however many are queued. Must not be called by a completion, which
    /// other transfers wait for.
    ///
    /// # Errors
    /// The result that a completion would get. The buffer is returned in any case.
    fn carry_out(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        buffer: Buffer,
    ) -> (Buffer, Result<()>) {
        waiter::wait_for(|completion| {
            self.start(Transfer { direction, offset, len_bytes, buffer, token: 0, completion });
        })
    }

    /// Discards bytes: until they are written again, a read returns zeros, the old bytes, or a mix. Gives the space
    /// back to the system, unless it is reserved for this backing. It may wait for the system.
    fn discard(&self, offset: u64, len_bytes: u64);
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the backing into the buffer.
    Read,
    /// From the buffer to the backing.
    Write,
}

/// A transfer of bytes between the start of a buffer and a backing.
pub struct Transfer {
    /// The direction.
    pub direction: Direction,
    /// The offset on the backing, in bytes.
    pub offset: u64,
    /// The number of bytes, more than 0.
    pub len_bytes: usize,
    /// The buffer to read into or to write from.
    pub buffer: Buffer,
    /// Passed to the completion, to identify the transfer.
    pub token: u64,
    /// Called with the result.
    pub completion: Arc<dyn Completion>,
}

/// A callback for the end of transfers.
pub trait Completion: Send + Sync {
    /// Called when the transfer of `token` has ended; `buffer` is the transfer's. After a failed read the contents of
    /// the buffer are undefined; after a failed write those of the backing are, within the transfer's range.
    ///
    /// Other transfers may wait while this runs. It may start new ones. A panic in it does not affect others.
    fn done(&self, token: u64, buffer: Buffer, result: Result<()>);
}

/// A transfer that its backing has accepted. Dropping it calls the completion, with its result, or with an error if a
/// panic ended the thread that carried it out, so that no thread waits for it forever.
struct Started {
    transfer: ManuallyDrop<Transfer>,
    /// `None` until it is carried out.
    result: Option<Result<()>>,
}

impl Started {
    fn new(transfer: Transfer) -> Self {
        Started { transfer: ManuallyDrop::new(transfer), result: None }
    }

    /// Ends the transfer. Must be called with no lock held.
    fn finish(mut self, result: Result<()>) {
        self.result = Some(result);
    }
}

impl Deref for Started {
    type Target = Transfer;

    fn deref(&self) -> &Transfer {
        &self.transfer
    }
}

impl DerefMut for Started {
    fn deref_mut(&mut self) -> &mut Transfer {
        &mut self.transfer
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once, and the transfer is not used after this.
        let transfer = unsafe { ManuallyDrop::take(&mut self.transfer) };
        transfer.finish(self.result.take().unwrap_or_else(|| Err(given_up())));
    }
}

/// Returns the error of a transfer that was not carried out because of a panic.
fn given_up() -> Error {
    Error::new(ErrorKind::Io, "a defect of uzram ended a transfer to the backing device")
        .with_setting(SETTING)
}

/// Returns the error of all transfers after a panic has ended a thread of their backing.
fn dead(why: &str) -> Error {
    let what = format!("the backing device is no longer used: {why}. Reset the device to go on");
    Error::new(ErrorKind::Io, what).with_setting(SETTING)
}

impl Transfer {
    /// Calls the completion. Must be called with no lock held.
    fn finish(self, result: Result<()>) {
        let Transfer { completion, token, buffer, .. } = self;
        // The panic hook has reported a panic; other transfers go on.
        let _ = std::panic::catch_unwind(AssertUnwindSafe(move || completion.done(token, buffer, result)));
    }
}
