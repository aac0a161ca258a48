//! Memory that outlives the process: an anonymous file, which exists as long as a process holds its
//! descriptor.
//!
//! A memfd is sealed against resizing, so that a process with its descriptor cannot make accesses to a
//! mapping of it fail. A file that is never swapped out (`noswap.rs`) cannot be sealed: nobody but this user
//! can open it. Like private memory, it takes memory only where it was written to; punching a hole gives
//! memory back.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use linux_raw_sys::general::{__NR_cachestat, TMPFS_MAGIC, cachestat, cachestat_range};
use rustix::fs::{FallocateFlags, FileType, MemfdFlags, Mode, SealFlags, SeekFrom};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::file_size::check_file_size;
use crate::base::sync::Arc;

use super::noswap;
use super::whole::{NO_PAGES, Whole};

/// An anonymous file of a fixed length, whose memory outlives the process.
#[derive(Debug)]
pub struct MemoryFile {
    fd: OwnedFd,
    len_bytes: u64,
    /// The mapping of the whole file, if it was mapped ahead: mappings of regions are parts of it.
    pub(super) whole: OnceLock<Whole>,
}

/// A part of a file, to be mapped. It begins on a page of the host.
#[derive(Clone, Debug)]
pub struct Region {
    file: Arc<MemoryFile>,
    pub(super) offset: u64,
    pub(super) len_bytes: u64,
}

/// The most ranges of mapped pages that are taken of a part: as many as a chunk of the arena can have, for
/// every second page may be missing. With more, the file is asked.
const MAPPED_AT_ONCE: usize = 257;

/// The length is fixed, and so are the seals.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn failed(what: &str, error: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::Io, format!("{what}: {error}"))
}

impl MemoryFile {
    /// Creates a file of zeros. It is closed on exec. `/proc/PID/maps` shows it by this name, unless it is
    /// one that is never swapped out ([`keep_memory_out_of_swap`](super::keep_memory_out_of_swap)). Fails
    /// with `Io` when the system has no such files; `NoSpace` when it allows none of that length (`ulimit
    /// -f`).
    pub fn create(name: &str, len_bytes: u64) -> Result<Arc<Self>> {
        check_file_size("a memory file", len_bytes)?;
        let sized = |fd: &OwnedFd| {
            let too_long = |error| failed(&format!("no memory file of {len_bytes} bytes"), error);
            rustix::fs::ftruncate(fd, len_bytes).map_err(too_long)
        };
        let fd = if let Some(directory) = noswap::noswap_directory() {
            let fd = noswap::create_file(directory)
                .map_err(|error| failed("no memory file that is kept out of swap", error))?;
            sized(&fd)?;
            fd
        } else {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create(name, flags).map_err(|error| failed("no memfd", error))?;
            sized(&fd)?;
            rustix::fs::fcntl_add_seals(&fd, SEALS)
                .map_err(|error| failed("a memfd cannot be sealed", error))?;
            fd
        };
        Ok(Arc::new(MemoryFile { fd, len_bytes, whole: OnceLock::new() }))
    }

    /// Opens a file that [`MemoryFile::create`] created, in this process or another. Fails with `Invalid` for
    /// any other descriptor: a file that others can shrink is not safe to map.
    pub fn from_fd(fd: OwnedFd) -> Result<Arc<Self>> {
        let invalid =
            |_| Error::invalid("the descriptor is not of a memory file, or one that others can shrink");
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(invalid)?;
        let stat = rustix::fs::fstat(&fd).map_err(invalid)?;
        let is_sealed =
            seals.contains(SEALS) && !seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE);
        let is_ours = || {
            let of_others = Mode::RWXG | Mode::RWXO | Mode::XUSR;
            let is_on_tmpfs =
                rustix::fs::fstatfs(&fd).is_ok_and(|stat| stat.f_type as u64 == u64::from(TMPFS_MAGIC));
            is_on_tmpfs
                && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                && stat.st_nlink == 0
                && stat.st_uid == rustix::process::geteuid().as_raw()
                && !Mode::from_raw_mode(stat.st_mode).intersects(of_others)
                && seals == SealFlags::SEAL
        };
        if !is_sealed && !is_ours() {
            return Err(invalid(rustix::io::Errno::INVAL));
        }
        Ok(Arc::new(MemoryFile { fd, len_bytes: stat.st_size.unsigned_abs(), whole: OnceLock::new() }))
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns a part of the file. Fails with `Invalid` if the part does not begin on a page of the host, or
    /// does not lie inside the file.
    pub fn region(self: &Arc<Self>, offset: u64, len_bytes: u64) -> Result<Region> {
        let is_inside = offset.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes);
        if !is_inside || !offset.is_multiple_of(rustix::param::page_size() as u64) {
            return Err(Error::invalid("the part is not inside the file"));
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
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the address of the region in the mapping of the whole file, if that was mapped ahead.
    pub(super) fn mapped_ahead(&self) -> Option<NonNull<u8>> {
        let whole = self.file.whole.get()?;
        // SAFETY: the region lies inside the file, all of which is mapped.
        Some(unsafe { whole.start().add(self.offset as usize) })
    }

    /// Gives the memory of a part back to the system; returns whether the system took it. The part then reads
    /// as zeros in all processes. Unlike `MADV_REMOVE`, this works for locked memory.
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

    /// Returns how many pages of a range of bytes of the file are in memory, and how many in swap, by
    /// cachestat(2), which is faster than to seek; `None` where that is not available (before Linux 6.5).
    pub(super) fn count_pages(&self, bytes: Range<u64>) -> Option<(u64, u64)> {
        let range = cachestat_range { off: bytes.start, len: bytes.end.saturating_sub(bytes.start) };
        // A length of 0 would be all of the file.
        if range.len == 0 {
            return Some((0, 0));
        }
        let mut found =
            cachestat { nr_cache: 0, nr_dirty: 0, nr_writeback: 0, nr_evicted: 0, nr_recently_evicted: 0 };
        // SAFETY: both structs are the call's, and it writes to the second only.
        let answer = unsafe {
            let fd = self.file.fd.as_raw_fd();
            libc::syscall(__NR_cachestat.into(), fd, &raw const range, &raw mut found, 0)
        };
        // Evicted pages of such files are in swap.
        (answer == 0).then_some((found.nr_cache, found.nr_evicted))
    }

    /// Returns the place in the file, at or after `at`, of the region's first memory.
    fn next_data(&self, at: u64) -> Result<Option<u64>> {
        match rustix::fs::seek(&self.file.fd, SeekFrom::Data(at)) {
            Ok(data) => Ok(Some(data).filter(|data| *data < self.offset + self.len_bytes)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(failed("SEEK_DATA in a memory file", error)),
        }
    }

    /// Returns a multiple of `step_bytes` at or behind which the region has no memory, the smallest one.
    /// Fails as [`Region::for_each_data`].
    pub fn data_end(&self, step_bytes: u64) -> Result<u64> {
        let (mut below, mut end) = (0, self.len_bytes.div_ceil(step_bytes));
        while below < end {
            let middle = below + (end - below) / 2;
            match self.next_data(self.offset + middle * step_bytes)? {
                Some(_) => below = middle + 1,
                None => end = middle,
            }
        }
        Ok(end * step_bytes)
    }

    /// Calls `f` with each range of bytes of the region that has memory, rounded to pages, in order. Fails
    /// with `Io` if the system does not report which ranges have memory.
    pub fn for_each_data(&self, f: impl FnMut(Range<u64>)) -> Result<()> {
        self.walk_data(0..self.len_bytes, None, f)
    }

    /// As [`Region::for_each_data`], in a small part of the region that consists of whole pages of the host.
    pub fn for_each_data_in(&self, part: Range<u64>, mut f: impl FnMut(Range<u64>)) -> Result<()> {
        let bytes = self.offset + part.start..self.offset + part.end;
        // A page that is mapped is in memory. If as many are mapped as the file has there, these are all.
        let mut mapped = [NO_PAGES; MAPPED_AT_ONCE];
        let whole = self.file.whole.get();
        let count = whole.and_then(|whole| whole.find_mapped(bytes.clone(), &mut mapped)).unwrap_or(0);
        let mapped = &mapped[..count];
        let mapped_bytes: u64 = mapped.iter().map(|pages| pages.end - pages.start).sum();
        let has_all_mapped = mapped_bytes == bytes.end - bytes.start;
        let pages = if has_all_mapped { None } else { self.count_pages(bytes) };
        let pages = pages.map(|(in_memory, in_swap)| in_memory + in_swap);
        let mapped_pages = mapped_bytes / rustix::param::page_size() as u64;
        if has_all_mapped || pages == Some(mapped_pages) {
            mapped.iter().for_each(|pages| f(pages.start - self.offset..pages.end - self.offset));
            return Ok(());
        }
        self.walk_data(part, pages, f)
    }

    /// As [`Region::for_each_data_in`], with the number of pages that have memory, if it is known: to seek
    /// the end of the part's last range could lead far beyond the part.
    fn walk_data(
        &self,
        part: Range<u64>,
        mut pages: Option<u64>,
        mut f: impl FnMut(Range<u64>),
    ) -> Result<()> {
        let page_bytes = rustix::param::page_size() as u64;
        let end = self.offset + part.end.min(self.len_bytes);
        let mut at = self.offset + part.start;
        while at < end {
            let Some(data) = self.next_data(at)?.filter(|data| *data < end) else { break };
            let hole = if pages == Some((end - data).div_ceil(page_bytes)) {
                end
            } else {
                let hole = rustix::fs::seek(&self.file.fd, SeekFrom::Hole(data));
                hole.map_err(|error| failed("SEEK_HOLE in a memory file", error))?.min(end)
            };
            if data < hole {
                f(data - self.offset..hole - self.offset);
                pages = pages.map(|pages| pages.saturating_sub((hole - data).div_ceil(page_bytes)));
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
        assert_eq!((data(&region), region.data_end(4096)), (vec![], Ok(0)));
        for at in [0, 5, 6, 1 << 17] {
            rustix::io::pwrite(&file.fd, b"x", (1 << 20) + (at << 12)).expect("written");
        }
        assert_eq!(data(&region), [0..4096, 5 << 12..7 << 12, 1 << 29..(1 << 29) + 4096]);
        let counts =
            |from: u64, to: u64| region.count_pages((1 << 20) + (from << 12)..(1 << 20) + (to << 12));
        if counts(0, 1).is_some() {
            assert_eq!([counts(0, 1), counts(1, 5), counts(4, 7)], [1, 0, 2].map(|pages| Some((pages, 0))));
        }
        #[allow(clippy::single_range_in_vec_init)]
        for (part, wanted) in [(4..8, vec![5 << 12..7 << 12]), (5..6, vec![5 << 12..6 << 12]), (7..9, vec![])]
        {
            let mut ranges = Vec::new();
            let part = part.start << 12..part.end << 12;
            region.for_each_data_in(part, |range| ranges.push(range)).expect("data");
            assert_eq!(ranges, wanted);
        }
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
