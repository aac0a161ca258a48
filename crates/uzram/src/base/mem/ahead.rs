//! A file that is mapped ahead of its use, while another process uses it.
//!
//! Pages that are in the file are mapped again and again as they come, so that later uses take no page
//! faults. The other process may give any of them back meanwhile, and counts what the file takes. So they are
//! neither touched nor populated (`madvise`), which would fill a hole that was just punched:
//! `UFFDIO_CONTINUE` of userfaultfd(2) maps a page that is there, and never makes one, nor brings one back
//! from swap.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_MINOR_SHMEM, UFFD_USER_MODE_ONLY, UFFDIO_REGISTER_MODE_MINOR, uffdio_api,
    uffdio_continue, uffdio_range, uffdio_register,
};
use linux_raw_sys::ioctl;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::file::{MemoryFile, Region};
use super::map::{Access, Mapped};
use super::whole::Whole;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;

/// Bytes of a page's entry in `/proc/self/pagemap`.
const ENTRY_BYTES: usize = 8;
/// The bit of an entry that says that the page is mapped.
const PRESENT: u64 = 1 << 63;
/// Pages that are looked at together: entries in 4 KiB.
const PAGES_AT_ONCE: usize = 512;

/// A file that is mapped ahead.
pub struct MappedAhead {
    file: Arc<MemoryFile>,
    whole: Whole,
    faults: OwnedFd,
    page_bytes: usize,
}

impl MappedAhead {
    /// Maps a whole file. Pages follow with [`MappedAhead::catch_up`]. Fails with `Unsupported` where
    /// userfaultfd(2) or `/proc/self/pagemap` is not available; `NoMemory` when there is no address space.
    pub fn new(file: Arc<MemoryFile>) -> Result<Self> {
        let unsupported = |what: &str, error: &dyn std::fmt::Display| {
            let what = format!("memory cannot be mapped ahead of its use: {what}: {error}");
            Error::new(ErrorKind::Unsupported, what)
        };
        let page_bytes = rustix::param::page_size();
        let len_bytes = usize::try_from(file.len_bytes()).unwrap_or(usize::MAX).next_multiple_of(page_bytes);
        let whole = Mapped::shared(file.as_fd(), 0, len_bytes, Access::ReadWrite)?;
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // Needs no privilege.
        let flags = flags | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        // SAFETY: a new descriptor. Nothing is registered with it yet.
        let faults = unsafe { userfaultfd(flags) }.map_err(|error| unsupported("userfaultfd", &error))?;
        let mut api =
            uffdio_api { api: UFFD_API.into(), features: UFFD_FEATURE_MINOR_SHMEM.into(), ioctls: 0 };
        // SAFETY: the struct is the one of this request.
        unsafe { request::<{ ioctl::UFFDIO_API as Opcode }, _>(&faults, &mut api) }
            .map_err(|error| unsupported("userfaultfd of shared memory", &error))?;
        let mut registered = uffdio_register {
            range: uffdio_range { start: whole.start().addr().get() as u64, len: len_bytes as u64 },
            mode: UFFDIO_REGISTER_MODE_MINOR.into(),
            ioctls: 0,
        };
        // SAFETY: the struct is the one of this request. Nobody accesses the mapping as long as it is
        // registered: its address is known here only.
        unsafe { request::<{ ioctl::UFFDIO_REGISTER as Opcode }, _>(&faults, &mut registered) }
            .map_err(|error| unsupported("userfaultfd of shared memory", &error))?;
        let page_table =
            File::open("/proc/self/pagemap").map_err(|error| unsupported("/proc/self/pagemap", &error))?;
        Ok(MappedAhead { file, whole: Whole::new(whole, page_table), faults, page_bytes })
    }

    /// Maps the pages that the file has in memory now and that are not mapped yet, as long as `goes_on`
    /// returns true. Returns how many it mapped, in bytes. Fails with `Io` if the system does not report
    /// which pages the file has, or which are mapped.
    pub fn catch_up(&self, goes_on: &dyn Fn() -> bool) -> Result<u64> {
        let all = self.file.region(0, self.file.len_bytes())?;
        let (mut mapped_pages, mut failure) = (0, None);
        all.for_each_data(|data| {
            let page_bytes = self.page_bytes as u64;
            let (mut at, end) = (data.start / page_bytes * page_bytes, data.end.next_multiple_of(page_bytes));
            while at < end && goes_on() {
                // Of those that are mapped, any number at a time; of the others, a few.
                let mapped = self.whole.first_mapped(at..end);
                if let Some(mapped) = mapped.as_ref().filter(|mapped| mapped.start == at) {
                    at = mapped.end;
                    continue;
                }
                let few = (at + (PAGES_AT_ONCE as u64) * page_bytes).min(end);
                let next = mapped.as_ref().map_or(few, |mapped| mapped.start.min(few));
                let pages = (at / page_bytes) as usize..(next / page_bytes) as usize;
                let done = match mapped {
                    Some(_) => Ok(self.map(&all, pages)),
                    // Before Linux 6.7.
                    None => self.map_missing(&all, pages),
                };
                match done {
                    Ok(pages) => mapped_pages += pages,
                    Err(error) => failure = Some(error),
                }
                at = next;
            }
        })?;
        failure.map_or(Ok((mapped_pages * self.page_bytes) as u64), Err)
    }

    /// Maps those of at most [`PAGES_AT_ONCE`] pages that are unmapped and in memory; returns how many.
    fn map_missing(&self, all: &Region, pages: Range<usize>) -> Result<usize> {
        let mut entries = [[0; ENTRY_BYTES]; PAGES_AT_ONCE];
        let entries = &mut entries[..pages.len()];
        let first = self.whole.start().addr().get() / self.page_bytes + pages.start;
        self.whole
            .page_table
            .read_exact_at(entries.as_flattened_mut(), (first * ENTRY_BYTES) as u64)
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot read /proc/self/pagemap: {error}")))?;
        let is_mapped = |entry: &[u8; ENTRY_BYTES]| u64::from_ne_bytes(*entry) & PRESENT != 0;
        let (mut at, mut mapped) = (0, 0);
        for run in entries.chunk_by(|one, next| is_mapped(one) == is_mapped(next)) {
            if !is_mapped(&run[0]) {
                mapped += self.map(all, pages.start + at..pages.start + at + run.len());
            }
            at += run.len();
        }
        Ok(mapped)
    }

    /// Maps those of these pages, none of which is mapped, that the file has in memory; returns how many.
    fn map(&self, all: &Region, pages: Range<usize>) -> usize {
        let bytes_of = |pages: Range<usize>| {
            (pages.start * self.page_bytes) as u64..(pages.end * self.page_bytes) as u64
        };
        let is_in_swap = |pages| all.count_pages(bytes_of(pages)).is_some_and(|(_, in_swap)| in_swap > 0);
        if !is_in_swap(pages.clone()) {
            return self.map_present(pages);
        }
        let in_memory = pages.map(|page| page..page + 1).filter(|page| !is_in_swap(page.clone()));
        in_memory.map(|page| self.map_present(page)).sum()
    }

    /// As [`MappedAhead::map`], also pages in swap.
    fn map_present(&self, pages: Range<usize>) -> usize {
        let (mut next, mut mapped) = (pages.start, 0);
        while next < pages.end {
            let start = self.whole.start().addr().get() + next * self.page_bytes;
            let len = (pages.end - next) * self.page_bytes;
            let range = uffdio_range { start: start as u64, len: len as u64 };
            let mut asked = uffdio_continue { range, mode: 0, mapped: 0 };
            // SAFETY: the struct is the one of this request. It changes no contents.
            let answer =
                unsafe { request::<{ ioctl::UFFDIO_CONTINUE as Opcode }, _>(&self.faults, &mut asked) };
            // The count is an error's number if there is none.
            let done = usize::try_from(asked.mapped).unwrap_or(0) / self.page_bytes;
            (next, mapped) = (next + done, mapped + done);
            if answer.is_err() && done == 0 {
                // This page is mapped, or is in memory no more.
                next += 1;
            }
        }
        mapped
    }

    /// Has mappings of the file's regions be parts of this one from now on; returns the file.
    pub fn into_file(self) -> Arc<MemoryFile> {
        let MappedAhead { file, whole, faults, .. } = self;
        // The mapping is a usual one as soon as the descriptor is closed.
        drop(faults);
        // A second mapping is not needed.
        let _ = file.whole.set(whole);
        file
    }
}

/// Makes a request of userfaultfd.
///
/// # Safety
/// `argument` is of the type of `REQUEST`, and what that does to the mappings of this process is sound.
unsafe fn request<const REQUEST: Opcode, T>(
    faults: &OwnedFd,
    argument: &mut T,
) -> std::result::Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { rustix::ioctl::ioctl(faults, Updater::<REQUEST, T>::new(argument)) }
}

#[cfg(test)]
mod tests {
    use super::super::whole::NO_PAGES;
    use super::*;

    #[test]
    fn mapped_pages_are_told_from_others() {
        let file = MemoryFile::create("test", 1 << 30).expect("a memfd");
        let page_bytes = rustix::param::page_size() as u64;
        let write = |page: u64| _ = rustix::io::pwrite(&file, b"x", page * page_bytes).expect("written");
        [0, 1, 2, 3, 5].into_iter().for_each(write);
        let ahead = match MappedAhead::new(Arc::clone(&file)) {
            Err(error) if error.kind() == ErrorKind::Unsupported => return println!("skipped: {error}"),
            ahead => ahead.expect("mapped"),
        };
        assert_eq!(ahead.catch_up(&|| true), Ok(5 * page_bytes));
        // These are not mapped any more, or not yet.
        let region = file.region(0, 1 << 30).expect("inside");
        assert!(region.punch(2 * page_bytes, page_bytes));
        write(6);
        let file = ahead.into_file();
        let mut found = [NO_PAGES; 8];
        let whole = file.whole.get().expect("it is mapped");
        let Some(count) = whole.find_mapped(0..8 * page_bytes, &mut found) else {
            return println!("skipped: PAGEMAP_SCAN is not available");
        };
        let in_pages = |bytes: Range<u64>| bytes.start / page_bytes..bytes.end / page_bytes;
        let mapped: Vec<_> = found[..count].iter().map(|pages| in_pages(pages.start..pages.end)).collect();
        assert_eq!(mapped, [0..2, 3..4, 5..6]);
        assert_eq!(whole.first_mapped(2 * page_bytes..8 * page_bytes).map(in_pages), Some(3..4));
        assert_eq!(whole.first_mapped(6 * page_bytes..8 * page_bytes).map(in_pages), Some(8..8));
        assert_eq!(whole.first_mapped(0..0), None);
        // What the file has, be it mapped or not.
        #[allow(clippy::single_range_in_vec_init)]
        for (part, wanted) in [
            (0..2, vec![0..2]),
            (1..6, vec![1..2, 3..4, 5..6]),
            (0..8, vec![0..2, 3..4, 5..7]),
            (2..3, vec![]),
            (6..7, vec![6..7]),
            (7..8, vec![]),
            (3..3, vec![]),
        ] {
            let mut data = Vec::new();
            let part = part.start * page_bytes..part.end * page_bytes;
            region.for_each_data_in(part.clone(), |bytes| data.push(in_pages(bytes))).expect("data");
            assert_eq!(data, wanted, "in {part:?}");
        }
    }
}
