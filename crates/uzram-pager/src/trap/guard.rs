//! Touches trapped by guard pages, for processes that may do nothing special.
//!
//! The program's memory is a file in memory (memfd), mapped shared. `MADV_GUARD_INSTALL` (Linux 6.13) takes pages out of the
//! mapping atomically, and a touch is then a SIGSEGV (`sigsegv.rs`). The pages' contents stay in the file, are read from
//! there, and their memory is given back by punching a hole. To come back, contents are written to the file, and then
//! `MADV_GUARD_REMOVE` opens the pages. File and mapping never disagree: both are the page cache.
//!
//! The kernel can only refuse the whole: it does not say that data is being transferred to a page. What arrives after the
//! page was taken is lost, if the page is not pinned.
//!
//! An older kernel protects the memory instead (mprotect(2)), in units of 64 KiB or more: around each unit that is open a
//! mapping is split, and a process has 65530 of them. The units are so large that those in memory take half of these at
//! most: then a unit can always be opened.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use uzram::units::{Page, format_size, pages_to_bytes};
use uzram::{Error, ErrorKind, Result, check_file_size};

use super::{MOST_PAGES, RETRY, Run, Space, Trap};

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of <asm-generic/mman-common.h>, Linux 6.13; for files, Linux 6.15.
const GUARD_INSTALL: i32 = 102;
const GUARD_REMOVE: i32 = 103;

/// The least pages that are trapped together where there are no guard pages: 64 KiB.
const LEAST_PROTECTED_PAGES: usize = 16;
/// The most units that are open: each splits a mapping into three. `vm.max_map_count` is 65530 by default.
const MOST_OPEN_UNITS: u64 = 16 << 10;

/// What takes pages away from the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    /// Guard pages.
    Guard,
    /// Memory protection, of so many pages together.
    Protect(usize),
}

impl Fence {
    /// Returns the better one that this system has.
    ///
    /// # Errors
    /// `NoMemory`.
    pub(crate) fn of_this_system() -> Result<Fence> {
        let probe = Guard::new(1, Fence::Guard)?;
        let run = Run { first: 0, pages: 1 };
        Ok(if probe.map(run).is_ok() { Fence::Guard } else { Fence::Protect(LEAST_PROTECTED_PAGES) })
    }

    /// Returns memory protection for so many pages in memory.
    ///
    /// # Errors
    /// `Unsupported`: these are too many.
    pub(crate) fn protect(resident_pages: u64) -> Result<Fence> {
        let unit_pages =
            resident_pages.div_ceil(MOST_OPEN_UNITS).next_power_of_two().max(LEAST_PROTECTED_PAGES as u64);
        if unit_pages > MOST_PAGES as u64 {
            let what = format!(
                "without guard pages (Linux 6.15) or userfaultfd a pager's limit is at most {}",
                format_size(pages_to_bytes(MOST_OPEN_UNITS * MOST_PAGES as u64))
            );
            return Err(Error::new(ErrorKind::Unsupported, what).with_setting("limit"));
        }
        Ok(Fence::Protect(unit_pages as usize))
    }

    /// Returns the pages that are trapped together.
    pub(crate) fn unit_pages(self) -> usize {
        match self {
            Fence::Guard => 1,
            Fence::Protect(unit_pages) => unit_pages,
        }
    }
}

/// See the [module's documentation](self).
pub(crate) struct Guard {
    file: File,
    space: Space,
    fence: Fence,
}

impl Guard {
    /// Returns the trap; reserves address space for `pages`.
    ///
    /// # Errors
    /// `NoMemory`.
    pub(crate) fn new(pages: u64, fence: Fence) -> Result<Guard> {
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
        Ok(Guard { file, space: Space::new(pages)?, fence })
    }

    /// Traps pages.
    fn close(&self, run: Run) -> rustix::io::Result<()> {
        let (start, len_bytes) = (self.space.address(run.first), run.bytes());
        match self.fence {
            Fence::Guard => advise(start, len_bytes, GUARD_INSTALL),
            // SAFETY: the pages are the program's, which waits for them in the handler.
            Fence::Protect(_) => unsafe {
                rustix::mm::mprotect(start.cast(), len_bytes, MprotectFlags::empty())
            },
        }
    }

    /// Opens pages.
    fn open(&self, run: Run) -> rustix::io::Result<()> {
        let (start, len_bytes) = (self.space.address(run.first), run.bytes());
        match self.fence {
            Fence::Guard => advise(start, len_bytes, GUARD_REMOVE),
            // SAFETY: the pages are mapped, and the program's.
            Fence::Protect(_) => unsafe {
                rustix::mm::mprotect(start.cast(), len_bytes, MprotectFlags::READ | MprotectFlags::WRITE)
            },
        }
    }

    /// Opens pages; waits for as long as the system has no memory for that.
    fn open_all(&self, run: Run) {
        while self.open(run).is_err() {
            std::thread::sleep(RETRY);
        }
    }

    /// Gives the memory of trapped pages back.
    fn punch(&self, run: Run) {
        let (offset, len_bytes) = (pages_to_bytes(run.first), run.bytes() as u64);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // It fails only if a signal arrives, which the handler blocks.
        while fallocate(&self.file, flags, offset, len_bytes) == Err(Errno::INTR) {}
    }
}

/// Calls madvise(2), which repeats itself for as long as a signal interrupts it.
fn advise(start: *mut u8, len_bytes: usize, advice: i32) -> rustix::io::Result<()> {
    loop {
        // rustix has no names for these.
        // SAFETY: the range is a mapping of this module's. A guard changes no contents.
        let result = unsafe { libc::madvise(start.cast(), len_bytes, advice) };
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
    /// Contents stay in the file.
    type Shelf = ();

    fn shelf(&self) -> Result<()> {
        Ok(())
    }

    fn map(&self, run: Run) -> Result<()> {
        let address = self.space.address(run.first);
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        let protection = match self.fence {
            Fence::Guard => ProtFlags::READ | ProtFlags::WRITE,
            Fence::Protect(_) => ProtFlags::empty(),
        };
        // SAFETY: the pages are inside the reservation, and not in use.
        let mapped = unsafe {
            rustix::mm::mmap(
                address.cast(),
                run.bytes(),
                protection,
                flags,
                &self.file,
                pages_to_bytes(run.first),
            )
        };
        mapped.map_err(|error| Error::new(ErrorKind::NoMemory, format!("mmap of a region: {error}")))?;
        super::advise(address, run.bytes(), super::Children::Exclude)?;
        self.close(run).map_err(|error| {
            let what = format!("this system has no guard pages: {error}");
            Error::new(ErrorKind::Unsupported, what).with_setting("trap")
        })
    }

    fn unmap(&self, run: Run) {
        self.space.reserve_again(run);
        self.punch(run);
    }

    fn place(&self, contents: &[Page], run: Run) -> Result<()> {
        let written = self.file.write_all_at(contents.as_flattened(), pages_to_bytes(run.first));
        written.map_err(|_| Error::new(ErrorKind::NoMemory, "no memory for a page"))?;
        // Some may be open after a failure: their contents must not be written again.
        self.open_all(run);
        Ok(())
    }

    fn take(&self, (): &(), _: usize, run: Run) -> usize {
        #[cfg(test)]
        if crate::faults::of_ioctl(true).is_some() {
            return 0;
        }
        if self.close(run).is_err() {
            // Some pages may be trapped; none holds other contents than before.
            self.open_all(run);
            return 0;
        }
        run.pages
    }

    fn read<'a>(&self, (): &'a (), _: usize, run: Run, buffer: &'a mut [Page]) -> Option<&'a [Page]> {
        let buffer = &mut buffer[..run.pages];
        let read = self.file.read_exact_at(buffer.as_flattened_mut(), pages_to_bytes(run.first));
        read.is_ok().then_some(buffer)
    }

    fn give_back(&self, (): &(), _: usize, run: Run) {
        self.open_all(run);
    }

    fn release(&self, (): &(), runs: impl Iterator<Item = Run>) {
        runs.for_each(|run| self.punch(run));
    }

    fn lose(&self, _: Run) {
        // The handler passes such touches on.
    }

    fn forget(&self, run: Run) {
        self.punch(run);
    }

    fn discard(&self, _: Run) -> bool {
        false
    }

    fn find(&self, _: Run) {}

    fn space(&self) -> &Space {
        &self.space
    }

    fn retry(&self, _: u64) {}
}
