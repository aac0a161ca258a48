//! What the pages of a store are like, found without locks; marking them as idle; compaction on request.

use std::ops::Range;

use crate::base::clock::uptime_s;
use crate::base::error::Result;
use crate::base::units::PageNo;
use crate::base::work::{Unit, Work};
use crate::zsmalloc::{Budget, Effort};

use super::{PageState, Store};

impl Store {
    /// Returns the state of `page`, and the number of consecutive pages from `page` on that are in it: at
    /// least 1, at most `max_pages`, which bounds the work. Takes no lock: the state of each page is one that
    /// it was in during the call.
    ///
    /// # Panics
    /// If `max_pages` is 0 or goes beyond the end.
    pub fn extent(&self, page: PageNo, max_pages: u64) -> (PageState, u64) {
        let state = self.slots.state(page);
        let behind = page.number() + 1..page.number() + max_pages;
        (state, 1 + self.slots.run(behind, |other| other == state))
    }

    /// Returns the number of consecutive pages from `page` on that read as zeros, 0 to `max_pages`; otherwise
    /// as [`Store::extent`].
    pub fn zero_pages(&self, page: PageNo, max_pages: u64) -> u64 {
        self.slots.run(page.number()..page.number() + max_pages, PageState::is_zeros)
    }

    /// Calls `line` for each of `pages` that holds something, until `line` returns false. The arguments are
    /// the page's number, its last use in seconds of the system's uptime, and its flags as the kernel shows
    /// them, each a letter or a dot: `s` same-filled, `w` on the backing device, `h` uncompressed, `i` marked
    /// as idle and not used since, `r` recompressed, `n` made smaller by no algorithm.
    pub fn block_states(&self, pages: Range<u64>, mut line: impl FnMut(u64, u32, [u8; 6]) -> bool) {
        for page in self.slots.touched(pages.start..pages.end.min(self.pages())) {
            let peek = self.slots.peek(page);
            if peek.is_same() || peek.is_stored() || peek.is_backed() {
                let flag = |is_set: bool, letter: u8| if is_set { letter } else { b'.' };
                let flags = [
                    flag(peek.is_same(), b's'),
                    flag(peek.is_backed(), b'w'),
                    flag(peek.is_huge(), b'h'),
                    flag(peek.is_idle(), b'i'),
                    flag(peek.priority() > 0, b'r'),
                    flag(peek.is_incompressible(), b'n'),
                ];
                if !line(page.number(), self.slots.used_s(page), flags) {
                    break;
                }
            }
        }
    }

    /// Marks pages that hold an object as idle: all, or those not used for `age_s` seconds. Clears the mark
    /// of the others.
    pub fn mark_idle(&self, age_s: Option<u32>) {
        // It cannot be interrupted.
        let _ = self.mark_idle_interruptible(age_s, &Work::uninterruptible(Unit::Pages));
    }

    /// As [`Store::mark_idle`], until `work` is interrupted. Fails with `Interrupted`.
    pub fn mark_idle_interruptible(&self, age_s: Option<u32>, work: &Work<'_>) -> Result<()> {
        let now_s = uptime_s();
        let pages = self.slots.touched(0..self.pages());
        for page in work.while_wanted(pages).filter(|page| self.slots.peek(*page).is_stored()) {
            let mut slot = self.slots.lock(page);
            let idle_s = now_s.saturating_sub(self.slots.used_s(page));
            slot.set_idle(age_s.is_none_or(|age_s| idle_s >= age_s));
            drop(slot);
            work.step()?;
        }
        work.check()
    }

    /// Packs the pool's objects together, gives the freed pages back to the system, and returns their number.
    pub fn compact(&self) -> u64 {
        self.compact_interruptible(&Work::uninterruptible(Unit::Objects))
    }

    /// As [`Store::compact`], until `work` is interrupted.
    pub fn compact_interruptible(&self, work: &Work<'_>) -> u64 {
        let freed = self.pool.compact(Effort::Tight, &mut Budget::of(work));
        self.arena.release_kept();
        freed
    }
}
