//! [`FileBacking`]: a regular file or a block device, and the engine that carries out its transfers, by
//! io_uring or by threads.

pub(super) mod engine;
mod mark;
mod open;
mod uring;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::FallocateFlags;

use super::threads::Threads;
use super::{Blocks, Buffer, Direction, Done, Start, Started, Transfer};
use crate::base::error::{Error, Result};
use crate::base::sync::Arc;
use engine::{QUEUE_DEPTH, Target};
use open::Opened;
pub use open::{Engine, FileOptions};
use uring::Uring;

pub use mark::{MARK_BYTES, Mark};

const THREADS: usize = 4;

/// [`Blocks`] on a file or block device, which it locks: opening the same file again is refused.
pub struct FileBacking {
    // Dropped before `target`, which it uses.
    start: Start,
    engine: Engine,
    target: Arc<Target>,
    opened: Opened,
    fallback: Option<Error>,
}

impl FileBacking {
    /// Opens or creates a file, or opens a block device. Its first block becomes uzram's header; the other
    /// bytes are neither used nor cleared.
    ///
    /// # Errors
    /// `NotFound`; `Permission`, also if other users may read or write it, or may have put a symbolic link
    /// into its path; `Busy` if it is in use, or without [`FileOptions::force`] if it holds other data;
    /// `NoSpace` if the file system is too full; `Invalid` if it is neither a file nor a block device, or has
    /// no room for a block; `Unsupported` if [`Engine::Uring`] is not available; `NoMemory`.
    pub fn open(options: &FileOptions) -> Result<Self> {
        Self::start(open::open(options)?, options.engine)
    }

    /// Goes on with the open file of a [`FileBacking`] of `len_bytes`, by a duplicate of its descriptor, in
    /// this process or another. `name` names it in messages.
    ///
    /// The transfers of a dead process must not go on: its [`Engine`] is [`Engine::Threads`], with which they
    /// end before it is waited for. So is the engine of this one.
    /// Fails with `Invalid` for a descriptor of anything else, or another length; `Busy` if the lock was
    /// given up and another process has it; `NoSpace`; `NoMemory`.
    pub fn from_descriptor(name: &str, fd: OwnedFd, len_bytes: u64) -> Result<Self> {
        Self::start(open::reopen(fd, Path::new(name), len_bytes)?, Engine::Threads)
    }

    /// Removes the file, if it was created: for who gives the backing up before its first use.
    pub(crate) fn undo(&self) {
        self.opened.undo();
    }

    /// Returns the descriptor. A duplicate of it keeps the file locked after this backing was dropped, and a
    /// block device claimed, unless [`FileBacking::unlock_when_dropped`] was called; a block device until the
    /// duplicate is closed.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.target.fd.as_fd()
    }

    /// Sets whether the lock is given up when this backing is dropped and its transfers have ended, whoever
    /// else has its descriptor. It is for one that was opened. One that was made from a descriptor stays
    /// locked as long as a duplicate of that is open.
    pub fn unlock_when_dropped(&self, is_so: bool) {
        self.target.unlocks.set(is_so.into());
    }

    fn start((target, opened): (Target, Opened), engine: Engine) -> Result<Self> {
        let target = Arc::new(target);
        let uring = || -> Result<(Start, _, _)> {
            let uring = Uring::new(Arc::clone(&target))?;
            Ok((Box::new(move |transfer| uring.start(transfer)), Engine::Uring, None))
        };
        let threads = |fallback| -> Result<(Start, _, _)> {
            let target = Arc::clone(&target);
            let carry_out = move |mut started: Started, usable: Result<()>| {
                let Transfer { direction, offset, len_bytes, buffer, .. } = &mut *started;
                let result = usable.and_then(|()| target.carry_out(*direction, *offset, *len_bytes, buffer));
                started.finish(result);
            };
            let threads = Threads::new("uzram-back", THREADS, QUEUE_DEPTH, Box::new(carry_out))?;
            Ok((Box::new(move |transfer| threads.start(transfer)), Engine::Threads, fallback))
        };
        let started = match engine {
            Engine::Uring => uring(),
            Engine::Threads => threads(None),
            Engine::Auto => uring().or_else(|refused| threads(Some(refused))),
        };
        let (start, engine, fallback) = started.inspect_err(|_| opened.undo())?;
        Ok(FileBacking { start, engine, target, opened, fallback })
    }

    /// Returns the engine in use, never [`Engine::Auto`].
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Returns why [`Engine::Auto`] became [`Engine::Threads`], if it did.
    pub fn fallback(&self) -> Option<&Error> {
        self.fallback.as_ref()
    }

    /// Returns whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.opened.is_direct
    }

    /// Returns whether all of the space is reserved. If not, a write may find the file system full.
    pub fn is_reserved(&self) -> bool {
        self.opened.is_reserved
    }

    #[cfg(test)]
    pub(super) fn pretend_sparse(&mut self, sparse: bool) {
        self.opened.is_reserved = !sparse;
    }

    #[cfg(test)]
    pub(super) fn panic_in_next_transfer(&self, panic_point: engine::PanicPoint) {
        *self.target.panic_point.lock().expect("no panic under it") = Some(panic_point);
    }
}

impl Blocks for FileBacking {
    fn len_bytes(&self) -> u64 {
        self.target.len_bytes
    }

    /// Returns the system's alignment for O_DIRECT if known, else 4096. If it is below 4096, writes that are
    /// not multiples of 4096 may be slower.
    fn block_bytes(&self) -> usize {
        self.target.block_bytes
    }

    fn start(&self, transfer: Transfer) {
        (self.start)(transfer);
    }

    /// Carries out the transfer in the calling thread, which saves two thread switches.
    fn carry_out(&self, direction: Direction, offset: u64, len_bytes: usize, mut buffer: Buffer) -> Done {
        let result = self.target.carry_out(direction, offset, len_bytes, &mut buffer);
        (buffer, result)
    }

    /// Punches a hole into a sparse file, or discards on a block device. A file with reserved space keeps it.
    fn discard(&self, offset: u64, len_bytes: u64) {
        let inside = offset.checked_add(len_bytes).is_some_and(|end| end <= self.target.len_bytes);
        if len_bytes == 0 || !inside || (self.opened.is_reserved && !self.opened.is_block_device) {
            return;
        }
        // A file system or device that does not support it keeps the bytes.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let start = self.target.start_bytes + offset;
        let _ = rustix::fs::fallocate(&self.target.fd, hole, start, len_bytes);
    }
}
