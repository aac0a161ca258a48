//! [`FileBacking`]: a regular file or a block device, and which engine moves the bytes.
//!
//! - `open.rs`: finds or makes the file, and what can be done with it
//! - `claim.rs`: whether it may be taken
//! - `mark.rs`: how uzram knows its own
//! - `engine.rs`: what the engines share
//! - `uring.rs` and `threads.rs`: the engines

mod claim;
mod engine;
mod mark;
mod open;
mod threads;
mod uring;

use std::path::PathBuf;

use rustix::fs::FallocateFlags;

use super::{Backing, Buffer, Direction, SETTING, Transfer};
use crate::base::error::{Error, Result};
use crate::base::sync::Arc;
use engine::Target;
use open::Opened;
use threads::Threads;
use uring::Uring;

#[cfg(test)]
pub(crate) use engine::PanicPoint;
pub use mark::{MARK_BYTES, Mark};

/// The most transfers of one backing that the system may be given at a time.
pub const MAX_QUEUE_DEPTH: usize = 1024;

/// What moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// [`Engine::Uring`] where the system permits it, else [`Engine::Threads`].
    #[default]
    Auto,
    /// io_uring, from Linux 5.10 on. Containers often forbid it.
    Uring,
    /// A few threads that read and write.
    Threads,
}

/// Which file, and how it is used.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// A regular file, which is made if there is none, or a block device.
    pub path: PathBuf,
    /// How much of it is used, in bytes, beside the header; none for all that is there. A file that is shorter is
    /// extended, one that is longer keeps its length.
    pub size_bytes: Option<u64>,
    /// What moves the bytes.
    pub engine: Engine,
    /// How many transfers the system is given at a time, up to [`MAX_QUEUE_DEPTH`]. Others wait.
    pub queue_depth: usize,
    /// Past the page cache (O_DIRECT) where the file system can do that.
    pub direct: bool,
    /// Takes a file or device that holds something else than a backing of uzram: what it holds is lost.
    pub force: bool,
}

impl FileOptions {
    /// All of the file at `path`, past the page cache.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        FileOptions {
            path: path.into(),
            size_bytes: None,
            engine: Engine::Auto,
            queue_depth: 64,
            direct: true,
            force: false,
        }
    }
}

/// A [`Backing`] on a file or block device, which belongs to it alone while it exists: another one of the same
/// file is refused.
pub struct FileBacking {
    // Before the target, which they use.
    mover: Backend,
    target: Arc<Target>,
    opened: Opened,
    fallback: Option<Error>,
}

enum Backend {
    Uring(Uring),
    Threads(Threads),
}

impl FileBacking {
    /// Opens or makes it. Its first block becomes uzram's header; of the rest nothing is kept, and nothing cleared.
    ///
    /// # Errors
    /// `NotFound`; `Permission`, also when other users may read or write it, or may have put a symbolic link into its
    /// path; `Busy` when it is in use, by another backing or otherwise, and without [`FileOptions::force`] when it
    /// holds something else; `NoSpace` when the file system has not that much room; `Invalid` for what is no file or
    /// block device, or has no room for a block; `Unsupported` when io_uring was asked for and is not to be had; `NoMemory`.
    pub fn open(options: &FileOptions) -> Result<Self> {
        if options.queue_depth == 0 || options.queue_depth > MAX_QUEUE_DEPTH {
            let what =
                format!("a queue depth of {}: 1 to {MAX_QUEUE_DEPTH} are possible", options.queue_depth);
            return Err(Error::invalid(what).with_setting(SETTING));
        }
        let (target, opened) = open::open(options)?;
        let target = Arc::new(target);
        let (mover, fallback) = match Self::start_engine(options, &target) {
            Ok(started) => started,
            Err(error) => {
                opened.undo();
                return Err(error);
            }
        };
        Ok(FileBacking { mover, target, opened, fallback })
    }

    fn start_engine(options: &FileOptions, target: &Arc<Target>) -> Result<(Backend, Option<Error>)> {
        let depth = options.queue_depth;
        let uring = || Uring::new(Arc::clone(target), depth).map(Backend::Uring);
        let threads = || Threads::new(Arc::clone(target), depth).map(Backend::Threads);
        match options.engine {
            Engine::Uring => Ok((uring()?, None)),
            Engine::Threads => Ok((threads()?, None)),
            Engine::Auto => match uring() {
                Ok(mover) => Ok((mover, None)),
                Err(refused) => Ok((threads()?, Some(refused))),
            },
        }
    }

    /// What moves the bytes: never [`Engine::Auto`].
    pub fn engine(&self) -> Engine {
        match self.mover {
            Backend::Uring(_) => Engine::Uring,
            Backend::Threads(_) => Engine::Threads,
        }
    }

    /// Why [`Engine::Auto`] became [`Engine::Threads`].
    pub fn fallback(&self) -> Option<&Error> {
        self.fallback.as_ref()
    }

    /// Whether bytes go past the page cache. If not, the file system can not do that, or was not to.
    pub fn is_direct(&self) -> bool {
        self.opened.is_direct
    }

    /// Whether all of the space is this backing's already. If not, a write may find the file system full.
    pub fn is_reserved(&self) -> bool {
        self.opened.is_reserved
    }

    /// As if the file system could not reserve space.
    #[cfg(test)]
    pub(super) fn pretend_sparse(&mut self, sparse: bool) {
        self.opened.is_reserved = !sparse;
    }

    /// Has the next transfer panic.
    #[cfg(test)]
    pub(crate) fn panic_in_next_transfer(&self, panic_point: PanicPoint) {
        *self.target.panic_point.lock().expect("no panic under it") = Some(panic_point);
    }

    /// Whether it is a block device, and not a file.
    pub fn is_block_device(&self) -> bool {
        self.opened.is_block_device
    }
}

impl Backing for FileBacking {
    fn len_bytes(&self) -> u64 {
        self.target.len_bytes
    }

    /// What the system says about O_DIRECT, if it says so, else 4096. With less than 4096, writes that are no
    /// multiples of that may be slower.
    fn block_bytes(&self) -> usize {
        self.target.block_bytes
    }

    fn start(&self, transfer: Transfer) {
        match &self.mover {
            Backend::Uring(uring) => uring.start(transfer),
            Backend::Threads(threads) => threads.start(transfer),
        }
    }

    /// By the calling thread: it is not worth waking another one up, which would wake this one up.
    fn carry_out(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        mut buffer: Buffer,
    ) -> (Buffer, Result<()>) {
        let result = self.target.carry_out(direction, offset, len_bytes, &mut buffer);
        (buffer, result)
    }

    /// Punches a hole into a sparse file, and discards on a block device. A file whose space is reserved keeps it.
    fn discard(&self, offset: u64, len_bytes: u64) {
        let inside = offset.checked_add(len_bytes).is_some_and(|end| end <= self.target.len_bytes);
        if len_bytes == 0 || !inside || (self.opened.is_reserved && !self.opened.is_block_device) {
            return;
        }
        // A file system or device that can not do it keeps the bytes.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let start = self.target.start_bytes + offset;
        let _ = rustix::fs::fallocate(&self.target.fd, hole, start, len_bytes);
    }
}
