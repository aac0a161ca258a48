//! Memory that is never waited for: chunks that are filled before anybody needs them.
//!
//! In an arena with a reserve a chunk is *present*, all of its pages being in memory and charged, or *absent*:
//! none is, and no run of it is taken. Runs are taken of present chunks only, so that committing their pages
//! charges nothing, and touching them takes no page fault. Who takes runs never makes a chunk present: a thread
//! of its own, the *refiller*, sees to it that so many free chunks are there, and until it has, an allocation
//! that finds none fails. Memory goes back by whole chunks only, in other threads than those that free.
//!
//! At the limit the refiller can fill nothing. There the reserve is kept free by whoever can have contents leave, who
//! leaves [`Arena::limit_but_reserve_pages`] to what is stored, and packs it as long as [`Arena::lacks_reserve`].
//!
//! An absent chunk is somebody's while it is filled or emptied, which takes system calls, and no lock is held
//! meanwhile. Its bits in `resident` belong to that thread.

use std::ops::Range;
use std::thread::Thread;

use super::charge::Full;
use super::runs::{CHUNK_PAGES, groups_of};
use super::{Account, Arena, Inner, used_up};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{MutexGuard, Ordering};
use crate::base::units::PAGE_SIZE;

const CHUNK_BYTES: usize = CHUNK_PAGES as usize * PAGE_SIZE;
/// The fewest chunks of a reserve: the pool's pages and the slabs' share none, so that the first page that is
/// stored takes two.
const MIN_RESERVE_CHUNKS: u64 = 2;

/// The chunks of a reserve of so many pages: it is whole chunks, and at least two, one for the first page that is
/// stored and one for the handle that leads to it. 0 for none.
pub fn reserve_chunks(pages: u64) -> u64 {
    if pages > 0 { pages.div_ceil(u64::from(CHUNK_PAGES)).max(MIN_RESERVE_CHUNKS) } else { 0 }
}

impl Arena {
    /// An arena as [`Arena::new`] makes it, with a reserve of `reserve_pages` (more than 0), which are
    /// [`reserve_chunks`]. It is empty until [`Arena::refill`] fills it.
    ///
    /// # Errors
    /// `NoMemory` when the system has no memory for the tables, which are all there from now on; `Invalid` for
    /// more than the reservation or the machine has.
    pub fn with_reserve(address_bytes: u64, reserve_pages: u64) -> Result<Self> {
        let mut arena = Arena::new(address_bytes)?;
        let chunks = reserve_chunks(reserve_pages);
        let most = arena.reserved_pages() / CHUNK_PAGES as usize;
        if chunks > most as u64 {
            let what = "the reserve is larger than all that the device can take";
            return Err(Error::invalid(what).with_setting("reserve"));
        }
        arena.reserve_chunks = chunks as usize;
        arena.resident.populate()?;
        arena.hidden.populate()?;
        let of_caches: usize = arena.caches.iter().map(|cache| cache.lock().touch()).sum();
        let of_runs = arena.inner.lock().runs.reserve(most)?;
        arena.reserve_table_bytes =
            arena.resident.max_bytes() + arena.hidden.max_bytes() + of_caches + of_runs;
        Ok(arena)
    }

    /// Whether there is a reserve.
    #[inline]
    pub fn has_reserve(&self) -> bool {
        self.reserve_chunks > 0
    }

    /// Pages of the reserve when it is full; 0 without one.
    pub fn reserve_pages(&self) -> u64 {
        self.reserve_chunks as u64 * u64::from(CHUNK_PAGES)
    }

    /// Pages of the free chunks that are there now; 0 without a reserve.
    pub fn reserve_free_pages(&self) -> u64 {
        if self.has_reserve() {
            self.inner.lock().runs.free_chunks() as u64 * u64::from(CHUNK_PAGES)
        } else {
            0
        }
    }

    /// Pages of the limit that are there for what is stored, the others being the reserve's: at most half of the limit,
    /// so that something can be stored even where the reserve is all of it. 0 without a limit.
    pub fn limit_but_reserve_pages(&self) -> u64 {
        self.limit_pages() - self.chunks_free_at_limit() as u64 * u64::from(CHUNK_PAGES)
    }

    /// Whether free chunks are missing that the limit keeps the refiller from filling.
    pub fn lacks_reserve(&self) -> bool {
        self.may_lack_reserve() && self.look_for_lack(&self.inner.lock())
    }

    /// Whether that was so when a run was last taken, or asked for. Takes no lock.
    #[inline]
    pub fn may_lack_reserve(&self) -> bool {
        self.lacks_reserve.get() != 0
    }

    /// What the arena's own tables take because of the reserve, whatever is in use.
    pub fn reserve_table_bytes(&self) -> usize {
        self.reserve_table_bytes
    }

    /// Makes chunks present until the reserve is full: the lowest absent ones first, then new ones. `prepare` is
    /// told of the pages of each before anybody else can take them, and sees to it that what belongs to them
    /// elsewhere is in memory. No lock is held meanwhile. One thread at a time does this.
    ///
    /// # Errors
    /// `NoSpace` when the limit is met or the reservation used up, `NoMemory` when the system gives no more, and
    /// what `prepare` returns: what was filled until then stays.
    pub fn refill(&self, prepare: impl Fn(Range<u32>) -> Result<()>) -> Result<()> {
        while let Some(chunk) = self.chunk_to_fill()? {
            let filled = self.fill(chunk, &prepare);
            if filled.is_err() {
                self.empty(chunk);
            }
            let mut inner = self.inner.lock();
            inner.chunks_on_their_way = 0;
            if filled.is_err() {
                self.look_for_lack(&inner);
                return filled;
            }
            inner.runs.bring(chunk);
            inner.free_resident_pages += u64::from(CHUNK_PAGES);
        }
        Ok(())
    }

    /// While a thread is registered here it is unparked when a run is taken and fewer chunks are free than the
    /// reserve is to have, once until it has called [`Arena::refill`] with success.
    pub fn set_refiller(&self, thread: Option<Thread>) {
        let mut inner = self.inner.lock();
        inner.refiller = thread;
        inner.refiller_is_told = false;
    }

    /// Gives all memory back that is kept free, but for a reserve. For those who may wait.
    pub fn release_kept(&self) {
        self.release_free();
        if self.has_reserve() {
            self.release_chunks_beyond(self.reserve_chunks, || true);
        }
    }

    /// A chunk to be filled, which is the caller's, unless the reserve is full.
    fn chunk_to_fill(&self) -> Result<Option<usize>> {
        let next = {
            let mut inner = self.inner.lock();
            if inner.runs.free_chunks() >= self.reserve_chunks {
                inner.refiller_is_told = false;
                return Ok(None);
            }
            if let Some(chunk) = inner.runs.take_absent() {
                inner.chunks_on_their_way = 1;
                return Ok(Some(chunk));
            }
            inner.runs.chunks()
        };
        // Nobody else adds chunks.
        if next * CHUNK_PAGES as usize >= self.reserved_pages() {
            return Err(used_up());
        }
        self.mapping.enable(next * CHUNK_BYTES, CHUNK_BYTES)?;
        let mut inner = self.inner.lock();
        let chunk = inner.runs.add_absent_chunk();
        debug_assert_eq!(chunk, next);
        inner.chunks_on_their_way = 1;
        Ok(Some(chunk))
    }

    /// Charges the pages of a chunk that is the caller's, and has the system give their memory.
    fn fill(&self, chunk: usize, prepare: impl Fn(Range<u32>) -> Result<()>) -> Result<()> {
        #[cfg(test)]
        if self.holds_refills.get() != 0 {
            return Err(Error::new(ErrorKind::NoMemory, "injected: no chunk"));
        }
        let first = chunk as u32 * CHUNK_PAGES;
        // Where the system did not take them back, pages are still charged.
        let new = |group| self.resident[group].load(Ordering::Relaxed).count_zeros();
        let new = groups_of(chunk).map(new).sum::<u32>();
        if !self.usage.charged_pages.add_within(u64::from(new), self.limit_pages.get()) {
            return Err(Full.into());
        }
        groups_of(chunk).for_each(|group| self.resident[group].store(u64::MAX, Ordering::Relaxed));
        prepare(first..first + CHUNK_PAGES)?;
        self.mapping.populate(chunk * CHUNK_BYTES, CHUNK_BYTES)
    }

    /// Gives the memory of an absent chunk that is the caller's back, and lets it go.
    fn empty(&self, chunk: usize) {
        // SAFETY: no run of an absent chunk is taken, and this one is the caller's.
        if unsafe { self.mapping.release(chunk * CHUNK_BYTES, CHUNK_BYTES) } {
            groups_of(chunk).for_each(|group| self.is_released(group, u64::MAX));
        }
        self.inner.lock().runs.leave_absent(chunk);
    }

    /// After a run was taken: tells the refiller if something is missing.
    #[inline]
    pub(super) fn look_at_reserve(&self, inner: MutexGuard<'_, Inner>) {
        if inner.runs.free_chunks() < self.reserve_chunks {
            self.look_for_lack(&inner);
            if !inner.refiller_is_told {
                Arena::tell_refiller(inner);
            }
        }
    }

    /// Looks anew whether the reserve lacks something at the limit.
    fn look_for_lack(&self, inner: &Inner) -> bool {
        let free = inner.runs.free_chunks() + inner.chunks_on_their_way;
        let lacks = free < self.chunks_free_at_limit() && !self.limit_allows_chunk();
        if lacks != self.may_lack_reserve() {
            self.lacks_reserve.set(u64::from(lacks));
        }
        lacks
    }

    /// Chunks that are to be free when the limit is met.
    fn chunks_free_at_limit(&self) -> usize {
        let most = self.limit_pages() / u64::from(2 * CHUNK_PAGES);
        self.reserve_chunks.min(most as usize)
    }

    fn limit_allows_chunk(&self) -> bool {
        let limit_pages = self.limit_pages();
        limit_pages == 0 || self.charged_pages() + u64::from(CHUNK_PAGES) <= limit_pages
    }

    #[cold]
    fn tell_refiller(mut inner: MutexGuard<'_, Inner>) {
        if let Some(refiller) = inner.refiller.clone() {
            inner.refiller_is_told = true;
            drop(inner);
            refiller.unpark();
        }
    }

    /// Why there is no free chunk.
    #[cold]
    pub(super) fn drained(&self, inner: &Inner) -> Error {
        if !self.limit_allows_chunk() {
            return Full.into();
        }
        if inner.runs.chunks() * CHUNK_PAGES as usize >= self.reserved_pages() && !inner.runs.has_absent() {
            return used_up();
        }
        Error::new(ErrorKind::NoMemory, "the reserve of memory is drained, and being filled")
            .with_setting("reserve")
    }

    /// After a free: has chunks given back, if more are free than are worth it.
    pub(super) fn tell_of_surplus_chunks(&self, mut inner: MutexGuard<'_, Inner>, keep_pages: u64) {
        if inner.runs.free_chunks() <= self.reserve_chunks + chunks_of(keep_pages) || inner.releaser_is_told {
            return;
        }
        if let Some(releaser) = inner.releaser.clone() {
            inner.releaser_is_told = true;
            drop(inner);
            releaser.unpark();
        }
    }

    /// [`Arena::release_surplus`], by chunks.
    pub(super) fn release_surplus_chunks(&self) {
        self.inner.lock().releaser_is_told = false;
        let kept = chunks_of(self.keep_pages());
        let most = self.reserve_chunks + kept;
        let used_pages: u64 = Account::ALL.into_iter().map(|account| self.used_pages(account)).sum();
        if self.charged_pages() > used_pages + most as u64 * u64::from(CHUNK_PAGES) {
            // Few runs in the CPUs' caches keep many chunks from being free.
            self.flush_caches();
        }
        let free = self.inner.lock().runs.free_chunks();
        if free > most {
            self.release_chunks_beyond(self.reserve_chunks + kept / 2, || true);
        }
        // What was in use when the limit was lowered, and is free now.
        self.release_beyond_limit();
    }

    /// Gives a chunk back that was emptied, if more are free than the reserve is to have.
    pub(super) fn release_chunk_if_surplus(&self, chunk: usize) {
        let _reclaim = self.reclaim.lock();
        let inner = self.inner.lock();
        if inner.runs.can_be_taken(chunk) && inner.runs.free_chunks() > self.reserve_chunks {
            self.take_away(inner, chunk);
        }
    }

    /// Has the reserve, if there is one, filled as far as a new limit allows.
    pub(super) fn retry_refill(&self) {
        let refiller = {
            let inner = self.inner.lock();
            self.look_for_lack(&inner);
            inner.refiller.clone()
        };
        refiller.iter().for_each(Thread::unpark);
    }

    /// [`Arena::release_beyond_limit`], by chunks: those of the reserve, too.
    pub(super) fn release_chunks_beyond_limit(&self) {
        self.flush_caches();
        self.release_chunks_beyond(0, || self.is_beyond_limit());
    }

    /// Gives free chunks back, the highest first, as long as more than `keep` are free and `goes_on`.
    fn release_chunks_beyond(&self, keep: usize, goes_on: impl Fn() -> bool) {
        let _reclaim = self.reclaim.lock();
        while goes_on() {
            let inner = self.inner.lock();
            match inner.runs.last_free_chunk().filter(|_| inner.runs.free_chunks() > keep) {
                Some(chunk) => self.take_away(inner, chunk),
                None => break,
            }
        }
    }

    /// Makes a free chunk absent.
    fn take_away(&self, mut inner: MutexGuard<'_, Inner>, chunk: usize) {
        inner.runs.take_away(chunk);
        inner.free_resident_pages -= u64::from(CHUNK_PAGES);
        // What it could not fill for the limit, it can again.
        inner.refiller_is_told = false;
        drop(inner);
        self.empty(chunk);
    }
}

/// So many chunks hold these pages.
fn chunks_of(pages: u64) -> usize {
    pages.div_ceil(u64::from(CHUNK_PAGES)) as usize
}
