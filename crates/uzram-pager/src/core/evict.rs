//! Evicting: units leave the program's memory.
//!
//! **An eviction** ([`Core::evict`]):
//!
//! 1. Each becomes `Leaving`, unless it is pinned.
//! 2. The trap takes the pages: nobody can change them any more.
//! 3. A page whose copy in the store is the same is done. Any other is written to the store.
//! 4. The pages' memory goes back to the system; pages that the store had no room for are given back to the program.
//! 5. The states become `Out`: the commit point. A unit that was touched meanwhile is loaded again.
//!
//! Whether a page was changed since it was loaded is found out in step 3, by comparison. Trapping the first write would cost a
//! fault, more than decompressing the copy does; and the comparison needs no trap.

use std::sync::TryLockError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use uzram::store::{BackingState, PageNo, Wait};
use uzram::units::{PAGE_SIZE, Page};

use super::{Core, lock};
use crate::bench::Bench;
use crate::state::Place;
use crate::trap::{MOST_PAGES, Run, Trap};
use crate::waiting::Waiting;

/// Pages that one thread evicts alone: it takes about as long as starting some threads, several times over.
const MOST_ALONE: usize = 1024;
/// The most threads that help to evict.
const MOST_HELPERS: usize = 3;

/// What happens to the contents of units that leave.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Store,
    Discard,
}

/// What the evictor does next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing: there is room.
    Enough,
    /// It takes units itself, if no thread that faults has done so by then.
    Later,
    /// It tries again: nothing can leave.
    Stuck,
}

/// A unit that was taken from the program.
#[derive(Clone, Copy, Default)]
struct Taken {
    unit: u64,
    /// Its place on the shelf, in units.
    nth: usize,
    /// Whether the store has a copy.
    copied: bool,
    /// Whether its contents are in the store by now, or to be discarded; if not, it is given back.
    stored: bool,
}

/// Returns the number of a place, in units, on one of the shelves of units that wait; it is not 0.
fn slot(shelf: usize, nth: usize) -> u32 {
    (shelf * MOST_PAGES + nth) as u32 + 1
}

impl<T: Trap> Core<T> {
    /// Takes the coldest units from the program, unless another thread is at that. Returns whether the evictor is to be woken.
    ///
    /// For threads that fault, while the evictor rests: the system interrupts each CPU on which a thread of this process runs for
    /// each page that it traps, and that takes longer than everything else. Here the evictor, which runs alone most of the
    /// time, is not one of them.
    pub(super) fn help(&self) -> bool {
        let mut waiting = match self.waiting.try_lock() {
            Ok(waiting) => waiting,
            Err(TryLockError::Poisoned(waiting)) => waiting.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        self.take_cold(&mut waiting);
        true
    }

    /// Takes the coldest units from the program, which wait on a shelf from now on. Returns how many: none without a free one.
    fn take_cold(&self, waiting: &mut Waiting) -> usize {
        let Some(shelf) = waiting.free_shelf() else { return 0 };
        let mut units = std::mem::take(&mut waiting.cold);
        units.clear();
        self.lru.isolate(MOST_PAGES / self.unit_pages, &mut units);
        units.sort_unstable();
        let mut taken = [Taken::default(); MOST_PAGES];
        let all = units.iter().map(|unit| u64::from(*unit));
        let count = self.take_all(&self.shelves[shelf], all, &mut taken);
        let taken = &taken[..count];
        for Taken { unit, nth, .. } in taken {
            self.slots[*unit as usize].store(slot(shelf, *nth), Ordering::Release);
        }
        waiting.add(taken.iter().map(|taken| taken.unit as u32));
        // Under the lock: who evicts the batch takes those that do not wait for touched ones.
        taken.iter().for_each(|taken| self.end(taken.unit, Place::Waiting, taken.copied));
        // Those that stayed.
        units.retain(|unit| taken.binary_search_by_key(&u64::from(*unit), |taken| taken.unit).is_err());
        self.lru.put_back(&units);
        waiting.cold = units;
        count
    }

    /// Evicts the units of the oldest batch that wait still. Returns false if there is no batch, or no room for any of its units.
    fn evict_oldest(&self, waiting: &mut Waiting) -> bool {
        let Some((shelf, units)) = waiting.oldest() else { return false };
        let (mut taken, mut count) = ([Taken::default(); MOST_PAGES], 0);
        for (nth, unit) in units.iter().enumerate() {
            let is_here = || self.slots[*unit as usize].load(Ordering::Acquire) == slot(shelf, nth);
            let Some(copied) = self.state(u64::from(*unit)).start_last() else {
                // A thread that opens it has not done so yet: the shelf must stay as it is.
                while is_here() && self.state(u64::from(*unit)).get().place() == Place::Loading {
                    std::thread::yield_now();
                }
                continue;
            };
            if is_here() {
                taken[count] = Taken { unit: u64::from(*unit), nth, copied, stored: true };
                count += 1;
            } else {
                // It was touched, and waits in a later batch.
                self.end(u64::from(*unit), Place::Waiting, copied);
            }
        }
        let taken = &mut taken[..count];
        let mut bench = self.benches.take();
        self.finish(&self.shelves[shelf], &mut *bench.buffer, taken, Leave::Store);
        drop(bench);
        waiting.remove_oldest();
        self.left(taken, Leave::Store) > 0 || taken.is_empty()
    }

    /// Evicts all units that wait for it.
    fn evict_waiting(&self) {
        let mut waiting = lock(&self.waiting);
        while waiting.oldest().is_some() {
            self.evict_oldest(&mut waiting);
        }
    }

    /// Opens a unit that was to leave, and that the caller owns.
    pub(super) fn reopen(&self, unit: u64, copied: bool) {
        // The shelf is not released before the slot is 0.
        let slot = &self.slots[unit as usize];
        let at = slot.load(Ordering::Acquire) as usize - 1;
        let (shelf, nth) = (&self.shelves[at / MOST_PAGES], at % MOST_PAGES);
        self.trap.give_back(shelf, nth * self.unit_pages, self.run(unit, 1));
        slot.store(0, Ordering::Release);
        if copied {
            // It is in use, and stays for a while: others have more of a copy.
            self.store.discard_pages(Self::pages(self.run(unit, 1)));
            self.copied_units.sub(1);
        }
        self.lru.mark(unit as u32);
        self.lru.put_back(&[unit as u32]);
        self.shares.local().pages_kept.add(self.unit_pages as u64);
        self.end(unit, Place::In, false);
    }

    /// Has units leave that are in memory and may leave: up to [`MOST_PAGES`] pages, in ascending order. Returns how many left.
    pub(super) fn evict(&self, units: impl Iterator<Item = u64>, leave: Leave) -> usize {
        let mut bench = self.benches.take();
        let mut taken = [Taken::default(); MOST_PAGES];
        let count = self.take_all(&bench.shelf, units, &mut taken);
        let taken = &mut taken[..count];
        let Bench { shelf, buffer } = &mut *bench;
        self.finish(shelf, &mut **buffer, taken, leave);
        drop(bench);
        self.left(taken, leave)
    }

    /// Takes units, in ascending order, as far as they are in memory and may leave. Returns how many.
    fn take_all(
        &self,
        shelf: &T::Shelf,
        units: impl Iterator<Item = u64>,
        taken: &mut [Taken; MOST_PAGES],
    ) -> usize {
        let (mut len, mut units) = (0, units.peekable());
        while let Some(first) = units.next() {
            let claim = |unit| {
                let copied = self.state(unit).start_leave()?;
                Some(Taken { unit, nth: 0, copied, stored: true })
            };
            let Some(claimed) = claim(first) else { continue };
            taken[len] = claimed;
            let mut count = 1;
            // Neighbours are taken together.
            while let Some(next) = units.next_if_eq(&(first + count as u64)) {
                let Some(claimed) = claim(next) else { break };
                taken[len + count] = claimed;
                count += 1;
            }
            len = self.take(shelf, taken, len, count);
        }
        taken[..len].iter_mut().enumerate().for_each(|(nth, taken)| taken.nth = nth);
        len
    }

    /// Takes `count` neighbours, behind `len` units that were taken before. Returns the units that are taken by now: those that
    /// could not be taken are in memory again.
    fn take(&self, shelf: &T::Shelf, taken: &mut [Taken], mut len: usize, count: usize) -> usize {
        let (mut from, end) = (len, len + count);
        while from < end {
            let run = self.run(taken[from].unit, end - from);
            let pages = self.trap.take(shelf, len * self.unit_pages, run);
            let (units, rest) = (pages / self.unit_pages, pages % self.unit_pages);
            if rest > 0 {
                let part = Run { first: run.first + (pages - rest) as u64, pages: rest };
                self.trap.give_back(shelf, len * self.unit_pages + pages - rest, part);
            }
            taken.copy_within(from..from + units, len);
            (from, len) = (from + units, len + units);
            if from < end {
                let Taken { unit, copied, .. } = taken[from];
                self.shares.local().busy.add(1);
                self.end(unit, Place::In, copied);
                from += 1;
            }
        }
        len
    }

    /// Stores the contents of units that were taken, or discards them, and gives their memory back. Those for which there is no
    /// room are given back to the program. All that was on the shelf has been given back then, or is released.
    fn finish(&self, shelf: &T::Shelf, buffer: &mut [Page], taken: &mut [Taken], leave: Leave) {
        let is_next = |a: &Taken, b: &Taken| a.unit + 1 == b.unit && a.nth + 1 == b.nth;
        for chunk in taken.chunk_by_mut(is_next) {
            let run = self.run(chunk[0].unit, chunk.len());
            if leave == Leave::Discard {
                self.store.discard_pages(Self::pages(run));
                continue;
            }
            let contents = self.trap.read(shelf, chunk[0].nth * self.unit_pages, run, buffer);
            for (at, taken) in chunk.iter_mut().enumerate() {
                taken.stored = contents.is_some_and(|contents| {
                    let contents = &contents[at * self.unit_pages..][..self.unit_pages];
                    self.write(Self::pages(self.run(taken.unit, 1)).zip(contents), taken.copied)
                });
            }
        }
        let runs = || {
            let same = |a: &Taken, b: &Taken| a.stored == b.stored && is_next(a, b);
            taken.chunk_by(same).map(|chunk| (chunk[0], self.run(chunk[0].unit, chunk.len())))
        };
        for (first, run) in runs().filter(|(first, _)| !first.stored) {
            self.trap.give_back(shelf, first.nth * self.unit_pages, run);
        }
        self.trap.release(shelf, runs().filter(|(first, _)| first.stored).map(|(_, run)| run));
    }

    /// Ends the states of units that were taken. Returns how many left.
    fn left(&self, taken: &[Taken], leave: Leave) -> usize {
        let share = self.shares.local();
        let (mut dead, mut dead_count, mut left) = ([0; MOST_PAGES], 0, 0);
        for Taken { unit, copied, stored, .. } in taken {
            self.copied_units.sub(u64::from(*copied));
            if !stored {
                share.no_room.add(1);
                self.lru.put_back(&[*unit as u32]);
                self.end(*unit, Place::In, false);
                continue;
            }
            share.pages_out.add(self.unit_pages as u64);
            self.room.left(self.unit_pages, leave == Leave::Discard);
            if self.lru.leave(*unit as u32) {
                dead[dead_count] = *unit as u32;
                dead_count += 1;
            }
            self.end(*unit, if leave == Leave::Store { Place::Out } else { Place::New }, false);
            left += 1;
        }
        self.lru.remove_dead(&mut dead[..dead_count]);
        left
    }

    /// Writes the pages of a unit to the store. Returns false if it has no room for one: then it has none of them.
    fn write<'a>(&self, pages: impl Iterator<Item = (u64, &'a Page)> + Clone, copied: bool) -> bool {
        for (page, contents) in pages.clone() {
            let number = PageNo::from_number(page);
            if copied && self.is_same(number, contents) {
                self.shares.local().pages_unchanged.add(1);
                continue;
            }
            if self.store.write(number, contents).is_err() {
                pages.for_each(|(page, _)| self.store.discard(PageNo::from_number(page)));
                return false;
            }
        }
        true
    }

    /// Returns whether the store has these contents for a page in memory: to read them from the spill file would take longer than
    /// to compress the page.
    fn is_same(&self, page: PageNo, contents: &Page) -> bool {
        let mut copy = [0; PAGE_SIZE];
        self.store.read_wait(page, &mut copy, Wait::No).is_ok() && copy == *contents
    }

    /// Gives compressed memory the share of the limit that it has without a spill file while that is full. Returns whether it has more
    /// now.
    pub(crate) fn share_memory(&self) -> bool {
        let Some([without_room, with_room]) = self.most_compressed else { return false };
        let is_full = self.store.backing_state() == Some(BackingState::Full);
        let (before, now) = (self.store.limit_pages(), if is_full { without_room } else { with_room });
        if before != now {
            self.store.set_limit_pages(now);
        }
        before < now
    }

    /// Makes room until memory is below the low watermark. `has_rested`: the last call has returned [`Next::Later`].
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

    /// Evicts the units of a run of pages, as far as they may leave; a long run on several CPUs.
    pub(crate) fn page_out(&self, run: Run) {
        let most = MOST_PAGES / self.unit_pages;
        let units = self.units_of(run);
        let next = AtomicU64::new(units.start);
        let work = || {
            loop {
                let first = next.fetch_add(most as u64, Ordering::Relaxed);
                if first >= units.end {
                    return;
                }
                let count = most.min((units.end - first) as usize);
                // The program may be here as soon as a page is open, before the thread that brought it has ended its state.
                (first..first + count as u64).for_each(|unit| self.wait_while(unit, Place::Loading));
                self.evict(first..first + count as u64, Leave::Store);
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
        if self.units_of(run).any(|unit| self.state(unit).get().place() == Place::Waiting) {
            self.evict_waiting();
        }
        self.note_change(Instant::now);
    }
}
