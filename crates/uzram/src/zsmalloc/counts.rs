//! Per-CPU counters of a pool's lock operations, if the pool is built with them. Without them they cost one
//! test of a pointer.

use crate::base::counters::per_cpu_counters;
use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;

per_cpu_counters! {
    /// What a pool has done since it was made.
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
    /// Time for which lists of zspages were locked, in ns: by the class's lock, or in `Consolidated` by the
    /// pool's.
    lists_hold_ns,
    /// Calls to the arena that gave back runs of pages.
    runs_freed,
    /// Those that were made while lists were locked.
    runs_freed_locked,
}

/// The counters of a pool, if they are on.
#[derive(Debug)]
pub struct Counts(Option<PerCpu<Share>>);

impl Counts {
    pub(super) fn new(wanted: bool) -> Self {
        Counts(wanted.then(|| PerCpu::new(|_| Share::default())))
    }

    #[inline]
    pub(super) fn count(&self, which: impl FnOnce(&Share) -> &Counter) {
        self.add(which, 1);
    }

    #[inline]
    pub(super) fn add(&self, which: impl FnOnce(&Share) -> &Counter, n: u64) {
        if let Some(shares) = &self.0 {
            which(shares.local()).add(n);
        }
    }

    #[inline]
    pub(super) fn lists_hold_ns(&self) -> Option<&Counter> {
        self.0.as_ref().map(|shares| &shares.local().lists_hold_ns)
    }

    pub(super) fn sum(&self) -> LockCounts {
        Share::sum(self.0.iter().flat_map(PerCpu::iter))
    }
}
