//! Which pages a process has in its page tables, by `PAGEMAP_SCAN` of its `/proc/PID/pagemap` (Linux 6.7).

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use linux_raw_sys::general::{PAGE_IS_FILE, PAGE_IS_PRESENT, pm_scan_arg};
use rustix::io::Errno;
use rustix::ioctl::opcode;

/// A range of addresses, `start` to `end`, whose pages were found.
pub use linux_raw_sys::general::page_region as FoundPages;

/// The request that returns ranges of pages by their entries in the page tables.
const PAGEMAP_SCAN: libc::Ioctl = opcode::read_write::<pm_scan_arg>(b'f', 16) as libc::Ioctl;

/// Which pages are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Those that are in memory.
    Present,
    /// Of these, those that belong to no file.
    PresentOfNoFile,
}

/// Looks for pages in a range of addresses; skips what is not mapped, however large. Returns how many entries
/// of `found` it filled: the first ranges, in order. If that is all of them, there may be more behind the
/// last one. Fails with `ENOTTY` before Linux 6.7; others of the system.
pub fn scan_page_table(
    page_table: &File,
    addresses: Range<u64>,
    wanted: Wanted,
    found: &mut [FoundPages],
) -> Result<usize, Errno> {
    let of_files = match wanted {
        Wanted::Present => 0,
        Wanted::PresentOfNoFile => u64::from(PAGE_IS_FILE),
    };
    let mut scan = pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: 0,
        start: addresses.start,
        end: addresses.end,
        walk_end: 0,
        vec: found.as_mut_ptr().expose_provenance() as u64,
        vec_len: found.len() as u64,
        max_pages: 0,
        category_inverted: of_files,
        category_mask: of_files | u64::from(PAGE_IS_PRESENT),
        category_anyof_mask: 0,
        return_mask: PAGE_IS_PRESENT.into(),
    };
    // `walk_end` is no help to a caller: Linux 6.18 leaves it behind regions that it returned, if there are
    // many. SAFETY: the struct is that of this request; the call writes there, and at most `vec_len` regions
    // to `vec`, which is an array of as many that is borrowed meanwhile. It changes no mapping.
    let count = unsafe { libc::ioctl(page_table.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
    match usize::try_from(count) {
        Ok(count) => Ok(count.min(found.len())),
        Err(_) => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
