//! The barn: the sheaves of a cache that no CPU holds, filled and empty ones.
//!
//! CPUs exchange whole sheaves here: one that frees gives a filled sheaf for an empty one, one that allocates gives
//! an empty sheaf for a filled one. A fixed barn has as many sheaves as the kernel's. If objects are freed in
//! bursts on one CPU and allocated in bursts on another, that is too few: the one has to empty sheaves into
//! slabs, and the other to fill sheaves from slabs a moment later.
//!
//! An elastic barn measures just that. Each time a CPU finds no filled sheaf after another one found no room,
//! the barn has room for one more, up to [`most_sheaves`]. It gives room up again one sheaf at a time when
//! filled sheaves were left over during a whole *review* of many exchanges: the idea is the working set of the
//! depot in Bonwick's and Adams's "Magazines and Vmem" (2001), counted in exchanges instead of seconds.
//!
//! Lock: the barn's; the caller holds its CPU's sheaf lock. Nothing is locked under it.

use std::ops::Range;

use crate::base::sync::{Mutex, classes};

/// Sheaves of a fixed barn: the kernel keeps up to ten full and ten empty ones.
pub(super) const BARN_SHEAVES: usize = if cfg!(loom) { 1 } else { 10 };
/// Exchanges of a review, for each sheaf that the barn has: a burst that fills and empties all of the barn takes
/// two for each.
const REVIEW_EXCHANGES: usize = 4;

/// Returns the sheaves of an elastic barn: together with the CPUs' no more than slabs are reserved for
/// (`max_slabs` in `core`).
pub(super) fn most_sheaves(cpus: usize) -> usize {
    if cfg!(loom) { 2 } else { BARN_SHEAVES + (BARN_SHEAVES - 2) * cpus }
}

/// See the [module's documentation](self).
pub(super) struct Barn(Mutex<Inner>);

/// Protected by the barn's lock.
struct Inner {
    /// Each with its number of objects.
    filled: Vec<(usize, u32)>,
    empty: Vec<usize>,
    /// Filled sheaves that the barn accepts; all of its sheaves if it is fixed.
    room: usize,
    /// Times a sheaf was refused for want of room, and no lack of a filled one has followed yet.
    refused: usize,
    /// The fewest filled sheaves since the review began.
    left_over: usize,
    /// Exchanges until the review ends.
    to_review: usize,
    is_elastic: bool,
}

impl Barn {
    /// Makes a barn of these sheaves, which are empty: an elastic one if there are more than [`BARN_SHEAVES`].
    pub(super) fn new(sheaves: Range<usize>) -> Self {
        let inner = Inner {
            filled: Vec::with_capacity(sheaves.len()),
            room: BARN_SHEAVES,
            refused: 0,
            left_over: 0,
            to_review: REVIEW_EXCHANGES * sheaves.len(),
            is_elastic: sheaves.len() > BARN_SHEAVES,
            empty: sheaves.collect(),
        };
        Barn(Mutex::new(&classes::SLAB_BARN, inner))
    }

    /// Exchanges an empty sheaf for a filled one; returns that and its number of objects. `None` if there is none:
    /// the caller fills its sheaf from slabs.
    pub(super) fn get(&self, empty: usize) -> Option<(usize, u32)> {
        let mut inner = self.0.lock();
        let Some(filled) = inner.filled.pop() else {
            inner.grow();
            return None;
        };
        inner.empty.push(empty);
        inner.review();
        Some(filled)
    }

    /// Exchanges a filled sheaf of `len` objects for an empty one. `None` if there is no room: the caller empties
    /// its sheaf into slabs.
    pub(super) fn put(&self, filled: usize, len: u32) -> Option<usize> {
        let mut inner = self.0.lock();
        let has_room = inner.filled.len() < inner.room;
        let Some(empty) = inner.empty.pop_if(|_| has_room) else {
            inner.refused = (inner.refused + 1).min(inner.sheaves());
            return None;
        };
        inner.filled.push((filled, len));
        inner.review();
        Some(empty)
    }

    /// Empties all sheaves: calls `each` with each filled one and its number of objects. An elastic barn is as
    /// small as at first then.
    pub(super) fn drain(&self, mut each: impl FnMut(usize, u32)) {
        let mut inner = self.0.lock();
        while let Some((sheaf, len)) = inner.filled.pop() {
            each(sheaf, len);
            inner.empty.push(sheaf);
        }
        (inner.room, inner.refused, inner.left_over) = (BARN_SHEAVES, 0, 0);
    }

    /// Returns the number of objects in all sheaves.
    pub(super) fn objects(&self) -> u64 {
        self.0.lock().filled.iter().map(|(_, len)| u64::from(*len)).sum()
    }
}

impl Inner {
    fn sheaves(&self) -> usize {
        self.filled.len() + self.empty.len()
    }

    /// Makes room for another sheaf, if one was refused that would have been needed now.
    fn grow(&mut self) {
        if self.refused > 0 && self.room < self.sheaves() {
            self.refused -= 1;
            self.room += 1;
        }
    }

    /// Counts an exchange. After the last one of a review gives up room that was not needed.
    fn review(&mut self) {
        if !self.is_elastic {
            return;
        }
        self.left_over = self.left_over.min(self.filled.len());
        self.to_review -= 1;
        if self.to_review > 0 {
            return;
        }
        if self.left_over > 0 && self.room > BARN_SHEAVES {
            self.room -= 1;
        }
        self.left_over = self.filled.len();
        self.to_review = REVIEW_EXCHANGES * self.sheaves();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Puts `n` sheaves of one object into the barn and takes as many out; returns how many were refused, and how
    /// many were lacking.
    fn burst(barn: &Barn, n: usize) -> [usize; 2] {
        let mut own: Vec<usize> = (100..100 + n).collect();
        let before = own.len();
        own.retain_mut(|sheaf| match barn.put(*sheaf, 1) {
            Some(empty) => {
                *sheaf = empty;
                false
            }
            None => true,
        });
        let refused = own.len();
        let lacking = (0..before).filter(|sheaf| barn.get(*sheaf).is_none()).count();
        [refused, lacking]
    }

    #[test]
    fn a_fixed_barn_stays_as_it_is() {
        let barn = Barn::new(0..BARN_SHEAVES);
        for _ in 0..100 {
            assert_eq!(burst(&barn, 16), [6, 6]);
        }
        assert_eq!(burst(&barn, BARN_SHEAVES), [0, 0]);
    }

    #[test]
    fn an_elastic_barn_grows_by_what_was_refused_and_then_lacking() {
        let barn = Barn::new(0..most_sheaves(2));
        assert_eq!(burst(&barn, 16), [6, 6]);
        assert_eq!(burst(&barn, 16), [0, 0]);
        // No further than it has sheaves.
        assert_eq!(burst(&barn, 40)[0], 24);
        assert_eq!(burst(&barn, 40), [40 - most_sheaves(2); 2]);
        // Nor by refusals alone, as when objects are freed for good.
        barn.drain(|_, len| assert_eq!(len, 1));
        for _ in 0..30 {
            barn.put(100, 1);
        }
        assert_eq!(barn.objects(), BARN_SHEAVES as u64);
    }

    #[test]
    fn room_that_is_left_over_is_given_up() {
        let barn = Barn::new(0..most_sheaves(2));
        burst(&barn, 40);
        let filled = || barn.objects() as usize;
        while barn.put(100, 1).is_some() {}
        assert_eq!(filled(), most_sheaves(2));
        // Exchanges that need one filled sheaf of many: each review gives up one, and a put is refused instead.
        for _ in 0..1000 * REVIEW_EXCHANGES {
            assert!(barn.get(100).is_some());
            barn.put(100, 1);
        }
        assert!(filled() <= BARN_SHEAVES, "{}", filled());
        // A burst that needs all of it keeps it.
        burst(&barn, 40);
        burst(&barn, 40);
        for _ in 0..1000 {
            assert_eq!(burst(&barn, most_sheaves(2)), [0, 0]);
        }
    }
}
