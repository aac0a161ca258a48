//! The expected contents of a disk: an array of bytes, and for each page what is known of it.

use std::ops::Range;

use uzram::device::{DeviceStats, OpenDevice, PageState};
use uzram::units::{PAGE_SIZE, bytes_to_pages, page_of};

pub(crate) struct Model {
    bytes: Vec<u8>,
    pages: Vec<Page>,
    has_backing: bool,
}

#[derive(Clone, Copy, PartialEq)]
struct Page {
    contents_known: bool,
    held: Held,
}

impl Page {
    const EMPTY: Page = Page { contents_known: true, held: Held::No };
}

/// Whether a page counts as holding something. One that was never written, or discarded since,
/// does not, though it reads as zeros.
#[derive(Clone, Copy, PartialEq)]
enum Held {
    No,
    Yes,
    Maybe,
}

impl Model {
    /// Makes a disk of `size_bytes`, whole pages, never written; its pages may go to a backing device, if it
    /// has one.
    pub fn new(size_bytes: usize, has_backing: bool) -> Self {
        let pages = bytes_to_pages(size_bytes as u64) as usize;
        Model { bytes: vec![0; size_bytes], pages: vec![Page::EMPTY; pages], has_backing }
    }

    pub fn clear(&mut self) {
        self.bytes.fill(0);
        self.pages.fill(Page::EMPTY);
    }

    pub fn size_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the range as indices, if it is on the disk.
    pub fn range(&self, offset: u64, len: u64) -> Option<Range<usize>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size_bytes())?;
        Some(offset as usize..end as usize)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let range = offset as usize..offset as usize + data.len();
        self.write_zeroes_allocated(range.clone());
        self.bytes[range].copy_from_slice(data);
    }

    /// Notes zeroes that were written: whole pages are freed, and parts of pages that hold nothing stay so.
    pub fn write_zeroes(&mut self, range: Range<usize>) {
        self.bytes[range.clone()].fill(0);
        self.discard(range);
    }

    /// Notes zeroes that were written so that the pages hold them.
    pub fn write_zeroes_allocated(&mut self, range: Range<usize>) {
        for (page, covered) in pieces(range) {
            self.pages[page].held = Held::Yes;
            self.pages[page].contents_known |= covered.len() == PAGE_SIZE;
            self.bytes[covered].fill(0);
        }
    }

    /// Returns the states that the page of a byte can be in; all, if it is not known.
    pub fn states(&self, offset: u64) -> &'static [PageState] {
        use PageState::*;
        let page = page_of(offset) as usize;
        let one_word = || self.is_one_word(page).then_some(self.bytes[page * PAGE_SIZE..][..8] == [0; 8]);
        match self.pages[page] {
            Page { held: Held::No, .. } => &[Hole],
            Page { held: Held::Yes, contents_known: true } => match one_word() {
                Some(true) => &[Zero],
                Some(false) => &[Same],
                None if self.has_backing => &[Compressed, Huge, Backed],
                None => &[Compressed, Huge],
            },
            _ if self.has_backing => &[Hole, Zero, Same, Compressed, Huge, Backed],
            _ => &[Hole, Zero, Same, Compressed, Huge],
        }
    }

    /// Notes a discard: whole pages only.
    pub fn discard(&mut self, range: Range<usize>) {
        for (page, covered) in pieces(range) {
            if covered.len() == PAGE_SIZE {
                self.pages[page] = Page::EMPTY;
                self.bytes[covered].fill(0);
            }
        }
    }

    /// Notes a change of the range that may have been made in part: its contents are unknown.
    pub fn lose(&mut self, range: Range<usize>) {
        for (page, _) in pieces(range) {
            self.pages[page] = Page { contents_known: false, held: Held::Maybe };
        }
    }

    /// Finds out what a failed write of `data`, or of zeroes, has changed on `disk`. Pages up to some page
    /// have the new contents, that one and all after it the old.
    pub fn settle(&mut self, disk: &OpenDevice, offset: u64, data: &[u8], zeroes: bool) {
        let start = offset as usize;
        let mut all_new = true;
        for (page, covered) in pieces(start..start + data.len()) {
            let mut now = vec![0; covered.len()];
            disk.read(covered.start as u64, &mut now).expect("what is stored can be read");
            let new = &data[covered.start - start..covered.end - start];
            let old = &self.bytes[covered.clone()];
            // Zeroes free whole pages.
            let held_if_done = match self.pages[page].held {
                _ if !zeroes => Held::Yes,
                _ if covered.len() == PAGE_SIZE => Held::No,
                before => before,
            };
            if now != *old {
                assert!(now == *new, "page {page} has neither its old nor its new contents");
                assert!(all_new, "page {page} was written though one before it failed");
                self.pages[page].held = held_if_done;
            } else if now != *new {
                all_new = false;
            } else if all_new && self.pages[page].held != held_if_done {
                // Changed or not, it reads the same.
                self.pages[page].held = Held::Maybe;
            }
            self.bytes[covered].copy_from_slice(&now);
        }
    }

    /// Checks the data read from `offset` on, as far as the contents are known.
    pub fn check_read(&self, offset: u64, data: &[u8], when: &str) {
        let start = offset as usize;
        for (page, covered) in pieces(start..start + data.len()) {
            let read = &data[covered.start - start..covered.end - start];
            let good = !self.pages[page].contents_known || *read == self.bytes[covered.clone()];
            assert!(good, "{when}: bytes {covered:?} of page {page} are not what was written");
        }
    }

    /// Reads all of `disk` and compares the contents and the states of its pages.
    pub fn check_all(&self, disk: &OpenDevice) {
        for page in 0..self.pages.len() as u64 {
            let offset = page * PAGE_SIZE as u64;
            let (extent, possible) = (disk.extent(offset, 1).expect("in range"), self.states(offset));
            assert!(possible.contains(&extent.state), "page {page}: {extent:?}, not {possible:?}");
        }
        let mut data = vec![0xa5; self.bytes.len()];
        disk.read(0, &mut data).expect("what is stored can be read");
        self.check_read(0, &data, "at the end");
    }

    /// Checks that the statistics count the pages that hold something, and the same-filled ones.
    pub fn check_stats(&self, stats: &DeviceStats) {
        let count = |wanted: &dyn Fn(usize) -> bool| {
            (0..self.pages.len()).filter(|page| wanted(*page)).count() as u64
        };
        let check = |what: &str, counted: u64, sure: u64, maybe: u64| {
            let is_right = (sure..=sure + maybe).contains(&counted);
            assert!(is_right, "{counted} pages are {what}, and should be {sure} and {maybe} perhaps");
        };
        let held = |held| count(&|page| self.pages[page].held == held);
        check("stored", stats.orig_data_bytes / PAGE_SIZE as u64, held(Held::Yes), held(Held::Maybe));
        let known = Page { contents_known: true, held: Held::Yes };
        let sure = count(&|page| self.pages[page] == known && self.is_one_word(page));
        let maybe = count(&|page| self.pages[page] != known && self.pages[page].held != Held::No);
        check("one word, repeated", stats.same_pages, sure, maybe);
    }

    fn is_one_word(&self, page: usize) -> bool {
        let page = &self.bytes[page * PAGE_SIZE..][..PAGE_SIZE];
        // Each word is the one before it.
        page[8..] == page[..PAGE_SIZE - 8]
    }
}

fn pieces(range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        (at < range.end).then(|| {
            let page = page_of(at as u64) as usize;
            let covered = at..range.end.min((page + 1) * PAGE_SIZE);
            at = covered.end;
            (page, covered)
        })
    })
}
