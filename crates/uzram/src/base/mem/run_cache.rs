//! Per-CPU caches of free runs, so that most runs are taken and freed without the arena's lock.
//!
//! For each account and length a cache holds a stack of runs (the run freed last is the one most
//! likely in the CPU's cache, and certainly resident). An empty stack is refilled by a batch, and one
//! of more than two batches drained by one. A batch is counted in pages, so that fewer long runs are
//! cached. Protected by the cache's lock.

use super::runs::{Account, MAX_RUN_PAGES, touch};

/// Pages of the largest batch. The kernel's per-CPU page lists are of similar size (the series that
/// made their batch a setting, "lru_lock scalability", D. Jordan, 2018, measured up to 310 pages).
pub const MAX_BATCH_PAGES: usize = 512;

pub(super) struct RunCache {
    stacks: [[Vec<u32>; MAX_RUN_PAGES]; Account::ALL.len()],
}

pub(super) fn batch_runs(batch_pages: usize, pages: usize) -> usize {
    (batch_pages / pages).max(1)
}

impl RunCache {
    /// Makes an empty cache with room for two of the largest batches of every length, and one run more.
    pub(super) fn new() -> Self {
        let stack = |index: usize| Vec::with_capacity(2 * batch_runs(MAX_BATCH_PAGES, index + 1) + 1);
        RunCache { stacks: std::array::from_fn(|_| std::array::from_fn(stack)) }
    }

    pub(super) fn touch(&mut self) -> usize {
        self.stacks.iter_mut().flatten().map(touch).sum()
    }

    #[inline]
    pub(super) fn stack(&mut self, account: Account, pages: usize) -> &mut Vec<u32> {
        &mut self.stacks[account as usize][pages - 1]
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = (u32, usize)> + '_ {
        let lengths = self.stacks.iter_mut().flat_map(|stacks| stacks.iter_mut().zip(1..));
        lengths.flat_map(|(stack, pages)| stack.drain(..).map(move |page| (page, pages)))
    }
}
