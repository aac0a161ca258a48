//! Units that were taken from the program, in memory still, and that leave unless they are touched meanwhile.
//!
//! User space does not see which pages a program uses. A page from the cold end of the LRU is therefore trapped first, which costs
//! a fraction of compressing it, and evicted a while later. If the program touches it meanwhile, it was not cold: it is
//! opened again as it is. The kernel's inactive list does the same with the bits that the hardware sets.
//!
//! Batches of units wait in a queue, the oldest first. Each has a shelf, by its number, on which its pages lie.

use std::collections::VecDeque;

/// The units of a batch, each at its place on the shelf; some were touched since.
struct Batch {
    shelf: usize,
    units: Vec<u32>,
}

pub(crate) struct Waiting {
    batches: VecDeque<Batch>,
    /// Numbers of shelves that no batch has.
    free: Vec<usize>,
}

impl Waiting {
    /// Makes an empty queue for so many shelves, at least one.
    pub(crate) fn new(shelves: usize) -> Waiting {
        Waiting { batches: VecDeque::with_capacity(shelves), free: (0..shelves).collect() }
    }

    /// Returns a free shelf for a batch; `None` if all are in use.
    pub(crate) fn free_shelf(&self) -> Option<usize> {
        self.free.last().copied()
    }

    /// Adds a batch on the shelf that [`Waiting::free_shelf`] returned.
    pub(crate) fn add(&mut self, units: Vec<u32>) {
        if units.is_empty() {
            return;
        }
        let shelf = self.free.pop().expect("a free shelf was asked for");
        self.batches.push_back(Batch { shelf, units });
    }

    /// Returns the oldest batch: its shelf and its units.
    pub(crate) fn oldest(&self) -> Option<(usize, &[u32])> {
        self.batches.front().map(|batch| (batch.shelf, &*batch.units))
    }

    /// Removes the oldest batch, whose shelf is free then.
    pub(crate) fn remove_oldest(&mut self) {
        self.free.extend(self.batches.pop_front().map(|batch| batch.shelf));
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
            waiting.add(Vec::new());
            waiting.add(vec![first, first + 1]);
        }
        assert!(waiting.free_shelf().is_none());
        let (shelf, units) = waiting.oldest().expect("two wait");
        assert_eq!(units, [10, 11]);
        waiting.remove_oldest();
        assert_eq!(waiting.free_shelf(), Some(shelf));
        assert_eq!(waiting.oldest().map(|(_, units)| units[0]), Some(20));
    }
}
