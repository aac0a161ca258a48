//! Reclaim: which pages leave memory in the background, and when.
//!
//! The policy's thread reclaims pages. When the pool grows above the policy's high watermark, a writer wakes the
//! thread, and it reclaims pages until the pool, if it were packed, would be below the low watermark. Each page is
//! recompressed, if that was not tried and moves it to a smaller size class, or else written back. If the pool is then
//! still too large because it is fragmented, it is packed. Once a second or less often, pages that were not used for
//! the time that the policy sets are recompressed or written back.
//!
//! With a reserve the watermarks are percentages of the limit less the reserve ([`Arena::limit_but_reserve_pages`]),
//! and the thread is also woken when the reserve lacks chunks at the limit: then the pool is packed until whole chunks
//! are free, and pages are reclaimed as long as that is not enough.
//!
//! A writer that reaches the limit waits until the thread has freed memory, and fails only if nothing can be reclaimed
//! or that takes too long. With a reserve it fails at once.
//!
//! - `watermarks.rs`: the watermarks, waking the thread, and waiting for it
//! - `room.rs`: what a write does at the limit
//! - `reclaim.rs`: which pages are reclaimed
//! - `parked.rs`: recompression of pages that were not used for long, and of hot ones
//! - `thread.rs`: when
//!
//! Lock order: `policy` is a leaf; the thread holds no lock between its steps.

#[cfg(not(loom))]
mod parked;
mod reclaim;
mod room;
#[cfg(not(loom))]
mod thread;
mod watermarks;

use crate::base::mem::{Account, Arena};
use crate::base::named::named;
use crate::base::sync::Counter;
use crate::store::designs::StorePool;

use super::Store;
#[cfg(all(test, not(loom)))]
pub(super) use parked::one_batch;
#[cfg(all(test, not(loom)))]
pub(super) use reclaim::Reclaimed;
#[cfg(not(loom))]
pub use thread::PolicyThread;
pub(super) use watermarks::Watermarks;

/// The order in which pages are reclaimed. Parses from and prints as `pages` or `zspages`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReclaimOrder {
    /// The coldest pages, wherever their objects lie.
    #[default]
    Pages,
    /// All pages whose objects are in the coldest zspage, which frees its memory at once.
    Zspages,
}

impl ReclaimOrder {
    /// All orders.
    pub const ALL: [ReclaimOrder; 2] = [ReclaimOrder::Pages, ReclaimOrder::Zspages];

    /// Returns the name used in settings.
    pub const fn name(self) -> &'static str {
        match self {
            ReclaimOrder::Pages => "pages",
            ReclaimOrder::Zspages => "zspages",
        }
    }
}

named!(ReclaimOrder, "'{}' is no order to reclaim in: {}");

/// A store's reclaim policy. It has effect only with a backing device or a recompression algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimPolicy {
    /// The high watermark: reclaim starts when the pool and its metadata exceed this percentage, 1 to 100, of the limit
    /// less the reserve.
    pub high_percent: u64,
    /// The low watermark: reclaim ends below this percentage, 0 to `high_percent`.
    pub low_percent: u64,
    /// Pages not used for this many seconds are recompressed, and hot ones if an algorithm decodes fast; 0 for never.
    pub recompress_after_s: u32,
    /// The most CPU time that this recompression takes, in percent of one CPU, 1 to 100; 0 for no bound.
    pub recompress_cpu_percent: u64,
    /// Pages not used for this many seconds are written back; 0 for never.
    pub writeback_after_s: u32,
    /// The maximum bytes written to the backing device in a day; 0 for no budget.
    pub writeback_budget_bytes: u64,
    /// The order in which pages are reclaimed; fixed when the store is built.
    pub order: ReclaimOrder,
}

impl Default for ReclaimPolicy {
    fn default() -> Self {
        ReclaimPolicy {
            high_percent: 95,
            low_percent: 90,
            recompress_after_s: 0,
            recompress_cpu_percent: 2,
            writeback_after_s: 0,
            writeback_budget_bytes: 0,
            order: ReclaimOrder::default(),
        }
    }
}

/// Returns the pages of the pool and its metadata.
#[inline]
fn used_pages(arena: &Arena) -> u64 {
    arena.used_pages(Account::Pool) + arena.used_pages(Account::Slab)
}

/// Returns the pages of the pool and its metadata that would be left if the pool were packed.
fn needed_pages(arena: &Arena, pool: &StorePool) -> u64 {
    used_pages(arena).saturating_sub(pool.freeable_pages())
}

impl Store {
    /// Sets the policy except its order, which cannot be changed.
    pub fn set_policy(&self, policy: ReclaimPolicy) {
        self.watermarks.set_policy(policy);
        if let Some(backing) = &self.backing {
            backing.set_budget_bytes(policy.writeback_budget_bytes);
        }
        self.update_watermarks();
        // The thread may have to wake up earlier than before.
        self.watermarks.wake();
        self.keep_setting(|kept| kept.policy = policy);
    }

    /// Returns the watermarks, the values compared with them, and counts of the policy's decisions, with their names.
    pub fn policy_stats(&self) -> Vec<(&'static str, u64)> {
        let policy = self.watermarks.policy();
        let decisions = &self.watermarks.decisions;
        let pages = |pages: &Counter| if pages.get() == u64::MAX { 0 } else { pages.get() };
        let budget_left = self.backing.as_ref().and_then(|backing| backing.budget_left_bytes());
        vec![
            ("high_pages", pages(&self.watermarks.high_pages)),
            ("low_pages", pages(&self.watermarks.low_pages)),
            ("used_pages", used_pages(&self.arena)),
            ("needed_pages", needed_pages(&self.arena, &self.pool)),
            ("recompress_after_s", u64::from(policy.recompress_after_s)),
            ("writeback_after_s", u64::from(policy.writeback_after_s)),
            ("budget_left_bytes", budget_left.unwrap_or(0)),
            ("wakeups", decisions.wakeups.get()),
            ("looked_at", decisions.looked_at.get()),
            ("recompressed", decisions.recompressed.get()),
            ("not_smaller", decisions.not_smaller.get()),
            ("written_back", decisions.written_back.get()),
            ("kept", decisions.kept.get()),
            ("busy", decisions.busy.get()),
            ("packed_pages", decisions.packed_pages.get()),
            ("looks", decisions.looks.get()),
            ("old_recompressed", decisions.old_recompressed.get()),
            ("recompress_cpu_ms", decisions.recompress_cpu_us.get() / 1000),
            ("old_written_back", decisions.old_written_back.get()),
            ("writers_waited", decisions.writers_waited.get()),
            ("writers_waited_ms", decisions.writers_waited_ms.get()),
            ("writers_refused", decisions.writers_refused.get()),
            ("stuck", decisions.stuck.get()),
            ("failures", decisions.failures.get()),
            ("thread_died", u64::from(self.watermarks.why_died().is_some())),
        ]
    }

    /// Computes the watermarks from the policy and the limit.
    pub(in crate::store) fn update_watermarks(&self) {
        self.watermarks.update(&self.arena, self.can_reclaim());
    }

    /// Returns whether pages can be written back or recompressed.
    pub(in crate::store) fn can_reclaim(&self) -> bool {
        self.lru.is_some() && (self.backing.is_some() || self.can_recompress())
    }
}
