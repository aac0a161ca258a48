//! The arena: the source of all memory of a device's contents and metadata, and the only place
//! that knows the host's mmap, madvise and page size.
//!
//! An arena reserves address space once, and makes it usable in chunks of 2 MiB. Pages are named
//! by their number from the arena's start (u32), so that the arena can be mapped at another address
//! one day. Accounts ([`Account`]) share no chunks, so that a chunk of movable pages can be
//! evacuated. Pages are allocated in two steps:
//!
//! 1. [`Arena::alloc_run`] takes a run of 1..=16 pages of address space. That costs no memory.
//! 2. [`Arena::commit`] charges pages of the run to its account before they are first touched.
//!    So a zspage grows page by page: pages that it has not reached take no memory.
//!
//! Each page has a *resident* bit: set when it is first committed, cleared when its memory goes back to the
//! system. [`Arena::charged_pages`] counts these bits: it is the memory that the arena takes, including free
//! pages kept for reuse, up to two batches of each account and length in each CPU's run cache, and beyond
//! that up to a sixteenth of the used pages. All of them go back when the limit is reached. (On hosts with
//! larger pages the system may take up to one of these for each of ours.) A free releases the surplus, or
//! leaves it to a thread ([`Arena::set_releaser`]). With a reserve (`reserve.rs`) whole chunks are charged,
//! kept and given back.
//!
//! Lock order: reclaim, run cache, arena. `commit` takes no lock and makes no system call: it may
//! be called with any lock held. Do not call the others under a size class's lock.

mod adopt;
mod ahead;
mod charge;
#[cfg(test)]
mod faults;
mod file;
mod hide;
mod map;
mod noswap;
mod page_table;
mod pages;
mod release;
mod reserve;
mod run_cache;
mod runs;
mod table;
mod tree;
mod whole;

#[cfg(all(test, loom))]
mod reserve_loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

pub use ahead::MappedAhead;
pub use charge::Full;
pub use file::{MemoryFile, Region};
pub use hide::HiddenChunks;
pub use noswap::{keep_memory_out_of_swap, noswap_directory};
pub use page_table::{FoundPages, Wanted, scan_page_table};
pub use pages::ZeroedPages;
pub use reserve::reserve_chunks;
pub use run_cache::MAX_BATCH_PAGES;
pub use runs::{Account, CHUNK_PAGES, MAX_RUN_PAGES};
pub use table::{Entry, Table};

use super::cpu::{Padded, PerCpu};
use super::error::{Error, ErrorKind, Result};
use super::sync::{AtomicU64, Counter, Mutex, MutexGuard, Ordering, classes};
use super::units::{PAGE_SHIFT, PAGE_SIZE, bytes_to_pages};
use std::thread::Thread;

pub(crate) use map::{Access, Mapping};
#[cfg(all(test, not(loom)))]
pub(crate) use map::{HOST_PAGE_BYTES, with_host_pages_of};
use run_cache::{RunCache, batch_runs};
use runs::{GROUP_PAGES, Runs, group_of, groups_of, mask};

const _: () = assert!(usize::BITS == 64, "an arena reserves more than 4 GiB");

/// How far an allocation may go to get memory, after the kernel's GFP flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gfp {
    /// It takes only memory that is available: it makes no system call, and does not wait for reclaim.
    NoWait,
    /// It also grows the arena, and gives free memory back at the limit; in an arena with a reserve it does
    /// neither.
    MayWait,
}

/// A run of pages, address space only until its pages are committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The number of its first page.
    pub page: u32,
    /// The number of its pages, 1..=16.
    pub pages: u8,
}

#[derive(Default)]
struct Usages {
    /// The number of set bits in `resident`.
    charged_pages: Counter,
    of: [Usage; Account::ALL.len()],
}

#[derive(Default)]
struct Usage {
    pages: Counter,
    pages_max: Counter,
}

/// See the [module's documentation](self).
pub struct Arena {
    mapping: Mapping,
    /// A bit per page, set if it is in memory; a word per group. The owner of its run changes the bit of
    /// a taken page, the holder of the arena's lock that of a free page.
    resident: Table<AtomicU64>,
    batch_pages: Counter,
    /// 1 while a [`HiddenChunks`] is being made, or exists and is not empty.
    hiding: Counter,
    /// A bit for each chunk that is hidden.
    hidden: Table<AtomicU64>,
    /// 0: none.
    limit_pages: Counter,
    caches: PerCpu<Mutex<RunCache>>,
    inner: Padded<Mutex<Inner>>,
    /// Held while memory goes back to the system: a thread that needs memory waits here instead of failing.
    reclaim: Mutex<()>,
    usage: Padded<Usages>,
    /// The target number of free present chunks; 0 without a reserve.
    reserve_chunks: usize,
    /// 1 if the reserve lacked chunks at the limit when last checked ([`Arena::lacks_reserve`]). Changed
    /// under the arena's lock.
    lacks_reserve: Counter,
    reserve_table_bytes: usize,
    #[cfg(test)]
    holds_refills: Counter,
    #[cfg(test)]
    faults: std::sync::Mutex<Option<faults::Faults>>,
}

/// Protected by the arena's lock.
#[derive(Default)]
struct Inner {
    runs: Runs,
    /// Resident pages of free runs (not those in CPU caches).
    free_resident_pages: u64,
    /// The next release starts below this group.
    release_below: usize,
    releaser: Helper,
    refiller: Helper,
    chunks_on_their_way: usize,
}

/// A thread that works for those that take and free runs, if there is one.
#[derive(Default)]
struct Helper {
    thread: Option<Thread>,
    /// Whether it was woken and has not done its work since.
    is_told: bool,
}

/// Wakes a helper, once until it has done its work.
#[inline]
fn tell(mut inner: MutexGuard<'_, Inner>, helper: impl FnOnce(&mut Inner) -> &mut Helper) {
    let helper = helper(&mut inner);
    if !helper.is_told
        && let Some(thread) = helper.thread.clone()
    {
        helper.is_told = true;
        drop(inner);
        thread.unpark();
    }
}

impl Arena {
    /// Reserves address space for `reserve_bytes`, rounded up to chunks, at most 16 TiB. Fails with
    /// `NoMemory` when the system refuses the reservation.
    pub fn new(reserve_bytes: u64) -> Result<Self> {
        Arena::new_in(None, reserve_bytes)
    }

    /// Returns the bytes of the region that [`Arena::new_in`] needs.
    pub fn region_bytes(reserve_bytes: u64) -> u64 {
        pages_of(reserve_bytes) << PAGE_SHIFT
    }

    /// As [`Arena::new`], in a region of a file; in private memory if `region` is `None`. The arena ignores
    /// memory that the region already holds until [`Arena::find_resident`]. Fails as [`Arena::new`];
    /// `Invalid` for a region shorter than [`Arena::region_bytes`].
    pub fn new_in(region: Option<&Region>, reserve_bytes: u64) -> Result<Self> {
        let (pages, chunk_pages) = (pages_of(reserve_bytes), u64::from(CHUNK_PAGES));
        Ok(Arena {
            mapping: Mapping::new_in(region, (pages << PAGE_SHIFT) as usize, Access::None)?,
            resident: Table::new((pages / u64::from(GROUP_PAGES)) as usize)?,
            batch_pages: Counter::new(0),
            hiding: Counter::new(0),
            hidden: Table::new((pages / chunk_pages).div_ceil(u64::from(u64::BITS)) as usize)?,
            limit_pages: Counter::new(0),
            caches: PerCpu::new(|_| Mutex::new(&classes::RUN_CACHE, RunCache::new())),
            inner: Padded(Mutex::new(&classes::ARENA, Inner::default())),
            reclaim: Mutex::new(&classes::RECLAIM, ()),
            usage: Padded::default(),
            reserve_chunks: 0,
            lacks_reserve: Counter::new(0),
            reserve_table_bytes: 0,
            #[cfg(test)]
            holds_refills: Counter::new(0),
            #[cfg(test)]
            faults: std::sync::Mutex::default(),
        })
    }

    /// Returns the number of pages of the reservation.
    pub fn reserved_pages(&self) -> usize {
        self.mapping.len_bytes() >> PAGE_SHIFT
    }

    /// Returns the address of a page of the reservation.
    #[inline]
    pub fn address(&self, page: u32) -> *mut u8 {
        debug_assert!((page as usize) < self.reserved_pages());
        self.mapping.base().wrapping_add((page as usize) << PAGE_SHIFT)
    }

    /// Returns the page that starts at an address, which [`Arena::address`] returned.
    pub fn page_at(&self, address: *const u8) -> u32 {
        let offset_bytes = address.addr() - self.mapping.base().addr();
        debug_assert!(offset_bytes < self.mapping.len_bytes() && offset_bytes.is_multiple_of(PAGE_SIZE));
        (offset_bytes >> PAGE_SHIFT) as u32
    }

    /// Takes a run of `pages` pages (1..=16) for `account`. Charges nothing. Fails with `NoMemory` when the
    /// system gives no more, or when no run is free and `gfp` does not allow growing; `NoSpace` when the
    /// reservation is used up.
    pub fn alloc_run(&self, pages: usize, account: Account, gfp: Gfp) -> Result<Run> {
        assert!((1..=MAX_RUN_PAGES).contains(&pages), "runs have 1 to 16 pages");
        #[cfg(test)]
        if self.fails() {
            return Err(Error::new(ErrorKind::NoMemory, "injected: no run"));
        }
        let run = |page| Run { page, pages: pages as u8 };
        let batch_pages = self.batch_pages.get() as usize;
        if batch_pages == 0 {
            let mut inner = self.inner.lock();
            let taken = self.take(&mut inner, pages, account, gfp).map(run);
            self.look_at_reserve(inner);
            return taken;
        }
        let mut cache = self.caches.local().lock();
        if let Some(page) = cache.stack(account, pages).pop() {
            return Ok(run(page));
        }
        let mut inner = self.inner.lock();
        let first = self.take(&mut inner, pages, account, gfp)?;
        // While chunks are hidden, take no spare runs: they would hold chunks.
        let batch = if self.hiding.get() == 0 { batch_runs(batch_pages, pages) } else { 1 };
        for _ in 1..batch {
            // Fill the batch with free runs only: growing for spare runs would waste memory.
            match self.take_free(&mut inner, pages, account, true) {
                Some(page) => cache.stack(account, pages).push(page),
                None => break,
            }
        }
        self.look_at_reserve(inner);
        Ok(run(first))
    }

    /// Frees a run that was taken for `account`. `committed` of its pages were charged to it; no thread
    /// uses their contents any more. It makes no system call if no page is committed, and with a
    /// releaser ([`Arena::set_releaser`]) rarely one.
    pub fn free_run(&self, run: Run, account: Account, committed: u64) {
        self.free_runs(account, &[(run, committed)]);
    }

    /// Frees runs, each with its number of committed pages, as [`Arena::free_run`] does, but takes each
    /// lock only once.
    #[inline]
    pub fn free_runs(&self, account: Account, runs: &[(Run, u64)]) {
        let committed: u64 = runs.iter().map(|(_, committed)| committed).sum();
        self.usage(account).pages.sub(committed);
        let batch_pages = self.batch_pages.get() as usize;
        let inner = if batch_pages == 0 {
            let mut inner = self.inner.lock();
            runs.iter().for_each(|(run, _)| self.put(&mut inner, run.page, usize::from(run.pages)));
            inner
        } else {
            let mut cache = self.caches.local().lock();
            let mut inner = None;
            for (run, _) in runs {
                let pages = usize::from(run.pages);
                if self.is_hidden(run.page) {
                    self.put(inner.get_or_insert_with(|| self.inner.lock()), run.page, pages);
                    continue;
                }
                let stack = cache.stack(account, pages);
                stack.push(run.page);
                let batch = batch_runs(batch_pages, pages);
                if stack.len() > 2 * batch {
                    let inner = inner.get_or_insert_with(|| self.inner.lock());
                    // Drain the oldest: the newest are warm in the CPU's cache.
                    stack.drain(..batch).for_each(|page| self.put(inner, page, pages));
                }
            }
            match inner {
                Some(inner) => inner,
                None => return,
            }
        };
        // With no page committed there is no more free memory than before the runs were taken.
        if committed > 0 {
            self.deal_with_surplus(inner);
        }
    }

    /// Sets the batch size, in pages, of the CPUs' run caches, at most [`MAX_BATCH_PAGES`]; 0 empties the
    /// caches and turns them off. Fails with `Invalid` beyond the maximum.
    pub fn set_run_cache_batch_pages(&self, pages: usize) -> Result<()> {
        if pages > MAX_BATCH_PAGES {
            let most = format!("a run cache moves at most {MAX_BATCH_PAGES} pages at a time");
            return Err(Error::invalid(most).with_setting("run_cache_batch"));
        }
        self.batch_pages.set(pages as u64);
        if pages == 0 {
            self.release_free();
        }
        Ok(())
    }

    /// Returns the resident bytes of the arena's own tables that grow with it.
    pub fn table_resident_bytes(&self) -> usize {
        // With a reserve they do not grow: see `reserve_table_bytes`.
        if self.has_reserve() { 0 } else { self.resident.resident_bytes() }
    }

    /// Returns the resident bytes by the system's count, to check [`Arena::charged_pages`].
    #[cfg(test)]
    pub fn resident_bytes(&self) -> usize {
        self.mapping.resident_bytes()
    }

    fn take(&self, inner: &mut Inner, pages: usize, account: Account, gfp: Gfp) -> Result<u32> {
        loop {
            // An evacuation frees nothing if it takes a run of a free chunk.
            let begins_chunk = gfp == Gfp::MayWait || self.hiding.get() == 0;
            if let Some(page) = self.take_free(inner, pages, account, begins_chunk) {
                return Ok(page);
            }
            if gfp == Gfp::NoWait {
                return Err(Error::new(ErrorKind::NoMemory, "no run of pages is free"));
            }
            if let Err(error) = self.grow(inner) {
                // A run of a hidden chunk is better than a failure.
                if self.hiding.get() == 0 || !inner.runs.show_all() {
                    return Err(error);
                }
            }
        }
    }

    fn grow(&self, inner: &mut Inner) -> Result<()> {
        if self.has_reserve() {
            return Err(self.drained(inner));
        }
        let at = inner.runs.groups() * GROUP_PAGES as usize;
        if at >= self.reserved_pages() {
            return Err(used_up());
        }
        self.mapping.enable(at * PAGE_SIZE, CHUNK_PAGES as usize * PAGE_SIZE)?;
        inner.runs.add_chunk()
    }

    fn take_free(
        &self,
        inner: &mut Inner,
        pages: usize,
        account: Account,
        begins_chunk: bool,
    ) -> Option<u32> {
        let runs = &mut inner.runs;
        let page = if begins_chunk { runs.take(account, pages) } else { runs.take_own(account, pages) }?;
        inner.free_resident_pages -= self.resident_in(page, pages);
        Some(page)
    }

    fn put(&self, inner: &mut Inner, page: u32, pages: usize) {
        inner.runs.put(page, pages);
        inner.free_resident_pages += self.resident_in(page, pages);
    }

    fn resident_in(&self, page: u32, pages: usize) -> u64 {
        self.resident_of(group_of(page), mask(page, pages as u32))
    }

    fn resident_of(&self, group: usize, bits: u64) -> u64 {
        u64::from((self.resident[group].load(Ordering::Relaxed) & bits).count_ones())
    }

    fn chunk_is_resident(&self, chunk: usize) -> bool {
        groups_of(chunk).any(|group| self.resident[group].load(Ordering::Relaxed) != 0)
    }
}

fn pages_of(reserve_bytes: u64) -> u64 {
    let chunk_pages = u64::from(CHUNK_PAGES);
    let max_pages = (1 << u32::BITS) - chunk_pages;
    bytes_to_pages(reserve_bytes).next_multiple_of(chunk_pages).clamp(chunk_pages, max_pages)
}

fn used_up() -> Error {
    let what = "the device's address space is used up: its pool is too fragmented";
    Error::new(ErrorKind::NoSpace, what).with_setting("disksize")
}
