//! The mapping of a whole file that was mapped ahead, and which of its pages are mapped.
//!
//! A page that is mapped is in memory: the system takes it out of all mappings before it takes it out of the
//! file, be it that a hole is punched or that it is swapped out. So a look at this process's page tables
//! finds pages in memory in a fraction of the time that it takes to ask about the file. A page that is not
//! mapped may be in memory, too.

use std::fs::File;
use std::ops::Range;
use std::ptr::NonNull;

use super::map::Mapped;
use super::page_table::{FoundPages, Wanted, scan_page_table};

/// A place for pages to be found.
pub(super) const NO_PAGES: FoundPages = FoundPages { start: 0, end: 0, categories: 0 };

#[derive(Debug)]
pub(super) struct Whole {
    mapped: Mapped,
    /// `/proc/self/pagemap` of the process that mapped it.
    pub(super) page_table: File,
    process: u32,
}

impl Whole {
    pub(super) fn new(mapped: Mapped, page_table: File) -> Self {
        Whole { mapped, page_table, process: std::process::id() }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.mapped.start()
    }

    /// Finds mapped pages in a range of bytes of the file, which consists of whole pages of the host. Fills
    /// `found` with the first ranges of bytes that are mapped, in order, and returns how many these are; if
    /// that is all of `found`, there may be more. `None` if the system does not tell, or the range is empty.
    pub(super) fn find_mapped(&self, bytes: Range<u64>, found: &mut [FoundPages]) -> Option<usize> {
        // A child of that process has page tables of its own.
        if bytes.is_empty() || self.process != std::process::id() {
            return None;
        }
        let base = self.start().addr().get() as u64;
        let addresses = base + bytes.start..base + bytes.end;
        let count = scan_page_table(&self.page_table, addresses, Wanted::Present, found).ok()?;
        for pages in &mut found[..count] {
            (pages.start, pages.end) = (pages.start - base, pages.end - base);
        }
        Some(count)
    }

    /// As [`Whole::find_mapped`], for the first range; returns an empty one at the end if no page is mapped.
    pub(super) fn first_mapped(&self, bytes: Range<u64>) -> Option<Range<u64>> {
        let mut found = [NO_PAGES];
        let none = bytes.end..bytes.end;
        self.find_mapped(bytes, &mut found).map(|count| match count {
            0 => none,
            _ => found[0].start..found[0].end,
        })
    }
}
