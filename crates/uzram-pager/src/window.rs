//! Which neighbours come along with a page.
//!
//! A program that touches pages in order, upwards or downwards, faults exactly where the pages that came last
//! end. When it has done so twice, the next window is twice as large, and so on; a fault elsewhere begins a
//! new one, of the least that is asked for. Several places are remembered, as threads or parts of a program
//! may go through memory side by side.

use std::ops::Range;

use uzram::sync::{AtomicU64, Ordering};

use crate::MOST_PAGES;

/// Places that are remembered.
const PLACES: usize = 16;

#[derive(Default)]
pub(crate) struct Windows {
    places: [AtomicU64; PLACES],
    /// The place that is replaced next.
    oldest: AtomicU64,
}

/// The last window at a place, as a number: 0 if there is none.
///
/// ```text
///   63..16          15..8 7..0
/// [ first page + 1 | to  | pages ]
/// ```
#[derive(Clone, Copy)]
struct Window {
    first: u64,
    pages: u64,
    to: To,
}

/// In which direction a place is gone through.
#[derive(Clone, Copy, PartialEq)]
enum To {
    /// It was touched once.
    Nowhere = 0,
    Up = 1,
    Down = 2,
}

impl Window {
    fn of_number(number: u64) -> Option<Window> {
        let to = [To::Nowhere, To::Up, To::Down][(number >> 8 & 3) as usize];
        Some(Window { first: (number >> 16).checked_sub(1)?, pages: number & 255, to })
    }

    fn number(self) -> u64 {
        (self.first + 1) << 16 | (self.to as u64) << 8 | self.pages
    }

    /// Returns the window that a touch has come, if it is at one of this one's ends.
    fn next(self, page: u64, least: u64) -> Option<Window> {
        let to = if page == self.first + self.pages {
            To::Up
        } else if page + 1 == self.first {
            To::Down
        } else {
            return None;
        };
        let is_again = self.to == to;
        let pages = if is_again { 2 * self.pages } else { 1 };
        let pages = pages.max(least).min(MOST_PAGES as u64);
        Some(match to {
            To::Down if is_again => {
                let pages = pages.min(page + 1);
                Window { first: page + 1 - pages, pages, to }
            }
            _ => Window { first: page, pages, to },
        })
    }
}

impl Windows {
    /// Returns the pages that are to come with one, and that: as many as are asked for, which is at least
    /// one, or more.
    pub(crate) fn next(&self, page: u64, least: u64) -> Range<u64> {
        let last = |place: &AtomicU64| Window::of_number(place.load(Ordering::Relaxed));
        let next = |place| Some((place, last(place)?.next(page, least)?));
        let (place, window) = self.places.iter().find_map(next).unwrap_or_else(|| {
            let oldest = self.oldest.fetch_add(1, Ordering::Relaxed) as usize % PLACES;
            (&self.places[oldest], Window { first: page, pages: least, to: To::Nowhere })
        });
        place.store(window.number(), Ordering::Relaxed);
        window.first..window.first + window.pages
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_window_grows_with_faults_in_order_and_begins_anew_elsewhere() {
        let windows = Windows::default();
        let up = |page, least, pages| assert_eq!(windows.next(page, least), page..page + pages, "{page}");
        let down = |page: u64, pages| assert_eq!(windows.next(page, 1), page + 1 - pages..page + 1, "{page}");
        let (mut page, mut below) = (1000, 999);
        for pages in [1, 1, 2, 4, 8, 16, 32, 64, 64] {
            up(page, 1, pages);
            page += pages;
        }
        for pages in [1, 1, 2, 4, 8, 16, 32, 64, 64] {
            // From the first page of the windows above on, which are at another place by now.
            down(below, pages);
            below -= pages;
        }
        up(5, 1, 1);
        // Other places are remembered, until as many others have come.
        up(page, 1, 64);
        down(below, 64);
        up(6, 1, 1);
        (0..PLACES as u64).for_each(|other| up(5000 + 10 * other, 1, 1));
        up(page + 64, 1, 1);
        // None is below the first page.
        down(4, 1);
        down(3, 1);
        down(2, 2);
        assert_eq!(windows.next(0, 1), 0..1);
        // Who turns begins anew.
        up(300, 1, 1);
        up(301, 1, 1);
        up(302, 1, 2);
        down(301, 1);
        // It grows from what was asked for, and faster if more is; that lies upwards.
        up(204, 12, 12);
        up(216, 8, 8);
        up(224, 3, 16);
        up(223, 2, 2);
        assert_eq!(windows.next(222, 4), 219..223);
    }
}
