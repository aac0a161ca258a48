//! What the store counts, on each CPU for itself.

use crate::base::cpu::PerCpu;
use crate::base::sync::Counter;
use crate::base::units::PAGE_SIZE;

use super::slot::Contents;

/// The counts of a store. Pages of 4096 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
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
        u64::try_from(sum.cast_signed()).unwrap_or(0)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl Share {
    /// Books that a page now holds `new` instead of `old`.
    #[inline]
    pub(super) fn switched(&self, old: &Contents, new: &Contents) {
        change(&self.pages_stored, stored(old), stored(new));
        change(&self.same_pages, same(old), same(new));
        change(&self.compr_data_bytes, len(old), len(new));
        change(&self.huge_pages, huge(old), huge(new));
        if huge(new) > 0 {
            self.huge_pages_since.add(1);
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
