//! A few pages in an array.

use super::MAX_PAGEVEC_PAGES;

/// Pages that are to be put into the lists.
#[derive(Clone, Copy)]
pub struct Pagevec {
    pages: [u32; MAX_PAGEVEC_PAGES],
    len: usize,
}

impl Pagevec {
    /// No pages.
    pub(super) const EMPTY: Pagevec = Pagevec { pages: [0; MAX_PAGEVEC_PAGES], len: 0 };

    /// Appends a page.
    #[inline]
    pub(super) fn push(&mut self, page: u32) {
        self.pages[self.len] = page;
        self.len += 1;
    }

    /// How many there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The pages, to be put into another order.
    pub(super) fn pages_mut(&mut self) -> &mut [u32] {
        &mut self.pages[..self.len]
    }

    /// The pages, in the order they came in.
    #[inline]
    pub(super) fn pages(&self) -> &[u32] {
        &self.pages[..self.len]
    }
}
