//! The statistics of an LRU.

use crate::base::counters::{at_least_zero, per_cpu_counters};
use crate::base::cpu::PerCpu;
use crate::base::sync::{Counter, Mutex, MutexGuard, Timed};

use super::node::{LISTS, List};

pub(super) type LruGuard<'a, T> = Timed<'a, MutexGuard<'a, T>>;

per_cpu_counters! {
    /// The statistics of an LRU: numbers of pages, except those of the locks.
    pub struct LruStats;

    pub(super) struct Share;

    /// In the inactive list.
    inactive,
    /// In the active list.
    active,
    /// Put into a list from a pagevec, for the first time or again.
    added,
    /// Moved from the inactive to the active list.
    activated,
    /// Moved from the active to the inactive list.
    demoted,
    /// Removed because their contents were gone.
    removed,
    /// Isolated from the cold end.
    isolated,
    /// Put back after isolation.
    put_back,
    /// Evicted after isolation: their contents were moved elsewhere.
    evicted,
    /// Added so soon after their eviction that they were active at once.
    refaulted,
    /// Scanned at the cold end of the inactive list.
    scanned,
    /// Times `lru_lock` was taken.
    lru_locks,
    /// Times `lru_lock` was not free at once.
    lru_locks_contended,
    /// Time `lru_lock` was held, in ns, if [`LruConfig::times_holds`](super::LruConfig::times_holds) is set.
    lru_lock_hold_ns,
    /// Times a batch lock was taken.
    batch_locks,
    /// Times a batch lock was not free at once.
    batch_locks_contended,
}

/// The per-CPU counters.
#[derive(Debug)]
pub struct Counts {
    shares: PerCpu<Share>,
    times_holds: bool,
}

impl Counts {
    pub(super) fn new(times_holds: bool) -> Self {
        Counts { shares: PerCpu::new(|_| Share::default()), times_holds }
    }

    #[inline]
    pub(super) fn local(&self) -> &Share {
        self.shares.local()
    }

    #[inline]
    pub(super) fn removed(&self, pages: [usize; LISTS.len()]) {
        for (list, pages) in LISTS.into_iter().zip(pages).filter(|(_, pages)| *pages > 0) {
            self.left(list, pages);
            self.local().removed.add(pages as u64);
        }
    }

    pub(super) fn activated(&self) {
        self.left(List::Inactive, 1);
        self.came(List::Active, 1);
        self.local().activated.add(1);
    }

    #[inline]
    pub(super) fn lock_lru<'a, T>(&'a self, lru_lock: &'a Mutex<T>) -> LruGuard<'a, T> {
        let share = self.local();
        share.lru_locks.add(1);
        let guard = lru_lock.lock_noticing(|| {
            share.lru_locks_contended.add(1);
        });
        Timed::new(guard, self.times_holds.then_some(&share.lru_lock_hold_ns))
    }

    #[inline]
    pub(super) fn came(&self, list: List, pages: usize) {
        Self::len_in(self.local(), list).add(pages as u64);
    }

    #[inline]
    pub(super) fn left(&self, list: List, pages: usize) {
        Self::len_in(self.local(), list).sub(pages as u64);
    }

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
