//! What the lists hold, and what was done with them.

use crate::base::counters::{at_least_zero, per_cpu_counters};
use crate::base::cpu::PerCpu;
use crate::base::sync::{Counter, Mutex, MutexGuard, Timed};

use super::node::{LISTS, List};

/// `lru_lock`, taken.
pub(super) type LruGuard<'a, T> = Timed<'a, MutexGuard<'a, T>>;

per_cpu_counters! {
    /// What an LRU has and has done. Counts of pages, but for the locks.
    pub struct LruStats;

    /// A CPU's share.
    pub(super) struct Share;

    /// In the inactive list.
    inactive,
    /// In the active list.
    active,
    /// Put into a list for the first time, or anew.
    added,
    /// Moved from the inactive to the active list.
    activated,
    /// Moved from the active to the inactive list.
    demoted,
    /// Taken out because their contents went.
    removed,
    /// Given out from the cold end.
    isolated,
    /// Given back.
    put_back,
    /// Given out, and their contents moved elsewhere.
    evicted,
    /// Come back so soon that they were active at once.
    refaulted,
    /// Looked at, at the cold ends.
    scanned,
    /// Times `lru_lock` was taken.
    lru_locks,
    /// Times somebody else had it.
    lru_locks_contended,
    /// For how long it was held, in ns, if that is measured: [`LruConfig::times_holds`](super::LruConfig::times_holds).
    lru_lock_hold_ns,
    /// Times a batch lock was taken.
    batch_locks,
    /// Times somebody else had it.
    batch_locks_contended,
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
        Self::len_in(self.local(), list).add(pages as u64);
    }

    /// Pages left a list.
    #[inline]
    pub(super) fn left(&self, list: List, pages: usize) {
        Self::len_in(self.local(), list).sub(pages as u64);
    }

    /// Returns the number of pages in a list. Others change it meanwhile.
    pub(super) fn len(&self, list: List) -> u64 {
        at_least_zero(self.total(|share| Self::len_in(share, list)))
    }

    pub(super) fn total(&self, which: impl Fn(&Share) -> &Counter) -> u64 {
        self.shares.iter().fold(0, |sum: u64, share| sum.wrapping_add(which(share).get()))
    }

    pub(super) fn sum(&self) -> LruStats {
        Share::sum(self.shares.iter())
    }

    #[inline]
    fn len_in(share: &Share, list: List) -> &Counter {
        match list {
            List::Inactive => &share.inactive,
            List::Active => &share.active,
        }
    }
}
