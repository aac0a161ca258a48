//! Reclaim: which pages leave memory in the background, and when. ARCHITECTURE.md tells its steps, and
//! docs/internals/reserve.md what a reserve changes.
//!
//! Lock order: `policy` is a leaf; the thread holds no lock between its steps.

#[cfg(not(loom))]
mod parked;
mod reclaim;
#[cfg(not(loom))]
mod thread;
mod watermarks;

use crate::base::sync::Counter;

use super::Store;
#[cfg(all(test, not(loom)))]
pub(super) use parked::one_batch;
#[cfg(all(test, not(loom)))]
pub(super) use reclaim::Reclaimed;
#[cfg(not(loom))]
pub use thread::PolicyThread;
pub(super) use watermarks::Watermarks;
pub use watermarks::{ReclaimOrder, ReclaimPolicy};
use watermarks::{needed_pages, used_pages};

impl Store {
    /// Sets the policy except its order, which cannot be changed.
    pub fn set_policy(&self, policy: ReclaimPolicy) {
        self.watermarks.set_policy(policy);
        if let Some(backing) = &self.backing {
            backing.allowance.set_budget_bytes(policy.writeback_budget_bytes);
        }
        self.update_watermarks();
        // The thread may have to wake up earlier than before.
        self.watermarks.wake();
        self.keep_setting(|kept| kept.policy = policy);
    }

    /// Returns the watermarks, the values compared with them, and counts of the policy's decisions, with
    /// their names.
    pub fn policy_stats(&self) -> Vec<(&'static str, u64)> {
        let policy = self.watermarks.policy();
        let pages = |pages: &Counter| if pages.get() == u64::MAX { 0 } else { pages.get() };
        let budget_left = self.backing.as_ref().and_then(|backing| backing.allowance.budget_left_bytes());
        let mut stats = vec![
            ("high_pages", pages(&self.watermarks.high_pages)),
            ("low_pages", pages(&self.watermarks.low_pages)),
            ("used_pages", used_pages(&self.arena)),
            ("needed_pages", needed_pages(&self.arena, &self.pool)),
            ("recompress_after_s", u64::from(policy.recompress_after_s)),
            ("writeback_after_s", u64::from(policy.writeback_after_s)),
            ("budget_left_bytes", budget_left.unwrap_or(0)),
        ];
        stats.extend(self.watermarks.decisions.named().map(|decision| match decision {
            ("recompress_cpu_us", us) => ("recompress_cpu_ms", us / 1000),
            other => other,
        }));
        stats.push(("thread_died", u64::from(self.watermarks.why_died().is_some())));
        stats
    }

    pub(in crate::store) fn update_watermarks(&self) {
        self.watermarks.update(&self.arena, self.can_reclaim());
    }

    /// Returns whether pages can be written back or recompressed.
    pub(in crate::store) fn can_reclaim(&self) -> bool {
        let finds_cold = self.lru.is_some() || self.watermarks.policy().order == ReclaimOrder::Zspages;
        finds_cold && (self.backing.is_some() || self.can_recompress())
    }
}
