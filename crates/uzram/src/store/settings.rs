//! Settings that can be changed while the store is in use.

use crate::base::error::Result;
use crate::base::failures;

use super::Store;

impl Store {
    /// Ends the store's own thread, which compacts and gives memory back: before the process forks (fork(2)),
    /// as no thread may be at work then. A child has a store of its own, with the same contents.
    #[cfg(not(loom))]
    #[doc(hidden)]
    pub fn end_threads(&self) {
        self.maintenance.end();
    }

    /// Starts it again, in the process that has forked or in the child.
    /// Fails with `NoMemory`: memory is given back later, and nothing is compacted.
    #[cfg(not(loom))]
    #[doc(hidden)]
    pub fn begin_threads(&self) -> Result<()> {
        self.maintenance.begin()
    }

    /// Returns [`limit_pages`](super::StoreBuilder::limit_pages).
    pub fn limit_pages(&self) -> u64 {
        self.arena.limit_pages()
    }

    /// Sets [`limit_pages`](super::StoreBuilder::limit_pages). Free memory beyond the limit goes back to the
    /// system at once; a limit below the memory in use only stops growth.
    pub fn set_limit_pages(&self, pages: u64) {
        self.arena.set_limit_pages(pages);
        self.update_watermarks();
        self.watermarks.wake_if_high(&self.arena);
        self.keep_setting(|kept| kept.limit_pages = pages);
        // Writes that were refused may find room now.
        failures::note();
    }

    /// Sets how many pages a CPU's run cache moves at a time; 0 for no run caches.
    /// Fails with `Invalid` above [`MAX_BATCH_PAGES`](super::MAX_BATCH_PAGES).
    #[cfg(feature = "designs")]
    pub fn set_run_cache_batch_pages(&self, pages: usize) -> Result<()> {
        self.arena.set_run_cache_batch_pages(pages)?;
        self.keep_setting(|kept| kept.run_cache_batch_pages = pages);
        Ok(())
    }

    /// Sets the size of each CPU's pagevec.
    /// Fails with `Invalid` for 0, or above [`lru::MAX_PAGEVEC_PAGES`](crate::lru::MAX_PAGEVEC_PAGES).
    #[cfg(feature = "designs")]
    pub fn set_lru_pagevec_pages(&self, pages: usize) -> Result<()> {
        self.lru.as_ref().map_or(Ok(()), |lru| lru.set_pagevec_pages(pages))?;
        self.keep_setting(|kept| kept.lru_pagevec_pages = pages);
        Ok(())
    }

    /// Sets [`compact_threshold_percent`](super::StoreBuilder::compact_threshold_percent).
    #[cfg(not(loom))]
    pub fn set_compact_threshold_percent(&self, percent: u64) {
        self.maintenance.set_threshold_percent(percent);
        self.keep_setting(|kept| kept.compact_threshold_percent = percent);
    }

    /// Sets [`compact_rate_bytes`](super::StoreBuilder::compact_rate_bytes).
    #[cfg(not(loom))]
    pub fn set_compact_rate_bytes(&self, bytes: u64) {
        self.maintenance.set_rate_bytes_per_s(bytes);
        self.keep_setting(|kept| kept.compact_rate_bytes = bytes);
    }
}
