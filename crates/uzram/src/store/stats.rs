//! What a store counts, on each CPU for itself, and what it reports.

use crate::base::counters::per_cpu_counters;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Account, CHUNK_PAGES};
use crate::base::sync::Counter;
use crate::base::units::PAGE_SIZE;
use crate::lru::{self, AnyLru};
use crate::zsmalloc::ClassStat;

use super::Store;
use super::slot::Contents;
use super::stream::Codec;

per_cpu_counters! {
    /// What a store holds and has done. Pages of 4096 bytes.
    pub struct StoreStats {
        /// Pages of zspages.
        pool_pages,
        /// The most there ever were.
        pool_pages_max,
        /// Pages of metadata slabs: handles and descriptors.
        slab_pages,
        /// Pages in memory for all of these, and for free runs kept: what the limit bounds.
        charged_pages,
        /// Pages of all chunks that any of these lie in.
        chunk_pages,
        /// The limit; 0 for none.
        limit_pages,
        /// Pages of the reserve when it is full; 0 without one.
        reserve_pages,
        /// Pages of the free chunks that it has now.
        reserve_free_pages,
        /// Pages that compaction freed.
        pages_compacted,
        /// Objects found damaged when they were freed.
        corrupted,
        /// Times a thread found all streams lent and waited.
        stream_sleeps,
    };

    /// One CPU's share. A page may be stored on one CPU and freed on another: a single counter may be below
    /// zero, and only the sums mean anything.
    pub(super) struct Share;

    /// Pages that hold something, same-filled ones included.
    pages_stored,
    /// Bytes of all objects, huge ones included.
    compr_data_bytes,
    /// Writes that failed because it was drained, and being filled.
    reserve_drained,
    /// Writes that failed because the limit was met.
    limit_refused,
    /// Pages that are one word, repeated.
    same_pages,
    /// Pages stored as they are.
    huge_pages,
    /// Pages ever stored as they are.
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
    /// Pages that became smaller by being compressed again, so far.
    pages_recompressed,
    /// Writes that let their stream go to wait for memory: see [`super::StreamAlloc::Released`].
    writestall,
}

impl Store {
    /// The counts now.
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

    /// The state of each size class.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        self.pool.class_stats()
    }

    /// What the lists of pages by their use have and did; nothing where there are none.
    pub fn lru_stats(&self) -> lru::LruStats {
        self.lru.as_ref().map(AnyLru::stats).unwrap_or_default()
    }

    /// The memory that slot table, LRU, streams, dictionary and counters take at most, whatever is stored.
    pub fn fixed_bytes(&self) -> usize {
        let lru_bytes = self.lru.as_ref().map_or(0, AnyLru::max_bytes);
        let backing_bytes = self.backing.as_ref().map_or(0, |backing| backing.max_bytes());
        self.slots.max_bytes()
            + lru_bytes
            + backing_bytes
            + self.stream_bytes.get() as usize
            + self.counters.bytes()
            + self.arena.reserve_table_bytes()
    }

    /// The memory of [`Store::fixed_bytes`] that is in use now, and of the tables that grow with
    /// the pool.
    #[cfg(not(loom))]
    pub fn table_resident_bytes(&self) -> usize {
        // Whole pages are resident, of which the last may be used in part.
        let unused_by_lru = |lru: &AnyLru| lru.max_bytes().saturating_sub(lru.resident_bytes());
        let unused = self.slots.max_bytes().saturating_sub(self.slots.resident_bytes())
            + self.lru.as_ref().map_or(0, unused_by_lru);
        self.fixed_bytes() - unused + self.pool.table_resident_bytes() + self.arena.table_resident_bytes()
    }

    /// Starts [`StoreStats::pool_pages_max`] anew.
    pub fn reset_pool_max(&self) {
        self.arena.reset_used_max(Account::Pool);
    }

    /// Counts a request that failed before it came to any page.
    pub(crate) fn count_failure(&self, is_write: bool) {
        let share = self.counters.local();
        if is_write { &share.failed_writes } else { &share.failed_reads }.add(1);
    }
}

impl Share {
    /// Counts that a page now holds `new` instead of `old`.
    #[inline]
    pub(super) fn replaced(&self, old: &Contents, new: &Contents) {
        change(&self.pages_stored, stored(old), stored(new));
        change(&self.same_pages, same(old), same(new));
        change(&self.compr_data_bytes, len(old), len(new));
        change(&self.huge_pages, huge(old), huge(new));
        if huge(new) > 0 {
            self.huge_pages_since.add(1);
        }
    }

    /// Counts a read as done or as failed; one that would block is neither, as it comes again.
    #[inline]
    pub(super) fn read(&self, result: &Result<()>) {
        match result {
            Ok(()) => _ = self.pages_read.add(1),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => _ = self.failed_reads.add(1),
        }
    }

    /// Counts a write that failed, by its reason; one that would block did not fail, as it comes again.
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
    }
}

/// Counts `new` instead of `old`.
#[inline]
fn change(counter: &Counter, old: u64, new: u64) {
    if old != new {
        counter.add(new.wrapping_sub(old));
    }
}

fn stored(contents: &Contents) -> u64 {
    u64::from(*contents != Contents::Empty)
}

fn same(contents: &Contents) -> u64 {
    u64::from(matches!(contents, Contents::Same(_)))
}

fn len(contents: &Contents) -> u64 {
    if let Contents::Stored { len, .. } = contents { u64::from(*len) } else { 0 }
}

fn huge(contents: &Contents) -> u64 {
    u64::from(len(contents) == PAGE_SIZE as u64)
}
