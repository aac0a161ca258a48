//! Batches of pages that were taken from the program, in memory still, and leave unless they are touched
//! meanwhile: docs/internals/pager.md, *Second chance*.
//!
//! Batches wait in a queue, the oldest first, each on one of the shelves, which they use in turn.

use std::collections::VecDeque;

use crate::MOST_PAGES;

pub(crate) struct Waiting {
    /// The pages of each batch, at their places on its shelf, and how many; some were touched since. All
    /// memory is there beforehand: a signal handler adds batches.
    batches: VecDeque<([u32; MOST_PAGES], usize)>,
    /// The shelf of the oldest batch, and how many there are.
    first: usize,
    shelves: usize,
    /// Room for the numbers of as many pages.
    pub(crate) cold: Vec<u32>,
}

impl Waiting {
    /// Makes an empty queue for so many shelves, at least one.
    pub(crate) fn new(shelves: usize) -> Waiting {
        let (batches, cold) = (VecDeque::with_capacity(shelves), Vec::with_capacity(MOST_PAGES));
        Waiting { batches, first: 0, shelves, cold }
    }

    pub(crate) fn free_shelves(&self) -> usize {
        self.shelves - self.batches.len()
    }

    /// Returns a free shelf for a batch; `None` if all are in use.
    pub(crate) fn free_shelf(&self) -> Option<usize> {
        (self.free_shelves() > 0).then(|| (self.first + self.batches.len()) % self.shelves)
    }

    /// Adds a batch of up to [`MOST_PAGES`] pages on the shelf that [`Waiting::free_shelf`] returned.
    pub(crate) fn add(&mut self, pages: impl Iterator<Item = u32>) {
        let (mut batch, mut count) = ([0; MOST_PAGES], 0);
        for (place, page) in batch.iter_mut().zip(pages) {
            *place = page;
            count += 1;
        }
        if count > 0 {
            self.batches.push_back((batch, count));
        }
    }

    /// Returns the oldest batch: its shelf and its pages.
    pub(crate) fn oldest(&self) -> Option<(usize, &[u32])> {
        self.batches.front().map(|(pages, count)| (self.first, &pages[..*count]))
    }

    /// Removes the oldest batch, whose shelf is free then.
    pub(crate) fn remove_oldest(&mut self) {
        if self.batches.pop_front().is_some() {
            self.first = (self.first + 1) % self.shelves;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_batch_leaves_first_and_its_shelf_is_used_again() {
        let mut waiting = Waiting::new(2);
        for first in [10, 20] {
            waiting.add([].into_iter());
            waiting.add([first, first + 1].into_iter());
        }
        let (shelf, pages) = waiting.oldest().expect("two wait");
        assert_eq!(pages, [10, 11]);
        waiting.remove_oldest();
        assert_eq!(waiting.free_shelf(), Some(shelf));
        assert_eq!(waiting.oldest().map(|(_, pages)| pages[0]), Some(20));
    }
}
