//! Batch that were taken from the program, in memory still, and that leave unless they are touched meanwhile.
//!
//! User space does not see which pages a program uses. A page from the cold end of the LRU is therefore
//! trapped first, which costs a fraction of compressing it, and evicted a while later. If the program touches
//! it meanwhile, it was not cold: it is opened again as it is. The kernel's inactive list does the same with
//! the bits that the hardware sets.
//!
//! Batches of pages wait in a queue, the oldest first. Each has a shelf, by its number, on which its pages
//! lie.

use std::collections::VecDeque;

use crate::trap::MOST_PAGES;

pub(crate) struct Waiting {
    /// The shelves of the batches.
    batches: VecDeque<usize>,
    /// Numbers of shelves that no batch has.
    free: Vec<usize>,
    /// The pages on each shelf, each at its place; some were touched since. All memory is there beforehand: a
    /// signal handler adds batches.
    pages: Box<[Batch]>,
    /// Room for the numbers of as many pages.
    pub(crate) cold: Vec<u32>,
}

/// The pages of a batch.
#[derive(Clone)]
struct Batch {
    pages: [u32; MOST_PAGES],
    len: usize,
}

impl Waiting {
    /// Makes an empty queue for so many shelves, at least one.
    pub(crate) fn new(shelves: usize) -> Waiting {
        let empty = Batch { pages: [0; MOST_PAGES], len: 0 };
        Waiting {
            batches: VecDeque::with_capacity(shelves),
            free: (0..shelves).collect(),
            pages: vec![empty; shelves].into(),
            cold: Vec::with_capacity(MOST_PAGES),
        }
    }

    /// Returns how many shelves are free.
    pub(crate) fn free_shelves(&self) -> usize {
        self.free.len()
    }

    /// Returns a free shelf for a batch; `None` if all are in use.
    pub(crate) fn free_shelf(&self) -> Option<usize> {
        self.free.last().copied()
    }

    /// Adds a batch of up to [`MOST_PAGES`] pages on the shelf that [`Waiting::free_shelf`] returned.
    pub(crate) fn add(&mut self, pages: impl Iterator<Item = u32>) {
        let Some(shelf) = self.free_shelf() else { unreachable!("a free shelf was asked for") };
        let batch = &mut self.pages[shelf];
        batch.len = 0;
        for (place, page) in batch.pages.iter_mut().zip(pages) {
            *place = page;
            batch.len += 1;
        }
        if batch.len > 0 {
            self.free.pop();
            self.batches.push_back(shelf);
        }
    }

    /// Returns the oldest batch: its shelf and its pages.
    pub(crate) fn oldest(&self) -> Option<(usize, &[u32])> {
        let shelf = *self.batches.front()?;
        let batch = &self.pages[shelf];
        Some((shelf, &batch.pages[..batch.len]))
    }

    /// Removes the oldest batch, whose shelf is free then.
    pub(crate) fn remove_oldest(&mut self) {
        self.free.extend(self.batches.pop_front());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_batch_leaves_first_and_its_shelf_is_used_again() {
        let mut waiting = Waiting::new(2);
        assert!(waiting.oldest().is_none());
        for first in [10, 20] {
            assert!(waiting.free_shelf().is_some());
            waiting.add([].into_iter());
            waiting.add([first, first + 1].into_iter());
        }
        assert!(waiting.free_shelf().is_none());
        let (shelf, pages) = waiting.oldest().expect("two wait");
        assert_eq!(pages, [10, 11]);
        waiting.remove_oldest();
        assert_eq!(waiting.free_shelf(), Some(shelf));
        assert_eq!(waiting.oldest().map(|(_, pages)| pages[0]), Some(20));
    }
}
