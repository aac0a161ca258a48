//! The settings that a [`Store`] is built with.
//!
//! A memory limit too small for the first pages is refused ([`check_limit`]): the device would look sound,
//! and every write would fail. A limit below the memory in use only stops growth, as with the kernel's
//! `mem_limit`.

use crate::base::error::{Error, Result};
use crate::base::mem::{CHUNK_PAGES, reserve_chunks};
use crate::base::units::{format_size, pages_to_bytes};
use crate::codec::Algorithm;
use crate::lru;

use super::{BackingOptions, Designs, MAX_PAGES, MAX_RECOMPRESSION, ReclaimPolicy, Store, WritebackLimit};

/// Pages of a zspage at most. Zspages are charged page by page, so that long ones waste nothing while they
/// fill, and then 16 pages pack tightest: on mixed pages with lz4, pool memory is 1.024 x the compressed
/// bytes at 64 MiB of data and 1.013 x at 1 GiB; with the kernel's 8 it is 1.028 x and 1.023 x.
pub const DEFAULT_CHAIN_SIZE: usize = 16;
/// How many pages a CPU's run cache moves at a time.
pub const DEFAULT_RUN_CACHE_BATCH_PAGES: usize = 32;
const DEFAULT_COMPACT_THRESHOLD_PERCENT: u64 = 10;
/// A few percent of what one core can move in a second.
const DEFAULT_COMPACT_RATE_BYTES: u64 = 64 << 20;

/// Pages of a pool that holds one compressed and one huge page, each in its own zspage: two pages, plus the
/// first slab of handles (one page) and of zspage descriptors (three pages).
const FIRST_PAGES: u64 = 6;

/// Builds a [`Store`].
///
/// ```
/// use uzram::store::{PageNo, StoreBuilder};
///
/// let store = StoreBuilder::new("cache", 1024).checksum(true).limit_pages(256).build()?;
/// store.write(PageNo(7), &[42; 4096])?;
/// let mut page = [0; 4096];
/// store.read(PageNo(7), &mut page)?;
/// assert_eq!(page, [42; 4096]);
/// # Ok::<(), uzram::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StoreBuilder {
    pub(crate) name: String,
    pub(crate) pages: u64,
    pub(crate) algorithm: Algorithm,
    pub(crate) recompression: [Option<Algorithm>; MAX_RECOMPRESSION],
    pub(crate) chain_size: usize,
    pub(crate) designs: Designs,
    pub(crate) lru: bool,
    pub(crate) lru_pagevec_pages: usize,
    pub(crate) checksum: bool,
    pub(crate) limit_pages: u64,
    pub(crate) reserve_pages: u64,
    pub(crate) run_cache_batch_pages: usize,
    pub(crate) compact_threshold_percent: u64,
    pub(crate) compact_rate_bytes: u64,
    pub(crate) backing: Option<BackingOptions>,
    pub(crate) writeback_limit: WritebackLimit,
    /// `None` for the layout's default.
    pub(crate) writeback_batch: Option<u64>,
    pub(crate) policy: ReclaimPolicy,
}

impl StoreBuilder {
    /// Creates a builder for a store of `pages` pages, 1..=[`MAX_PAGES`], with defaults for all other
    /// settings. `name` appears in statistics and thread names.
    pub fn new(name: impl Into<String>, pages: u64) -> Self {
        StoreBuilder {
            name: name.into(),
            pages,
            algorithm: Algorithm::default(),
            recompression: [const { None }; MAX_RECOMPRESSION],
            chain_size: DEFAULT_CHAIN_SIZE,
            designs: Default::default(),
            lru: true,
            lru_pagevec_pages: lru::DEFAULT_PAGEVEC_PAGES,
            checksum: false,
            limit_pages: 0,
            reserve_pages: 0,
            run_cache_batch_pages: DEFAULT_RUN_CACHE_BATCH_PAGES,
            compact_threshold_percent: DEFAULT_COMPACT_THRESHOLD_PERCENT,
            compact_rate_bytes: DEFAULT_COMPACT_RATE_BYTES,
            backing: None,
            writeback_limit: WritebackLimit::default(),
            writeback_batch: None,
            policy: ReclaimPolicy::default(),
        }
    }

    /// Builds the store. Fails as [`StoreBuilder::check`]; `Invalid` for a setting out of range; `NoMemory`
    /// when the system refuses.
    pub fn build(&self) -> Result<Store> {
        Store::new(self)
    }

    /// Checks the settings as far as possible without building a store. Fails with `Invalid` for a disk size
    /// out of range, or a limit too small for the reserve or the first pages.
    pub fn check(&self) -> Result<()> {
        if self.pages == 0 || self.pages > MAX_PAGES {
            return Err(Error::invalid("a disk has from 4 KiB to 16 TiB").with_setting("disksize"));
        }
        check_limit(self.limit_pages, self.reserve_pages)
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($argument:ident: $type:ty) => $field:ident: $value:expr;)*) => {
        impl StoreBuilder {
            $($(#[$doc])*
            #[must_use]
            pub fn $name(self, $argument: $type) -> Self {
                StoreBuilder { $field: $value, ..self }
            })*
        }
    };
}

setters! {
    /// Sets the algorithm that compresses pages when they are written.
    algorithm(algorithm: Algorithm) => algorithm: algorithm;
    /// Sets the recompression algorithms; that of priority `n` is at index `n - 1`.
    recompression(algorithms: [Option<Algorithm>; MAX_RECOMPRESSION]) => recompression: algorithms;
    /// Sets whether pages are kept in LRU order, which reclaim needs. The default is that they are.
    lru(on: bool) => lru: on;
    /// Sets whether each page has a checksum that every read verifies.
    checksum(enabled: bool) => checksum: enabled;
    /// Sets the limit of [`charged_pages`](super::StoreStats::charged_pages); 0 for no limit.
    limit_pages(pages: u64) => limit_pages: pages;
    /// Sets how many pages of free memory are kept ready, rounded up to chunks, so that no read, write or
    /// discard waits for memory from the system; 0 for none.
    reserve_pages(pages: u64) => reserve_pages: pages;
    /// Sets the percentage of the pool's pages that background compaction must be able to free before it
    /// runs; 0 for never.
    compact_threshold_percent(percent: u64) => compact_threshold_percent: percent;
    /// Sets the maximum bytes of objects that background compaction moves in a second.
    compact_rate_bytes(bytes: u64) => compact_rate_bytes: bytes;
    /// Sets the backing device that cold pages are written back to.
    backing(backing: BackingOptions) => backing: Some(backing);
    /// Sets how much may be written to the backing device. The default is no limit.
    writeback_limit(limit: WritebackLimit) => writeback_limit: limit;
    /// Sets how many writes to the backing device may be in flight, from 1 to
    /// [`MAX_WRITEBACK_BATCH`](super::MAX_WRITEBACK_BATCH).
    writeback_batch(writes: u64) => writeback_batch: Some(writes);
    /// Sets which pages are reclaimed in the background, and when.
    policy(policy: ReclaimPolicy) => policy: policy;
}

#[cfg(feature = "designs")]
impl StoreBuilder {
    /// Sets the lock design of the pool.
    #[must_use]
    pub fn pool_design(self, pool: crate::zsmalloc::PoolDesign) -> Self {
        StoreBuilder { designs: Designs { pool, ..self.designs }, ..self }
    }

    /// Sets the lock design of the LRU's lists.
    #[must_use]
    pub fn lru_design(self, lru: crate::lru::LruDesign) -> Self {
        StoreBuilder { designs: Designs { lru, ..self.designs }, ..self }
    }

    /// Sets how threads share compression streams.
    #[must_use]
    pub fn streams(self, streams: crate::stream::StreamDesign) -> Self {
        StoreBuilder { designs: Designs { streams, ..self.designs }, ..self }
    }
}

pub(crate) fn check_limit(limit_pages: u64, reserve_pages: u64) -> Result<()> {
    let reserve_pages = reserve_chunks(reserve_pages).saturating_mul(u64::from(CHUNK_PAGES));
    // The reserve is filled before the first write, and includes the two chunks that the first page needs.
    let least_pages = reserve_pages.max(FIRST_PAGES);
    if limit_pages == 0 || limit_pages >= least_pages {
        return Ok(());
    }
    let least = format_size(pages_to_bytes(least_pages));
    let needs = if reserve_pages > 0 { "its reserve" } else { "its first pages" };
    let what = format!("the memory limit leaves the device no room for {needs}: it takes at least {least}");
    Err(Error::invalid(what).with_setting("mem_limit"))
}
