//! Where cold pages go: bytes by offset, on a file or a block device (on other machines one day). Nothing here
//! knows what the bytes are: pages, extents, checksums and slots belong to those who write them.
//!
//! A [`Transfer`] takes its [`Buffer`] with it. Whoever carries it out owns the buffer until the kernel no longer
//! touches it, and hands it back with the result to the transfer's [`Completion`]. So nobody can read a buffer
//! that is half full, or free one that the kernel still writes to.
//!
//! - `buffers.rs`: the memory of transfers, made beforehand
//! - `waiter.rs`: waiting for a transfer
//! - `file/`: a file or block device ([`FileBacking`]), by io_uring or by threads
//! - `faulty.rs`: a backing that fails as it is told to ([`FaultyBacking`])
//!
//! Once as many transfers have been in flight as ever will be, none of this allocates for a transfer that
//! succeeds.
//!
//! Locks: `backing queue` (transfers that wait for a thread; the result of a waiter) and `backing buffers` (which
//! buffers are free). Both are leaves: no system call is made, no completion told and no other lock taken under
//! them. Buffers may be taken and given back under any lock of the engine but a wait table's.

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
/// The attribute that errors name where only [`FileOptions::force`] would do.
#[cfg(not(loom))]
const FORCE_SETTING: &str = "backing_force";

/// Bytes by offset, kept elsewhere than in memory.
///
/// Transfers that are in flight together happen in any order, also where they overlap. Dropped, a backing first
/// carries out all that was started. That takes as long as it takes, so the last handle to a backing is not to be
/// dropped by one of its completions, which could not wait for itself.
pub trait Backing: Send + Sync {
    /// How many bytes there are: a multiple of [`Backing::block_bytes`].
    fn len_bytes(&self) -> u64;

    /// What offsets and lengths must be multiples of: a power of two.
    fn block_bytes(&self) -> usize;

    /// Starts a transfer and returns without waiting for it, or for room. Its completion is told exactly once,
    /// by another thread and with no lock held, also of a transfer that can not be carried out.
    fn start(&self, transfer: Transfer);

    /// Carries out a transfer and waits for it, however many are queued. Not for a completion, which others wait
    /// for.
    ///
    /// # Errors
    /// What the completion would have been told. The buffer comes back in any case.
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

    /// Nobody needs these bytes any more: whoever reads them before they are written again gets zeros, what was
    /// there, or some of both. The space goes back to the system where that is possible and was not promised to
    /// this backing. It may wait for the system.
    fn discard(&self, offset: u64, len_bytes: u64);
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the backing into the buffer.
    Read,
    /// From the buffer to the backing.
    Write,
}

/// Bytes to move between a buffer's start and a backing.
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// Where on the backing, in bytes.
    pub offset: u64,
    /// How many bytes, more than 0.
    pub len_bytes: usize,
    /// From where, or where to.
    pub buffer: Buffer,
    /// What the completion is told, to know which transfer it is.
    pub token: u64,
    /// Who is told of the result.
    pub completion: Arc<dyn Completion>,
}

/// Who is told how a transfer ended.
pub trait Completion: Send + Sync {
    /// The transfer of `token` has ended: `buffer` is the one it was given. After an error of a read its contents
    /// are anything; after an error of a write those of the backing are, within the transfer's range.
    ///
    /// Other transfers may wait while this runs. It may start new ones. A panic in it reaches nobody else.
    fn done(&self, token: u64, buffer: Buffer, result: Result<()>);
}

/// A transfer that its backing has taken. Dropped, it ends: with its result, or with an error where a panic ended who
/// carried it out, so that nobody waits for it for ever.
struct Started {
    transfer: ManuallyDrop<Transfer>,
    /// None until it is carried out.
    result: Option<Result<()>>,
}

impl Started {
    fn new(transfer: Transfer) -> Self {
        Started { transfer: ManuallyDrop::new(transfer), result: None }
    }

    /// Ends it. Called with no lock held.
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
        // SAFETY: it is not used after this.
        let transfer = unsafe { ManuallyDrop::take(&mut self.transfer) };
        transfer.finish(self.result.take().unwrap_or_else(|| Err(given_up())));
    }
}

/// What a transfer ends with that a panic kept from being carried out.
fn given_up() -> Error {
    Error::new(ErrorKind::Io, "a defect of uzram ended a transfer to the backing device")
        .with_setting(SETTING)
}

/// What transfers end with once a panic has ended a thread of their backing.
fn dead(why: &str) -> Error {
    let what = format!("the backing device is not used any more: {why}. Reset the device to go on");
    Error::new(ErrorKind::Io, what).with_setting(SETTING)
}

impl Transfer {
    /// Tells the completion. Called with no lock held.
    fn finish(self, result: Result<()>) {
        let Transfer { completion, token, buffer, .. } = self;
        // The panic hook has reported it; the transfers of others go on.
        let _ = std::panic::catch_unwind(AssertUnwindSafe(move || completion.done(token, buffer, result)));
    }
}
