//! In which state runs of pages are, looked at without locks.

use crate::base::units::PageNo;

use super::{PageState, Store};

impl Store {
    /// The state that `page` and those after it are in, and for how many pages, one after another, that holds: at
    /// least 1, at most `max_pages`, which bounds the work. Takes no lock: the state of each page is one that it was in
    /// during the call.
    ///
    /// # Panics
    /// When `max_pages` is 0 or goes beyond the end.
    pub fn extent(&self, page: PageNo, max_pages: u64) -> (PageState, u64) {
        let state = self.slots.state(page);
        let behind = page.number() + 1..page.number() + max_pages;
        (state, 1 + self.slots.run(behind, |other| other == state))
    }

    /// How many pages from `page` on read as zeros: at most `max_pages`; otherwise as [`Store::extent`].
    pub fn zero_pages(&self, page: PageNo, max_pages: u64) -> u64 {
        self.slots.run(page.number()..page.number() + max_pages, PageState::is_zeros)
    }
}
