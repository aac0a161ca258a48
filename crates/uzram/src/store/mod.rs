//! The store: page number to contents. A slot table, compression streams, a zsmalloc pool, and
//! lists that say which pages are cold.
//!
//! A page is compressed and stored first, then its slot is switched to the new object under the
//! slot's lock, then the old object is freed: whatever fails before the switch leaves the old
//! contents readable. A reader holds the slot's lock only to pin the object it reads.
//!
//! Lock order: slot, stream, then the pool's or the lists'. A whole page is compressed before its slot is
//! locked; a part of a page is read, changed and written back under the slot's lock, but what is not in memory is
//! read before that. Nobody waits for a backing device, or for pages to leave, with a slot's lock.

mod limit;
#[cfg(not(loom))]
mod maintenance;
mod policy;
mod recompress;
#[cfg(not(loom))]
mod reserve;
mod slot;
mod stats;
mod stream;
mod table_pages;
mod writeback;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod recompress_tests;
#[cfg(all(test, not(loom)))]
mod reserve_tests;
#[cfg(all(test, loom))]
mod table_loom_tests;
#[cfg(all(test, not(loom)))]
mod table_tests;
#[cfg(all(test, not(loom)))]
mod tests;
#[cfg(all(test, loom))]
mod writeback_loom_tests;
#[cfg(all(test, not(loom)))]
mod writeback_fault_tests;
#[cfg(all(test, not(loom)))]
mod writeback_tests;

use std::borrow::Borrow;
use std::ops::Range;

use crate::base::error::{Error, ErrorKind, Result};
pub use crate::base::mem::MAX_BATCH_PAGES;
use crate::base::mem::{Account, Arena, CHUNK_PAGES, Gfp};
use crate::base::sync::{Arc, Counter};
use crate::base::units::{PAGE_SIZE, Page, pages_to_bytes};
use crate::base::work::{Unit, Work};
use crate::codec::Algorithm;
use crate::lru::{self, AnyLru, LruDesign};
use crate::stream::StreamDesign;
use crate::zsmalloc::{AnyPool, Budget, ClassStat, Effort, PoolBuilder, PoolDesign};
#[cfg(not(loom))]
use maintenance::Maintenance;
use policy::Keeper;
#[cfg(not(loom))]
pub use policy::PolicyThread;
pub use policy::{Policy, Reclaim};
pub use recompress::{BlockState, Candidates, Recompression};
#[cfg(not(loom))]
use reserve::Refiller;
pub use slot::PageState;
use slot::{Backed, Contents, SlotGuard, Slots};
use stats::Counters;
pub use stats::Stats;
pub use stream::StreamAlloc;
use stream::{Codec, Stream};
use writeback::BackingDevice;
pub use writeback::{BackingOptions, BackingStats, Layout, MAX_WRITEBACK_BATCH, Writeback, WritebackLimit};

/// The most pages a store can have: a page number is a u32.
pub const MAX_PAGES: u64 = 1 << u32::BITS;
/// Address space reserved for each byte of the disk, up to the arena's 16 TiB: a pool scattered by
/// overwrites may need more than the disk's size. It costs nothing until it is used, and a write
/// that would need more fails.
const RESERVE_FACTOR: u64 = 4;
/// Address space beyond that, for the smallest of disks.
const RESERVE_BASE_BYTES: u64 = if cfg!(loom) { 1 << 19 } else { 64 << 20 };
/// Objects beyond one a page: pages being overwritten, and old objects that are still being read.
const SPARE_OBJECTS: u64 = if cfg!(loom) { 8 } else { 65536 };

/// The default of [`Config::chain_size`]. Zspages are charged page by page, so that long ones waste nothing
/// while they fill, and then 16 pages pack tightest: on mixed pages compressed with lz4, pool
/// memory is 1.024 x the compressed bytes at 64 MiB of data and 1.013 x at 1 GiB; with the
/// kernel's 8 it is 1.028 x and 1.023 x.
pub const DEFAULT_CHAIN_SIZE: usize = 16;
/// The default of [`Config::run_cache_batch_pages`].
pub const DEFAULT_RUN_CACHE_BATCH_PAGES: usize = 32;
/// The default of [`Config::compact_threshold_percent`].
pub const DEFAULT_COMPACT_THRESHOLD_PERCENT: u64 = 10;
/// The default of [`Config::compact_rate_bytes`]: some hundredths of what a core moves in a second.
pub const DEFAULT_COMPACT_RATE_BYTES: u64 = 64 << 20;

/// Algorithms beside the first, by the kernel's `ZRAM_MAX_COMPS`.
pub const MAX_RECOMPRESSION: usize = 3;

/// Discarded pages that are taken out of their lists at once: the patch series' bitmap of them.
const DOOMED_AT_ONCE: usize = 512;

/// Whether a page is in the lists of pages by their use as it should be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Listing {
    /// It is.
    Right,
    /// It is to be put in.
    New,
    /// It is to be taken out.
    Doomed,
}

/// Whether an operation may wait: for a backing device that has a page, or until others have freed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// As long as it takes.
    Yes,
    /// No: it answers `WouldBlock` instead, and has done nothing.
    No,
}

/// How to make a [`Store`].
#[derive(Clone, Debug)]
pub struct Config {
    /// Its name, in statistics.
    pub name: String,
    /// Its size, 1..=[`MAX_PAGES`].
    pub pages: u64,
    /// How pages are compressed.
    pub algorithm: Algorithm,
    /// How they can be compressed again, by priority less 1.
    pub recompression: [Option<Algorithm>; MAX_RECOMPRESSION],
    /// The most pages of a zspage.
    pub chain_size: usize,
    /// How the pool is locked.
    pub pool_design: PoolDesign,
    /// How the lists of pages by their use are locked, if there are any.
    pub lru_design: LruDesign,
    /// Pages that a CPU collects for these lists, 1 to [`lru::MAX_PAGEVEC_PAGES`].
    pub lru_pagevec_pages: usize,
    /// Whether each page carries a checksum that every read verifies.
    pub checksum: bool,
    /// The most memory, as [`Stats::charged_pages`] counts it; 0 for no limit.
    pub limit_pages: u64,
    /// Free memory that is kept ready, in pages, rounded up to chunks: with it no read, write or discard waits for
    /// the system's; 0 for none.
    pub reserve_pages: u64,
    /// Pages that the CPUs' caches of free runs move at a time; 0 for none.
    pub run_cache_batch_pages: usize,
    /// How threads share compression streams.
    pub streams: StreamDesign,
    /// What becomes of a writer's stream while it waits for memory.
    pub stream_alloc: StreamAlloc,
    /// The pool is compacted by itself when that frees so many in a hundred of its pages; 0 for never.
    pub compact_threshold_percent: u64,
    /// Bytes of objects that are then moved in a second, at most.
    pub compact_rate_bytes: u64,
    /// Where cold pages go, if anywhere.
    pub backing: Option<BackingOptions>,
    /// What leaves memory without anyone asking.
    pub policy: Policy,
}

impl Config {
    /// That of a disk of so many pages, with the defaults of everything else.
    pub fn new(name: impl Into<String>, pages: u64) -> Self {
        Config {
            name: name.into(),
            pages,
            algorithm: Algorithm::default(),
            recompression: [const { None }; MAX_RECOMPRESSION],
            chain_size: DEFAULT_CHAIN_SIZE,
            pool_design: PoolDesign::default(),
            lru_design: LruDesign::default(),
            lru_pagevec_pages: lru::DEFAULT_PAGEVEC_PAGES,
            checksum: false,
            limit_pages: 0,
            reserve_pages: 0,
            run_cache_batch_pages: DEFAULT_RUN_CACHE_BATCH_PAGES,
            streams: StreamDesign::PerCpu,
            stream_alloc: StreamAlloc::Held,
            compact_threshold_percent: DEFAULT_COMPACT_THRESHOLD_PERCENT,
            compact_rate_bytes: DEFAULT_COMPACT_RATE_BYTES,
            backing: None,
            policy: Policy::default(),
        }
    }
}

/// See the [module's documentation](self).
pub struct Store {
    slots: Slots,
    /// By which pages are compressed when they are written.
    codec: Codec,
    /// By which they can be compressed again, in the order of their priorities, from 1 on.
    recompression: [Option<Codec>; MAX_RECOMPRESSION],
    /// What all streams and what they share take; it grows when a spare one is made.
    stream_bytes: Arc<Counter>,
    stream_alloc: StreamAlloc,
    pool: Arc<AnyPool>,
    arena: Arc<Arena>,
    lru: Option<AnyLru>,
    counters: Counters,
    checksum: bool,
    /// Where cold pages go, if anywhere.
    device: Option<Box<BackingDevice>>,
    keeper: Keeper,
    // Models start no threads of their own.
    #[cfg(not(loom))]
    maintenance: Maintenance,
    /// Where there is a reserve.
    #[cfg(not(loom))]
    _refiller: Option<Refiller>,
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    /// `Invalid` for a size or a setting out of range, `NoMemory` when the system refuses.
    pub fn new(config: &Config) -> Result<Self> {
        config.check()?;
        let address_bytes = pages_to_bytes(config.pages) * RESERVE_FACTOR + RESERVE_BASE_BYTES;
        let is_ready = config.reserve_pages > 0;
        #[cfg(not(loom))]
        if is_ready {
            reserve::check_fits(config.pages, config.reserve_pages)?;
        }
        let arena = Arc::new(match config.reserve_pages {
            0 => Arena::new(address_bytes)?,
            pages => Arena::with_reserve(address_bytes, pages)?,
        });
        arena.set_limit_pages(config.limit_pages);
        arena.set_run_cache_batch_pages(config.run_cache_batch_pages)?;
        let pool_builder = PoolBuilder::new(config.name.as_str())
            .max_objects(config.pages + SPARE_OBJECTS)
            .max_objects_setting("disksize")
            .chain_size(config.chain_size)
            .reclaim(config.policy.reclaim == Reclaim::Zspages);
        let lru_options =
            lru::LruConfig { pagevec_pages: config.lru_pagevec_pages, ..lru::LruConfig::new(config.pages) };
        let lru = AnyLru::new(config.lru_design, &lru_options)?;
        let pool = Arc::new(AnyPool::new(config.pool_design, Arc::clone(&arena), &pool_builder)?);
        let stream_bytes = Arc::new(Counter::new(0));
        let codec = |algorithm: &Algorithm| Codec::new(algorithm, config.streams, is_ready, &stream_bytes);
        let primary = codec(&config.algorithm)?;
        let mut recompression = [const { None }; MAX_RECOMPRESSION];
        for (place, algorithm) in recompression.iter_mut().zip(&config.recompression) {
            *place = algorithm.as_ref().map(codec).transpose()?;
        }
        let device = config.backing.as_ref().map(BackingDevice::new).transpose()?.map(Box::new);
        #[cfg(not(loom))]
        let maintenance = Maintenance::start(
            &config.name,
            Arc::clone(&pool),
            Arc::clone(&arena),
            config.compact_threshold_percent,
            config.compact_rate_bytes,
        )?;
        #[cfg_attr(loom, allow(unused_mut))]
        let mut slots = Slots::new(config.pages)?;
        #[cfg(not(loom))]
        let refiller = if is_ready {
            slots.populate()?;
            lru.as_ref().map_or(Ok(()), AnyLru::populate)?;
            pool.populate()?;
            Some(Refiller::start(&config.name, Arc::clone(&pool), Arc::clone(&arena))?)
        } else {
            None
        };
        let store = Store {
            #[cfg(not(loom))]
            maintenance,
            #[cfg(not(loom))]
            _refiller: refiller,
            slots,
            codec: primary,
            recompression,
            stream_bytes,
            stream_alloc: config.stream_alloc,
            pool,
            arena,
            lru,
            counters: Counters::new(),
            checksum: config.checksum,
            device,
            keeper: Keeper::new(config.policy),
        };
        store.set_policy(config.policy);
        Ok(store)
    }

    /// How many pages it has.
    pub fn pages(&self) -> u64 {
        self.slots.pages()
    }

    /// Reads a page, waiting for it as long as it takes.
    ///
    /// # Errors
    /// As [`Store::read_wait`].
    ///
    /// # Panics
    /// As all of these, when the page is beyond the end.
    #[inline]
    pub fn read(&self, page: u64, out: &mut Page) -> Result<()> {
        self.read_wait(page, out, Wait::Yes)
    }

    /// Reads a page.
    ///
    /// # Errors
    /// `Corrupt` when what is stored does not decode to what was written, `Io` when the backing device fails;
    /// `WouldBlock`, which counts as no read, for a page that is not in memory and not to be waited for; `out` is then
    /// undefined.
    #[inline]
    pub fn read_wait(&self, page: u64, out: &mut Page, wait: Wait) -> Result<()> {
        let done = if self.slots.is_empty(page) {
            out.fill(0);
            Ok(())
        } else {
            if let Some(lru) = &self.lru {
                lru.prefetch(page as u32);
            }
            let mut slot = self.slots.lock(page);
            slot.touch();
            let is_listed = slot.peek().is_object();
            let done = match &self.device {
                Some(device) if wait == Wait::Yes && slot.peek().is_backed() => {
                    drop(slot);
                    self.read_back(device, page, out)
                }
                _ => self.load(slot, page, out),
            };
            if let Some(lru) = self.lru.as_ref().filter(|_| is_listed) {
                lru.mark(page as u32);
            }
            done
        };
        let share = self.counters.local();
        count(done, &share.pages_read, &share.failed_reads)
    }

    /// Reads the part of a page from byte `at` on.
    ///
    /// # Errors
    /// As [`Store::read_wait`].
    pub fn read_part(&self, page: u64, at: usize, out: &mut [u8], wait: Wait) -> Result<()> {
        let mut whole = [0; PAGE_SIZE];
        self.read_wait(page, &mut whole, wait)?;
        out.copy_from_slice(&whole[at..at + out.len()]);
        Ok(())
    }

    /// Writes a page. At the limit it waits for pages to leave, if any can.
    ///
    /// # Errors
    /// As [`Store::write_wait`].
    #[inline]
    pub fn write(&self, page: u64, contents: &Page) -> Result<()> {
        self.write_wait(page, contents, Wait::Yes)
    }

    /// Writes a page.
    ///
    /// # Errors
    /// `NoSpace` when the limit is met and nothing leaves, `NoMemory` when the system gives no more; `WouldBlock`, which
    /// counts as no write, when the limit is met, pages can leave, and that is not to be waited for. With a reserve
    /// nothing is ever waited for: `NoSpace` at the limit, though pages may then leave for the next write, and `NoMemory`
    /// when the reserve is drained. The page keeps its old contents.
    #[inline]
    pub fn write_wait(&self, page: u64, contents: &Page, wait: Wait) -> Result<()> {
        let made = self.with_room(wait, || self.make(page, contents));
        self.count_write(made.map(|new| self.switch(self.slots.lock(page), page, new)))
    }

    /// Writes the part of a page from byte `at` on; the rest of it stays.
    ///
    /// # Errors
    /// As [`Store::write_wait`] and [`Store::read_wait`].
    pub fn write_part(&self, page: u64, at: usize, bytes: &[u8], wait: Wait) -> Result<()> {
        self.change_part(page, wait, |whole| whole[at..at + bytes.len()].copy_from_slice(bytes))
    }

    /// The state that `page` and those after it are in, and of how many pages that holds, one page
    /// after another: at least 1, at most `max_pages`, which bounds the work. Takes no lock, so it
    /// answers for each page with a state that it was in while this was asked.
    ///
    /// # Panics
    /// When `max_pages` is 0 or goes beyond the end.
    pub fn extent(&self, page: u64, max_pages: u64) -> (PageState, u64) {
        let state = self.slots.state(page);
        (state, 1 + self.slots.run(page + 1..page + max_pages, |other| other == state))
    }

    /// How many pages from `page` on read as zeros: at most `max_pages`; otherwise as
    /// [`Store::extent`].
    pub fn zero_pages(&self, page: u64, max_pages: u64) -> u64 {
        self.slots.run(page..page + max_pages, PageState::is_zeros)
    }

    /// Makes a page read as zeros and hold them: it is not a hole afterwards.
    pub fn zero(&self, page: u64) {
        self.switch(self.slots.lock(page), page, Contents::Same(0));
        self.counters.local().pages_written.add(1);
    }

    /// Makes `len` bytes of a page from byte `at` on read as zeros. A page that holds nothing stays
    /// so, unless `allocate`.
    ///
    /// # Errors
    /// As [`Store::write_part`].
    pub fn zero_part(&self, page: u64, at: usize, len: usize, allocate: bool, wait: Wait) -> Result<()> {
        if !allocate && self.slots.is_empty(page) {
            return Ok(());
        }
        self.change_part(page, wait, |whole| whole[at..at + len].fill(0))
    }

    /// Forgets a page: it reads as zeros.
    pub fn discard(&self, page: u64) {
        self.discard_pages(page..page + 1);
    }

    /// Forgets pages: they read as zeros.
    pub fn discard_pages(&self, pages: Range<u64>) {
        let (mut doomed, mut count) = ([0; DOOMED_AT_ONCE], 0);
        self.counters.local().notify_free.add(pages.end.saturating_sub(pages.start));
        self.slots.discard(pages, |page| {
            if self.switch_but_list(self.slots.lock(page), page, Contents::Empty) == Listing::Doomed {
                doomed[count] = page as u32;
                count += 1;
            }
            if let Some(lru) = self.lru.as_ref().filter(|_| count == DOOMED_AT_ONCE) {
                lru.remove_doomed(&mut doomed);
                count = 0;
            }
        });
        if let Some(lru) = &self.lru {
            lru.remove_doomed(&mut doomed[..count]);
        }
    }

    /// Counts a request that failed before it came to any page.
    pub(crate) fn count_failure(&self, is_write: bool) {
        let share = self.counters.local();
        if is_write { &share.failed_writes } else { &share.failed_reads }.add(1);
    }

    /// The counts now.
    pub fn stats(&self) -> Stats {
        let (counters, arena) = (&self.counters, &self.arena);
        Stats {
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

    /// Packs the pool's objects together, gives back what that frees, and returns the number of pages.
    pub fn compact(&self) -> u64 {
        self.compact_interruptible(&Work::uninterruptible(Unit::Objects))
    }

    /// The same, as long as the work is wanted.
    pub fn compact_interruptible(&self, work: &Work<'_>) -> u64 {
        let freed = self.pool.compact(Effort::Tight, &mut Budget::of(work));
        self.arena.release_kept();
        freed
    }

    /// Sets [`Config::compact_threshold_percent`] anew.
    #[cfg(not(loom))]
    pub fn set_compact_threshold_percent(&self, percent: u64) {
        self.maintenance.set_threshold_percent(percent);
    }

    /// Sets [`Config::compact_rate_bytes`] anew.
    #[cfg(not(loom))]
    pub fn set_compact_rate_bytes(&self, bytes: u64) {
        self.maintenance.set_rate_bytes_per_s(bytes);
    }

    /// The state of each size class.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        self.pool.class_stats()
    }

    /// What the lists of pages by their use have and did; nothing where there are none.
    pub fn lru_stats(&self) -> lru::LruStats {
        self.lru.as_ref().map(AnyLru::stats).unwrap_or_default()
    }

    /// Sets [`Config::lru_pagevec_pages`] anew.
    ///
    /// # Errors
    /// `Invalid` for none, or beyond [`lru::MAX_PAGEVEC_PAGES`].
    pub fn set_lru_pagevec_pages(&self, pages: usize) -> Result<()> {
        self.lru.as_ref().map_or(Ok(()), |lru| lru.set_pagevec_pages(pages))
    }

    /// The memory that slot table, LRU, streams, dictionary and counters take at most, whatever is stored.
    pub fn fixed_bytes(&self) -> usize {
        let lru_bytes = self.lru.as_ref().map_or(0, AnyLru::max_bytes);
        let device_bytes = self.device.as_ref().map_or(0, |device| device.max_bytes());
        self.slots.max_bytes()
            + lru_bytes
            + device_bytes
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

    /// Starts [`Stats::pool_pages_max`] anew.
    pub fn reset_pool_max(&self) {
        self.arena.reset_used_max(Account::Pool);
    }

    /// Sets [`Config::limit_pages`] anew. Free memory beyond it goes back at once; what is in use
    /// stays, and a limit below it only stops growth.
    pub fn set_limit_pages(&self, pages: u64) {
        self.arena.set_limit_pages(pages);
        self.set_marks();
        self.keeper.look(&self.arena);
    }

    /// Sets [`Config::run_cache_batch_pages`] anew.
    ///
    /// # Errors
    /// `Invalid` beyond [`MAX_BATCH_PAGES`].
    pub fn set_run_cache_batch_pages(&self, pages: usize) -> Result<()> {
        self.arena.set_run_cache_batch_pages(pages)
    }

    /// Reads what a locked slot holds; `WouldBlock` for what is not in memory. The lock is let go by dropping `slot`,
    /// as soon as the pool allows it; pass a reference to keep it.
    #[inline]
    fn load<'a>(&self, slot: impl Borrow<SlotGuard<'a>>, page: u64, out: &mut Page) -> Result<()> {
        match slot.borrow().contents() {
            Contents::Empty => out.fill(0),
            Contents::Same(word) => fill(out, word),
            Contents::Backed(_) => {
                return Err(Error::new(ErrorKind::WouldBlock, "the page is on the backing device"));
            }
            Contents::Stored { handle, len, checksum, priority } => {
                // SAFETY: the handle is the locked slot's, and is freed only after it is the slot's no more:
                // after the slot's lock is let go, which waits for the end of reading unless that need not be.
                let bytes = unsafe { self.pool.read(handle, page as u32, usize::from(len)) }?;
                let kept = if self.pool.reads_outlive_frees() {
                    drop(slot);
                    None
                } else {
                    Some(slot)
                };
                self.decode(priority, &bytes, out)?;
                drop(bytes);
                drop(kept);
                if self.checksum && crc32fast::hash(out) != checksum {
                    let what = "the stored page is damaged: its checksum is wrong";
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn decode(&self, priority: u8, bytes: &[u8], out: &mut Page) -> Result<()> {
        if bytes.len() == PAGE_SIZE {
            out.copy_from_slice(bytes);
            return Ok(());
        }
        match self.codec_of(priority) {
            Some(codec) => codec.decode(bytes, out),
            None => {
                Err(Error::new(ErrorKind::Corrupt, "the stored page is damaged: no algorithm has its number"))
            }
        }
    }

    /// The codec of a priority, 0 being that of writes.
    #[inline]
    fn codec_of(&self, priority: u8) -> Option<&Codec> {
        match usize::from(priority).checked_sub(1) {
            None => Some(&self.codec),
            Some(at) => self.recompression.get(at)?.as_ref(),
        }
    }

    /// Stores a page's contents where nobody finds them yet.
    #[inline]
    fn make(&self, page: u64, contents: &Page) -> Result<Contents> {
        if let Some(word) = same_word(contents) {
            return Ok(Contents::Same(word));
        }
        let checksum = if self.checksum { crc32fast::hash(contents) } else { 0 };
        self.slots.prefetch(page);
        if let Some(lru) = &self.lru {
            lru.prefetch(page as u32);
        }
        let (handle, len) = match self.stream_alloc {
            StreamAlloc::Held => self.codec.with(|stream| {
                let bytes = self.compress(stream, page, contents);
                self.pool.store(bytes, page as u32, Gfp::MayWait).map(|handle| (handle, bytes.len()))
            }),
            StreamAlloc::Released => self.store_released(page, contents),
        }?;
        Ok(Contents::Stored { handle, len: len as u16, checksum, priority: 0 })
    }

    /// What is to be stored of a page: itself, if it does not compress well enough.
    #[inline]
    fn compress<'a>(&self, stream: &'a mut Stream, page: u64, contents: &'a Page) -> &'a [u8] {
        let len = stream.encoder.encode(contents, &mut stream.compressed);
        // What is about to be replaced is cold: its misses can pass while the new is stored.
        self.prefetch_held(page);
        match len.filter(|len| *len < self.pool.huge_threshold()) {
            Some(len) => &stream.compressed[..len],
            None => contents,
        }
    }

    /// Stores a page without waiting for memory while a stream is held: where that takes waiting,
    /// the page is compressed once more after it.
    fn store_released(&self, page: u64, contents: &Page) -> Result<(u32, usize)> {
        let owner = page as u32;
        let stored = self.codec.with(|stream| {
            let bytes = self.compress(stream, page, contents);
            let handle = self.pool.store(bytes, owner, Gfp::NoWait);
            handle.map(|handle| (handle, bytes.len())).map_err(|_| bytes.len())
        });
        let len = match stored {
            Ok(stored) => return Ok(stored),
            Err(len) => len,
        };
        self.counters.local().writestall.add(1);
        let reserved = self.pool.reserve(len, Gfp::MayWait)?;
        if len == PAGE_SIZE {
            return reserved.write(contents, owner).map(|handle| (handle, len));
        }
        self.codec.with(|stream| {
            // As long as before; were it not, the pool would find another object for it.
            let bytes = self.compress(stream, page, contents);
            reserved.write(bytes, owner).map(|handle| (handle, bytes.len()))
        })
    }

    /// Switches a locked slot to `new`, lets it go, and frees what it held.
    #[inline]
    fn switch(&self, slot: SlotGuard<'_>, page: u64, new: Contents) {
        let listing = self.switch_but_list(slot, page, new);
        match &self.lru {
            Some(lru) if listing == Listing::New => lru.queue(page as u32),
            Some(lru) if listing == Listing::Doomed => lru.remove_doomed(&mut [page as u32]),
            _ => {}
        }
    }

    /// Switches a slot, and answers what is still to be done in the lists of pages.
    fn switch_but_list(&self, mut slot: SlotGuard<'_>, page: u64, new: Contents) -> Listing {
        let old = self.exchange(&mut slot, new);
        if new != Contents::Empty {
            slot.touch();
        }
        let is_stored = matches!(new, Contents::Stored { .. });
        // Others were taken out of the lists when they came to be what they are; to ask again would only bring the
        // memory of their nodes.
        let was_listed = matches!(old, Contents::Stored { .. } | Contents::Backed(_));
        let listing = match &self.lru {
            Some(lru) if is_stored && lru.arrive(page as u32) => Listing::New,
            Some(lru) if !is_stored && was_listed && lru.doom(page as u32) => Listing::Doomed,
            _ => Listing::Right,
        };
        drop(slot);
        self.free(old);
        listing
    }

    /// Switches a locked slot, and answers what it held: to be [freed](Store::free) once it is let go.
    #[inline]
    fn exchange(&self, slot: &mut SlotGuard<'_>, new: Contents) -> Contents {
        let old = slot.replace(new);
        // Counted before others can change the page again, so that they do not count it first.
        self.counters.local().switched(&old, &new);
        old
    }

    /// Frees what a slot held.
    #[inline]
    fn free(&self, old: Contents) {
        match old {
            // SAFETY: the slot held it, and who calls this took it out, which one does.
            Contents::Stored { handle, .. } => unsafe { self.pool.free(handle) },
            Contents::Backed(Backed { place, len, .. }) => {
                self.device.iter().for_each(|device| device.log.died(place, usize::from(len)));
            }
            Contents::Empty | Contents::Same(_) => {}
        }
    }

    /// Changes a part of a page. What that waits for, it waits for without the slot's lock, so that who needs the
    /// page and must not wait never meets a holder who does.
    fn change_part(&self, page: u64, wait: Wait, change: impl Fn(&mut Page)) -> Result<()> {
        let changed = self.with_room(wait, || {
            let mut whole = [0; PAGE_SIZE];
            let slot = match &self.device {
                Some(device) if wait == Wait::Yes => self.read_and_lock(device, page, &mut whole)?,
                _ => {
                    let slot = self.slots.lock(page);
                    self.load(&slot, page, &mut whole)?;
                    slot
                }
            };
            change(&mut whole);
            let new = self.make(page, &whole)?;
            self.switch(slot, page, new);
            Ok(())
        });
        self.count_write(changed)
    }

    /// Counts a write, and has pages leave if there is now too much.
    #[inline]
    fn count_write(&self, done: Result<()>) -> Result<()> {
        self.keeper.look(&self.arena);
        let share = self.counters.local();
        if let Err(error) = &done {
            match error.setting() {
                Some("reserve") => _ = share.reserve_drained.add(1),
                Some("mem_limit") => _ = share.limit_refused.add(1),
                _ => {}
            }
        }
        count(done, &share.pages_written, &share.failed_writes)
    }
}

/// Counts a request as done or as failed; what would have to wait is neither, as it comes again.
#[inline]
fn count(request: Result<()>, done: &Counter, failed: &Counter) -> Result<()> {
    match &request {
        Ok(()) => _ = done.add(1),
        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
        Err(_) => _ = failed.add(1),
    }
    request
}

/// The word that fills the page, if one does.
#[inline]
fn same_word(page: &Page) -> Option<u64> {
    let (words, _) = page.as_chunks::<8>();
    let (first, last) = (words[0], words[words.len() - 1]);
    // Pages that start and end alike are rare: look at the rest only of those.
    (first == last && words.iter().all(|word| *word == first)).then(|| u64::from_ne_bytes(first))
}

#[inline]
fn fill(page: &mut Page, word: u64) {
    let (words, _) = page.as_chunks_mut::<8>();
    words.fill(word.to_ne_bytes());
}
