//! Evicting: pages leave the program's memory ([`Core::evict`]).
//! 1. Each becomes `Leaving`, unless it is pinned.
//! 2. The trap takes the pages: nobody can change them any more.
//! 3. A page whose copy in the store is the same is done. Any other is written to the store. Trapping the
//!    first write instead of comparing would cost a fault, more than decompressing the copy does.
//! 4. The pages' memory goes back to the system; pages that the store had no room for are given back.
//! 5. The states become `Out`: the commit point. A page that was touched meanwhile is loaded again.

use std::sync::TryLockError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use uzram::store::{BackingState, PageNo, Wait};
use uzram::units::{PAGE_SIZE, Page};

use super::{Core, Leave, Next, lock};
use crate::areas::Run;
use crate::bench::Bench;
use crate::state::Place;
use crate::trap::{MOST_PAGES, Trap};
use crate::waiting::Waiting;

/// Pages that one thread evicts alone: it takes about as long as starting some threads, several times over.
const MOST_ALONE: usize = 1024;
/// The most threads that help to evict.
const MOST_HELPERS: usize = 3;

/// A page that was taken from the program.
#[derive(Clone, Copy, Default)]
struct Taken {
    page: u64,
    /// Its place on the shelf.
    nth: usize,
    /// Whether the store has a copy.
    copied: bool,
    /// Whether its contents are in the store by now, or to be discarded; if not, it is given back.
    stored: bool,
}

/// Returns the number of a place on one of the shelves of pages that wait; it is not 0.
fn slot(shelf: usize, nth: usize) -> u32 {
    (shelf * MOST_PAGES + nth) as u32 + 1
}

impl<T: Trap> Core<T> {
    /// Takes the coldest pages from the program, unless another thread is at that. Returns whether the
    /// evictor is to be woken.
    ///
    /// For threads that fault, while the evictor rests: the system interrupts each CPU on which a thread of
    /// this process runs for each page that it traps, and that takes longer than everything else. Here the
    /// evictor, which runs alone most of the time, is not one of them.
    pub(super) fn help(&self) -> bool {
        let mut waiting = match self.waiting.try_lock() {
            Ok(waiting) => waiting,
            Err(TryLockError::Poisoned(waiting)) => waiting.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        self.take_cold(&mut waiting);
        true
    }

    /// Takes the coldest pages from the program, which wait on a shelf from now on. Returns how many: none
    /// without a free one.
    fn take_cold(&self, waiting: &mut Waiting) -> usize {
        let Some(shelf) = waiting.free_shelf() else { return 0 };
        let mut pages = std::mem::take(&mut waiting.cold);
        pages.clear();
        self.lru.isolate(self.room.batch_pages(), &mut pages);
        pages.sort_unstable();
        let mut taken = [Taken::default(); MOST_PAGES];
        let all = pages.iter().map(|page| u64::from(*page));
        let count = self.take_all(&self.shelves[shelf], all, &mut taken);
        let taken = &taken[..count];
        for Taken { page, nth, .. } in taken {
            self.slots[*page as usize].store(slot(shelf, *nth), Ordering::Release);
        }
        waiting.add(taken.iter().map(|taken| taken.page as u32));
        // Under the lock: who evicts the batch takes those that do not wait for touched ones.
        taken.iter().for_each(|taken| self.end(taken.page, Place::Waiting, taken.copied));
        // Those that stayed.
        pages.retain(|page| taken.binary_search_by_key(&u64::from(*page), |taken| taken.page).is_err());
        self.lru.put_back(&pages);
        waiting.cold = pages;
        count
    }

    /// Evicts the pages of the oldest batch that wait still. Returns false if there is no batch, or no room
    /// for any of its pages.
    fn evict_oldest(&self, waiting: &mut Waiting) -> bool {
        let Some((shelf, pages)) = waiting.oldest() else { return false };
        let (mut taken, mut count) = ([Taken::default(); MOST_PAGES], 0);
        for (nth, page) in pages.iter().enumerate() {
            let is_here = || self.slots[*page as usize].load(Ordering::Acquire) == slot(shelf, nth);
            let Some(copied) = self.state(u64::from(*page)).start_last() else {
                // A thread that opens it has not done so yet: the shelf must stay as it is.
                while is_here() && self.state(u64::from(*page)).get().place() == Place::Loading {
                    std::thread::yield_now();
                }
                continue;
            };
            if is_here() {
                taken[count] = Taken { page: u64::from(*page), nth, copied, stored: true };
                count += 1;
            } else {
                // It was touched, and waits in a later batch.
                self.end(u64::from(*page), Place::Waiting, copied);
            }
        }
        let taken = &mut taken[..count];
        let mut bench = self.benches.take();
        self.finish(&self.shelves[shelf], &mut *bench.buffer, taken, Leave::Store);
        drop(bench);
        waiting.remove_oldest();
        self.left(taken, Leave::Store) > 0 || taken.is_empty()
    }

    /// Evicts all pages that wait for it.
    fn evict_waiting(&self) {
        let mut waiting = lock(&self.waiting);
        while waiting.oldest().is_some() {
            self.evict_oldest(&mut waiting);
        }
    }

    /// Returns the place of a page that waits: its shelf, and where it lies on that.
    pub(super) fn slot(&self, page: u64) -> (&T::Shelf, usize) {
        let at = self.slots[page as usize].load(Ordering::Acquire) as usize - 1;
        (&self.shelves[at / MOST_PAGES], at % MOST_PAGES)
    }

    /// Opens a page that was to leave, and that the caller owns.
    pub(super) fn reopen(&self, page: u64, copied: bool) {
        // The shelf is not released before the slot is 0.
        let (shelf, nth) = self.slot(page);
        self.trap.give_back(shelf, nth, Run::new(page, 1));
        self.slots[page as usize].store(0, Ordering::Release);
        if copied {
            // It is in use, and stays for a while: others have more of a copy.
            self.store.discard(PageNo::from_number(page));
            self.copied_pages.sub(1);
        }
        self.lru.mark(page as u32);
        self.lru.put_back(&[page as u32]);
        self.shares.local().pages_kept.add(1);
        self.end(page, Place::In, false);
    }

    /// Has pages leave that are in memory and may leave: up to [`MOST_PAGES`] pages, in ascending order.
    /// Returns how many left.
    pub(super) fn evict(&self, pages: impl Iterator<Item = u64>, leave: Leave) -> usize {
        let mut bench = self.benches.take();
        let mut taken = [Taken::default(); MOST_PAGES];
        let count = self.take_all(&bench.shelf, pages, &mut taken);
        let taken = &mut taken[..count];
        let Bench { shelf, buffer } = &mut *bench;
        self.finish(shelf, &mut **buffer, taken, leave);
        drop(bench);
        self.left(taken, leave)
    }

    /// Takes pages, in ascending order, as far as they are in memory and may leave. Returns how many.
    fn take_all(
        &self,
        shelf: &T::Shelf,
        pages: impl Iterator<Item = u64>,
        taken: &mut [Taken; MOST_PAGES],
    ) -> usize {
        let (mut len, mut pages) = (0, pages.peekable());
        while let Some(first) = pages.next() {
            let claim = |page| {
                let copied = self.state(page).start_leave()?;
                Some(Taken { page, nth: 0, copied, stored: true })
            };
            let Some(claimed) = claim(first) else { continue };
            taken[len] = claimed;
            let mut count = 1;
            // Neighbours are taken together.
            while let Some(next) = pages.next_if_eq(&(first + count as u64)) {
                let Some(claimed) = claim(next) else { break };
                taken[len + count] = claimed;
                count += 1;
            }
            len = self.take(shelf, taken, len, count);
        }
        taken[..len].iter_mut().enumerate().for_each(|(nth, taken)| taken.nth = nth);
        len
    }

    /// Takes `count` neighbours, behind `len` pages that were taken before. Returns the pages that are taken
    /// by now: those that could not be taken are in memory again.
    fn take(&self, shelf: &T::Shelf, taken: &mut [Taken], mut len: usize, count: usize) -> usize {
        let (mut from, end) = (len, len + count);
        while from < end {
            let run = Run::new(taken[from].page, end - from);
            let pages = self.trap.take(shelf, len, run);
            taken.copy_within(from..from + pages, len);
            (from, len) = (from + pages, len + pages);
            if from < end {
                let Taken { page, copied, .. } = taken[from];
                self.shares.local().busy.add(1);
                self.end(page, Place::In, copied);
                from += 1;
            }
        }
        len
    }

    /// Stores the contents of pages that were taken, or discards them, and gives their memory back. Those for
    /// which there is no room are given back to the program. All that was on the shelf has been given back
    /// then, or is released.
    fn finish(&self, shelf: &T::Shelf, buffer: &mut [Page], taken: &mut [Taken], leave: Leave) {
        let is_next = |a: &Taken, b: &Taken| a.page + 1 == b.page && a.nth + 1 == b.nth;
        for chunk in taken.chunk_by_mut(is_next) {
            let run = Run::new(chunk[0].page, chunk.len());
            if leave == Leave::Discard {
                self.store.discard_pages(run.numbers());
                continue;
            }
            let contents = self.trap.read(shelf, chunk[0].nth, run, buffer);
            for (at, taken) in chunk.iter_mut().enumerate() {
                taken.stored = contents.is_some_and(|contents| {
                    self.write(PageNo::from_number(taken.page), &contents[at], taken.copied)
                });
            }
        }
        let runs = || {
            let same = |a: &Taken, b: &Taken| a.stored == b.stored && is_next(a, b);
            taken.chunk_by(same).map(|chunk| (chunk[0], Run::new(chunk[0].page, chunk.len())))
        };
        for (first, run) in runs().filter(|(first, _)| !first.stored) {
            self.trap.give_back(shelf, first.nth, run);
        }
        self.trap.release(shelf, runs().filter(|(first, _)| first.stored).map(|(_, run)| run));
    }

    /// Ends the states of pages that were taken. Returns how many left.
    fn left(&self, taken: &[Taken], leave: Leave) -> usize {
        let share = self.shares.local();
        let (mut dead, mut dead_count, mut left) = ([0; MOST_PAGES], 0, 0);
        for Taken { page, copied, stored, .. } in taken {
            self.copied_pages.sub(u64::from(*copied));
            if !stored {
                share.no_room.add(1);
                self.lru.put_back(&[*page as u32]);
                self.end(*page, Place::In, false);
                continue;
            }
            share.pages_out.add(1);
            self.room.left(1, leave == Leave::Discard);
            if self.lru.leave(*page as u32) {
                dead[dead_count] = *page as u32;
                dead_count += 1;
            }
            self.end(*page, if leave == Leave::Store { Place::Out } else { Place::New }, false);
            left += 1;
        }
        self.lru.remove_dead(&mut dead[..dead_count]);
        left
    }

    /// Writes a page to the store. Returns false if that has no room for it: then it has no copy of it
    /// either.
    fn write(&self, page: PageNo, contents: &Page, copied: bool) -> bool {
        if copied && self.is_same(page, contents) {
            self.shares.local().pages_unchanged.add(1);
            return true;
        }
        let is_written = self.store.write(page, contents).is_ok();
        if !is_written {
            self.store.discard(page);
        }
        is_written
    }

    /// Returns whether the store has these contents for a page in memory: to read them from the spill file
    /// would take longer than to compress the page.
    fn is_same(&self, page: PageNo, contents: &Page) -> bool {
        let mut copy = [0; PAGE_SIZE];
        self.store.read_wait(page, &mut copy, Wait::No).is_ok() && copy == *contents
    }

    /// Gives compressed memory the share of the limit that it has without a spill file while that is full.
    /// Returns whether it has more now.
    pub(crate) fn share_memory(&self) -> bool {
        let Some([without_room, with_room]) = self.most_compressed else { return false };
        let is_full = self.store.backing_state() == Some(BackingState::Full);
        let (before, now) = (self.store.limit_pages(), if is_full { without_room } else { with_room });
        if before != now {
            self.store.set_limit_pages(now);
        }
        before < now
    }

    /// Makes room until memory is below the low watermark. `has_rested`: the last call has returned
    /// [`Next::Later`].
    pub(crate) fn make_room(&self, mut has_rested: bool) -> Next {
        while self.room.is_above_low(&self.store)
            && !self.ends.load(Ordering::Relaxed)
            && !self.room.is_held()
        {
            let mut waiting = lock(&self.waiting);
            let goes_on = match waiting.free_shelves() {
                0 => {
                    has_rested = false;
                    self.evict_oldest(&mut waiting)
                }
                // Left to threads that fault, unless they come faster than pages leave.
                1 if !has_rested && !self.room.is_urgent(&self.store) => return Next::Later,
                _ => self.take_cold(&mut waiting) > 0 || self.evict_oldest(&mut waiting),
            };
            drop(waiting);
            let goes_on = goes_on || self.share_memory();
            self.room.made(goes_on);
            if !goes_on {
                return Next::Stuck;
            }
        }
        Next::Enough
    }

    /// Evicts the pages of a run, as far as they may leave; a long run on several CPUs.
    pub(crate) fn page_out(&self, run: Run) {
        let (next, most) = (AtomicU64::new(run.first), self.room.batch_pages() as u64);
        let work = || {
            loop {
                let first = next.fetch_add(most, Ordering::Relaxed);
                if first >= run.end() {
                    return;
                }
                let last = run.end().min(first + most);
                // The program may be here as soon as a page is open, before the thread that brought it has
                // ended its state.
                (first..last).for_each(|page| self.wait_while(page, Place::Loading));
                self.evict(first..last, Leave::Store);
            }
        };
        let helpers = match run.pages {
            ..MOST_ALONE => 0,
            _ => std::thread::available_parallelism().map_or(0, |cpus| (cpus.get() - 1).min(MOST_HELPERS)),
        };
        std::thread::scope(|scope| {
            for _ in 0..helpers {
                // Without it, this thread does more.
                let _ = std::thread::Builder::new().name("uzram-pager-out".into()).spawn_scoped(scope, work);
            }
            work();
        });
        if run.numbers().any(|page| self.state(page).get().place() == Place::Waiting) {
            self.evict_waiting();
        }
        self.note_change(Instant::now);
    }
}
