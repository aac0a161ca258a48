//! How many neighbours come along with a page.
//!
//! A program that touches pages in order faults exactly where the pages that came last end. Then the next
//! window is twice as large; a fault elsewhere begins a new one, of the least that is asked for. The last
//! faults of several places are remembered, as threads or parts of a program may go through memory side by
//! side.

use uzram::sync::{AtomicU64, Ordering};

use crate::trap::MOST_PAGES;

/// Places that are remembered.
const PLACES: usize = 8;

/// One place: the page behind the last window, plus one, and the window's pages; 0 if there is none.
///
/// ```text
///   63..8         7..0
/// [ next page + 1 | pages ]
/// ```
#[derive(Default)]
struct Place(AtomicU64);

/// See the [module's documentation](self).
#[derive(Default)]
pub(crate) struct Windows {
    places: [Place; PLACES],
    /// The place that is replaced next.
    oldest: AtomicU64,
}

impl Windows {
    /// Returns how many pages are to come from `page` on, at least `least`, which is not 0, and remembers
    /// them.
    pub(crate) fn next(&self, page: u64, least: usize) -> usize {
        for place in &self.places {
            let seen = place.0.load(Ordering::Relaxed);
            if seen >> 8 == page + 1 {
                let pages = (2 * (seen & 255)).max(least as u64).min(MOST_PAGES as u64);
                place.0.store(word(page + pages, pages), Ordering::Relaxed);
                return pages as usize;
            }
        }
        let oldest = self.oldest.fetch_add(1, Ordering::Relaxed) as usize % PLACES;
        self.places[oldest].0.store(word(page + least as u64, least as u64), Ordering::Relaxed);
        least
    }
}

fn word(next: u64, pages: u64) -> u64 {
    (next + 1) << 8 | pages
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_window_grows_with_faults_in_order_and_begins_anew_elsewhere() {
        let windows = Windows::default();
        let mut page = 100;
        for pages in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(windows.next(page, 1), pages);
            page += pages as u64;
        }
        assert_eq!(windows.next(5, 1), 1);
        assert_eq!(windows.next(page, 1), 64, "the other place is remembered");
        assert_eq!(windows.next(6, 1), 2);
        for other in 0..PLACES as u64 {
            assert_eq!(windows.next(1000 + 10 * other, 1), 1);
        }
        assert_eq!(windows.next(page + 64, 1), 1, "forgotten");
        assert_eq!(windows.next(0, 1), 1, "an empty place has no page");
        assert_eq!(windows.next(204, 12), 12);
        assert_eq!(windows.next(216, 8), 24, "it grows from there");
        assert_eq!(windows.next(1, 16), 16, "it grows faster if more is asked for");
    }
}
