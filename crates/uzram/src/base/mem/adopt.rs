//! Adoption of an arena whose memory another process left: its pages in memory are found first, then its
//! runs.
//!
//! 1. [`Arena::find_resident`] asks the file which pages are in memory, and makes their chunks usable.
//! 2. The pool and the slab caches read these pages, and take the runs that they recognize
//!    ([`Arena::adopt_run`]).
//! 3. [`Arena::end_adoption`] charges the pages in memory, and gives those of no run back to the system.

use std::ops::Range;

use super::runs::{CHUNK_PAGES, GROUP_PAGES, group_of, groups_of, mask};
use super::{Account, Arena, Run};
use crate::base::error::Result;
use crate::base::sync::Ordering;
use crate::base::thread::share_out;
use crate::base::units::PAGE_SIZE;

const CHUNK_BYTES: u64 = CHUNK_PAGES as u64 * PAGE_SIZE as u64;

impl Arena {
    /// Marks the pages in memory as resident, and makes the chunks up to the last of them usable. The arena
    /// is new, made by [`Arena::new_in`] or [`Arena::with_reserve_in`]. Fails with `Io` if the system does
    /// not report which pages are in memory; `NoMemory` when it gives none for the tables.
    pub fn find_resident(&self) -> Result<()> {
        let Some(region) = self.mapping.region() else { return Ok(()) };
        let len_bytes = self.mapping.len_bytes() as u64;
        let chunks = region.data_end(CHUNK_BYTES)?.min(len_bytes).div_ceil(CHUNK_BYTES);
        let looked_at = share_out(chunks as usize, |chunks| {
            chunks.map(|chunk| chunk as u64 * CHUNK_BYTES).try_for_each(|start| {
                let chunk = start..len_bytes.min(start + CHUNK_BYTES);
                region.for_each_data_in(chunk, |data| self.set_resident(&data))
            })
        });
        looked_at.into_iter().collect::<Result<()>>()?;
        if chunks > 0 {
            self.mapping.enable(0, (chunks * CHUNK_BYTES) as usize)?;
        }
        let mut inner = self.inner.lock();
        for _ in 0..chunks {
            if self.has_reserve() {
                inner.runs.add_absent_chunk();
            } else {
                inner.runs.add_chunk()?;
            }
        }
        Ok(())
    }

    fn set_resident(&self, data: &Range<u64>) {
        let [mut page, end] = [data.start, data.end].map(|at| (at / PAGE_SIZE as u64) as u32);
        while page < end {
            let pages = (GROUP_PAGES - page % GROUP_PAGES).min(end - page);
            self.resident[group_of(page)].fetch_or(mask(page, pages), Ordering::Relaxed);
            page += pages;
        }
    }

    /// Returns the number of pages of the usable chunks.
    pub fn used_end(&self) -> u32 {
        self.inner.lock().runs.groups() as u32 * GROUP_PAGES
    }

    /// Returns whether these pages can be a part of a run, and are all in memory.
    pub fn is_resident(&self, page: u32, pages: u32) -> bool {
        let is_run = (page as usize) < self.reserved_pages()
            && pages >= 1
            && page % GROUP_PAGES + pages <= GROUP_PAGES;
        is_run && {
            let bits = mask(page, pages);
            self.resident[group_of(page)].load(Ordering::Relaxed) & bits == bits
        }
    }

    /// Takes a run for `account`, with its first `committed` pages committed; returns false if a page of it
    /// is taken, or if its chunk belongs to another account.
    pub fn adopt_run(&self, run: Run, account: Account, committed: u64) -> bool {
        let mut inner = self.inner.lock();
        if !inner.runs.take_at(account, run.page, usize::from(run.pages)) {
            return false;
        }
        let bits = mask(run.page, committed.clamp(1, u64::from(run.pages)) as u32);
        self.resident[group_of(run.page)].fetch_or(bits, Ordering::Relaxed);
        let usage = self.usage(account);
        usage.pages.add(committed);
        true
    }

    /// Charges the pages in memory, after all runs were adopted, and gives the free ones back to the system.
    /// With a reserve, free chunks that are entirely in memory become the reserve's.
    pub fn end_adoption(&self) {
        if self.has_reserve() {
            self.sort_chunks();
        }
        let mut charged_pages = 0;
        {
            let mut inner = self.inner.lock();
            let mut free_pages = 0;
            for group in 0..inner.runs.groups() {
                let resident = self.resident[group].load(Ordering::Relaxed);
                charged_pages += u64::from(resident.count_ones());
                free_pages += u64::from((resident & !inner.runs.taken(group)).count_ones());
            }
            inner.free_resident_pages = free_pages;
        }
        self.usage.charged_pages.set(charged_pages);
        Account::ALL.into_iter().for_each(|account| self.reset_used_max(account));
        self.release_free();
    }

    /// Makes chunks present that have runs or are entirely in memory; gives the memory of others back.
    fn sort_chunks(&self) {
        let chunks = self.inner.lock().runs.chunks();
        for chunk in 0..chunks {
            let resident = |group| self.resident[group].load(Ordering::Relaxed);
            let mut inner = self.inner.lock();
            if !inner.runs.is_free(chunk) || groups_of(chunk).all(|group| resident(group) == u64::MAX) {
                groups_of(chunk).for_each(|group| self.resident[group].store(u64::MAX, Ordering::Relaxed));
                inner.runs.bring(chunk);
                continue;
            }
            drop(inner);
            // SAFETY: no run of the chunk was taken.
            unsafe { self.mapping.release(chunk * CHUNK_BYTES as usize, CHUNK_BYTES as usize) };
            groups_of(chunk).for_each(|group| self.resident[group].store(0, Ordering::Relaxed));
            self.inner.lock().runs.leave_absent(chunk);
        }
    }
}
