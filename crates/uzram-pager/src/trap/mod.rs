//! How a touch of memory that is not there reaches the pager, and how pages come and go beneath a running
//! program.
//!
//! There are two ways, a type each:
//! - `uffd.rs`: userfaultfd. System calls may touch memory that is not there. Needs a privilege.
//! - `guard.rs`: a file in memory, guard pages, and a handler of SIGSEGV (`sigsegv.rs`). Needs nothing;
//!   system calls fail with EFAULT.

pub(crate) mod guard;
pub(crate) mod sigsegv;
pub(crate) mod uffd;

use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::AtomicBool;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use uzram::units::Page;
use uzram::{Error, ErrorKind, Result};

use crate::map::Part;

/// How long a thread waits before it asks the system again for what it must have.
pub(crate) const RETRY: std::time::Duration = std::time::Duration::from_millis(1);

/// Memory for `MOST_PAGES` pages, registered, which pages are moved to. A page without access lies on each
/// side, so that the kernel does not join it with other memory.
pub(crate) struct Staging {
    part: Part,
    /// Something else has touched pages that were not there.
    was_touched: AtomicBool,
}

/// Where up to `MOST_PAGES` pages lie that were taken; `None` where their contents stay in a file.
pub(crate) type Shelf = Option<Staging>;

/// A way to trap touches. Pages are *trapped* or *open*. A touch of a trapped page waits until it is open, or
/// fails. While a program changes its memory map, some calls do less than they are asked to, and say what
/// they have done: the caller lets the change pass, and tries again.
pub(crate) trait Trap: Send + Sync + 'static {
    /// Makes a shelf. Errors: `NoMemory`.
    fn shelf(&self) -> Result<Shelf>;

    /// Maps reserved pages, all trapped. Errors: `NoMemory`.
    fn map(&self, part: Part) -> Result<()>;

    /// Takes mapped pages away from the program, whatever is in them. Threads that wait for one fail.
    fn unmap(&self, part: Part);

    /// Opens trapped pages, which get these contents, and returns how many, from the first. Pages that are
    /// open by then stay as they are. Waits for as long as the system has no memory for that.
    fn place(&self, contents: &[Page], part: Part) -> usize;

    /// Traps open pages, whose contents stay in memory: on the shelf, from its `nth` place on. Returns how
    /// many, from the first, and whether a child has the next one, too.
    fn take(&self, shelf: &Shelf, nth: usize, part: Part) -> (usize, bool);

    /// Copies a page that a child has, too, so that it can be taken. One that is not there any more may be a
    /// trapped touch of this thread.
    fn make_own(&self, _page: Part) {}

    /// Returns the contents of pages that were taken, from the shelf's `nth` place on, as they are or copied
    /// to the buffer, which has room for them. `None` if the system refuses. `first` is their first number.
    fn read<'a>(
        &self,
        shelf: &'a Shelf,
        nth: usize,
        first: u64,
        pages: usize,
        buffer: &'a mut [Page],
    ) -> Option<&'a [Page]>;

    /// Opens a page again that was taken, at the shelf's `nth` place. Waits as [`Trap::place`] does. Returns
    /// false if the memory map is changing.
    fn give_back(&self, shelf: &Shelf, nth: usize, page: Part) -> bool;

    /// Gives the memory of pages that were taken, and not given back, to the system: runs of numbers, each
    /// the first and how many. All places of the shelf are free then.
    fn release(&self, shelf: &Shelf, runs: &mut dyn Iterator<Item = (u64, usize)>);

    /// Has touches of a trapped page fail: its contents are lost. Returns false if the memory map is
    /// changing.
    fn lose(&self, _page: Part) -> bool {
        true
    }

    /// Traps pages of a region, whose contents are not needed any more, and gives their memory back. Returns
    /// false if it cannot: they are as before.
    fn discard(&self, part: Part) -> bool;

    /// Gives the memory of a trapped page of a region back, or the mark that its contents are lost.
    fn forget(&self, page: Part) {
        self.discard(page);
    }

    /// Has threads touch pages again that found them trapped.
    fn wake(&self, _part: Part) {}
}

/// Reserves addresses for so many bytes, without access. Errors: `NoMemory`.
pub(crate) fn reserve(bytes: usize) -> Result<usize> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
    let start = unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), flags) };
    let refused = |error| {
        Error::new(ErrorKind::NoMemory, format!("the system refused {bytes} bytes of memory: {error}"))
    };
    start.map(|start| start.expose_provenance()).map_err(refused)
}

/// Unmaps memory that this module has mapped, and that nobody uses any more.
pub(crate) fn unmap(part: Part) {
    // SAFETY: as said.
    let unmapped = unsafe { rustix::mm::munmap(with_exposed_provenance_mut(part.address), part.bytes()) };
    debug_assert!(unmapped.is_ok(), "{unmapped:?}");
}

/// Sets what the kernel does with mapped memory: no huge pages, which would not be trapped page by page, and
/// whether a child has a copy of it, or no memory there. Errors: `NoMemory`.
fn advise(part: Part, is_inherited: bool) -> Result<()> {
    let dont_fork = (!is_inherited).then_some(Advice::LinuxDontFork);
    for advice in [Some(Advice::LinuxNoHugepage), dont_fork].into_iter().flatten() {
        let start = with_exposed_provenance_mut(part.address);
        // SAFETY: the range is mapped, and the advice changes no contents.
        match unsafe { rustix::mm::madvise(start, part.bytes(), advice) } {
            // A kernel without huge pages.
            Err(rustix::io::Errno::INVAL) if matches!(advice, Advice::LinuxNoHugepage) => {}
            advised => advised
                .map_err(|error| Error::new(ErrorKind::NoMemory, format!("madvise of a region: {error}")))?,
        }
    }
    Ok(())
}
