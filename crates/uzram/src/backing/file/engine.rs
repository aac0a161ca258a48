//! Common parts of both engines: the open file, and the progress of a transfer.

use std::os::fd::OwnedFd;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::backing::{Buffer, Direction, SETTING};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Stamp;

/// The maximum number of transfers in flight; others wait. Small in tests, which start more.
pub(in crate::backing) const QUEUE_DEPTH: usize = if cfg!(test) { 8 } else { 64 };
/// How often a transfer is retried that was interrupted, or that the system lacked resources for.
const MAX_RETRIES: u32 = 1000;

#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backing) enum PanicPoint {
    Begin,
    Advance,
}

pub(super) struct Target {
    pub(super) fd: OwnedFd,
    /// Where the backing's bytes begin, after the header: a multiple of `block_bytes`. The sum with
    /// `len_bytes` is at most the maximum size of a file.
    pub(super) start_bytes: u64,
    pub(super) len_bytes: u64,
    pub(super) block_bytes: usize,
    /// Whether to give up the lock when this is closed: other processes may have the descriptor, and keep the
    /// file locked.
    pub(super) unlocks: Stamp,
    #[cfg(test)]
    pub(super) panic_point: std::sync::Mutex<Option<PanicPoint>>,
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.unlocks.get() > 0 {
            // A block device has no lock: it is claimed until its last descriptor is closed.
            let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
        }
    }
}

impl Target {
    pub(super) fn new(fd: OwnedFd, [start_bytes, len_bytes]: [u64; 2], block_bytes: usize) -> Self {
        Target {
            fd,
            start_bytes,
            len_bytes,
            block_bytes,
            unlocks: Stamp::default(),
            #[cfg(test)]
            panic_point: Default::default(),
        }
    }

    /// Begins a transfer, after checking that it is aligned and lies within the file and the buffer.
    pub(super) fn begin(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        buffer: &Buffer,
    ) -> Result<Progress> {
        #[cfg(test)]
        let panic_point = self.panic_point.lock().expect("no panic under it").take();
        #[cfg(test)]
        assert!(panic_point != Some(PanicPoint::Begin), "a test asked for it");
        if len_bytes == 0 || len_bytes > buffer.len() {
            return Err(Error::invalid("a transfer of no bytes, or of more bytes than its buffer has"));
        }
        if !offset.is_multiple_of(self.block_bytes as u64) || !len_bytes.is_multiple_of(self.block_bytes) {
            return Err(Error::invalid("a transfer that is not a multiple of the backing's blocks"));
        }
        let end = offset.checked_add(len_bytes as u64);
        if end.is_none_or(|end| end > self.len_bytes) {
            return Err(Error::new(ErrorKind::OutOfRange, "a transfer beyond the end of the backing"));
        }
        let start = self.start_bytes + offset;
        Ok(Progress {
            direction,
            start,
            len_bytes,
            done_bytes: 0,
            retries: 0,
            #[cfg(test)]
            panics: panic_point == Some(PanicPoint::Advance),
        })
    }

    pub(super) fn carry_out(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        buffer: &mut Buffer,
    ) -> Result<()> {
        let mut progress = self.begin(direction, offset, len_bytes, buffer)?;
        loop {
            let (rest, offset) = (progress.rest(), progress.offset());
            let answer = match direction {
                Direction::Read => rustix::io::pread(&self.fd, &mut buffer[rest], offset),
                Direction::Write => rustix::io::pwrite(&self.fd, &buffer[rest], offset),
            };
            if let Some(result) = progress.advance(answer) {
                return result;
            }
        }
    }
}

pub(super) struct Progress {
    direction: Direction,
    start: u64,
    len_bytes: usize,
    done_bytes: usize,
    retries: u32,
    #[cfg(test)]
    panics: bool,
}

impl Progress {
    pub(super) fn offset(&self) -> u64 {
        self.start + self.done_bytes as u64
    }

    pub(super) fn rest(&self) -> std::ops::Range<usize> {
        self.done_bytes..self.len_bytes
    }

    /// Notes what the system returned. Returns the transfer's result, once it has ended.
    pub(super) fn advance(&mut self, answer: Result<usize, Errno>) -> Option<Result<()>> {
        #[cfg(test)]
        assert!(!self.panics, "a test asked for it");
        match answer {
            Ok(0) => Some(Err(ended_early(self.direction))),
            Ok(bytes) => {
                self.done_bytes += bytes;
                (self.done_bytes >= self.len_bytes).then_some(Ok(()))
            }
            Err(Errno::INTR | Errno::AGAIN) if self.retries < MAX_RETRIES => {
                self.retries += 1;
                None
            }
            Err(errno) => Some(Err(transfer_error(errno))),
        }
    }
}

fn ended_early(direction: Direction) -> Error {
    let what = match direction {
        Direction::Read => "the backing file has become shorter",
        Direction::Write => "the backing device accepts no more bytes",
    };
    Error::new(ErrorKind::Io, what).with_setting(SETTING)
}

/// Returns the error of a failed transfer. The texts are static, so that failing allocates nothing.
fn transfer_error(errno: Errno) -> Error {
    let (kind, what) = match errno {
        Errno::NOSPC => (ErrorKind::NoSpace, "the backing file's file system is full"),
        Errno::DQUOT => (ErrorKind::NoSpace, "the quota of the backing file's file system is used up"),
        Errno::FBIG => (ErrorKind::NoSpace, "the backing file exceeds the maximum file size"),
        Errno::NXIO | Errno::NODEV => (ErrorKind::Io, "the backing device is gone"),
        Errno::ROFS | Errno::PERM | Errno::ACCESS => {
            (ErrorKind::Permission, "the backing device can no longer be written to")
        }
        Errno::NOMEM => {
            (ErrorKind::NoMemory, "the system has no memory for a transfer to the backing device")
        }
        Errno::INVAL => (ErrorKind::Io, "the backing device does not support transfers of this alignment"),
        _ => (ErrorKind::Io, "the backing device returned an I/O error"),
    };
    Error::new(kind, what).with_setting(SETTING)
}
