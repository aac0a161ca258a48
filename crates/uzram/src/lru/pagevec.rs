//! Pagevecs: small arrays of pages.

/// The most pages of a pagevec.
pub const MAX_PAGEVEC_PAGES: usize = 128;

/// Pages that are waiting to be put into the lists.
#[derive(Clone, Copy)]
pub struct Pagevec {
    pages: [u32; MAX_PAGEVEC_PAGES],
    len: usize,
}

impl Pagevec {
    pub(super) const EMPTY: Pagevec = Pagevec { pages: [0; MAX_PAGEVEC_PAGES], len: 0 };

    #[inline]
    pub(super) fn push(&mut self, page: u32) {
        self.pages[self.len] = page;
        self.len += 1;
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn pages_mut(&mut self) -> &mut [u32] {
        &mut self.pages[..self.len]
    }

    /// Returns the pages in the order in which they were added.
    #[inline]
    pub(super) fn pages(&self) -> &[u32] {
        &self.pages[..self.len]
    }
}
