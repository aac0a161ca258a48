//! The reserve: chunks that are made resident before they are needed, so that no allocation waits for memory
//! (`docs/internals/reserve.md`).
//!
//! In an arena with a reserve a chunk is *present* (all its pages are resident and charged) or *absent* (none
//! is, and no run of it is taken). Runs are taken only from present chunks. A chunk is filled or emptied
//! without a lock: the absent chunk and its bits in `resident` belong to that thread meanwhile.

use std::ops::Range;
use std::thread::Thread;

use super::charge::Full;
use super::runs::{CHUNK_PAGES, groups_of};
use super::{Arena, Helper, Inner, Region, tell, used_up};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{MutexGuard, Ordering};
use crate::base::units::PAGE_SIZE;

const CHUNK_BYTES: usize = CHUNK_PAGES as usize * PAGE_SIZE;
/// The fewest chunks of a reserve: pool pages and slab pages share no chunk, so the first stored page takes
/// two.
const MIN_RESERVE_CHUNKS: u64 = 2;

/// Returns the number of chunks of a reserve of `pages` pages: 0 for 0 pages, otherwise at least two.
pub fn reserve_chunks(pages: u64) -> u64 {
    if pages > 0 { pages.div_ceil(u64::from(CHUNK_PAGES)).max(MIN_RESERVE_CHUNKS) } else { 0 }
}

impl Arena {
    /// Makes an arena like [`Arena::new_in`], with a reserve of `reserve_pages` (more than 0), rounded up as
    /// [`reserve_chunks`] does. The reserve is empty until [`Arena::refill`] fills it. Fails as
    /// [`Arena::new_in`]; `NoMemory` when the system has no memory for the tables, which are all populated
    /// here; `Invalid` for a reserve that is larger than the reservation.
    pub fn with_reserve_in(region: Option<&Region>, address_bytes: u64, reserve_pages: u64) -> Result<Self> {
        let mut arena = Arena::new_in(region, address_bytes)?;
        let chunks = reserve_chunks(reserve_pages);
        let most = arena.reserved_pages() / CHUNK_PAGES as usize;
        if chunks > most as u64 {
            let what = "the reserve is larger than the most memory that the device can take";
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

    /// Returns whether the arena has a reserve.
    #[inline]
    pub fn has_reserve(&self) -> bool {
        self.reserve_chunks > 0
    }

    /// Returns the number of pages of the full reserve; 0 without one.
    pub fn reserve_pages(&self) -> u64 {
        self.reserve_chunks as u64 * u64::from(CHUNK_PAGES)
    }

    /// Returns the number of pages of the free present chunks; 0 without a reserve.
    pub fn reserve_free_pages(&self) -> u64 {
        if self.has_reserve() {
            self.inner.lock().runs.free_chunks() as u64 * u64::from(CHUNK_PAGES)
        } else {
            0
        }
    }

    /// Returns the limit less the reserve: the pages that may be used. The reserve counts as at most half of
    /// the limit, so that something can be stored even if the reserve is as large. 0 without a limit.
    pub fn limit_but_reserve_pages(&self) -> u64 {
        self.limit_pages() - self.chunks_free_at_limit() as u64 * u64::from(CHUNK_PAGES)
    }

    /// Returns whether the reserve lacks free chunks that the limit keeps the refiller from filling.
    pub fn lacks_reserve(&self) -> bool {
        self.may_lack_reserve() && self.look_for_lack(&self.inner.lock())
    }

    /// Returns the result of the last such check, which each taken run makes. Takes no lock.
    #[inline]
    pub fn may_lack_reserve(&self) -> bool {
        self.lacks_reserve.get() != 0
    }

    /// Returns the bytes of the arena's own tables, which the reserve keeps resident; 0 without one.
    pub fn reserve_table_bytes(&self) -> usize {
        self.reserve_table_bytes
    }

    /// Makes chunks present until the reserve is full: the lowest absent ones first, then new ones. `prepare`
    /// is called with the pages of each chunk before they can be taken, and populates their entries in other
    /// tables. No lock is held during the call. Only one thread at a time may call this. Fails with `NoSpace`
    /// when the limit is reached or the reservation used up, `NoMemory` when the system gives no more, and
    /// errors of `prepare`: chunks filled until then stay.
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

    /// Registers the refiller: the thread is unparked when a run is taken and the reserve is not full, once
    /// until its call of [`Arena::refill`] succeeds.
    pub fn set_refiller(&self, thread: Option<Thread>) {
        self.inner.lock().refiller = Helper { thread, is_told: false };
    }

    /// Gives all free memory back to the system, except the reserve. May wait for other threads.
    pub fn release_kept(&self) {
        self.release_free();
        if self.has_reserve() {
            self.release_chunks_beyond(self.reserve_chunks, || true);
        }
    }

    /// Returns an absent chunk to fill, which belongs to the caller; `None` if the reserve is full.
    fn chunk_to_fill(&self) -> Result<Option<usize>> {
        let next = {
            let mut inner = self.inner.lock();
            if inner.runs.free_chunks() >= self.reserve_chunks {
                inner.refiller.is_told = false;
                return Ok(None);
            }
            if let Some(chunk) = inner.runs.take_absent() {
                inner.chunks_on_their_way = 1;
                return Ok(Some(chunk));
            }
            inner.runs.chunks()
        };
        // Only the refiller adds chunks.
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

    /// Charges the pages of a chunk that belongs to the caller, and populates them.
    fn fill(&self, chunk: usize, prepare: impl Fn(Range<u32>) -> Result<()>) -> Result<()> {
        #[cfg(test)]
        if self.holds_refills.get() != 0 {
            return Err(Error::new(ErrorKind::NoMemory, "injected: no chunk"));
        }
        let first = chunk as u32 * CHUNK_PAGES;
        // Pages that the system did not take back are still charged.
        let new = |group| self.resident[group].load(Ordering::Relaxed).count_zeros();
        let new = groups_of(chunk).map(new).sum::<u32>();
        if !self.usage.charged_pages.add_within(u64::from(new), self.limit_pages.get()) {
            return Err(Full.into());
        }
        groups_of(chunk).for_each(|group| self.resident[group].store(u64::MAX, Ordering::Relaxed));
        prepare(first..first + CHUNK_PAGES)?;
        self.mapping.populate(chunk * CHUNK_BYTES, CHUNK_BYTES)
    }

    /// Gives the memory of an absent chunk back to the system. The chunk belongs to the caller until this
    /// returns.
    fn empty(&self, chunk: usize) {
        // SAFETY: no run of an absent chunk is taken, and this one belongs to the caller.
        if unsafe { self.mapping.release(chunk * CHUNK_BYTES, CHUNK_BYTES) } {
            groups_of(chunk).for_each(|group| self.is_released(group, u64::MAX));
        }
        self.inner.lock().runs.leave_absent(chunk);
    }

    /// Wakes the refiller if the reserve is not full. Called after a run was taken.
    #[inline]
    pub(super) fn look_at_reserve(&self, inner: MutexGuard<'_, Inner>) {
        if inner.runs.free_chunks() < self.reserve_chunks {
            self.look_for_lack(&inner);
            tell(inner, |inner| &mut inner.refiller);
        }
    }

    fn look_for_lack(&self, inner: &Inner) -> bool {
        let free = inner.runs.free_chunks() + inner.chunks_on_their_way;
        let lacks = free < self.chunks_free_at_limit() && !self.limit_allows_chunk();
        if lacks != self.may_lack_reserve() {
            self.lacks_reserve.set(u64::from(lacks));
        }
        lacks
    }

    /// Returns the number of chunks that must be free when the limit is reached.
    fn chunks_free_at_limit(&self) -> usize {
        let most = self.limit_pages() / u64::from(2 * CHUNK_PAGES);
        self.reserve_chunks.min(most as usize)
    }

    fn limit_allows_chunk(&self) -> bool {
        let limit_pages = self.limit_pages();
        limit_pages == 0 || self.charged_pages() + u64::from(CHUNK_PAGES) <= limit_pages
    }

    /// Returns the error that says why there is no free chunk.
    #[cold]
    pub(super) fn drained(&self, inner: &Inner) -> Error {
        if !self.limit_allows_chunk() {
            return Full.into();
        }
        if inner.runs.chunks() * CHUNK_PAGES as usize >= self.reserved_pages() && !inner.runs.has_absent() {
            return used_up();
        }
        Error::new(ErrorKind::NoMemory, "the memory reserve is drained and being refilled")
            .with_setting("reserve")
    }

    /// Wakes the releaser if more than the reserve and `keep_pages` are free. Called after a free.
    pub(super) fn tell_of_surplus_chunks(&self, inner: MutexGuard<'_, Inner>, keep_pages: u64) {
        if inner.runs.free_chunks() > self.reserve_chunks + chunks_of(keep_pages) {
            tell(inner, |inner| &mut inner.releaser);
        }
    }

    /// Implements [`Arena::release_surplus`] for arenas with a reserve.
    pub(super) fn release_surplus_chunks(&self) {
        self.inner.lock().releaser.is_told = false;
        let kept = chunks_of(self.keep_pages());
        let most = self.reserve_chunks + kept;
        if self.charged_pages() > self.all_used_pages() + most as u64 * u64::from(CHUNK_PAGES) {
            // A few cached runs may keep many chunks from being free.
            self.flush_caches();
        }
        let free = self.inner.lock().runs.free_chunks();
        if free > most {
            self.release_chunks_beyond(self.reserve_chunks + kept / 2, || true);
        }
        // Memory that was used when the limit was lowered, and is free now.
        self.release_beyond_limit();
    }

    pub(super) fn release_chunk_if_surplus(&self, chunk: usize) {
        let _reclaim = self.reclaim.lock();
        let inner = self.inner.lock();
        if inner.runs.can_be_taken(chunk) && inner.runs.free_chunks() > self.reserve_chunks {
            self.take_away(inner, chunk);
        }
    }

    pub(super) fn retry_refill(&self) {
        let refiller = {
            let inner = self.inner.lock();
            self.look_for_lack(&inner);
            inner.refiller.thread.clone()
        };
        refiller.iter().for_each(Thread::unpark);
    }

    /// Implements [`Arena::release_beyond_limit`] for arenas with a reserve: chunks of the reserve go, too.
    pub(super) fn release_chunks_beyond_limit(&self) {
        self.flush_caches();
        self.release_chunks_beyond(0, || self.is_beyond_limit());
    }

    /// Gives free chunks back, the highest first, while more than `keep` are free and `goes_on` returns true.
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

    fn take_away(&self, mut inner: MutexGuard<'_, Inner>, chunk: usize) {
        inner.runs.take_away(chunk);
        inner.free_resident_pages -= u64::from(CHUNK_PAGES);
        // The refiller may succeed now where the limit stopped it before.
        inner.refiller.is_told = false;
        drop(inner);
        self.empty(chunk);
    }
}

fn chunks_of(pages: u64) -> usize {
    pages.div_ceil(u64::from(CHUNK_PAGES)) as usize
}
