//! Touches trapped by guard pages, for processes that may do nothing special.
//!
//! The program's memory is a file in memory (memfd), mapped shared. `MADV_GUARD_INSTALL` (Linux 6.13) takes
//! pages out of the mapping atomically, and a touch is then a SIGSEGV (`sigsegv.rs`). The pages' contents
//! stay in the file, are read from there, and their memory is given back by punching a hole. To come back,
//! contents are written to the file, and then `MADV_GUARD_REMOVE` opens the pages. File and mapping never
//! disagree: both are the page cache.
//!
//! The kernel can only refuse the whole: it does not say that data is being transferred to a page. What
//! arrives after the page was taken is lost, if the page is not pinned.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use uzram::units::{Page, pages_to_bytes};
use uzram::{Error, ErrorKind, Result, check_file_size};

use super::{RETRY, Run, Space, Trap};

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of <asm-generic/mman-common.h>, Linux 6.13; for files, Linux
/// 6.15.
const GUARD_INSTALL: i32 = 102;
const GUARD_REMOVE: i32 = 103;

/// See the [module's documentation](self).
pub(crate) struct Guard {
    file: File,
    space: Space,
}

impl Guard {
    /// Returns the trap; reserves address space for `pages`. Errors: `NoMemory`.
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
        Ok(Guard { file, space: Space::new(pages)? })
    }

    /// Returns whether this system has guard pages for files. Errors: `Unsupported`; `NoMemory`.
    pub(crate) fn check() -> Result<()> {
        Guard::new(1)?.map(Run::new(0, 1))
    }

    /// Traps pages.
    fn close(&self, run: Run) -> rustix::io::Result<()> {
        advise(self.space.address(run.first), run.bytes(), GUARD_INSTALL)
    }

    /// Opens pages; waits for as long as the system has no memory for that.
    fn open_all(&self, run: Run) {
        while advise(self.space.address(run.first), run.bytes(), GUARD_REMOVE).is_err() {
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
        let protection = ProtFlags::READ | ProtFlags::WRITE;
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
            let what = format!("this kernel has no guard pages for files, which takes Linux 6.15: {error}");
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

    fn lose(&self, _: u64) {
        // The handler passes such touches on.
    }

    fn forget(&self, page: u64) {
        self.punch(Run::new(page, 1));
    }

    fn discard(&self, _: Run) -> bool {
        false
    }

    fn find(&self, _: u64) {}

    fn space(&self) -> &Space {
        &self.space
    }

    fn retry(&self, _: u64) {}
}
