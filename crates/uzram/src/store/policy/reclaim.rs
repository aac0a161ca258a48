//! Which pages are reclaimed: the coldest first, or those of the coldest zspages.
//!
//! Lock order: `writeback`, then slots, which are only tried.

use crate::base::clock::uptime_s;
use crate::base::mem::CHUNK_PAGES;
use crate::base::units::{PAGE_SIZE, PageNo};
use crate::store::slot::Tried;
use crate::store::writeback::Pass;
use crate::store::{Recompression, Store};
use crate::zsmalloc::{Budget, Effort};

use super::watermarks::{ReclaimOrder, needed_pages, used_pages};

/// Pages isolated from the cold end of the LRU at a time.
const PAGES_AT_ONCE: usize = 64;
const ZSPAGES_AT_ONCE: usize = 16;
/// A reclaim frees at least the limit divided by this.
const LEAST_SHARE: u64 = 64;
/// Pages scanned between checks for more urgent work.
const LOOKS_AT_ONCE: u64 = 1024;
/// The pool is packed if that frees more than its pages divided by this.
const PACKED_SHARE: u64 = 64;

impl Store {
    /// Reclaims pages until the pool is below the low watermark, and at least some.
    pub(in crate::store) fn reclaim(&self) -> Reclaimed {
        let lacks_reserve = self.arena.lacks_reserve();
        if lacks_reserve
            && used_pages(&self.arena) <= self.watermarks.high_pages.get()
            && self.pack_for_reserve()
        {
            return Reclaimed::Some;
        }
        // A writer may reach the limit while the pool is below the watermark, if it cannot use the free
        // pages.
        let least = self.least_pages();
        let now = needed_pages(&self.arena, &self.pool);
        let goal = self.watermarks.low_pages.get().min(now.saturating_sub(least));
        let mut reclaimer = Reclaimer::begin(self, goal);
        match self.watermarks.policy().order {
            ReclaimOrder::Pages => reclaimer.pages(),
            ReclaimOrder::Zspages => reclaimer.zspages(),
        }
        let reclaimed = reclaimer.end();
        let has_packed = if lacks_reserve { self.pack_for_reserve() } else { self.pack(goal) };
        // Otherwise the freed pages would be kept for reuse.
        self.arena.release_beyond_limit();
        if has_packed { Reclaimed::Some } else { reclaimed }
    }

    fn least_pages(&self) -> u64 {
        let chunk_pages = if self.arena.lacks_reserve() { u64::from(CHUNK_PAGES) } else { 0 };
        chunk_pages.max(self.arena.limit_pages() / LEAST_SHARE).max(PAGES_AT_ONCE as u64 / 2)
    }

    /// Returns whether writers find room without another reclaim.
    pub(super) fn has_reclaimed_enough(&self) -> bool {
        !self.arena.lacks_reserve()
            && used_pages(&self.arena) + self.least_pages() <= self.arena.limit_pages()
    }

    /// Returns whether writes find room now: below the memory limit, if there is one, and in the reserve.
    pub fn has_room(&self) -> bool {
        match self.arena.limit_pages() {
            0 => !self.arena.lacks_reserve(),
            _ => self.has_reclaimed_enough(),
        }
    }

    fn pack(&self, goal: u64) -> bool {
        let freeable = self.pool.freeable_pages();
        if freeable <= self.pool.pages_used() / PACKED_SHARE || used_pages(&self.arena) <= goal {
            return false;
        }
        self.compact_for_policy() > 0
    }

    fn pack_for_reserve(&self) -> bool {
        self.compact_for_policy();
        !self.arena.lacks_reserve()
    }

    fn compact_for_policy(&self) -> u64 {
        let freed = self.pool.compact(Effort::Zspages, &mut Budget::unlimited());
        self.watermarks.decisions.packed_pages.add(freed);
        freed
    }

    /// Returns the pages that were not used for `age_s`; none if that is 0. Ends early for more urgent work.
    pub(super) fn old_pages(&self, age_s: u32) -> impl Iterator<Item = PageNo> {
        let is_old = move |page: &PageNo| self.slots.peek(*page).is_stored() && self.is_unused(*page, age_s);
        let pages = if age_s > 0 { 0..self.pages() } else { 0..0 };
        let mut looks = 0u64;
        let is_undisturbed = move |_: &PageNo| {
            looks += 1;
            !looks.is_multiple_of(LOOKS_AT_ONCE) || !self.watermarks.is_urgent(&self.arena)
        };
        self.slots.touched(pages).take_while(is_undisturbed).filter(is_old)
    }

    pub(super) fn is_unused(&self, page: PageNo, age_s: u32) -> bool {
        uptime_s().saturating_sub(self.slots.used_s(page)) >= age_s
    }

    /// Writes back old pages. Returns whether it finished before more urgent work came up.
    pub(super) fn write_back_old(&self, age_s: u32) -> bool {
        let Some(backing) = &self.backing else { return true };
        let (mut pass, decisions) = (None, &self.watermarks.decisions);
        for page in self.old_pages(age_s) {
            let pass = pass.get_or_insert_with(|| Pass::begin(self, backing));
            if pass.has_failed() || pass.make_room().is_err() {
                break;
            }
            let slot = self.slots.try_lock(page).locked().filter(|slot| slot.peek().is_stored());
            if slot.is_some_and(|slot| pass.add(slot, page).is_err()) {
                decisions.failures.add(1);
            }
        }
        if let Some(pass) = pass {
            let outcome = pass.end();
            decisions.old_written_back.add(outcome.written);
            decisions.failures.add(u64::from(outcome.error.is_some()));
        }
        !self.watermarks.is_urgent(&self.arena)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store) enum Reclaimed {
    /// Pages were reclaimed, or the pool was packed.
    Some,
    /// No page was reclaimed, because the candidates were in use; a retry may succeed.
    NotYet,
    Failed,
    None,
}

struct Reclaimer<'a> {
    store: &'a Store,
    pass: Option<Pass<'a>>,
    recompression: Recompression,
    /// Reclaim ends when the pool would need no more pages than this if packed.
    goal: u64,
    became_smaller: u64,
    /// Whether no more may be written, or there is no backing device.
    is_full: bool,
    /// Pages that stayed because they were in use.
    in_use: u64,
}

impl<'a> Reclaimer<'a> {
    fn begin(store: &'a Store, goal: u64) -> Self {
        Reclaimer {
            store,
            pass: store.backing.as_ref().map(|backing| Pass::begin(store, backing)),
            recompression: store.within_algorithms(&Recompression::default()),
            goal,
            became_smaller: 0,
            is_full: false,
            in_use: 0,
        }
    }

    fn pages(&mut self) {
        let Some(lru) = &self.store.lru else { return };
        let stats = lru.stats();
        let mut left = stats.inactive + stats.active;
        let mut pages = Vec::with_capacity(PAGES_AT_ONCE);
        while left > 0 && self.goes_on() {
            pages.clear();
            lru.isolate(PAGES_AT_ONCE, &mut pages);
            if pages.is_empty() {
                return;
            }
            left = left.saturating_sub(pages.len() as u64);
            for (at, page) in pages.iter().enumerate() {
                self.store.prefetch_object(|ahead| pages.get(at + ahead).copied().map(PageNo));
                if !self.page(PageNo(*page), || lru.is_isolated(*page)) {
                    lru.put_back(&[*page]);
                }
            }
        }
    }

    /// Reclaims all pages whose objects are in the least recently filled zspages.
    fn zspages(&mut self) {
        let mut left = self.store.pool.pages_used();
        while left > 0 && self.goes_on() {
            let emptied = self.store.pool.reclaim_coldest(ZSPAGES_AT_ONCE, |pages| {
                for page in pages {
                    self.page(PageNo(*page), || true);
                }
                // A zspage is freed only once all of its objects are.
                self.pass.iter_mut().for_each(Pass::flush);
            });
            match emptied {
                Ok(emptied) if emptied.looked_at > 0 => left = left.saturating_sub(emptied.looked_at),
                _ => return,
            }
        }
    }

    fn goes_on(&self) -> bool {
        let is_sound = !self.pass.as_ref().is_some_and(Pass::has_failed);
        let pending_bytes = self.pass.as_ref().map_or(0, |pass| pass.pending_bytes);
        let needed = needed_pages(&self.store.arena, &self.store.pool);
        let may_win = !self.is_full || self.store.can_recompress();
        is_sound
            && may_win
            && !self.store.watermarks.ends()
            && needed.saturating_sub(pending_bytes / PAGE_SIZE as u64) > self.goal
    }

    /// Recompresses a page or adds it to the pass, if it still `is_cold`. Returns whether it was added.
    fn page(&mut self, page: PageNo, is_cold: impl FnOnce() -> bool) -> bool {
        let (store, decisions) = (self.store, &self.store.watermarks.decisions);
        decisions.looked_at.add(1);
        if page.number() >= store.pages() {
            // The number comes from a damaged object header; the object's page is unknown.
            decisions.failures.add(1);
            return false;
        }
        self.is_full = self.is_full || self.pass.as_mut().is_none_or(|pass| pass.make_room().is_err());
        let slot = match store.slots.try_lock(page) {
            Tried::Locked(slot) if is_cold() => slot,
            Tried::Locked(_) | Tried::Busy => {
                decisions.busy.add(1);
                self.in_use += 1;
                return false;
            }
            // It was discarded meanwhile, so it cannot be reclaimed later either.
            Tried::Empty => return false,
        };
        let slot = match store.recompress_locked(slot, page, &self.recompression) {
            Ok((_, None)) => {
                decisions.recompressed.add(1);
                self.became_smaller += 1;
                store.watermarks.notify_waiters(None);
                return false;
            }
            Ok((tried, Some(slot))) => {
                decisions.not_smaller.add(u64::from(tried));
                slot
            }
            // At the limit there may be no room for the new object, although it is smaller.
            Err(_) => {
                decisions.failures.add(1);
                let Some(slot) = store.slots.try_lock(page).locked() else { return false };
                slot
            }
        };
        let Some(pass) = self.pass.as_mut().filter(|_| !self.is_full && slot.peek().is_stored()) else {
            return false;
        };
        let added = pass.add(slot, page);
        decisions.failures.add(u64::from(added.is_err()));
        added.is_ok()
    }

    fn end(mut self) -> Reclaimed {
        let decisions = &self.store.watermarks.decisions;
        let outcome = self.pass.take().map(Pass::end).unwrap_or_default();
        decisions.written_back.add(outcome.written);
        decisions.kept.add(outcome.kept);
        decisions.failures.add(u64::from(outcome.error.is_some()));
        match outcome.error {
            _ if self.became_smaller + outcome.written > 0 => Reclaimed::Some,
            Some(_) => Reclaimed::Failed,
            None if outcome.unanswered.is_some() => Reclaimed::Failed,
            None if self.in_use + outcome.kept > 0 => Reclaimed::NotYet,
            None => Reclaimed::None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::store::StoreBuilder;

    #[test]
    fn a_page_that_is_gone_is_not_in_use() {
        let store = Store::new(&StoreBuilder::new("test", 1000)).expect("memory");
        let mut reclaimer = Reclaimer::begin(&store, 0);
        assert!(!reclaimer.page(PageNo(7), || true));
        assert_eq!((reclaimer.in_use, store.watermarks.decisions.busy.get()), (0, 0));
        assert_eq!(reclaimer.end(), Reclaimed::None);
        let held = store.slots.lock(PageNo(7));
        let mut reclaimer = Reclaimer::begin(&store, 0);
        assert!(!reclaimer.page(PageNo(7), || true));
        drop(held);
        assert_eq!((reclaimer.end(), store.watermarks.decisions.busy.get()), (Reclaimed::NotYet, 1));
    }
}
