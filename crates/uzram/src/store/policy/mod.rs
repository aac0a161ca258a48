//! Reclaim: which pages leave memory without anyone asking, and when.
//!
//! A thread of the store carries it out. When the pool takes more than the policy's high watermark, a writer wakes it,
//! and pages leave until what would be left if the pool were packed is below the low watermark. Each page is compressed
//! again, if that was not tried and makes it fall into a smaller size class, or else written back. When that is not
//! enough because what is left lies scattered, the pool is packed. Once a second or less often, pages that were not
//! used for as long as the policy says are compressed again or written back.
//!
//! With a reserve the watermarks are of what the limit leaves beside it ([`Arena::limit_but_reserve_pages`]), and the thread
//! is woken, too, when the reserve lacks chunks at the limit: then the pool is packed until whole chunks are free, and
//! pages leave as long as that is not enough.
//!
//! A writer that meets the limit waits until the thread has freed something, and fails only when nothing can leave
//! or that takes too long. With a reserve it fails at once.
//!
//! - `watermarks.rs`: the watermarks, and who waits for whom
//! - `room.rs`: what a write does at the limit
//! - `reclaim.rs`: which pages leave
//! - `thread.rs`: when
//!
//! Lock order: `policy` is a leaf; the thread holds no lock between its steps.

mod reclaim;
mod room;
#[cfg(not(loom))]
mod thread;
mod watermarks;

use crate::base::mem::{Account, Arena};
use crate::base::named::named;
use crate::base::sync::Counter;
use crate::zsmalloc::AnyPool;

use super::Store;
#[cfg(all(test, not(loom)))]
pub(super) use reclaim::Reclaimed;
#[cfg(not(loom))]
pub use thread::PolicyThread;
pub(super) use watermarks::Watermarks;

/// In what order pages are reclaimed. Reads and prints as `pages` or `zspages`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReclaimOrder {
    /// The coldest pages, wherever their objects lie.
    #[default]
    Pages,
    /// All objects of the coldest zspage, so that its memory is free at once.
    Zspages,
}

impl ReclaimOrder {
    /// All of them.
    pub const ALL: [ReclaimOrder; 2] = [ReclaimOrder::Pages, ReclaimOrder::Zspages];

    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            ReclaimOrder::Pages => "pages",
            ReclaimOrder::Zspages => "zspages",
        }
    }
}

named!(ReclaimOrder, "'{}' is no order to reclaim in: {}");

/// A store's policy. It does something once there is a backing device or an algorithm to compress pages again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimPolicy {
    /// Pages leave when the pool and its metadata come above so many in a hundred of the limit, 1 to 100, or
    /// with a reserve, of what the limit leaves beside that.
    pub high_percent: u64,
    /// And until it is below so many, 0 to `high_percent`.
    pub low_percent: u64,
    /// Pages are compressed again when they were not used for so many seconds; 0 for never.
    pub recompress_after_s: u32,
    /// Pages are written back when they were not used for so many seconds; 0 for never.
    pub writeback_after_s: u32,
    /// The most bytes that are written to the backing device in a day; 0 for any.
    pub writeback_budget_bytes: u64,
    /// In what order pages are reclaimed. A store keeps the one that it was made with.
    pub order: ReclaimOrder,
}

impl Default for ReclaimPolicy {
    fn default() -> Self {
        ReclaimPolicy {
            high_percent: 95,
            low_percent: 90,
            recompress_after_s: 0,
            writeback_after_s: 0,
            writeback_budget_bytes: 0,
            order: ReclaimOrder::default(),
        }
    }
}

/// Pages of the pool and its metadata.
#[inline]
fn used_pages(arena: &Arena) -> u64 {
    arena.used_pages(Account::Pool) + arena.used_pages(Account::Slab)
}

/// Pages that would be left of them if the pool were packed.
fn needed_pages(arena: &Arena, pool: &AnyPool) -> u64 {
    used_pages(arena).saturating_sub(pool.freeable_pages())
}

impl Store {
    /// Sets the policy, but for its order, which stays.
    pub fn set_policy(&self, policy: ReclaimPolicy) {
        self.watermarks.set_policy(policy);
        if let Some(backing) = &self.backing {
            backing.set_budget_bytes(policy.writeback_budget_bytes);
        }
        self.update_watermarks();
        // The thread may have another time to wait for.
        self.watermarks.wake();
    }

    /// The watermarks, what they are compared with, and what the policy decided so far: a name and a count each.
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

    /// Whether pages can leave memory, or become smaller.
    pub(in crate::store) fn can_reclaim(&self) -> bool {
        self.lru.is_some() && (self.backing.is_some() || self.can_recompress())
    }
}
