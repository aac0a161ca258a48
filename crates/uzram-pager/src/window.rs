//! How many neighbours come along with a page.
//!
//! A program that touches pages in order faults exactly where the pages that came last end. Then the next
//! window is twice as large; a fault elsewhere begins a new one, of the least that is asked for. Several
//! places are remembered, as threads or parts of a program may go through memory side by side.

use uzram::sync::{AtomicU64, Ordering};

use crate::MOST_PAGES;

/// Places that are remembered.
const PLACES: usize = 8;

/// See the [module's documentation](self).
#[derive(Default)]
pub(crate) struct Windows {
    /// For each place the page behind the last window, plus one, and the window's pages; 0 if there is none.
    ///
    /// ```text
    ///   63..8         7..0
    /// [ next page + 1 | pages ]
    /// ```
    places: [AtomicU64; PLACES],
    /// The place that is replaced next.
    oldest: AtomicU64,
}

impl Windows {
    /// Returns how many pages are to come from `page` on, at least `least`, which is not 0.
    pub(crate) fn next(&self, page: u64, least: usize) -> usize {
        for place in &self.places {
            let seen = place.load(Ordering::Relaxed);
            if seen >> 8 == page + 1 {
                let pages = (2 * (seen & 255)).max(least as u64).min(MOST_PAGES as u64);
                place.store((page + pages + 1) << 8 | pages, Ordering::Relaxed);
                return pages as usize;
            }
        }
        let oldest = self.oldest.fetch_add(1, Ordering::Relaxed) as usize % PLACES;
        let pages = least as u64;
        self.places[oldest].store((page + pages + 1) << 8 | pages, Ordering::Relaxed);
        least
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_window_grows_with_faults_in_order_and_begins_anew_elsewhere() {
        let windows = Windows::default();
        let expect = |page, least, pages| assert_eq!(windows.next(page, least), pages, "{page}");
        let mut page = 100;
        for pages in [1, 2, 4, 8, 16, 32, 64, 64] {
            expect(page, 1, pages);
            page += pages as u64;
        }
        expect(5, 1, 1);
        // The other place is remembered, until as many others have come.
        expect(page, 1, 64);
        expect(6, 1, 2);
        (0..PLACES as u64).for_each(|other| expect(1000 + 10 * other, 1, 1));
        expect(page + 64, 1, 1);
        // An empty place has no page.
        expect(0, 1, 1);
        // It grows from what was asked for, and faster if more is.
        expect(204, 12, 12);
        expect(216, 8, 24);
        expect(1, 16, 16);
    }
}
