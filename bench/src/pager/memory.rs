//! The memory that is measured: a pager's region, or a plain mapping.

use std::fs::File;
use std::path::Path;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use uzram::units::{PAGE_SIZE, Page};
use uzram::{Error, ErrorKind, Result};
use uzram_pager::{Pager, Region};

use crate::harness::io_error;

/// A mapping, unmapped when it is dropped.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`; accesses follow the rules of references.
unsafe impl Sync for Mapping {}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

impl Mapping {
    /// Maps private memory without huge pages.
    pub(super) fn anonymous(pages: usize) -> Result<Mapping> {
        let len = pages * PAGE_SIZE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, READ_WRITE, MapFlags::PRIVATE) };
        let mapping = Mapping::new(start, len)?;
        mapping.advise(Advice::LinuxNoHugepage).map_err(no_memory)?;
        Ok(mapping)
    }

    /// Maps the whole pages of a file to read them: their memory is the page cache's, and not this process's.
    pub(super) fn file(path: &Path) -> Result<Mapping> {
        let file = File::open(path).map_err(|error| io_error(path, error))?;
        let len =
            file.metadata().map_err(|error| io_error(path, error))?.len() as usize / PAGE_SIZE * PAGE_SIZE;
        if len == 0 {
            return Err(Error::invalid(format!("{} holds no page", path.display())));
        }
        // SAFETY: as above. Nobody changes the file while it is measured with.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, 0)
        };
        Mapping::new(start, len)
    }

    fn new(start: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> Result<Mapping> {
        let start = start.map_err(no_memory)?;
        let start = NonNull::new(start.cast()).ok_or_else(|| no_memory(Errno::NOMEM))?;
        Ok(Mapping { start, len })
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is this mapping; no advice that is given here changes its contents.
        unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, advice) }
    }

    pub(super) fn pages(&self) -> &[Page] {
        // SAFETY: the mapping has these bytes for as long as it lives.
        let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) };
        bytes.as_chunks::<PAGE_SIZE>().0
    }

    fn pages_mut(&mut self) -> &mut [Page] {
        // SAFETY: as above, the mapping is writable where this is called, and this is the only reference.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) };
        bytes.as_chunks_mut::<PAGE_SIZE>().0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference to it is left.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

fn no_memory(error: Errno) -> Error {
    Error::new(ErrorKind::NoMemory, format!("no memory to measure with: {error}"))
}

/// Memory that can be paged out.
pub(super) enum Memory {
    Kernel(Mapping),
    Paged(Region),
}

impl Memory {
    /// Maps memory of the kernel, or of a pager.
    pub(super) fn map(pager: Option<&Pager>, pages: usize) -> Result<Memory> {
        match pager {
            Some(pager) => pager.map(pages * PAGE_SIZE).map(Memory::Paged),
            None => Mapping::anonymous(pages).map(Memory::Kernel),
        }
    }

    pub(super) fn pages(&self) -> &[Page] {
        match self {
            Memory::Kernel(mapping) => mapping.pages(),
            Memory::Paged(region) => region.as_chunks::<PAGE_SIZE>().0,
        }
    }

    pub(super) fn pages_mut(&mut self) -> &mut [Page] {
        match self {
            Memory::Kernel(mapping) => mapping.pages_mut(),
            Memory::Paged(region) => region.as_chunks_mut::<PAGE_SIZE>().0,
        }
    }

    /// Fills it with the pages of a corpus, from its page `first` on, again and again.
    pub(super) fn fill(&mut self, corpus: &[Page], first: usize) {
        for (nth, page) in self.pages_mut().iter_mut().enumerate() {
            *page = *corpus_page(corpus, first + nth);
        }
    }

    /// Fails unless it holds what [`Memory::fill`] wrote.
    pub(super) fn check(&self, corpus: &[Page], first: usize) -> Result<()> {
        let same = |(nth, page): (usize, &Page)| page == corpus_page(corpus, first + nth);
        match self.pages().iter().enumerate().position(|page| !same(page)) {
            None => Ok(()),
            Some(nth) => Err(changed(nth)),
        }
    }

    pub(super) fn page_out(&self) -> Result<()> {
        match self {
            Memory::Kernel(mapping) => mapping
                .advise(Advice::LinuxPageOut)
                .map_err(|error| Error::new(ErrorKind::Io, format!("MADV_PAGEOUT: {error}"))),
            Memory::Paged(region) => region.pageout(..),
        }
    }

    /// Returns how many of its pages are in memory as they are.
    pub(super) fn resident_pages(&self) -> Result<usize> {
        let pages = self.pages();
        let mut is_there = vec![0u8; pages.len()];
        // SAFETY: the range is mapped, and the answer has room for it.
        let answer = unsafe {
            libc::mincore(pages.as_ptr().cast_mut().cast(), size_of_val(pages), is_there.as_mut_ptr())
        };
        match answer {
            0 => Ok(is_there.iter().filter(|page| **page & 1 != 0).count()),
            _ => Err(Error::new(ErrorKind::Io, format!("mincore: {}", std::io::Error::last_os_error()))),
        }
    }
}

pub(super) fn corpus_page(corpus: &[Page], number: usize) -> &Page {
    &corpus[number % corpus.len()]
}

pub(super) fn changed(page: usize) -> Error {
    Error::new(ErrorKind::Corrupt, format!("page {page} changed while it was paged out"))
}

/// Touches a page of memory.
#[inline]
pub(super) fn touch(page: &Page) {
    // SAFETY: a reference to a byte of the page.
    unsafe { std::ptr::read_volatile(&raw const page[0]) };
}
