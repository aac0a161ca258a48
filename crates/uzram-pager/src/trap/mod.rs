//! How a touch of memory that is not there reaches the pager, and how pages come and go beneath a running
//! program.
//!
//! There are two ways, a type each. Both move up to [`MOST_PAGES`] neighbours at once.
//!
//! - `uffd.rs`: userfaultfd. System calls may touch memory that is not there. Needs a privilege.
//! - `guard.rs`: a file in memory, guard pages, and a handler of SIGSEGV (`sigsegv.rs`). Needs nothing;
//!   system calls fail with EFAULT.
//!
//! All addresses of a pager lie in one range of address space, so that a page's number is its place in that
//! range.

pub(crate) mod guard;
pub(crate) mod sigsegv;
pub(crate) mod uffd;

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use uzram::units::{PAGE_SHIFT, PAGE_SIZE, Page};
use uzram::{Error, ErrorKind, Result};

use crate::areas::{Protection, Run};

/// How long a thread waits before it asks the system again for what it must have.
pub(crate) const RETRY: std::time::Duration = std::time::Duration::from_millis(1);

pub(crate) use crate::MOST_PAGES;

/// What a child (fork(2)) has of a pager's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Children {
    /// Nothing: a touch is a SIGSEGV.
    Exclude,
    /// A copy, as of all memory. Its pages that are not in memory read as zeros until it has a trap of its
    /// own.
    Inherit,
}

/// A way to trap touches.
///
/// Pages are *trapped* or *open*. A touch of a trapped page waits until the page is open, or fails.
pub(crate) trait Trap: Send + Sync + Sized + 'static {
    /// Where pages lie that were taken from the program: up to [`MOST_PAGES`], each at its place.
    type Shelf: Send + Sync;

    /// Makes a shelf. Errors: `NoMemory`.
    fn shelf(&self) -> Result<Self::Shelf>;

    /// Makes pages usable, all trapped. Errors: `NoMemory`.
    fn map(&self, run: Run) -> Result<()>;

    /// Takes mapped pages away from the program, whatever is in them. Threads that wait for one fail.
    fn unmap(&self, run: Run);

    /// Opens trapped pages, which get these contents. Errors: `NoMemory`. The caller repeats the call with
    /// the same contents: pages that are open by then stay as the program has changed them.
    fn place(&self, contents: &[Page], run: Run) -> Result<()>;

    /// Traps open pages, whose contents stay in memory: on the shelf, from its `nth` place on. Returns how
    /// many, from the first: fewer if the next one cannot be taken, for example because the kernel transfers
    /// data to it.
    fn take(&self, shelf: &Self::Shelf, nth: usize, run: Run) -> usize;

    /// Returns the contents of pages that were taken, from the shelf's `nth` place on, as they are or copied
    /// to the buffer, which has room for them. `None` if the system refuses.
    fn read<'a>(
        &self,
        shelf: &'a Self::Shelf,
        nth: usize,
        run: Run,
        buffer: &'a mut [Page],
    ) -> Option<&'a [Page]>;

    /// Opens pages again that were taken, from the shelf's `nth` place on, with their contents. Waits for as
    /// long as the system has no memory for that.
    fn give_back(&self, shelf: &Self::Shelf, nth: usize, run: Run);

    /// Gives the memory of pages that were taken, and not given back, to the system: `runs`. All places of
    /// the shelf are free then.
    fn release(&self, shelf: &Self::Shelf, runs: impl Iterator<Item = Run>);

    /// Has touches of a trapped page fail, as its contents are lost.
    fn lose(&self, page: u64);

    /// Gives the memory of a page back whose contents are not needed any more, though it was taken and not
    /// released.
    fn forget(&self, page: u64);

    /// Traps open pages, whose contents are not needed any more, and gives their memory back. Returns false
    /// if this trap takes them in no other way than [`Trap::take`].
    fn discard(&self, run: Run) -> bool;

    /// Ends [`Trap::lose`]: the page is trapped as others are.
    fn find(&self, page: u64);

    /// Returns the addresses of all pages.
    fn space(&self) -> &Space;

    /// Has threads touch a page again that found it trapped.
    fn retry(&self, page: u64);
}

/// A range of address space, reserved and without access, for all pages of a pager.
pub(crate) struct Space {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: an address range belongs to no thread.
unsafe impl Send for Space {}
// SAFETY: as for `Send`.
unsafe impl Sync for Space {}

impl Space {
    /// Reserves room for `pages`. Errors: `NoMemory`.
    pub(crate) fn new(pages: u64) -> Result<Space> {
        let refused = |why: &dyn std::fmt::Display| {
            let what = format!("the system refused {pages} pages of address space: {why}");
            Error::new(ErrorKind::NoMemory, what).with_setting("capacity")
        };
        let len_bytes = usize::try_from(pages).ok().and_then(|pages| pages.checked_mul(PAGE_SIZE));
        let len_bytes = len_bytes.ok_or_else(|| refused(&"more than there is"))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len_bytes, ProtFlags::empty(), flags) };
        let start = start.map_err(|error| refused(&error))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| refused(&"mapped at 0"))?;
        Ok(Space { start, len_bytes })
    }

    pub(crate) fn start(&self) -> usize {
        self.start.as_ptr().addr()
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    pub(crate) fn address(&self, page: u64) -> *mut u8 {
        let offset = (page as usize) << PAGE_SHIFT;
        assert!(offset <= self.len_bytes, "inside the space");
        // SAFETY: inside the reservation, or at its end.
        unsafe { self.start.as_ptr().add(offset) }
    }

    /// Returns the number of the page at an address; `None` outside.
    pub(crate) fn page_at(&self, address: usize) -> Option<u64> {
        let offset = address.checked_sub(self.start())?;
        (offset < self.len_bytes).then_some((offset >> PAGE_SHIFT) as u64)
    }

    /// Returns the run of the pages in which bytes at an address lie; `None` if one of them is outside.
    pub(crate) fn run_at(&self, address: usize, len_bytes: usize) -> Option<Run> {
        let first = self.page_at(address)?;
        let end = address.checked_add(len_bytes)?.checked_next_multiple_of(PAGE_SIZE)?;
        let end = end.checked_sub(self.start()).filter(|end| *end <= self.len_bytes)? >> PAGE_SHIFT;
        Some(Run { first, pages: end - first as usize })
    }

    /// Maps private memory in place of what was there. Errors: `NoMemory`.
    pub(crate) fn map(&self, run: Run, protection: Protection, children: Children) -> Result<()> {
        let address = self.address(run.first);
        self.replace(run, ProtFlags::from_bits_retain(protection.0.cast_unsigned()))
            .map_err(|error| Error::new(ErrorKind::NoMemory, format!("mmap of a region: {error}")))?;
        advise(address, run.bytes(), children)
    }

    /// Puts memory that is not used any more back into the reservation.
    pub(crate) fn reserve_again(&self, run: Run) {
        let reserved = self.replace(run, ProtFlags::empty());
        debug_assert!(reserved.is_ok(), "{reserved:?}");
    }

    fn replace(&self, run: Run, protection: ProtFlags) -> rustix::io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the pages are inside the reservation, which this value owns; the caller has them unmapped.
        unsafe { rustix::mm::mmap_anonymous(self.address(run.first).cast(), run.bytes(), protection, flags) }
            .map(drop)
    }
}

/// Sets what the kernel does with mapped memory: no huge pages, which would not be trapped page by page, and
/// what a child has of it. Errors: `NoMemory`.
fn advise(start: *mut u8, len_bytes: usize, children: Children) -> Result<()> {
    let dont_fork = (children == Children::Exclude).then_some(Advice::LinuxDontFork);
    for advice in [Some(Advice::LinuxNoHugepage), dont_fork].into_iter().flatten() {
        // SAFETY: the range is mapped, and the advice changes no contents.
        match unsafe { rustix::mm::madvise(start.cast(), len_bytes, advice) } {
            Ok(()) => {}
            // A kernel without huge pages.
            Err(rustix::io::Errno::INVAL) if matches!(advice, Advice::LinuxNoHugepage) => {}
            Err(error) => {
                return Err(Error::new(ErrorKind::NoMemory, format!("madvise of a region: {error}")));
            }
        }
    }
    Ok(())
}

impl Drop for Space {
    fn drop(&mut self) {
        // SAFETY: this value owns the range; the pager that hands out its parts has unmapped them.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
