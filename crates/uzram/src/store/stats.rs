//! A store's statistics: per-CPU counters, and the sums that it reports.

use crate::base::counters::per_cpu_counters;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::failures;
use crate::base::mem::{Account, CHUNK_PAGES};
use crate::base::units::PAGE_SIZE;
use crate::lru;
use crate::zsmalloc::ClassStat;

use super::Store;
use super::designs::StoreLru;
use super::slot::Contents;
use super::stream::Codec;

per_cpu_counters! {
    /// Statistics of a store. Pages are of 4096 bytes.
    pub struct StoreStats {
        /// Pages of zspages.
        pool_pages,
        /// The maximum of `pool_pages` so far.
        pool_pages_max,
        /// Pages of metadata slabs: handles and descriptors.
        slab_pages,
        /// Pages in memory for the pool, the slabs and free runs kept for reuse: what the limit bounds.
        charged_pages,
        /// Pages of all chunks that hold any charged page.
        chunk_pages,
        /// The limit; 0 for none.
        limit_pages,
        /// Pages of the reserve when it is full; 0 without one.
        reserve_pages,
        /// Pages of the free chunks in the reserve.
        reserve_free_pages,
        /// Pages that compaction freed.
        pages_compacted,
        /// Objects found damaged when they were freed.
        corrupted,
        /// Times a thread waited because all streams were in use.
        stream_sleeps,
    };

    /// One CPU's share. A page may be stored on one CPU and freed on another, so that a single share may be
    /// below zero; only the sums are meaningful.
    pub(super) struct Share;

    /// Pages that hold something, same-filled ones included.
    pages_stored,
    /// Bytes of all objects, huge ones included.
    compr_data_bytes,
    /// Writes that failed because the reserve was drained and not yet refilled.
    reserve_drained,
    /// Writes that failed because the limit was reached.
    limit_refused,
    /// Pages found damaged when the store was attached: their reads fail until they are written.
    pages_lost,
    /// Same-filled pages.
    same_pages,
    /// Pages stored uncompressed.
    huge_pages,
    /// Pages stored uncompressed so far.
    huge_pages_since,
    /// Pages read.
    pages_read,
    /// Pages written.
    pages_written,
    /// Reads that failed.
    failed_reads,
    /// Writes that failed.
    failed_writes,
    /// Pages discarded.
    notify_free,
    /// Pages made smaller by recompression so far.
    pages_recompressed,
}

impl Store {
    /// Returns the current statistics.
    pub fn stats(&self) -> StoreStats {
        let arena = &self.arena;
        StoreStats {
            pool_pages: self.pool.pages_used(),
            pool_pages_max: arena.used_pages_max(Account::Pool),
            slab_pages: arena.used_pages(Account::Slab),
            charged_pages: arena.charged_pages(),
            chunk_pages: arena.chunks_held() * u64::from(CHUNK_PAGES),
            limit_pages: arena.limit_pages(),
            reserve_pages: arena.reserve_pages(),
            reserve_free_pages: arena.reserve_free_pages(),
            pages_compacted: self.pool.pages_compacted(),
            corrupted: self.pool.corrupted(),
            stream_sleeps: self.codec.sleeps()
                + self.recompression.iter().flatten().map(Codec::sleeps).sum::<u64>(),
            ..Share::sum(self.counters.iter())
        }
    }

    /// Returns [`StoreStats::charged_pages`] alone, at next to no cost.
    pub fn charged_pages(&self) -> u64 {
        self.arena.charged_pages()
    }

    /// Returns the statistics of each size class.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        self.pool.class_stats()
    }

    /// Returns the statistics of the LRU; all 0 without one.
    pub fn lru_stats(&self) -> lru::LruStats {
        self.lru.as_ref().map(StoreLru::stats).unwrap_or_default()
    }

    /// Returns the maximum memory of slot table, LRU, streams, dictionary and counters, whatever is stored.
    pub fn fixed_bytes(&self) -> usize {
        let lru_bytes = self.lru.as_ref().map_or(0, StoreLru::max_bytes);
        let backing_bytes = self.backing.as_ref().map_or(0, |backing| backing.max_bytes());
        self.slots.max_bytes()
            + lru_bytes
            + backing_bytes
            + self.stream_bytes.get() as usize
            + self.counters.bytes()
            + self.arena.reserve_table_bytes()
    }

    /// Returns how much of [`Store::fixed_bytes`] is in memory now, plus the tables that grow with the pool.
    #[cfg(not(loom))]
    pub fn table_resident_bytes(&self) -> usize {
        // Whole pages are resident, and the last one may be used in part.
        let unused_by_lru = |lru: &StoreLru| lru.max_bytes().saturating_sub(lru.resident_bytes());
        let unused = self.slots.max_bytes().saturating_sub(self.slots.resident_bytes())
            + self.lru.as_ref().map_or(0, unused_by_lru);
        self.fixed_bytes() - unused + self.pool.table_resident_bytes() + self.arena.table_resident_bytes()
    }

    /// Resets [`StoreStats::pool_pages_max`] to the current value.
    pub fn reset_pool_max(&self) {
        self.arena.reset_used_max(Account::Pool);
    }

    /// Counts a request that failed before it reached any page.
    pub(crate) fn count_failure(&self, is_write: bool) {
        let share = self.counters.local();
        if is_write { &share.failed_writes } else { &share.failed_reads }.add(1);
    }
}

impl Share {
    /// Counts that a page now holds `new` instead of `old`.
    #[inline]
    pub(super) fn replaced(&self, old: &Contents, new: &Contents) {
        let counters = [
            &self.pages_stored,
            &self.same_pages,
            &self.pages_lost,
            &self.compr_data_bytes,
            &self.huge_pages,
        ];
        let (old, new) = (tally(old), tally(new));
        for (counter, (old, new)) in counters.into_iter().zip(old.into_iter().zip(new)) {
            if old != new {
                counter.add(new.wrapping_sub(old));
            }
        }
        if new[4] > 0 {
            self.huge_pages_since.add(1);
        }
    }

    /// Counts a read, unless it would block: then the caller retries it.
    #[inline]
    pub(super) fn read(&self, result: &Result<()>) {
        match result {
            Ok(()) => _ = self.pages_read.add(1),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => {
                self.failed_reads.add(1);
                failures::note();
            }
        }
    }

    /// Counts a failed write, by its cause, unless it would block: then the caller retries it.
    pub(super) fn failed_write(&self, error: &Error) {
        if error.kind() == ErrorKind::WouldBlock {
            return;
        }
        self.failed_writes.add(1);
        match error.setting() {
            Some("reserve") => _ = self.reserve_drained.add(1),
            Some("mem_limit") => _ = self.limit_refused.add(1),
            _ => {}
        }
        failures::note();
    }
}

/// Returns the pages stored, same-filled and lost, the bytes of objects, and the huge pages of such contents.
#[inline]
fn tally(contents: &Contents) -> [u64; 5] {
    match contents {
        Contents::Empty => [0; 5],
        Contents::Same(_) => [1, 1, 0, 0, 0],
        Contents::Lost => [1, 0, 1, 0, 0],
        Contents::Backed(_) => [1, 0, 0, 0, 0],
        Contents::Stored { len, .. } => [1, 0, 0, u64::from(*len), u64::from(usize::from(*len) == PAGE_SIZE)],
    }
}
