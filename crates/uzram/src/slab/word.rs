//! The slab word: everything about a slab that changes without a lock.
//!
//! ```text
//! 63        48 47       46      32 31     16 15        0
//! [ unused    | frozen | objects  | inuse   | free list ]
//! ```
//!
//! `free list` is the place of the first free object, in units of 8 bytes from the slab's start, or
//! [`NONE`]. Objects in the free list of the CPU that owns the slab are not in it: they count as in use.
//! `frozen` says that a CPU owns the slab, so that no other thread puts it on a list.
//!
//! In the kernel the free list is a pointer, and the two words are changed by a double-width
//! compare-exchange; with indices one word and an ordinary compare-exchange suffice.

use crate::base::sync::{AtomicU64, Ordering};

pub(super) const NONE: u16 = u16::MAX;

const INUSE_SHIFT: u32 = 16;
const OBJECTS_SHIFT: u32 = 32;
const OBJECTS_MASK: u64 = (1 << 15) - 1;
const FROZEN: u64 = 1 << 47;

/// A chain of free objects of a slab, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FreeList {
    pub(super) first: u16,
    pub(super) len: u16,
}

impl FreeList {
    pub(super) const EMPTY: FreeList = FreeList { first: NONE, len: 0 };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) free: u16,
    pub(super) inuse: u16,
    pub(super) objects: u16,
    pub(super) frozen: bool,
}

impl State {
    /// Returns the state in which every object is taken.
    pub(super) fn full(objects: u16, frozen: bool) -> Self {
        State { free: NONE, inuse: objects, objects, frozen }
    }

    pub(super) fn is_full(self) -> bool {
        self.free == NONE
    }

    pub(super) fn free_list(self) -> FreeList {
        FreeList { first: self.free, len: self.objects - self.inuse }
    }

    fn encode(self) -> u64 {
        u64::from(self.free)
            | u64::from(self.inuse) << INUSE_SHIFT
            | (u64::from(self.objects) & OBJECTS_MASK) << OBJECTS_SHIFT
            | if self.frozen { FROZEN } else { 0 }
    }

    fn decode(word: u64) -> Self {
        State {
            free: word as u16,
            inuse: (word >> INUSE_SHIFT) as u16,
            objects: (word >> OBJECTS_SHIFT & OBJECTS_MASK) as u16,
            frozen: word & FROZEN != 0,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct SlabWord(AtomicU64);

impl SlabWord {
    #[inline]
    pub(super) fn load(&self) -> State {
        State::decode(self.0.load(Ordering::Acquire))
    }

    /// Sets the word. No other thread knows the slab.
    pub(super) fn store(&self, state: State) {
        self.0.store(state.encode(), Ordering::Release);
    }

    /// Changes the word to `new` if it is `old`; returns whether it was.
    #[inline]
    pub(super) fn exchange(&self, old: State, new: State) -> bool {
        // Release publishes the links behind `new.free`; acquire makes those behind `old.free` visible.
        self.0.compare_exchange(old.encode(), new.encode(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::random::Random;

    #[test]
    fn the_word_is_laid_out_as_drawn() {
        let state = State { free: 0x1234, inuse: 0x5678, objects: 0x1abc, frozen: true };
        assert_eq!(state.encode(), 0x0000_9abc_5678_1234);
        assert_eq!(State { frozen: false, ..state }.encode(), 0x0000_1abc_5678_1234);
        assert_eq!(State::full(7, false).encode(), 0x0000_0007_0007_ffff);
    }

    #[test]
    fn words_keep_what_they_encode() {
        let mut random = Random::new(1);
        for _ in 0..1000 {
            let state = State {
                free: random.next() as u16,
                inuse: random.next() as u16,
                objects: random.next() as u16 & OBJECTS_MASK as u16,
                frozen: random.below(2) == 1,
            };
            assert_eq!(State::decode(state.encode()), state);
            let word = SlabWord::default();
            word.store(state);
            assert!(!word.exchange(State { inuse: state.inuse ^ 1, ..state }, state));
            assert!(word.exchange(state, State::full(3, true)));
            assert_eq!(word.load(), State::full(3, true));
        }
    }
}
