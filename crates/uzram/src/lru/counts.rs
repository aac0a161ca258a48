//! What the lists hold, and what was done with them.

use crate::base::cpu::PerCpu;
use crate::base::sync::{Counter, Mutex, MutexGuard, Timed};

use super::node::{LISTS, List};

/// `lru_lock`, taken.
pub(super) type LruGuard<'a, T> = Timed<'a, MutexGuard<'a, T>>;

/// A CPU's share of the counts.
#[derive(Debug, Default)]
pub(super) struct Share {
    lens: [Counter; 2],
    pub(super) added: Counter,
    pub(super) activated: Counter,
    pub(super) demoted: Counter,
    pub(super) removed: Counter,
    pub(super) isolated: Counter,
    pub(super) put_back: Counter,
    pub(super) evicted: Counter,
    pub(super) refaulted: Counter,
    pub(super) scanned: Counter,
    pub(super) lru_locks: Counter,
    pub(super) lru_locks_contended: Counter,
    pub(super) lru_lock_hold_ns: Counter,
    pub(super) batch_locks: Counter,
    pub(super) batch_locks_contended: Counter,
}

/// The counts, each CPU's for itself.
#[derive(Debug)]
pub struct Counts {
    shares: PerCpu<Share>,
    times_holds: bool,
}

impl Counts {
    /// Counts of nothing yet. `times_holds`: for how long `lru_lock` is held counts as well.
    pub(super) fn new(times_holds: bool) -> Self {
        Counts { shares: PerCpu::new(|_| Share::default()), times_holds }
    }

    #[inline]
    pub(super) fn local(&self) -> &Share {
        self.shares.local()
    }

    /// Pages were taken out of either list because their contents went.
    #[inline]
    pub(super) fn removed(&self, pages: [usize; LISTS.len()]) {
        for (list, pages) in LISTS.into_iter().zip(pages).filter(|(_, pages)| *pages > 0) {
            self.left(list, pages);
            self.local().removed.add(pages as u64);
        }
    }

    /// A page went from the inactive to the active list.
    pub(super) fn activated(&self) {
        self.left(List::Inactive, 1);
        self.came(List::Active, 1);
        self.local().activated.add(1);
    }

    /// Takes `lru_lock`.
    #[inline]
    pub(super) fn lock_lru<'a, T>(&'a self, lru_lock: &'a Mutex<T>) -> LruGuard<'a, T> {
        let share = self.local();
        share.lru_locks.add(1);
        let guard = lru_lock.lock_noticing(|| {
            share.lru_locks_contended.add(1);
        });
        Timed::new(guard, self.times_holds.then_some(&share.lru_lock_hold_ns))
    }

    /// Pages came to a list.
    #[inline]
    pub(super) fn came(&self, list: List, pages: usize) {
        self.local().lens[list as usize].add(pages as u64);
    }

    /// Pages left a list.
    #[inline]
    pub(super) fn left(&self, list: List, pages: usize) {
        self.local().lens[list as usize].sub(pages as u64);
    }

    /// Pages of a list. Others change it meanwhile.
    pub(super) fn total_len(&self, list: List) -> u64 {
        // One CPU may have taken out what another put in, and may have done so after it was looked at.
        let sum = self.sum(|share| &share.lens[list as usize]);
        if sum > u64::MAX / 2 { 0 } else { sum }
    }

    pub(super) fn sum(&self, which: impl Fn(&Share) -> &Counter) -> u64 {
        self.shares.iter().fold(0, |sum: u64, share| sum.wrapping_add(which(share).get()))
    }
}
