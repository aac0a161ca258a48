//! Faults injected into system calls, and userfaultfd for valgrind, which does not know it: for tests.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use linux_raw_sys::general::uffdio_copy;
use rustix::io::Errno;
use rustix::ioctl::Opcode;
use uzram::units::PAGE_SHIFT;

use crate::uffd::{COPY, MOVE};

/// Nothing is trapped: pages are copied.
pub(crate) static IS_EMULATED: AtomicBool = AtomicBool::new(false);

/// Does what an ioctl of userfaultfd does to pages, but for one that moves them: they stay where they are.
pub(crate) fn emulate<T>(code: Opcode, argument: &T) {
    let argument = (&raw const *argument).cast::<u8>();
    if code == COPY || code == MOVE {
        // SAFETY: the arguments of both begin so, and their ranges are mapped.
        unsafe {
            let uffdio_copy { dst, src, len, .. } = *argument.cast::<uffdio_copy>();
            let (from, to) =
                (with_exposed_provenance::<u8>(src as usize), with_exposed_provenance_mut(dst as usize));
            std::ptr::copy_nonoverlapping(from, to, len as usize);
        }
    }
}

/// One call of so many fails; 0 for none.
pub(crate) static ONE_OF: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(1);

/// Returns whether the next call is to fail, and a number that chooses how.
fn next() -> Option<u64> {
    let mixed = CALLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let one_of = ONE_OF.load(Ordering::Relaxed);
    (one_of > 0 && mixed.is_multiple_of(one_of)).then(|| mixed / one_of)
}

/// Returns the error that the next call is to fail with, before it does anything.
pub(crate) fn of_ioctl(may_refuse: bool) -> Option<Errno> {
    let errors = if may_refuse { [Errno::AGAIN, Errno::BUSY, Errno::NOENT] } else { [Errno::AGAIN; 3] };
    next().map(|which| errors[(which % 3) as usize])
}

/// Has a move that succeeded look as if not all of its pages, or none, had been moved, as Linux 6.18 does.
pub(crate) fn miscount(moved: Result<(), Errno>, pages: usize, counted_bytes: &mut i64) -> Result<(), Errno> {
    moved?;
    let Some(which) = next() else { return Ok(()) };
    match which as usize % pages {
        0 => Err(Errno::EXIST),
        counted => {
            *counted_bytes = (counted << PAGE_SHIFT) as i64;
            Err(Errno::AGAIN)
        }
    }
}
