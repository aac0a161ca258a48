//! Runs of pages in the same state, found without locks.

use crate::base::units::PageNo;

use super::{PageState, Store};

impl Store {
    /// Returns the state of `page`, and the number of consecutive pages from `page` on that are in it: at least 1, at
    /// most `max_pages`, which bounds the work. Takes no lock: the state of each page is one that it was in during the
    /// call.
    ///
    /// # Panics
    /// If `max_pages` is 0 or goes beyond the end.
    pub fn extent(&self, page: PageNo, max_pages: u64) -> (PageState, u64) {
        let state = self.slots.state(page);
        let behind = page.number() + 1..page.number() + max_pages;
        (state, 1 + self.slots.run(behind, |other| other == state))
    }

    /// Returns the number of consecutive pages from `page` on that read as zeros, 0 to `max_pages`; otherwise as
    /// [`Store::extent`].
    pub fn zero_pages(&self, page: PageNo, max_pages: u64) -> u64 {
        self.slots.run(page.number()..page.number() + max_pages, PageState::is_zeros)
    }
}
