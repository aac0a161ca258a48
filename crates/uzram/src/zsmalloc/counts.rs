//! What a pool counts of its locks, on each CPU for itself, if it is asked to. One that is not spends a test of a
//! pointer on it.

use crate::base::counters::per_cpu_counters;
use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;

per_cpu_counters! {
    /// What a pool has done so far.
    pub struct LockCounts;

    /// A CPU's share.
    pub struct Share;

    /// Objects allocated.
    allocs,
    /// Objects freed.
    frees,
    /// Times the pool's lock was taken, for reading or writing.
    pool_locks,
    /// Times a size class's lock was taken.
    class_locks,
    /// Time for which lists of zspages were locked, in ns: by the class's lock, or by the pool's where that
    /// is the one.
    lists_hold_ns,
    /// Calls of the arena to give back a run of pages.
    runs_freed,
    /// Those of them that were made while lists were locked.
    runs_freed_locked,
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

    /// Returns the counter of the time for which lists are locked.
    #[inline]
    pub(super) fn lists_hold_ns(&self) -> Option<&Counter> {
        self.0.as_ref().map(|shares| &shares.local().lists_hold_ns)
    }

    pub(super) fn sum(&self) -> LockCounts {
        Share::sum(self.0.iter().flat_map(PerCpu::iter))
    }
}
