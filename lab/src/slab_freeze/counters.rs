//! The caches' counters, which are on only while they are wanted, because they cost time.

use std::sync::{LazyLock, Mutex, PoisonError};

use uzram::Result;
use uzram::slab::{self, Policy, Stat};

use super::objects::Objects;
use crate::experiment::Plan;
use crate::experiment::clock::{COUNTED_SHARE, Total};

/// The counters' names for one object, in the order of [`Stat::ALL`].
static NAMES: LazyLock<Vec<String>> =
    LazyLock::new(|| Stat::ALL.iter().map(|stat| format!("{}_per_object", stat.name())).collect());

/// Held while the caches count: the switches are global to the process.
static SWITCHES: Mutex<()> = Mutex::new(());

/// Runs a part of a plan's work while the caches of this process count operations and measure how long they
/// hold `list_lock`; returns the counters for one object of that work.
pub(crate) fn counted<P: Policy>(
    caches: &[Objects<P>],
    plan: &Plan<'_>,
    run: impl FnOnce(&Plan<'_>) -> Result<Total>,
) -> Result<Vec<(&'static str, f64)>> {
    let before = counts(caches);
    let switches = SWITCHES.lock().unwrap_or_else(PoisonError::into_inner);
    slab::set_counting(true);
    let total = run(&Plan { work: plan.work.div_ceil(COUNTED_SHARE), ..*plan });
    slab::set_counting(false);
    drop(switches);
    let total = total?;
    let counts = counts(caches).into_iter().zip(before).map(|(now, then)| now - then);
    Ok(NAMES.iter().zip(counts).map(|(name, count)| (name.as_str(), total.per_unit(count as f64))).collect())
}

/// Returns the counters of all caches and CPUs, in the order of [`Stat::ALL`].
fn counts<P: Policy>(caches: &[Objects<P>]) -> Vec<u64> {
    let stats: Vec<_> = caches.iter().flat_map(|cache| cache.info().stats).collect();
    Stat::ALL.iter().map(|stat| stats.iter().map(|stats| stats[*stat as usize]).sum()).collect()
}
