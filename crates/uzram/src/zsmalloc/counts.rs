//! What a pool counts of its locks, on each CPU for itself, for those who want to know. A pool that was
//! not asked to count spends a test of a pointer on it.

use std::ops::AddAssign;

use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;

/// What a pool has done so far, summed over the CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockCounts {
    /// Objects allocated.
    pub allocs: u64,
    /// Objects freed.
    pub frees: u64,
    /// Times the pool's lock was taken, for reading or writing.
    pub pool_locks: u64,
    /// Times a size class's lock was taken.
    pub class_locks: u64,
    /// Time that lists of zspages were locked, in ns: by the class's lock, or by the pool's where that
    /// is the one.
    pub lists_hold_ns: u64,
    /// Calls of the arena to give back a run of pages.
    pub runs_freed: u64,
    /// Those of them that were made while lists were locked.
    pub runs_freed_locked: u64,
}

impl AddAssign for LockCounts {
    fn add_assign(&mut self, other: Self) {
        self.allocs += other.allocs;
        self.frees += other.frees;
        self.pool_locks += other.pool_locks;
        self.class_locks += other.class_locks;
        self.lists_hold_ns += other.lists_hold_ns;
        self.runs_freed += other.runs_freed;
        self.runs_freed_locked += other.runs_freed_locked;
    }
}

/// A CPU's share.
#[derive(Debug, Default)]
pub struct Share {
    pub(super) allocs: Counter,
    pub(super) frees: Counter,
    pub(super) pool_locks: Counter,
    pub(super) class_locks: Counter,
    lists_hold_ns: Counter,
    pub(super) runs_freed: Counter,
    pub(super) runs_freed_locked: Counter,
}

/// The counters of a pool, if it has any.
#[derive(Debug)]
pub struct Counts(Option<PerCpu<Share>>);

impl Counts {
    pub(super) fn new(wanted: bool) -> Self {
        Counts(wanted.then(|| PerCpu::new(|_| Share::default())))
    }

    /// Adds one to a counter.
    #[inline]
    pub(super) fn count(&self, which: impl FnOnce(&Share) -> &Counter) {
        if let Some(shares) = &self.0 {
            which(shares.local()).add(1);
        }
    }

    /// Where the time is added up for which lists are locked.
    #[inline]
    pub(super) fn lists_hold_ns(&self) -> Option<&Counter> {
        self.0.as_ref().map(|shares| &shares.local().lists_hold_ns)
    }

    pub(super) fn sum(&self) -> LockCounts {
        let mut sum = LockCounts::default();
        for share in self.0.iter().flat_map(PerCpu::iter) {
            sum += LockCounts {
                allocs: share.allocs.get(),
                frees: share.frees.get(),
                pool_locks: share.pool_locks.get(),
                class_locks: share.class_locks.get(),
                lists_hold_ns: share.lists_hold_ns.get(),
                runs_freed: share.runs_freed.get(),
                runs_freed_locked: share.runs_freed_locked.get(),
            };
        }
        sum
    }
}
