//! Memory that stays resident: a process killed during a page fault in the kernel's copy of a request would fail it.

use rustix::io::Errno;
use uzram::mem::ZeroedPages;

/// Allocates `len` bytes, touches all of them, and locks them in memory if the system allows it.
pub(super) fn allocate(len: usize) -> Result<ZeroedPages, Errno> {
    let mut pages = ZeroedPages::new(len).map_err(|_| Errno::NOMEM)?;
    pages.fill(0);
    lock(pages.as_ptr(), len);
    Ok(pages)
}

/// Locks memory, if the system allows it.
pub(super) fn lock(start: *const u8, len: usize) {
    // SAFETY: locking changes no contents. The system refuses addresses where nothing is mapped, and more memory than a
    // user may lock; it then stays as it is.
    let _ = unsafe { rustix::mm::mlock(start.cast_mut().cast(), len) };
}
