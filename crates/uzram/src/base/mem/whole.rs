//! The mapping of a whole file that was mapped ahead, and which of its pages are mapped.
//!
//! A page that is mapped is in memory: the system takes it out of all mappings before it takes it out of the file, be it
//! that a hole is punched or that it is swapped out. So a look at this process's page tables finds pages in memory in a
//! fraction of the time that it takes to ask about the file. A page that is not mapped may be in memory, too.

use std::fs::File;
use std::ops::Range;
use std::ptr::NonNull;

use linux_raw_sys::general::{PAGE_IS_PRESENT, page_region, pm_scan_arg};
use rustix::ioctl::{Opcode, Updater, opcode};

use super::map::Mapped;

/// The request that returns ranges of pages by their entries in the page tables (Linux 6.7).
const PAGEMAP_SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);

/// A mapping of a whole file.
#[derive(Debug)]
pub(super) struct Whole {
    mapped: Mapped,
    /// `/proc/self/pagemap` of the process that mapped it.
    page_table: File,
    /// That process.
    process: u32,
}

impl Whole {
    /// Takes a mapping that this process made, and its `/proc/self/pagemap`.
    pub(super) fn new(mapped: Mapped, page_table: File) -> Self {
        Whole { mapped, page_table, process: std::process::id() }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.mapped.start()
    }

    /// Returns this process's `/proc/self/pagemap`.
    pub(super) fn page_table(&self) -> &File {
        &self.page_table
    }

    /// Returns whether all pages of a range of bytes of the file are known to be mapped. The range consists of whole pages
    /// of the host.
    pub(super) fn has_all_mapped(&self, bytes: Range<u64>) -> bool {
        self.first_mapped(bytes.clone()) == Some(bytes)
    }

    /// Returns the first range of mapped pages in a range of bytes of the file, which consists of whole pages of the host;
    /// an empty one at its end if none is. `None` if the system does not tell, or the range is empty.
    pub(super) fn first_mapped(&self, bytes: Range<u64>) -> Option<Range<u64>> {
        // A child of that process has page tables of its own.
        if bytes.is_empty() || self.process != std::process::id() {
            return None;
        }
        let base = self.start().addr().get() as u64;
        let (start, end) = (base + bytes.start, base + bytes.end);
        let mut found = page_region { start: 0, end: 0, categories: 0 };
        let mut scan = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: 0,
            start,
            end,
            walk_end: 0,
            vec: (&raw mut found).expose_provenance() as u64,
            vec_len: 1,
            max_pages: 0,
            category_inverted: 0,
            category_mask: PAGE_IS_PRESENT.into(),
            category_anyof_mask: 0,
            return_mask: PAGE_IS_PRESENT.into(),
        };
        // SAFETY: the structs are those of this request, and live on. It changes no mapping.
        let done =
            unsafe { rustix::ioctl::ioctl(&self.page_table, Updater::<PAGEMAP_SCAN, _>::new(&mut scan)) };
        match done {
            Err(_) => None,
            Ok(()) if found.end == 0 => Some(bytes.end..bytes.end),
            Ok(()) => Some(found.start - base..found.end - base),
        }
    }
}
