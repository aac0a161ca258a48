//! Evicting: pages leave the program's memory.
//! 1. Each becomes `Leaving`, unless it is pinned ([`Core::take`]).
//! 2. The kernel moves the pages to a shelf: nobody can change them any more. Most wait there, and leave
//!    later.
//! 3. A page is written to the store, unless its copy there is the same ([`Core::finish`]).
//! 4. The pages' memory goes back to the system; pages that the store had no room for are given back.
//! 5. The states become `Out`: the commit point. A page that was touched meanwhile is loaded again.

use std::sync::atomic::{AtomicU64, Ordering};

use uzram::store::{BackingState, PageNo, Wait};
use uzram::units::{PAGE_SIZE, Page};

use super::{Core, Fault, Next, lock, take_one, tried};
use crate::MOST_PAGES;
use crate::map::Part;
use crate::state::Place;
use crate::uffd::{RETRY, Staging, Tells};
use crate::waiting::Waiting;

/// Pages that one thread evicts alone: it takes about as long as starting some threads, several times over.
const MOST_ALONE: usize = 1024;
/// Pages that leave together if all are cold: 64 KiB.
const GROUP_PAGES: u32 = 16;
/// The most threads that help to evict.
const MOST_HELPERS: usize = 3;

/// A page that was taken from the program.
#[derive(Clone, Copy, Default)]
struct Taken {
    page: u64,
    /// Its place on the shelf.
    nth: usize,
    /// Whether the store had a copy, and whether it has its contents by now.
    copied: bool,
    stored: bool,
}

struct Take {
    pages: [Taken; MOST_PAGES],
    count: usize,
}

impl Take {
    fn new() -> Take {
        Take { pages: [Taken::default(); MOST_PAGES], count: 0 }
    }

    fn add(&mut self, page: u64, nth: usize, copied: bool) {
        self.pages[self.count] = Taken { page, nth, copied, stored: false };
        self.count += 1;
    }
}

/// Returns the number of a place on one of the shelves of pages that wait; it is not 0.
fn slot(shelf: usize, nth: usize) -> u32 {
    (shelf * MOST_PAGES + nth) as u32 + 1
}

impl Core {
    /// Takes the coldest pages, which wait on a shelf from now on. Returns how many: none without a free one.
    /// `may_copy`: also those that a child has, which takes as much memory again, and may be a touch.
    pub(super) fn take_cold(&self, waiting: &mut Waiting, may_copy: bool) -> usize {
        let Some(shelf) = waiting.free_shelf() else { return 0 };
        let mut pages = std::mem::take(&mut waiting.cold);
        pages.clear();
        self.isolate(&mut pages);
        let all = || pages.iter().map(|page| u64::from(*page));
        let mut take = Take::new();
        if self.take(&self.shelves[shelf], all(), &mut take) && may_copy {
            for page in all().filter(|page| self.state(*page).get().place() == Place::In) {
                let part = self.map().of(page, 1);
                part.into_iter().for_each(|part| self.uffd.make_own(part));
            }
            self.take(&self.shelves[shelf], all(), &mut take);
        }
        let taken = &take.pages[..take.count];
        for Taken { page, nth, .. } in taken {
            self.slots[*page as usize].store(slot(shelf, *nth), Ordering::Release);
        }
        waiting.add(taken.iter().map(|taken| taken.page as u32));
        // Under the lock: who evicts the batch takes those that do not wait for touched ones.
        taken.iter().for_each(|taken| self.end(taken.page, Place::Waiting, taken.copied));
        // Those that stayed.
        pages.retain(|page| !taken.iter().any(|taken| taken.page == u64::from(*page)));
        self.lru.put_back(&pages);
        waiting.cold = pages;
        take.count
    }

    /// Isolates cold pages for a batch: the coldest, and those in the 64 KiB around each that are inactive,
    /// too: the kernel moves neighbours together in a fraction of the time. Sorts them.
    fn isolate(&self, pages: &mut Vec<u32>) {
        let most = self.room.batch_pages();
        while pages.len() < most {
            let found = pages.len();
            // As many as are enough if all have such neighbours: each call locks all lists.
            self.lru.isolate((most - found).div_ceil(GROUP_PAGES as usize), pages);
            if pages.len() == found {
                break;
            }
            for coldest in found..pages.len() {
                let first = pages[coldest] & !(GROUP_PAGES - 1);
                let mut group: [u32; GROUP_PAGES as usize] = std::array::from_fn(|nth| first + nth as u32);
                let group = &mut group[..(most - pages.len()).min(GROUP_PAGES as usize)];
                let count = self.lru.isolate_inactive(group);
                pages.extend(&group[..count]);
            }
        }
        pages.sort_unstable();
    }

    /// Evicts the pages of the oldest batch that wait still. Returns false without one, or without room.
    fn evict_oldest(&self, waiting: &mut Waiting) -> bool {
        let Some((shelf, pages)) = waiting.oldest() else { return false };
        let mut take = Take::new();
        for (nth, page) in pages.iter().enumerate() {
            let is_here = || self.slots[*page as usize].load(Ordering::Acquire) == slot(shelf, nth);
            let state = self.state(u64::from(*page));
            let start = || state.start(Place::Waiting, Place::Leaving);
            let mut started = start();
            // A thread that opens it may not have done so yet, or fail: the shelf must stay as it is.
            while started.is_none() && is_here() {
                std::thread::yield_now();
                started = start();
            }
            let Some(copied) = started else { continue };
            if is_here() {
                take.add(u64::from(*page), nth, copied);
            } else {
                // It was touched, and waits in a later batch.
                self.end(u64::from(*page), Place::Waiting, copied);
            }
        }
        let left = self.finish(&self.shelves[shelf], &mut take);
        waiting.remove_oldest();
        left > 0 || take.count == 0
    }

    /// Returns the place of a page that waits: its shelf, and where it lies on that.
    pub(super) fn slot(&self, page: u64) -> (&Staging, usize) {
        let at = self.slots[page as usize].load(Ordering::Acquire) as usize - 1;
        (&self.shelves[at / MOST_PAGES], at % MOST_PAGES)
    }

    /// Opens a page that was to leave, and that the caller owns.
    pub(super) fn reopen(&self, page: u64, copied: bool, waits: bool) -> Fault {
        // The shelf is not released before the slot is 0.
        let (shelf, nth) = self.slot(page);
        if !self.give_back(shelf, nth, page, waits, false) {
            self.end(page, Place::Waiting, copied);
            return Fault::Changing;
        }
        shelf.reopened.fetch_add(1, Ordering::Relaxed);
        self.room.twice_pages.add(1);
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
        Fault::Done
    }

    /// Opens a page again that was taken: `moves` or copies it. Returns false if the memory map is changing,
    /// unless it `waits`.
    fn give_back(&self, shelf: &Staging, nth: usize, page: u64, waits: bool, moves: bool) -> bool {
        loop {
            let map = self.map();
            // What is not mapped or needed any more stays away. The lock keeps it so.
            let part = map.of(page, 1).filter(|_| !self.state(page).get().is_copied());
            if part.is_none_or(|part| self.uffd.give_back(shelf, nth, part, moves)) {
                return true;
            }
            drop(map);
            if !waits {
                return false;
            }
            std::thread::yield_now();
        }
    }

    /// Takes pages, in ascending order, as far as they are in memory and may leave, besides those that lie on
    /// the shelf. Returns whether a child has some of the others, too.
    fn take(&self, shelf: &Staging, pages: impl Iterator<Item = u64>, take: &mut Take) -> bool {
        let (mut pages, mut is_any_shared) = (pages.peekable(), false);
        while let Some(first) = pages.next() {
            if self.state(first).get().place() != Place::In {
                continue;
            }
            // Not for longer: who changes it waits, and all touches with him.
            tried(|| (self.changers.load(Ordering::Relaxed) == 0).then_some(()));
            let map = self.map();
            let Some(part) = map.of(first, MOST_PAGES).filter(|_| !map.is_doubtful) else { continue };
            let (mut copied, mut count) = ([false; MOST_PAGES], 0);
            let start = |page| self.state(page).start(Place::In, Place::Leaving);
            // Neighbours are taken together.
            let mut next = Some(first);
            while let Some(is_copied) = next.and_then(start) {
                copied[count] = is_copied;
                count += 1;
                next = pages.next_if(|page| count < part.pages && *page == first + count as u64);
            }
            let mut from = 0;
            while from < count {
                let (done, is_shared) = self.uffd.take(shelf, take.count, part.from(from, count - from));
                for (page, is_copied) in (first + from as u64..).zip(&copied[from..from + done]) {
                    take.add(page, take.count, *is_copied);
                }
                from += done;
                if from < count {
                    let page = first + from as u64;
                    is_any_shared |= is_shared;
                    self.shares.local().busy.add(1);
                    if self.end_quietly(page, Place::In, copied[from]) {
                        self.wake(&map, page);
                    }
                    from += 1;
                }
            }
        }
        is_any_shared
    }

    /// Stores pages that were taken, gives their memory back, and ends their states. Those for which there is
    /// no room are given back to the program. The shelf is empty then. Returns how many left.
    fn finish(&self, shelf: &Staging, take: &mut Take) -> usize {
        let taken = &mut take.pages[..take.count];
        for Taken { page, nth, copied, stored } in &mut *taken {
            *stored = self.write(PageNo::from_number(*page), shelf.page(*nth), *copied);
        }
        for taken in taken.iter().filter(|taken| !taken.stored) {
            self.give_back(shelf, taken.nth, taken.page, true, true);
        }
        shelf.release();
        self.room.twice_pages.sub(shelf.reopened.swap(0, Ordering::Relaxed));
        let share = self.shares.local();
        let (mut dead, mut dead_count, mut left) = ([0; MOST_PAGES], 0, 0);
        for Taken { page, copied, stored, .. } in taken {
            self.copied_pages.sub(u64::from(*copied));
            if !*stored {
                share.no_room.add(1);
                self.lru.put_back(&[*page as u32]);
                self.end(*page, Place::In, false);
                continue;
            }
            share.pages_out.add(1);
            self.room.resident_pages.sub(1);
            if self.lru.leave(*page as u32) {
                dead[dead_count] = *page as u32;
                dead_count += 1;
            }
            self.end(*page, Place::Out, false);
            left += 1;
        }
        self.lru.remove_dead(&mut dead[..dead_count]);
        left
    }

    /// Writes a page, unless the store has the same contents. Returns false without room: then it has none.
    fn write(&self, page: PageNo, contents: &Page, copied: bool) -> bool {
        // To read it from the spill file would take longer than to compress the page.
        let is_same =
            |copy: &mut Page| self.store.read_wait(page, copy, Wait::No).is_ok() && copy == contents;
        if copied && is_same(&mut [0; PAGE_SIZE]) {
            self.shares.local().pages_unchanged.add(1);
            return true;
        }
        let is_written = self.store.write(page, contents).is_ok();
        if !is_written {
            self.store.discard(page);
        }
        is_written
    }

    /// Sets compressed memory's share of the limit, by the room in the spill file. Returns whether it has
    /// more.
    pub(crate) fn share_memory(&self) -> bool {
        if self.spill.is_none() {
            return false;
        }
        let [without_room, with_room] = self.most_compressed;
        let is_full = self.store.backing_state() == Some(BackingState::Full);
        let (before, now) = (self.store.limit_pages(), if is_full { without_room } else { with_room });
        if before != now {
            self.store.set_limit_pages(now);
        }
        before < now
    }

    /// Returns whether the store has room again once the spill file is written.
    pub(crate) fn waits_for_spill(&self) -> bool {
        let state = self.store.backing_state();
        let takes_pages = matches!(state, Some(BackingState::Ok | BackingState::Degraded(_)));
        takes_pages && 2 * self.store.charged_pages() > self.store.limit_pages()
    }

    /// Makes room until memory is below the low watermark. `has_rested`: after [`Next::Later`].
    pub(crate) fn make_room(&self, mut has_rested: bool) -> Next {
        let (mut has_failed, is_own) = (false, self.uffd.tells != Tells::Changes);
        while self.room.is_above_low() && !self.ends.load(Ordering::Relaxed) {
            let mut waiting = lock(&self.waiting);
            let goes_on = match waiting.free_shelves() {
                // Left to threads that fault, unless they come faster than pages leave.
                1 if !has_rested && is_own && !self.room.is_urgent() => return Next::Later,
                // No room is made by that yet: if none could be made, one batch is tried.
                1.. if (waiting.oldest().is_none() || !self.room.gives_up())
                    && self.take_cold(&mut waiting, true) > 0 =>
                {
                    continue;
                }
                free => {
                    has_rested &= free > 0;
                    self.evict_oldest(&mut waiting)
                }
            };
            drop(waiting);
            let goes_on = goes_on || self.share_memory();
            // One write that fails is none that fails for good: the limit holds until the next one.
            if !goes_on && !std::mem::replace(&mut has_failed, true) {
                std::thread::sleep(RETRY);
                continue;
            }
            has_failed = !goes_on;
            self.room.made(goes_on);
            if !goes_on {
                return Next::Stuck;
            }
        }
        self.room.made(true);
        Next::Enough
    }

    /// Evicts pages, as far as they may leave; many on several CPUs.
    pub(crate) fn page_out(&self, part: Part) {
        let (next, most) = (AtomicU64::new(part.first), self.room.batch_pages() as u64);
        let work = || {
            loop {
                let first = next.fetch_add(most, Ordering::Relaxed);
                if first >= part.numbers().end {
                    return;
                }
                let last = part.numbers().end.min(first + most);
                // The program may be here before the thread that brought a page has ended its state.
                (first..last).for_each(|page| self.wait_while(page, Place::Loading));
                let (bench, mut take) = (take_one(&self.benches), Take::new());
                self.take(&bench.shelf, first..last, &mut take);
                self.finish(&bench.shelf, &mut take);
            }
        };
        let helpers = match part.pages {
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
        if part.numbers().any(|page| self.state(page).get().place() == Place::Waiting) {
            let mut waiting = lock(&self.waiting);
            while waiting.oldest().is_some() {
                self.evict_oldest(&mut waiting);
            }
        }
    }
}
