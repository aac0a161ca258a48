//! Which requests are under way, and how many lives in a row ended at the same one.
//!
//! A *life* is that of a process that serves the connection; they are numbered from 1. The words are:
//!
//! ```text
//!          32 bits            32 bits
//! life   | number           | strikes |   the life that began last
//! next   | number           | strikes |   the same, or the one that is about to begin
//! ```
//!
//! A life with an even number has its requests in the first set, another in the second. So when life n + 1 begins, the
//! set of life n is as its death left it, and the other is still that of life n - 1. [`Ledger::begin_life`] compares them,
//! stores the outcome in `next`, which settles it even if this process dies before it has begun its life, empties the
//! other set for itself, and commits by a store to `life`.

use std::collections::BTreeSet;

use uzram::sync::Ordering;

use super::{
    ANSWERED_AT, LANES_AT, LIFE_AT, LINE_WORDS, Ledger, MAX_LANES, MAX_REQUESTS, NEXT_LIFE_AT, REQUESTS_AT,
};
use crate::fuse::proto::FUSE_UNIQUE_RESEND;

/// The entry of a request under way; the default for none, if too many are.
#[derive(Debug, Default)]
pub(in crate::fuse) struct UnderWay {
    /// The word, plus 1; 0 for none.
    word: u32,
}

/// What is known of the lives before this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strikes {
    /// The number of this life, from 1.
    pub life: u32,
    /// Lives in a row, up to the last one, that died without having answered any request, all at the same ones: those
    /// under way in one and in the next have one in common. The first of a row counts in any case, so that this is 0 in
    /// the first life only.
    pub strikes: u32,
}

impl Strikes {
    fn from_word(word: u64) -> Self {
        Strikes { life: (word >> 32) as u32, strikes: word as u32 }
    }

    fn to_word(self) -> u64 {
        u64::from(self.life) << 32 | u64::from(self.strikes)
    }
}

impl Ledger {
    /// Begins the life of a process that serves. Call it once, before it serves, and when the one before is dead.
    pub fn begin_life(&self) -> Strikes {
        let last = self.life();
        let life = last.life.wrapping_add(1);
        let settled = Strikes::from_word(self.load(NEXT_LIFE_AT));
        let next = if settled.life == life {
            settled
        } else {
            let next = Strikes { life, strikes: self.count_strikes(last) };
            self.store(NEXT_LIFE_AT, next.to_word());
            next
        };
        self.store(answered_at(life), self.answered());
        set_of(life).for_each(|at| self.store(at, 0));
        self.store(LIFE_AT, next.to_word());
        next
    }

    /// Returns this life; life 0 before the first.
    pub(in crate::fuse) fn life(&self) -> Strikes {
        Strikes::from_word(self.load(LIFE_AT))
    }

    fn count_strikes(&self, last: Strikes) -> u32 {
        if last.life == 0 {
            return 0;
        }
        if self.answered() != self.load(answered_at(last.life)) {
            return 1;
        }
        let [under_way, before] = [last.life, last.life.wrapping_sub(1)].map(|life| {
            let uniques = set_of(life).map(|at| self.load(at) & !FUSE_UNIQUE_RESEND);
            uniques.filter(|unique| *unique != 0).collect::<BTreeSet<_>>()
        });
        if under_way.is_disjoint(&before) { 1 } else { last.strikes.saturating_add(1) }
    }

    /// Returns the number of answered requests, of all lives.
    fn answered(&self) -> u64 {
        (0..MAX_LANES).map(|lane| self.load(lane_at(lane))).fold(0, u64::wrapping_add)
    }

    /// Notes that `thread` begins to carry out a request.
    #[inline]
    pub(in crate::fuse) fn begin_request(&self, thread: usize, unique: u64) -> UnderWay {
        let set = set_of(self.life().life);
        // Each thread begins to look at a cache line of its own.
        let hint = thread.wrapping_mul(LINE_WORDS);
        for probe in 0..MAX_REQUESTS {
            let word = set.start + hint.wrapping_add(probe) % MAX_REQUESTS;
            let is_free = self.words[word].load(Ordering::Relaxed) == 0;
            if is_free
                && self.words[word].compare_exchange(0, unique, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                return UnderWay { word: word as u32 + 1 };
            }
        }
        UnderWay::default()
    }

    /// Notes that a request of `thread` was answered.
    #[inline]
    pub(in crate::fuse) fn end_request(&self, thread: usize, request: UnderWay) {
        // The thread itself and tasks that it started may count at the same time. A lost count does not matter: it only
        // matters that the number changes.
        let lane = lane_at(thread % MAX_LANES);
        self.store(lane, self.load(lane).wrapping_add(1));
        if let Some(word) = request.word.checked_sub(1) {
            self.store(word as usize, 0);
        }
    }
}

fn lane_at(lane: usize) -> usize {
    LANES_AT + lane * LINE_WORDS
}

fn answered_at(life: u32) -> usize {
    ANSWERED_AT + (life & 1) as usize
}

fn set_of(life: u32) -> std::ops::Range<usize> {
    let start = REQUESTS_AT + (life & 1) as usize * MAX_REQUESTS;
    start..start + MAX_REQUESTS
}

#[cfg(test)]
impl UnderWay {
    pub(super) fn word(&self) -> Option<u32> {
        self.word.checked_sub(1)
    }
}

#[cfg(test)]
impl Ledger {
    pub(super) fn has_answered(&self) -> bool {
        self.answered() != self.load(answered_at(self.life().life))
    }
}
