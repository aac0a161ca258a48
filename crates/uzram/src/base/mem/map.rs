//! The only door to mmap, mprotect, madvise and mincore.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use super::file::Region;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::rewrite;

/// A mapping of private anonymous memory, or of a [`Region`] of a file: it takes memory only where it is
/// touched. It is unmapped when dropped.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
    page_bytes: usize,
    region: Option<Region>,
    /// What to unmap: more than `len_bytes` where a test emulates larger pages. `None` for a part of a file
    /// that is mapped as a whole ([`Region::mapped_ahead`]).
    _mapped: Option<Mapped>,
}

#[derive(Debug)]
pub(super) struct Mapped {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: an address range belongs to no thread.
unsafe impl Send for Mapped {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `len_bytes` bytes of a file from `offset` on, shared with other processes. Both are multiples of
    /// the host's page size. Fails with `NoMemory` when the system refuses.
    pub(super) fn shared(fd: BorrowedFd<'_>, offset: u64, len_bytes: usize, access: Access) -> Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len_bytes, access.protection(), flags, fd, offset)
        };
        let mapped = Mapped::at(start.map_err(|error| refused(len_bytes, &error))?, len_bytes)?;
        mapped.advise();
        Ok(mapped)
    }

    fn at(start: *mut std::ffi::c_void, len_bytes: usize) -> Result<Self> {
        let start = NonNull::new(start.cast::<u8>());
        Ok(Mapped { start: start.ok_or_else(|| Error::new(ErrorKind::NoMemory, "mapped at 0"))?, len_bytes })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn advise(&self) {
        let (start, len_bytes) = (self.start.as_ptr().cast(), self.len_bytes);
        // Huge pages would make untouched pages resident, and the counts wrong. A kernel without
        // them refuses the advice, which does no harm.
        // SAFETY: the range is this mapping, and the advice changes no contents.
        let _ = unsafe { rustix::mm::madvise(start, len_bytes, Advice::LinuxNoHugepage) };
        // The mapping will hold users' data, or large tables: keep it out of core dumps.
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(start, len_bytes, Advice::LinuxDontDump) };
    }
}

fn refused(len_bytes: usize, why: &dyn std::fmt::Display) -> Error {
    let what = format!("the system refused {len_bytes} bytes of address space: {why}");
    Error::new(ErrorKind::NoMemory, what).with_setting("disksize")
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this value owns the address space, and every user of it borrowed this value, or holds the
        // file that owns it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

// SAFETY: a mapping is an address range that belongs to no thread; the types that hand out its parts
// (`Arena`, `Table`) ensure that accesses to them are sound.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

/// Returns the host's page size: the system gives and takes memory in multiples of it.
pub(crate) fn host_page_bytes() -> usize {
    #[cfg(all(test, not(loom)))]
    if let Some(bytes) = EMULATED_PAGE_BYTES.get() {
        return bytes;
    }
    rustix::param::page_size()
}

#[cfg(all(test, not(loom)))]
thread_local! {
    static EMULATED_PAGE_BYTES: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

#[cfg(all(test, not(loom)))]
pub(crate) const HOST_PAGE_BYTES: [usize; 3] = [4 << 10, 16 << 10, 64 << 10];

/// Runs a test with emulated host pages of `page_bytes`, a multiple of this host's: mappings that this thread
/// makes meanwhile are aligned to such pages, and only release whole ones as long as they live.
#[cfg(all(test, not(loom)))]
pub(crate) fn with_host_pages_of<R>(page_bytes: usize, test: impl FnOnce() -> R) -> R {
    struct Restore(Option<usize>);
    impl Drop for Restore {
        fn drop(&mut self) {
            EMULATED_PAGE_BYTES.set(self.0);
        }
    }
    assert!(
        page_bytes.is_multiple_of(rustix::param::page_size()),
        "pages of the host can be joined, not cut"
    );
    let _restore = Restore(EMULATED_PAGE_BYTES.replace(Some(page_bytes)));
    test()
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// No access before [`Mapping::enable`]: the reservation is not charged, even with strict overcommit.
    None,
    ReadWrite,
}

impl Access {
    fn protection(self) -> ProtFlags {
        match self {
            Access::None => ProtFlags::empty(),
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }
}

impl Mapping {
    /// Reserves `len_bytes` bytes (more than 0), rounded up to whole pages of the host. Fails with `NoMemory`
    /// when the system refuses.
    pub(crate) fn new(len_bytes: usize, access: Access) -> Result<Self> {
        let protection = access.protection();
        let page_bytes = host_page_bytes();
        let too_many = || refused(len_bytes, &"that is more than there is");
        let len_bytes = len_bytes.checked_next_multiple_of(page_bytes).ok_or_else(too_many)?;
        // The system aligns to its own pages, which may be smaller than emulated ones.
        let spare_bytes = page_bytes - rustix::param::page_size();
        let mapped_bytes = len_bytes.checked_add(spare_bytes).ok_or_else(too_many)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses affects no existing memory.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped_bytes, protection, flags) };
        let mapped = Mapped::at(base.map_err(|error| refused(len_bytes, &error))?, mapped_bytes)?;
        mapped.advise();
        // SAFETY: the system's page size divides `page_bytes`, so the offset is at most `spare_bytes`.
        let base = unsafe { mapped.start.add(mapped.start.as_ptr().align_offset(page_bytes)) };
        Ok(Mapping { base, len_bytes, page_bytes, region: None, _mapped: Some(mapped) })
    }

    /// Maps the first `len_bytes` bytes of a region, rounded up to whole pages of the host; private memory if
    /// `region` is `None`. Fails as [`Mapping::new`]; `Invalid` for a shorter region.
    pub(crate) fn new_in(region: Option<&Region>, len_bytes: usize, access: Access) -> Result<Self> {
        let Some(region) = region else { return Mapping::new(len_bytes, access) };
        let page_bytes = rustix::param::page_size();
        let len_bytes = len_bytes.next_multiple_of(page_bytes);
        if len_bytes == 0 || (len_bytes as u64) > region.len_bytes {
            return Err(Error::invalid("a region of a memfd is too short"));
        }
        // The file is sealed against shrinking.
        let (base, mapped) = match region.mapped_ahead() {
            Some(base) => (base, None),
            None => {
                let mapped = Mapped::shared(region.fd(), region.offset, len_bytes, access)?;
                (mapped.start, Some(mapped))
            }
        };
        Ok(Mapping { base, len_bytes, page_bytes, region: Some(region.clone()), _mapped: mapped })
    }

    pub(crate) fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the size of the host's pages here: [`host_page_bytes`] when it was mapped.
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn part(&self, offset: usize, len: usize) -> *mut std::ffi::c_void {
        assert!(offset <= self.len_bytes && len <= self.len_bytes - offset, "inside the mapping");
        // SAFETY: `offset` is inside the mapping, as just checked.
        unsafe { self.base().add(offset).cast() }
    }

    /// Makes a page-aligned part readable and writable. Fails with `NoMemory` when the system refuses.
    pub(crate) fn enable(&self, offset: usize, len: usize) -> Result<()> {
        let start = self.part(offset, len);
        // SAFETY: the range lies inside this mapping, and more access invalidates nothing.
        let enabled = unsafe { rustix::mm::mprotect(start, len, MprotectFlags::READ | MprotectFlags::WRITE) };
        enabled.map_err(|_| Error::new(ErrorKind::NoMemory, "the system gave no memory"))
    }

    /// Makes a page-aligned, writable part resident. Other threads may use its contents meanwhile. Fails with
    /// `NoMemory` when the system gives none; some of the part may be resident then.
    pub(super) fn populate(&self, offset: usize, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range lies inside this mapping, and the advice changes no contents.
        match unsafe { rustix::mm::madvise(self.part(offset, len), len, Advice::LinuxPopulateWrite) } {
            // Before Linux 5.14.
            Err(Errno::INVAL) => self.touch(offset, len),
            Err(error) => {
                let what = format!("the system gave no memory: {error}");
                return Err(Error::new(ErrorKind::NoMemory, what));
            }
            Ok(()) => {}
        }
        Ok(())
    }

    /// As [`Mapping::populate`], by rewriting a byte of each page.
    pub(super) fn touch(&self, offset: usize, len: usize) {
        let start = self.part(offset, len).cast::<u8>();
        for at in (0..len).step_by(rustix::param::page_size()) {
            // SAFETY: the byte lies in the part, which is writable, and other threads change it only
            // atomically.
            unsafe { rewrite(start.add(at)) };
        }
    }

    /// Gives the memory of a part back to the system; returns whether the system took it (before Linux
    /// 5.18 it does not take locked memory). The part then reads as zeros. It consists of whole pages
    /// of the host.
    ///
    /// # Safety
    /// No thread uses the part's contents, now or later.
    pub(super) unsafe fn release(&self, offset: usize, len: usize) -> bool {
        debug_assert!(offset.is_multiple_of(self.page_bytes) && len.is_multiple_of(self.page_bytes));
        let start = self.part(offset, len);
        if let Some(region) = &self.region {
            return region.punch(offset as u64, len as u64);
        }
        let advise = |advice| {
            // SAFETY: the range lies inside this mapping, and the caller vouches for its contents.
            unsafe { rustix::mm::madvise(start, len, advice) }
        };
        match advise(Advice::LinuxDontNeed) {
            // The error for locked memory.
            Err(Errno::INVAL) => advise(Advice::LinuxDontneedLocked).is_ok(),
            answer => answer.is_ok(),
        }
    }

    /// Returns the resident bytes, by asking the system about every page.
    pub(super) fn resident_bytes(&self) -> usize {
        self.resident_bytes_in(0, self.len_bytes)
    }

    pub(super) fn resident_bytes_in(&self, offset: usize, len: usize) -> usize {
        const STEP_BYTES: usize = 64 << 20;
        let host_page = rustix::param::page_size();
        let mut answers = vec![0u8; STEP_BYTES / host_page];
        let mut resident_pages = 0;
        let end = offset + len;
        for offset in (offset..end).step_by(STEP_BYTES) {
            let len = STEP_BYTES.min(end - offset);
            let answers = &mut answers[..len.div_ceil(host_page)];
            // SAFETY: the range lies inside this mapping, and `answers` has a byte for each of its pages.
            let asked = unsafe { libc::mincore(self.part(offset, len), len, answers.as_mut_ptr()) };
            if asked == 0 {
                resident_pages += answers.iter().filter(|answer| **answer & 1 != 0).count();
            }
        }
        resident_pages * host_page
    }
}
