//! Memory that outlives the process: an anonymous file (memfd), which exists as long as a process holds its descriptor.
//!
//! A file is sealed against resizing, so that a process with its descriptor cannot make accesses to a mapping of it
//! fail. Like private memory, it takes memory only where it was written to; punching a hole gives memory back.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, SeekFrom};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;

/// An anonymous file of a fixed length, whose memory outlives the process.
#[derive(Debug)]
pub struct MemoryFile {
    fd: OwnedFd,
    len_bytes: u64,
}

/// A part of a file, to be mapped. It begins on a page of the host.
#[derive(Clone, Debug)]
pub struct Region {
    file: Arc<MemoryFile>,
    offset: u64,
    len_bytes: u64,
}

/// The length is fixed, and so are the seals.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn failed(what: &str, error: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::Io, format!("{what}: {error}"))
}

impl MemoryFile {
    /// Creates a file of zeros, which `/proc/PID/maps` shows by this name. It is closed on exec.
    ///
    /// # Errors
    /// `Io` when the system has no such files, or allows none of that length (`ulimit -f`).
    pub fn create(name: &str, len_bytes: u64) -> Result<Arc<Self>> {
        // The system would send SIGXFSZ.
        let most_bytes = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if most_bytes.is_some_and(|most_bytes| most_bytes < len_bytes) {
            let what = format!("a memfd of {len_bytes} bytes is more than `ulimit -f` allows");
            return Err(Error::new(ErrorKind::NoMemory, what));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(|error| failed("no memfd", error))?;
        rustix::fs::ftruncate(&fd, len_bytes)
            .map_err(|error| failed(&format!("no memfd of {len_bytes} bytes"), error))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|error| failed("a memfd cannot be sealed", error))?;
        Ok(Arc::new(MemoryFile { fd, len_bytes }))
    }

    /// Opens a file that [`MemoryFile::create`] created, in this process or another.
    ///
    /// # Errors
    /// `Invalid` for any other descriptor: a file that can shrink is not safe to map.
    pub fn from_fd(fd: OwnedFd) -> Result<Arc<Self>> {
        let invalid = |_| Error::invalid("the descriptor is not of a memfd sealed against shrinking");
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(invalid)?;
        if !seals.contains(SEALS) || seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(invalid(rustix::io::Errno::INVAL));
        }
        let stat = rustix::fs::fstat(&fd).map_err(invalid)?;
        Ok(Arc::new(MemoryFile { fd, len_bytes: stat.st_size.unsigned_abs() }))
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns a part of the file.
    ///
    /// # Errors
    /// `Invalid` if the part does not begin on a page of the host, or does not lie inside the file.
    pub fn region(self: &Arc<Self>, offset: u64, len_bytes: u64) -> Result<Region> {
        let is_inside = offset.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes);
        if !is_inside || !offset.is_multiple_of(rustix::param::page_size() as u64) {
            return Err(Error::invalid("the part is not inside the memfd"));
        }
        Ok(Region { file: Arc::clone(self), offset, len_bytes })
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Region {
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Gives the memory of a part back to the system; returns whether the system took it. The part then reads as zeros
    /// in all processes. Unlike `MADV_REMOVE`, this works for locked memory.
    pub(super) fn punch(&self, offset: u64, len_bytes: u64) -> bool {
        debug_assert!(offset + len_bytes <= self.len_bytes);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(&self.file.fd, flags, self.offset + offset, len_bytes) {
                Err(rustix::io::Errno::INTR) => {}
                done => return done.is_ok(),
            }
        }
    }

    /// Calls `f` with each range of bytes of the region that has memory, rounded to pages, in order.
    ///
    /// # Errors
    /// `Io` if the system does not report which ranges have memory.
    pub fn for_each_data(&self, mut f: impl FnMut(std::ops::Range<u64>)) -> Result<()> {
        let end = self.offset + self.len_bytes;
        let mut at = self.offset;
        while at < end {
            let data = match rustix::fs::seek(&self.file.fd, SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(failed("SEEK_DATA in a memfd", error)),
            };
            let hole = rustix::fs::seek(&self.file.fd, SeekFrom::Hole(data));
            let hole = hole.map_err(|error| failed("SEEK_HOLE in a memfd", error))?.min(end);
            if data < hole {
                f(data - self.offset..hole - self.offset);
            }
            at = hole.max(at + 1);
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn holes_and_data_are_told_apart() {
        let file = MemoryFile::create("test", 1 << 40).expect("a memfd");
        let region = file.region(1 << 20, 1 << 30).expect("inside");
        let data = |region: &Region| {
            let mut ranges = Vec::new();
            region.for_each_data(|range| ranges.push(range)).expect("data");
            ranges
        };
        assert_eq!(data(&region), []);
        for at in [0, 5, 6, 1 << 17] {
            rustix::io::pwrite(&file.fd, b"x", (1 << 20) + (at << 12)).expect("written");
        }
        assert_eq!(data(&region), [0..4096, 5 << 12..7 << 12, 1 << 29..(1 << 29) + 4096]);
        assert!(region.punch(5 << 12, 4096));
        assert_eq!(data(&region), [0..4096, 6 << 12..7 << 12, 1 << 29..(1 << 29) + 4096]);
        assert!(file.region(1 << 40, 1).is_err() && file.region(1, 4096).is_err());
        assert!(file.region(4096, u64::MAX).is_err());
    }

    #[test]
    fn only_sealed_files_are_taken() {
        let made = MemoryFile::create("test", 4096).expect("a memfd");
        let again = MemoryFile::from_fd(made.fd.try_clone().expect("a descriptor")).expect("sealed");
        assert_eq!(again.len_bytes(), 4096);
        assert!(rustix::fs::ftruncate(&again.fd, 0).is_err());
        let open = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("a memfd");
        assert!(MemoryFile::from_fd(open).is_err());
        let null = std::fs::File::open("/dev/null").expect("a file");
        assert!(MemoryFile::from_fd(null.into()).is_err());
    }
}
