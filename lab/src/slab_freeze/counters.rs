//! The caches' counters, which are on only while a [`Counting`] lives, because they cost time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use uzram::Result;
use uzram::slab::{self, Policy, Stat};

use super::objects::Objects;
use crate::experiment::Plan;
use crate::experiment::clock::{COUNTED_SHARE, Total};

/// The counters, and their names for one object.
pub(crate) const COUNTERS: [(Stat, &str); 33] = [
    (Stat::CmpxchgDouble, "cmpxchg_double_per_object"),
    (Stat::CmpxchgDoubleFail, "cmpxchg_double_fail_per_object"),
    (Stat::ListLockAcquired, "list_lock_acquired_per_object"),
    (Stat::ListLockContended, "list_lock_contended_per_object"),
    (Stat::ListLockHoldNs, "list_lock_hold_ns_per_object"),
    (Stat::AllocFastpath, "alloc_fastpath_per_object"),
    (Stat::AllocSlowpath, "alloc_slowpath_per_object"),
    (Stat::AllocRefill, "alloc_refill_per_object"),
    (Stat::AllocFromPartial, "alloc_from_partial_per_object"),
    (Stat::AllocSlab, "alloc_slab_per_object"),
    (Stat::FreeFastpath, "free_fastpath_per_object"),
    (Stat::FreeSlowpath, "free_slowpath_per_object"),
    (Stat::FreeFrozen, "free_frozen_per_object"),
    (Stat::FreeAddPartial, "free_add_partial_per_object"),
    (Stat::FreeRemovePartial, "free_remove_partial_per_object"),
    (Stat::FreeSlab, "free_slab_per_object"),
    (Stat::DeactivateFull, "deactivate_full_per_object"),
    (Stat::DeactivateEmpty, "deactivate_empty_per_object"),
    (Stat::DeactivateToHead, "deactivate_to_head_per_object"),
    (Stat::DeactivateToTail, "deactivate_to_tail_per_object"),
    (Stat::DeactivateBypass, "deactivate_bypass_per_object"),
    (Stat::CpuPartialAlloc, "cpu_partial_alloc_per_object"),
    (Stat::CpuPartialFree, "cpu_partial_free_per_object"),
    (Stat::CpuPartialNode, "cpu_partial_node_per_object"),
    (Stat::CpuPartialDrain, "cpu_partial_drain_per_object"),
    (Stat::AllocPcs, "alloc_pcs_per_object"),
    (Stat::FreePcs, "free_pcs_per_object"),
    (Stat::SheafRefill, "sheaf_refill_per_object"),
    (Stat::SheafFlush, "sheaf_flush_per_object"),
    (Stat::BarnGet, "barn_get_per_object"),
    (Stat::BarnGetFail, "barn_get_fail_per_object"),
    (Stat::BarnPut, "barn_put_per_object"),
    (Stat::BarnPutFail, "barn_put_fail_per_object"),
];

/// Held while the caches count: the switches are global to the process.
static SWITCHES: Mutex<()> = Mutex::new(());

/// While it lives, the caches of this process count operations and measure how long they hold `list_lock`.
struct Counting {
    _switches: MutexGuard<'static, ()>,
}

impl Counting {
    fn start() -> Self {
        let switches = SWITCHES.lock().unwrap_or_else(PoisonError::into_inner);
        slab::set_counting(true);
        slab::set_timing(true);
        Counting { _switches: switches }
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        slab::set_timing(false);
        slab::set_counting(false);
    }
}

/// Runs a part of a plan's work while the caches count; returns the counters for one object of that work.
pub(crate) fn counted<P: Policy>(
    caches: &[Objects<P>],
    plan: &Plan<'_>,
    run: impl FnOnce(&Plan<'_>) -> Result<Total>,
) -> Result<Vec<(&'static str, f64)>> {
    let before = counts(caches);
    let total = {
        let _counting = Counting::start();
        run(&Plan { work: plan.work.div_ceil(COUNTED_SHARE), ..*plan })?
    };
    let counts = counts(caches).into_iter().zip(before).map(|(now, then)| now - then);
    Ok(COUNTERS.iter().zip(counts).map(|((_, name), count)| (*name, total.per_unit(count as f64))).collect())
}

/// Returns the counters of all caches and CPUs, in the order of [`COUNTERS`].
fn counts<P: Policy>(caches: &[Objects<P>]) -> Vec<u64> {
    let stats: Vec<_> = caches.iter().flat_map(|cache| cache.info().stats).collect();
    let sum = |(stat, _): &(Stat, _)| stats.iter().map(|stats| stats[*stat as usize]).sum();
    COUNTERS.iter().map(sum).collect()
}
