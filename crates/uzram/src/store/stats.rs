//! A store's statistics: per-CPU counters, and the sums that it reports.

use crate::base::counters::per_cpu_counters;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::failures;
use crate::base::units::PAGE_SIZE;

use super::slot::Contents;

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

impl Share {
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
