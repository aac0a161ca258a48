//! Releases the memory of free pages to the system.
//!
//! One thread at a time does so, under the lock `reclaim`: a thread that needs memory waits there
//! for memory that is going back, instead of failing. The arena's lock is not held during the
//! system calls; the pages are marked as taken meanwhile.

use std::thread::Thread;

use super::runs::{CHUNK_GROUPS, CHUNK_PAGES, GROUP_PAGES, groups_of, mask};
use super::{Account, Arena, Helper, Inner, tell};
use crate::base::sync::{MutexGuard, Ordering};
use crate::base::units::PAGE_SIZE;

/// Free pages that are always kept for reuse: half a chunk.
pub(super) const KEPT_FREE_PAGES: u64 = 256;
/// If that is more, one free page is kept per this many used pages: about what a compressed pool
/// loses to partly filled zspages.
const USED_PER_KEPT_PAGE: u64 = 16;
/// Groups that are released before the lock `reclaim` is released: 4 MiB.
const GROUPS_PER_STEP: usize = 16;
/// With a releaser, frees release memory themselves only beyond this multiple of the pages to keep.
const MOST_KEPT_FOR_RELEASER: u64 = 8;

impl Arena {
    /// Returns whether the arena keeps free memory: memory that [`Arena::release_free`] could give back, or
    /// with a reserve, that is present or in a CPU's cache.
    pub fn keeps_free(&self) -> bool {
        self.charged_pages() > self.all_used_pages()
    }

    pub(super) fn all_used_pages(&self) -> u64 {
        Account::ALL.into_iter().map(|account| self.used_pages(account)).sum()
    }

    /// Gives free memory back if more is charged than the limit allows, because it was lowered.
    pub fn release_beyond_limit(&self) {
        match (self.is_beyond_limit(), self.has_reserve()) {
            (false, _) => {}
            (true, false) => self.release_free(),
            (true, true) => self.release_chunks_beyond_limit(),
        }
    }

    /// Gives the memory of all free runs, those in CPU caches included, back to the system, and waits for
    /// other threads that do so. With a reserve it only empties the CPU caches: the memory stays, and it
    /// waits for no thread.
    pub fn release_free(&self) {
        if self.has_reserve() {
            self.flush_caches();
            return;
        }
        let reclaim = self.reclaim.lock();
        self.flush_caches();
        self.inner.lock().release_below = 0;
        self.release_down_to(&reclaim, 0, usize::MAX);
    }

    /// Registers the releaser: a free that leaves a surplus unparks the thread, once until it has called
    /// [`Arena::release_surplus`], instead of giving memory back itself. If the releaser does not keep up,
    /// frees do give memory back.
    pub fn set_releaser(&self, thread: Option<Thread>) {
        self.inner.lock().releaser = Helper { thread, is_told: false };
    }

    /// Gives surplus memory back. For the registered releaser: it works in steps, between which other
    /// threads can free, allocate and wait for memory.
    pub fn release_surplus(&self) {
        if self.has_reserve() {
            self.release_surplus_chunks();
            return;
        }
        let (mut left, groups) = {
            let mut inner = self.inner.lock();
            inner.releaser.is_told = false;
            (inner.free_resident_pages, inner.runs.groups())
        };
        let mut goal = self.keep_pages();
        // This many steps visit every group.
        for _ in 0..groups.div_ceil(GROUPS_PER_STEP) {
            if left <= goal {
                return;
            }
            goal = self.keep_pages() / 2;
            left = self.release_down_to(&self.reclaim.lock(), goal, GROUPS_PER_STEP);
        }
    }

    /// Gives surplus memory back, or wakes the releaser. Called after a free.
    pub(super) fn deal_with_surplus(&self, inner: MutexGuard<'_, Inner>) {
        let keep = self.keep_pages();
        if self.has_reserve() {
            self.tell_of_surplus_chunks(inner, keep);
            return;
        }
        if inner.free_resident_pages <= keep {
            return;
        }
        if inner.releaser.thread.is_some() && inner.free_resident_pages <= keep * MOST_KEPT_FOR_RELEASER {
            return tell(inner, |inner| &mut inner.releaser);
        }
        drop(inner);
        if let Some(reclaim) = self.reclaim.try_lock() {
            self.release_down_to(&reclaim, keep / 2, GROUPS_PER_STEP);
        }
    }

    pub(super) fn keep_pages(&self) -> u64 {
        KEPT_FREE_PAGES.max(self.all_used_pages() / USED_PER_KEPT_PAGE)
    }

    pub(super) fn flush_caches(&self) {
        for cache in self.caches.iter() {
            let mut cache = cache.lock();
            let mut inner = self.inner.lock();
            cache.drain().for_each(|(page, pages)| self.put(&mut inner, page, pages));
        }
    }

    /// Gives memory of free pages back, from the highest group down to the lowest and around, until
    /// at most `keep` resident free pages are left or `most_groups` groups are released. Returns the
    /// number of pages left.
    fn release_down_to(&self, _reclaim: &MutexGuard<'_, ()>, keep: u64, most_groups: usize) -> u64 {
        let mut inner = self.inner.lock();
        let (mut released_groups, groups) = (0, inner.runs.groups());
        for _ in 0..groups {
            if inner.free_resident_pages <= keep || released_groups == most_groups {
                break;
            }
            let below = if inner.release_below == 0 { groups } else { inner.release_below };
            let group = below - 1;
            inner.release_below = group;
            let bits = self.releasable(&inner, group);
            if bits == 0 {
                continue;
            }
            let first = group as u32 * GROUP_PAGES;
            self.withhold(&mut inner, group, bits);
            drop(inner);
            let released = self.release(first, bits);
            self.is_released(group, released);
            released_groups += 1;
            inner = self.inner.lock();
            self.restore(&mut inner, group, bits);
        }
        inner.free_resident_pages
    }

    pub(super) fn release_chunk(&self, _reclaim: &MutexGuard<'_, ()>, chunk: usize) {
        let first = chunk as u32 * CHUNK_PAGES;
        let mut inner = self.inner.lock();
        if !self.chunk_is_resident(chunk) {
            return;
        }
        let is_free = inner.runs.is_free(chunk);
        let mut bits = [u64::MAX; CHUNK_GROUPS];
        for (group, bits) in groups_of(chunk).zip(&mut bits) {
            if !is_free {
                *bits = self.releasable(&inner, group);
            }
            self.withhold(&mut inner, group, *bits);
        }
        drop(inner);
        if is_free {
            let (offset, len) = (first as usize * PAGE_SIZE, CHUNK_PAGES as usize * PAGE_SIZE);
            // SAFETY: all pages of the chunk were free and are marked as taken now.
            if unsafe { self.mapping.release(offset, len) } {
                groups_of(chunk).for_each(|group| self.is_released(group, u64::MAX));
            }
        } else {
            for (group, bits) in groups_of(chunk).zip(bits) {
                self.is_released(group, self.release(group as u32 * GROUP_PAGES, bits));
            }
        }
        let mut inner = self.inner.lock();
        groups_of(chunk).zip(bits).for_each(|(group, bits)| self.restore(&mut inner, group, bits));
    }

    /// Returns the free pages of a group whose memory the system can take: it takes only whole host pages, of
    /// which no part may be used.
    fn releasable(&self, inner: &Inner, group: usize) -> u64 {
        let unit_pages = (self.mapping.page_bytes() / PAGE_SIZE).max(1) as u32;
        units_to_release(self.resident[group].load(Ordering::Relaxed), inner.runs.taken(group), unit_pages)
    }

    /// Marks free pages as taken while their memory goes back.
    fn withhold(&self, inner: &mut Inner, group: usize, bits: u64) {
        inner.runs.mark(group as u32 * GROUP_PAGES, bits, true);
        inner.free_resident_pages -= self.resident_of(group, bits);
    }

    fn restore(&self, inner: &mut Inner, group: usize, bits: u64) {
        inner.runs.mark(group as u32 * GROUP_PAGES, bits, false);
        inner.free_resident_pages += self.resident_of(group, bits);
    }

    /// Accounts for pages that the system took: clears their resident bits and uncharges them.
    pub(super) fn is_released(&self, group: usize, released: u64) {
        let before = self.resident[group].fetch_and(!released, Ordering::Relaxed);
        self.usage.charged_pages.sub(u64::from((before & released).count_ones()));
    }

    /// Gives the pages of `bits`, counted from page `first`, back; returns those that the system took.
    fn release(&self, first: u32, bits: u64) -> u64 {
        let (mut left, mut released) = (bits, 0);
        while left != 0 {
            let start = left.trailing_zeros();
            let pages = (left >> start).trailing_ones();
            let offset = (first + start) as usize * PAGE_SIZE;
            // SAFETY: the caller marked the pages as taken while they were free: no run contains them.
            if unsafe { self.mapping.release(offset, pages as usize * PAGE_SIZE) } {
                released |= mask(start, pages);
            }
            left &= !mask(start, pages);
        }
        released
    }
}

/// Returns the pages of all aligned units of `unit_pages` (a power of two, at most 64) of which no page is
/// taken and at least one is in memory.
pub(super) fn units_to_release(resident: u64, taken: u64, unit_pages: u32) -> u64 {
    let unit = u64::MAX >> (u64::BITS - unit_pages.min(u64::BITS));
    let units = (0..u64::BITS).step_by(unit_pages as usize).map(|at| unit << at);
    units.filter(|unit| taken & unit == 0 && resident & unit != 0).sum()
}
