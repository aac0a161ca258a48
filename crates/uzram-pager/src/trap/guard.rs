//! Touches trapped by guard pages, for processes that may do nothing special.
//!
//! The program's memory is a file in memory (memfd), mapped shared. `MADV_GUARD_INSTALL` (Linux 6.13) takes
//! pages out of the mapping atomically, and a touch is then a SIGSEGV (`sigsegv.rs`). The pages' contents
//! stay in the file, are read from there, and their memory is given back by punching a hole. To come back,
//! contents are written to the file, and then `MADV_GUARD_REMOVE` opens the pages.
//!
//! The kernel can only refuse the whole: it does not say that data is being transferred to a page. What
//! arrives after the page was taken is lost, if the page is not pinned.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use uzram::units::{PAGE_SIZE, Page, pages_to_bytes};
use uzram::{Error, ErrorKind, Result, check_file_size};

use super::{RETRY, Shelf, Trap, advise, reserve, unmap};
use crate::map::Part;

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of <asm-generic/mman-common.h>; for files, Linux 6.15.
const GUARD_INSTALL: i32 = 102;
const GUARD_REMOVE: i32 = 103;

/// See the [module's documentation](self).
pub(crate) struct Guard {
    /// Each page lies at its number.
    file: File,
}

impl Guard {
    /// Errors: `NoMemory`.
    pub(crate) fn new(pages: u64) -> Result<Guard> {
        let refused = |error: Errno| {
            let what = format!("the system refused a file in memory of {pages} pages: {error}");
            Error::new(ErrorKind::NoMemory, what).with_setting("capacity")
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL;
        let file = match memfd_create("uzram-pager", flags) {
            // Before Linux 6.3.
            Err(Errno::INVAL) => memfd_create("uzram-pager", MemfdFlags::CLOEXEC),
            file => file,
        };
        let file = File::from(file.map_err(refused)?);
        check_file_size("a file in memory", pages_to_bytes(pages))?;
        ftruncate(&file, pages_to_bytes(pages)).map_err(refused)?;
        Ok(Guard { file })
    }

    /// Returns whether this system has guard pages for files. Errors: `Unsupported`; `NoMemory`.
    pub(crate) fn check() -> Result<()> {
        let guard = Guard::new(1)?;
        let part = Part { address: reserve(PAGE_SIZE)?, first: 0, pages: 1 };
        let mapped = guard.map(part);
        guard.unmap(part);
        mapped
    }

    /// Opens pages; waits for as long as the system has no memory for that.
    fn open_all(&self, part: Part) {
        while guard(part, GUARD_REMOVE).is_err() {
            std::thread::sleep(RETRY);
        }
    }

    /// Gives the memory of trapped pages back.
    fn punch(&self, first: u64, pages: usize) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, len_bytes) = (pages_to_bytes(first), pages_to_bytes(pages as u64));
        // It fails only if a signal arrives, which the handler blocks.
        while fallocate(&self.file, flags, offset, len_bytes) == Err(Errno::INTR) {}
    }
}

/// Calls madvise(2), which repeats itself for as long as a signal interrupts it.
fn guard(part: Part, advice: i32) -> rustix::io::Result<()> {
    let start = std::ptr::with_exposed_provenance_mut(part.address);
    loop {
        // SAFETY: the range is a mapping of this module's. A guard, which rustix lacks, changes no contents.
        let result = unsafe { libc::madvise(start, part.bytes(), advice) };
        if result == 0 {
            return Ok(());
        }
        match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO) {
            Errno::INTR | Errno::AGAIN => {}
            error => return Err(error),
        }
    }
}

impl Trap for Guard {
    fn shelf(&self) -> Result<Shelf> {
        Ok(None)
    }

    fn map(&self, part: Part) -> Result<()> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        let (start, bytes) = (std::ptr::with_exposed_provenance_mut(part.address), part.bytes());
        let (access, offset) = (ProtFlags::READ | ProtFlags::WRITE, pages_to_bytes(part.first));
        // SAFETY: the pages are reserved, and not in use.
        unsafe { rustix::mm::mmap(start, bytes, access, flags, &self.file, offset) }
            .map_err(|error| Error::new(ErrorKind::NoMemory, format!("mmap of a region: {error}")))?;
        advise(part, false)?;
        guard(part, GUARD_INSTALL).map_err(|error| {
            let what = format!("this kernel has no guard pages for files, which takes Linux 6.15: {error}");
            Error::new(ErrorKind::Unsupported, what).with_setting("trap")
        })
    }

    fn unmap(&self, part: Part) {
        unmap(part);
        self.punch(part.first, part.pages);
    }

    fn place(&self, contents: &[Page], part: Part) -> usize {
        while self.file.write_all_at(contents.as_flattened(), pages_to_bytes(part.first)).is_err() {
            std::thread::sleep(RETRY);
        }
        self.open_all(part);
        part.pages
    }

    fn take(&self, _: &Shelf, _: usize, part: Part) -> (usize, bool) {
        #[cfg(test)]
        if crate::faults::of_ioctl(true).is_some() {
            return (0, false);
        }
        if guard(part, GUARD_INSTALL).is_err() {
            // Some pages may be trapped; none holds other contents than before.
            self.open_all(part);
            return (0, false);
        }
        (part.pages, false)
    }

    fn read<'a>(
        &self,
        _: &'a Shelf,
        _: usize,
        first: u64,
        pages: usize,
        buffer: &'a mut [Page],
    ) -> Option<&'a [Page]> {
        let buffer = &mut buffer[..pages];
        let read = self.file.read_exact_at(buffer.as_flattened_mut(), pages_to_bytes(first));
        read.is_ok().then_some(buffer)
    }

    fn give_back(&self, _: &Shelf, _: usize, page: Part) -> bool {
        self.open_all(page);
        true
    }

    fn release(&self, _: &Shelf, runs: &mut dyn Iterator<Item = (u64, usize)>) {
        runs.for_each(|(first, pages)| self.punch(first, pages));
    }

    fn discard(&self, part: Part) -> bool {
        let is_trapped = self.take(&None, 0, part).0 > 0;
        if is_trapped {
            self.punch(part.first, part.pages);
        }
        is_trapped
    }

    fn forget(&self, page: Part) {
        self.punch(page.first, page.pages);
    }
}
