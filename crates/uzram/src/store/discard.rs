//! Discarding and zeroing of pages, and zeroing of parts of pages.
//!
//! A discarded page is a hole: it holds nothing, and its slot may leave memory. A zeroed page keeps its slot
//! in memory.

use std::ops::Range;

use crate::base::error::Result;
use crate::base::units::PageNo;

use super::slot::Contents;
use super::write::Part;
use super::{Store, Wait};

/// Discarded pages that are removed from the LRU's lists together.
const REMOVED_AT_ONCE: usize = 512;

impl Store {
    /// Discards a page: it then reads as zeros.
    pub fn discard(&self, page: PageNo) {
        self.discard_pages(page.number()..page.number() + 1);
    }

    /// Discards a range of pages: they then read as zeros.
    pub fn discard_pages(&self, pages: Range<u64>) {
        let (mut dead, mut count) = ([0; REMOVED_AT_ONCE], 0);
        self.counters.local().notify_free.add(pages.end.saturating_sub(pages.start));
        self.slots.discard(pages, |page| {
            let mut slot = self.slots.lock(page);
            let old = self.publish(&mut slot, Contents::Empty);
            let dies = self.mark_dead(page, &old);
            drop(slot);
            self.free(old);
            if dies {
                dead[count] = page.0;
                count += 1;
            }
            if let Some(lru) = self.lru.as_ref().filter(|_| count == REMOVED_AT_ONCE) {
                lru.remove_dead(&mut dead);
                count = 0;
            }
        });
        if let Some(lru) = &self.lru {
            lru.remove_dead(&mut dead[..count]);
        }
    }

    /// Fills a page with zeros: it is not a hole afterwards.
    pub fn zero(&self, page: PageNo) {
        self.replace(self.slots.lock(page), page, Contents::Same(0));
        self.counters.local().pages_written.add(1);
    }

    /// Zeroes `len` bytes of a page from byte `at` on. A hole stays a hole, unless `allocate` is set.
    /// Fails as [`Store::write_part`].
    pub fn zero_part(&self, page: PageNo, at: usize, len: usize, allocate: bool, wait: Wait) -> Result<()> {
        if !allocate && self.slots.is_empty(page) {
            return Ok(());
        }
        self.change_part(page, at, Part::Zeros(len), wait)
    }
}
