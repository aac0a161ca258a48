//! What a store counts, on each CPU for itself, and what it reports.

use crate::base::counters::at_least_zero;
use crate::base::cpu::PerCpu;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Account, CHUNK_PAGES};
use crate::base::sync::Counter;
use crate::base::units::PAGE_SIZE;
use crate::lru::{self, AnyLru};
use crate::zsmalloc::ClassStat;

use super::Store;
use super::slot::Contents;
use super::stream::Codec;

/// What a store holds and has done. Pages of 4096 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StoreStats {
    /// Pages that hold something, same-filled ones included.
    pub pages_stored: u64,
    /// Bytes of all objects, huge ones included.
    pub compr_data_bytes: u64,
    /// Pages of zspages.
    pub pool_pages: u64,
    /// The most there ever were.
    pub pool_pages_max: u64,
    /// Pages of metadata slabs: handles and descriptors.
    pub slab_pages: u64,
    /// Pages in memory for all of these, and for free runs kept: what the limit bounds.
    pub charged_pages: u64,
    /// Pages of all chunks that any of these lie in.
    pub chunk_pages: u64,
    /// The limit; 0 for none.
    pub limit_pages: u64,
    /// Pages of the reserve when it is full; 0 without one.
    pub reserve_pages: u64,
    /// Pages of the free chunks that it has now.
    pub reserve_free_pages: u64,
    /// Writes that failed because it was drained, and being filled.
    pub reserve_drained: u64,
    /// Writes that failed because the limit was met.
    pub limit_refused: u64,
    /// Pages that are one word, repeated.
    pub same_pages: u64,
    /// Pages stored as they are.
    pub huge_pages: u64,
    /// Pages ever stored as they are.
    pub huge_pages_since: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// Pages discarded.
    pub notify_free: u64,
    /// Pages that compaction freed.
    pub pages_compacted: u64,
    /// Pages that became smaller by being compressed again, so far.
    pub pages_recompressed: u64,
    /// Objects found damaged when they were freed.
    pub corrupted: u64,
    /// Times a thread found all streams lent and waited.
    pub stream_sleeps: u64,
    /// Writes that let their stream go to wait for memory: see [`super::StreamAlloc::Released`].
    pub writestall: u64,
}

impl Store {
    /// The counts now.
    pub fn stats(&self) -> StoreStats {
        let (counters, arena) = (&self.counters, &self.arena);
        StoreStats {
            pages_stored: counters.sum(|share| &share.pages_stored),
            compr_data_bytes: counters.sum(|share| &share.compr_data_bytes),
            pool_pages: self.pool.pages_used(),
            pool_pages_max: arena.used_pages_max(Account::Pool),
            slab_pages: arena.used_pages(Account::Slab),
            charged_pages: arena.charged_pages(),
            chunk_pages: arena.chunks_held() * u64::from(CHUNK_PAGES),
            limit_pages: arena.limit_pages(),
            reserve_pages: arena.reserve_pages(),
            reserve_free_pages: arena.reserve_free_pages(),
            reserve_drained: counters.sum(|share| &share.reserve_drained),
            limit_refused: counters.sum(|share| &share.limit_refused),
            same_pages: counters.sum(|share| &share.same_pages),
            huge_pages: counters.sum(|share| &share.huge_pages),
            huge_pages_since: counters.sum(|share| &share.huge_pages_since),
            pages_read: counters.sum(|share| &share.pages_read),
            pages_written: counters.sum(|share| &share.pages_written),
            failed_reads: counters.sum(|share| &share.failed_reads),
            failed_writes: counters.sum(|share| &share.failed_writes),
            notify_free: counters.sum(|share| &share.notify_free),
            pages_compacted: self.pool.pages_compacted(),
            pages_recompressed: counters.sum(|share| &share.pages_recompressed),
            corrupted: self.pool.corrupted(),
            stream_sleeps: self.codec.sleeps()
                + self.recompression.iter().flatten().map(Codec::sleeps).sum::<u64>(),
            writestall: counters.sum(|share| &share.writestall),
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

/// One CPU's share. A page may be stored on one CPU and freed on another, so a single share may
/// wrap below zero; only the sums mean anything.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) pages_stored: Counter,
    pub(super) compr_data_bytes: Counter,
    pub(super) same_pages: Counter,
    pub(super) huge_pages: Counter,
    pub(super) huge_pages_since: Counter,
    pub(super) pages_read: Counter,
    pub(super) pages_written: Counter,
    pub(super) failed_reads: Counter,
    pub(super) failed_writes: Counter,
    pub(super) reserve_drained: Counter,
    pub(super) limit_refused: Counter,
    pub(super) notify_free: Counter,
    pub(super) writestall: Counter,
    pub(super) pages_recompressed: Counter,
}

/// The counters of a store.
#[derive(Debug)]
pub(super) struct Counters(PerCpu<Share>);

impl Counters {
    pub(super) fn new() -> Self {
        Counters(PerCpu::new(|_| Share::default()))
    }

    /// This CPU's share.
    #[inline]
    pub(super) fn local(&self) -> &Share {
        self.0.local()
    }

    /// The sum of all shares. They are read one after another: a page that moves from one to
    /// another meanwhile may be missing, so that the sum comes out below zero.
    pub(super) fn sum(&self, field: impl Fn(&Share) -> &Counter) -> u64 {
        let sum = self.0.iter().fold(0u64, |sum, share| sum.wrapping_add(field(share).get()));
        at_least_zero(sum)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
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
