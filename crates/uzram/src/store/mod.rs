//! The store: page number to contents. A slot table, compression streams, a zsmalloc pool, and an LRU that
//! says which pages are cold.
//!
//! Lock order: slot, stream, then the pool's or the LRU's. No thread waits for a backing device or for
//! reclaim while it holds a slot's lock.

mod builder;
mod designs;
mod discard;
#[cfg(not(loom))]
mod maintenance;
mod policy;
mod read;
mod recompress;
#[cfg(not(loom))]
mod reserve;
mod settings;
mod slot;
mod states;
mod stats;
mod stream;
#[cfg(not(loom))]
mod survive;
mod table_pages;
mod write;
mod writeback;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod clean_tests;
#[cfg(all(test, not(loom)))]
mod objects_tests;
#[cfg(all(test, not(loom)))]
mod recompress_tests;
#[cfg(all(test, not(loom)))]
mod reserve_tests;
#[cfg(all(test, loom))]
mod table_loom_tests;
#[cfg(all(test, not(loom)))]
mod table_tests;
#[cfg(all(test, not(loom)))]
pub(crate) mod tests;
#[cfg(all(test, loom))]
mod writeback_loom_tests;
#[cfg(all(test, not(loom)))]
mod writeback_fault_tests;
#[cfg(all(test, not(loom)))]
mod writeback_tests;

use crate::base::cpu::PerCpu;
use crate::base::error::Result;
pub use crate::base::mem::{Account, CHUNK_PAGES, MAX_BATCH_PAGES};
use crate::base::mem::{Arena, Region};
use crate::base::sync::{Arc, Counter};
pub use crate::base::units::PageNo;
use crate::base::units::pages_to_bytes;
use crate::codec::Algorithm;
use crate::lru::LruConfig;
use crate::zsmalloc::{PoolConfig, PoolRegions};
#[cfg(not(loom))]
pub(crate) use builder::check_limit;
pub use builder::{DEFAULT_CHAIN_SIZE, DEFAULT_RUN_CACHE_BATCH_PAGES, StoreBuilder};
pub(crate) use designs::Designs;
use designs::{StoreLru, StorePool};
#[cfg(not(loom))]
use maintenance::Maintenance;
#[cfg(not(loom))]
pub use policy::PolicyThread;
use policy::Watermarks;
pub use policy::{ReclaimOrder, ReclaimPolicy};
pub use recompress::{Candidates, Recompression};
#[cfg(not(loom))]
use reserve::Refiller;
pub use slot::PageState;
use slot::Slots;
use stats::Share;
pub use stats::StoreStats;
use stream::Codec;
#[cfg(not(loom))]
pub(crate) use survive::check_machine;
#[cfg(not(loom))]
pub use survive::{AttachProgress, Attached, KeptMemory, LAYOUT_VERSION, StandBy};
use writeback::BackingDevice;
pub use writeback::sealed::are_whole;
pub use writeback::{
    BackingOptions, BackingState, BackingStats, MAX_WRITEBACK_BATCH, Writeback, WritebackLayout,
    WritebackLimit,
};

/// The maximum number of pages of a store: a page number is a u32.
pub const MAX_PAGES: u64 = 1 << u32::BITS;
/// Bytes of address space reserved for each byte of the disk, up to the arena's 16 TiB: a pool fragmented by
/// overwrites may need more than the disk's size. Unused address space costs nothing; a write that would need
/// more fails.
const RESERVE_FACTOR: u64 = 4;
/// Address space reserved in addition, for very small disks.
const RESERVE_BASE_BYTES: u64 = if cfg!(loom) { 1 << 19 } else { 64 << 20 };
/// Objects beyond one per page: pages being overwritten, and old objects that are still being read.
const SPARE_OBJECTS: u64 = if cfg!(loom) { 8 } else { 65536 };

/// Recompression algorithms, in addition to the primary one, as in the kernel's `ZRAM_MAX_COMPS`.
pub const MAX_RECOMPRESSION: usize = 3;

/// Whether an operation may wait for the backing device, or for pages to be reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It waits as long as necessary.
    Yes,
    /// It fails with `WouldBlock` instead of waiting, and changes nothing.
    No,
}

/// See the [module's documentation](self).
pub struct Store {
    slots: Slots,
    codec: Codec,
    /// The recompression algorithms, by priority; the first has priority 1.
    recompression: [Option<Codec>; MAX_RECOMPRESSION],
    /// Bytes of all streams and of what they share; grows when a spare stream is made.
    stream_bytes: Arc<Counter>,
    pool: Arc<StorePool>,
    arena: Arc<Arena>,
    lru: Option<StoreLru>,
    counters: PerCpu<Share>,
    checksum: bool,
    backing: Option<Box<BackingDevice>>,
    watermarks: Watermarks,
    // Loom models start no background threads.
    #[cfg(not(loom))]
    maintenance: Maintenance,
    /// `None` without a reserve.
    #[cfg(not(loom))]
    _refiller: Option<Refiller>,
    /// `None` unless the store's memory outlives the process.
    #[cfg(not(loom))]
    live_settings: Option<survive::LiveSettings>,
}

/// The regions of a file that the parts of a store have their memory in; `None` for private memory.
#[derive(Clone, Copy, Default)]
struct Regions<'a> {
    arena: Option<&'a Region>,
    slots: Option<&'a Region>,
    extents: Option<&'a Region>,
    allowance: Option<&'a Region>,
    pool: Option<&'a PoolRegions>,
}

fn address_bytes(pages: u64) -> u64 {
    pages_to_bytes(pages) * RESERVE_FACTOR + RESERVE_BASE_BYTES
}

fn pool_config(builder: &StoreBuilder, regions: Option<PoolRegions>) -> PoolConfig {
    PoolConfig {
        max_objects: Some(builder.pages + SPARE_OBJECTS),
        max_objects_setting: "disksize",
        chain_size: builder.chain_size,
        reclaim: builder.policy.order == ReclaimOrder::Zspages,
        regions,
        ..PoolConfig::new(builder.name.as_str())
    }
}

#[cfg(not(loom))]
impl Store {
    fn new(builder: &StoreBuilder) -> Result<Self> {
        builder.check()?;
        Store::assemble(builder, None)
    }

    /// Builds a store, in private memory or in `memory`, and restores the store that is in there.
    fn assemble(builder: &StoreBuilder, memory: Option<survive::Memory>) -> Result<Self> {
        let memory = memory.as_ref();
        let mut store = Store::empty(builder, memory.map(survive::Memory::regions).unwrap_or_default())?;
        store.live_settings = memory.map(survive::Memory::live_settings).transpose()?;
        if let Some(memory) = memory.filter(|memory| memory.holds_store) {
            survive::attach(&store, &memory.progress)?;
        }
        store.arena.set_limit_pages(builder.limit_pages);
        store.start_threads(builder)?;
        store.set_policy(builder.policy);
        store.begin(builder, memory)?;
        Ok(store)
    }

    /// Starts the threads. With a reserve, all memory that reads and writes touch is there after this.
    fn start_threads(&mut self, builder: &StoreBuilder) -> Result<()> {
        self.maintenance.begin()?;
        if builder.reserve_pages > 0 {
            self.slots.populate()?;
            self.lru.as_ref().map_or(Ok(()), StoreLru::populate)?;
            self.pool.populate()?;
            let (pool, arena) = (Arc::clone(&self.pool), Arc::clone(&self.arena));
            self._refiller = Some(Refiller::start(&builder.name, pool, arena)?);
        }
        Ok(())
    }

    fn begin(&self, builder: &StoreBuilder, memory: Option<&survive::Memory>) -> Result<()> {
        let begun = self.backing.as_ref().map_or(Ok(()), |backing| backing.log.backing.begin());
        if memory.is_some_and(|memory| memory.holds_store) {
            // One that was handed on may be in use already.
            return Ok(());
        }
        begun?;
        let Some(memory) = memory else { return Ok(()) };
        self.keep_setting(|kept| *kept = builder.clone());
        self.backing.iter().for_each(|backing| backing.allowance.change_limit(|_| ()));
        memory.complete().inspect_err(|_| {
            self.backing.iter().for_each(|backing| backing.log.backing.give_back());
        })
    }

    /// Returns how much of [`Store::fixed_bytes`] is in memory now, plus the tables that grow with the pool.
    pub fn table_resident_bytes(&self) -> usize {
        // Whole pages are resident, and the last one may be used in part.
        let unused_by_lru = |lru: &StoreLru| lru.max_bytes().saturating_sub(lru.resident_bytes());
        let unused = self.slots.max_bytes().saturating_sub(self.slots.resident_bytes())
            + self.lru.as_ref().map_or(0, unused_by_lru);
        self.fixed_bytes() - unused + self.pool.table_resident_bytes() + self.arena.table_resident_bytes()
    }
}

impl Store {
    /// Loom models have neither files nor threads.
    #[cfg(loom)]
    fn new(builder: &StoreBuilder) -> Result<Self> {
        let store = Store::empty(builder, Regions::default())?;
        store.arena.set_limit_pages(builder.limit_pages);
        store.set_policy(builder.policy);
        Ok(store)
    }

    /// Makes the parts of a store, without threads. Those in `regions` are as another process left them.
    fn empty(builder: &StoreBuilder, regions: Regions<'_>) -> Result<Self> {
        let address_bytes = address_bytes(builder.pages);
        let is_ready = builder.reserve_pages > 0;
        #[cfg(not(loom))]
        if is_ready {
            reserve::check_fits(builder.pages, builder.reserve_pages)?;
        }
        let arena = Arc::new(match builder.reserve_pages {
            0 => Arena::new_in(regions.arena, address_bytes)?,
            pages => Arena::with_reserve_in(regions.arena, address_bytes, pages)?,
        });
        arena.set_run_cache_batch_pages(builder.run_cache_batch_pages)?;
        let lru_options =
            LruConfig { pagevec_pages: builder.lru_pagevec_pages, ..LruConfig::new(builder.pages) };
        let lru = builder.lru.then(|| builder.designs.lru(&lru_options)).transpose()?;
        let config = pool_config(builder, regions.pool.cloned());
        let pool = Arc::new(builder.designs.pool(Arc::clone(&arena), &config)?);
        let stream_bytes = Arc::new(Counter::new(0));
        let codec = |algorithm: &Algorithm| Codec::new(algorithm, builder.designs, is_ready, &stream_bytes);
        let primary = codec(&builder.algorithm)?;
        let mut recompression = [const { None }; MAX_RECOMPRESSION];
        for (place, algorithm) in recompression.iter_mut().zip(&builder.recompression) {
            *place = algorithm.as_ref().map(codec).transpose()?;
        }
        let tables = [regions.extents, regions.allowance];
        let backing = builder.backing.as_ref().map(|options| {
            BackingDevice::new(options, builder.writeback_limit, builder.writeback_batch, tables)
                .map(Box::new)
        });
        Ok(Store {
            #[cfg(not(loom))]
            maintenance: Maintenance::new(builder, Arc::clone(&pool), Arc::clone(&arena)),
            #[cfg(not(loom))]
            _refiller: None,
            #[cfg(not(loom))]
            live_settings: None,
            slots: Slots::new_in(regions.slots, builder.pages)?,
            codec: primary,
            recompression,
            stream_bytes,
            pool,
            arena,
            lru,
            counters: PerCpu::new(|_| Share::default()),
            checksum: builder.checksum,
            backing: backing.transpose()?,
            watermarks: Watermarks::new(builder.policy),
        })
    }

    /// Records changed settings for [`Store::attach`], if the store's memory outlives the process.
    #[cfg_attr(loom, allow(clippy::unused_self))]
    fn keep_setting(&self, change: impl FnOnce(&mut StoreBuilder)) {
        #[cfg(not(loom))]
        if let Some(live_settings) = &self.live_settings {
            live_settings.change(change);
        }
        #[cfg(loom)]
        let _ = change;
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u64 {
        self.slots.pages()
    }

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
    pub fn class_stats(&self) -> Vec<crate::zsmalloc::ClassStat> {
        self.pool.class_stats()
    }

    /// Returns the statistics of the LRU; all 0 without one.
    pub fn lru_stats(&self) -> crate::lru::LruStats {
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
