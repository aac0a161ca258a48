//! Loading and evicting: the same for both ways to trap a touch. A page's [`State`] says where its contents
//! are, and which thread may move them.
//!
//! **A fault** ([`Core::fault`]):
//! 1. The state says what to do: the thread that makes it `Loading` loads the page, others wait for that.
//! 2. If memory is above the limit, the thread waits until the evictor has made room.
//! 3. The neighbours that are to come along are claimed in the same way.
//! 4. Their contents are read from the store into the bench's buffer, and placed all at once. The threads
//!    that wait for them run.
//! 5. The store's copies are freed, or kept if the touch was a read.
//! 6. The pages enter the LRU, and their states become `In`.

mod evict;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use uzram::cpu::PerCpu;
use uzram::lru::{Batched, Lru, LruConfig};
use uzram::mem::Table;
use uzram::store::{PageNo, Store};
use uzram::sync::{Arc, AtomicU32, Counter};
use uzram::units::{PAGE_SIZE, Page, bytes_to_pages};
use uzram::{Error, ErrorKind, Result};

use crate::areas::{Areas, Protection, Run, Use};
use crate::bench::Bench;
use crate::publisher::Publishing;
use crate::room::Room;
use crate::state::{Access, Place, State, Touched};
use crate::stats::{MemoryStats, PagerStats, Share, Stored, sum};
use crate::stock::Stock;
use crate::trap::{MOST_PAGES, RETRY, Trap};
use crate::waiting::Waiting;
use crate::waits::Waits;
use crate::window::Windows;

/// The share of the limit that pages take which wait to leave, and the most batches of them.
const WAITING_SHARE: u64 = 32;
const MOST_SHELVES: usize = 1024;
/// The share of pages in memory whose copies are kept. With more, the memory that copies take costs more
/// touches than they save compressing.
const COPIED_SHARE: u64 = 16;
/// The pages behind a new one come along with it while at least half of the memory is free, up to the next
/// multiple of so many: allocators hand out memory in blocks of 64 KiB.
const NEW_AT_ONCE: u64 = 16;

/// What happens to the contents of pages that leave.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leave {
    Store,
    Discard,
}

/// What the evictor does next.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing: there is room.
    Enough,
    /// It takes pages itself, if no thread that faults has done so by then.
    Later,
    /// It tries again: nothing can leave.
    Stuck,
}

/// See the [module's documentation](self).
pub(crate) struct Core<T: Trap> {
    pub(crate) trap: T,
    pub(crate) store: Arc<Store>,
    states: Table<State>,
    lru: Lru<Batched>,
    windows: Windows,
    waits: Waits,
    benches: Stock<Bench<T::Shelf>>,
    /// Pages that are to leave, and the shelves for them. Protected by the lock: which batch is on which
    /// shelf.
    waiting: Mutex<Waiting>,
    shelves: Box<[T::Shelf]>,
    /// Where each page that waits lies, or is being opened from; 0 for others. Written by the owner of the
    /// page's state.
    slots: Table<AtomicU32>,
    pub(crate) room: Room,
    shares: PerCpu<Share>,
    /// Pages whose copy in the store is kept while they are in memory.
    copied_pages: Counter,
    /// Which pages are mapped.
    areas: Arc<Mutex<Areas>>,
    /// What was unmapped, and has contents in the store still.
    closed: Mutex<Vec<Closed>>,
    /// Held while such contents are freed.
    cleaning: Mutex<()>,
    /// Held by the evictor while it works.
    pub(crate) evicting: Mutex<()>,
    /// Pages of all regions.
    mapped_pages: Counter,
    /// The most that was outside memory at once, as far as the evictor looked.
    most_stored: Mutex<Stored>,
    /// The most pages that the store takes while the spill file is full, and while it has room; `None`
    /// without one.
    most_compressed: Option<[u64; 2]>,
    /// Called by the evictor when the limit cannot be kept.
    pub(crate) on_excess: OnceLock<fn()>,
    pub(crate) publishing: Publishing,
    /// No thread waits any more: the pager is being dropped.
    pub(crate) ends: AtomicBool,
}

/// What was unmapped.
struct Closed {
    /// The pages that may have contents.
    contents: Run,
    /// The addresses that are free then.
    addresses: Run,
}

impl<T: Trap> Core<T> {
    /// Makes the core of a pager, for as many pages as the store has. `most_compressed` is for a store with a
    /// spill file, which finds cold pages itself: the most pages that it keeps in memory while that file is
    /// full, and while it has room. Errors: `NoMemory`.
    pub(crate) fn new(
        trap: T,
        areas: Arc<Mutex<Areas>>,
        store: Arc<Store>,
        limit_pages: u64,
        most_compressed: Option<[u64; 2]>,
    ) -> Result<Self> {
        let pages = store.pages();
        let room = Room::new(limit_pages, if most_compressed.is_some() { 2 } else { 1 });
        let shelves = (limit_pages / WAITING_SHARE) as usize / room.batch_pages();
        let shelves = shelves.clamp(1, MOST_SHELVES);
        let benches = 2 * std::thread::available_parallelism().map_or(1, usize::from) + 2;
        Ok(Core {
            benches: Stock::new(benches, |_| trap.shelf().map(Bench::new))?,
            waiting: Mutex::new(Waiting::new(shelves)),
            shelves: (0..shelves).map(|_| trap.shelf()).collect::<Result<_>>()?,
            slots: Table::new(pages as usize)?,
            trap,
            states: Table::new(pages as usize)?,
            lru: Lru::new(&LruConfig::new(pages))?,
            windows: Windows::default(),
            waits: Waits::new(),
            room,
            shares: PerCpu::new(|_| Share::default()),
            copied_pages: Counter::new(0),
            areas,
            closed: Mutex::default(),
            cleaning: Mutex::default(),
            evicting: Mutex::default(),
            mapped_pages: Counter::new(0),
            most_stored: Mutex::default(),
            most_compressed,
            on_excess: OnceLock::new(),
            publishing: Publishing::new(),
            ends: AtomicBool::new(false),
            store,
        })
    }

    fn state(&self, page: u64) -> &State {
        &self.states[page as usize]
    }

    pub(crate) fn stats(&self) -> PagerStats {
        PagerStats {
            limit_pages: self.room.limit_pages(),
            resident_pages: self.room.resident_pages(),
            compressed_pages: self.store.charged_pages(),
            used_pages: self.room.used_pages(&self.store),
            used_pages_max: self.room.most_used_pages(&self.store),
            mapped_pages: self.mapped_pages.get(),
            ..sum(&self.shares)
        }
    }

    /// Returns all figures.
    pub(crate) fn memory_stats(&self) -> MemoryStats {
        MemoryStats {
            runs: true,
            pager: self.stats(),
            stored: self.stored(),
            most_stored: self.most_stored(),
        }
    }

    /// Brings the page that was touched. `waits`: the caller is the thread that touched it, and returns only
    /// when the page is there. Returns false if there is nothing to bring.
    pub(crate) fn fault(&self, page: u64, writes: bool, waits: bool) -> bool {
        loop {
            let number = self.waits.number(page);
            match self.state(page).touch() {
                Touched::Load { stored } => {
                    let start = Instant::now();
                    self.make_way();
                    let loaded = self.load(page, stored, writes);
                    self.room.most_used_pages(&self.store);
                    let share = self.shares.local();
                    share.faults.add(1);
                    share.fault_us.add(start.elapsed().as_micros() as u64);
                    self.note_change(|| start);
                    return loaded;
                }
                Touched::Open { copied } => {
                    self.reopen(page, copied);
                    return true;
                }
                Touched::In if waits => return true,
                Touched::In => {
                    self.look(page);
                    return true;
                }
                Touched::Busy if waits => self.waits.wait(page, number),
                Touched::Busy => return true,
                Touched::Lost => return false,
            }
        }
    }

    /// Has figures published, if it is time, as something has changed.
    fn note_change(&self, now: impl FnOnce() -> Instant) {
        if self.publishing.is_due(now) {
            self.room.wake_evictor();
        }
    }

    /// Has room made for a page, above the high watermark, and waits for it if the page would exceed the
    /// limit.
    fn make_way(&self) {
        if self.room.has(1, &self.store) || self.room.gives_up() || self.room.is_held() {
            return;
        }
        if self.help() {
            self.room.wake_evictor();
        }
        self.room.wait_for_page(&self.store, || {
            self.shares.local().waits_for_room.add(1);
        });
    }

    /// Waits as long as a page is in a place that has an owner.
    fn wait_while(&self, page: u64, place: Place) {
        loop {
            let number = self.waits.number(page);
            if !self.state(page).want(place) {
                return;
            }
            self.waits.wait(page, number);
        }
    }

    /// Loads a page that the caller owns, and the neighbours that are to come along. Returns false if it
    /// cannot be read. Does not wait for room: the caller may be the evictor, which makes it.
    fn load(&self, page: u64, stored: bool, writes: bool) -> bool {
        let window = match self.state(page).get().access() {
            Access::Normal if !stored && self.room.is_half_free(&self.store) => {
                self.windows.next(page, (NEW_AT_ONCE - page % NEW_AT_ONCE) as usize)
            }
            Access::Normal => self.windows.next(page, 1),
            Access::Random => 1,
            Access::Sequential => MOST_PAGES,
        };
        let mut pages = [stored; MOST_PAGES];
        let has_room = |more: usize| self.room.has(1 + more, &self.store);
        let more = self.claim(page + 1, &mut pages[1..window], has_room);
        self.bring(page, &pages[..=more], writes) > 0
    }

    /// Claims pages next to each other to load them, as long as none is in memory, or another thread's, and
    /// `may` allows one more than it is given. Notes whether the store has contents of each; returns how many
    /// they are. Behind a region there is a page that is never claimed.
    fn claim(&self, first: u64, stored: &mut [bool], may: impl Fn(usize) -> bool) -> usize {
        for (nth, stored) in stored.iter_mut().enumerate() {
            let state = self.state(first + nth as u64);
            // What is pinned comes alone, or may not be touched at all.
            match (may(nth) && !state.get().is_pinned()).then(|| state.start_load()).flatten() {
                Some(is_stored) => *stored = is_stored,
                None => return nth,
            }
        }
        stored.len()
    }

    /// Brings pages next to each other that the caller owns, of which `stored` says whether the store has
    /// contents. Returns how many came.
    fn bring(&self, first: u64, stored: &[bool], writes: bool) -> usize {
        let mut bench = self.benches.take();
        let buffer = &mut bench.buffer;
        let mut good = 0;
        for (nth, stored) in stored.iter().enumerate() {
            let page = PageNo::from_number(first + nth as u64);
            if !stored {
                buffer[nth].fill(0);
            } else if self.store.read_once(page, &mut buffer[nth]).is_err() {
                break;
            }
            good += 1;
        }
        if good > 0 {
            self.place(&buffer[..good], Run::new(first, good));
        }
        drop(bench);
        // The pages that came along were not touched, so not written to either.
        let mut keeps = [false; MOST_PAGES];
        for (nth, (keeps, stored)) in keeps.iter_mut().zip(&stored[..good]).enumerate() {
            *keeps = *stored && (!writes || nth > 0) && self.may_copy();
            self.copied_pages.add(u64::from(*keeps));
        }
        self.free_copies(first, &stored[..good], &keeps);
        let share = self.shares.local();
        for (nth, stored) in stored.iter().enumerate() {
            let page = first + nth as u64;
            if nth < good {
                if *stored { &share.pages_in } else { &share.pages_new }.add(1);
                self.room.came(!stored);
                self.lru.add(page as u32);
                self.end(page, Place::In, keeps[nth]);
            } else if nth == 0 {
                self.trap.lose(page);
                share.pages_lost.add(1);
                self.end(page, Place::Bad, false);
            } else {
                self.end(page, if *stored { Place::Out } else { Place::New }, false);
            }
        }
        good
    }

    /// Frees the store's copies of pages next to each other that are in memory, and do not keep them.
    fn free_copies(&self, first: u64, stored: &[bool], keeps: &[bool]) {
        let mut nth = 0;
        let goes = |nth: usize| stored[nth] && !keeps[nth];
        while nth < stored.len() {
            let count = (nth..stored.len()).take_while(|nth| goes(*nth)).count();
            if count > 0 {
                self.store.discard_pages(Run::new(first + nth as u64, count).numbers());
            }
            nth += count + 1;
        }
    }

    /// Places pages. Waits for as long as the system gives no memory: nothing else can be done with contents
    /// that a program needs.
    fn place(&self, contents: &[Page], run: Run) {
        while self.trap.place(contents, run).is_err() {
            std::thread::sleep(RETRY);
        }
    }

    /// Returns whether another page in memory may keep its copy in the store: those of a share may, and all
    /// as long as there is memory in plenty; none may beyond the limit.
    fn may_copy(&self) -> bool {
        let copied_pages = self.copied_pages.get();
        (COPIED_SHARE * copied_pages <= self.room.resident_pages() && !self.room.gives_up())
            || self.room.is_half_free(&self.store)
    }

    /// Ends a state that the caller owns, and has threads that wait for the page go on.
    fn end(&self, page: u64, place: Place, copied: bool) {
        if self.state(page).end(place, copied) {
            self.waits.wake(page);
            match place {
                Place::In => self.trap.retry(page),
                Place::Out | Place::New | Place::Waiting => match self.state(page).touch() {
                    Touched::Load { stored } => drop(self.load(page, stored, false)),
                    Touched::Open { copied } => self.reopen(page, copied),
                    _ => {}
                },
                _ => {}
            }
        }
    }

    /// Brings a page that is said to be in memory, as zeros, if it is not: the program has given its memory
    /// back to the system.
    fn look(&self, page: u64) {
        let Some(copied) = self.state(page).start_look() else { return };
        let mut bench = self.benches.take();
        bench.buffer[0].fill(0);
        self.place(&bench.buffer[..1], Run::new(page, 1));
        drop(bench);
        self.end(page, Place::In, copied);
        self.trap.retry(page);
    }

    /// Loads the pages of a run, for as long as there is room for them.
    pub(crate) fn prefetch(&self, run: Run) {
        self.by_windows(run, |first, pages| {
            let mut at = 0;
            while at < pages && self.room.has(MOST_PAGES, &self.store) {
                let mut stored = [false; MOST_PAGES];
                let count = self.claim(first + at as u64, &mut stored[..pages - at], |_| true);
                if count > 0 {
                    self.bring(first + at as u64, &stored[..count], false);
                }
                at += count + 1;
            }
        });
    }

    /// Pins pages, so that they are in memory and stay there. Returns false if one of them cannot be read:
    /// then it is pinned, but not in memory.
    pub(crate) fn pin(&self, run: Run) -> bool {
        let pages = run.numbers();
        pages.clone().for_each(|page| self.state(page).pin(true));
        pages.fold(true, |all, page| {
            // An eviction that had begun ends, and then the page is loaded again.
            while !matches!(self.state(page).get().place(), Place::In | Place::Bad | Place::Gone) {
                self.fault(page, true, true);
            }
            all && self.state(page).get().place() == Place::In
        })
    }

    /// Ends [`Core::pin`] for the pages of a run for which `is_pinned` returns false.
    pub(crate) fn unpin(&self, run: Run, is_pinned: impl Fn(u64) -> bool) {
        for page in run.numbers() {
            if !is_pinned(page) {
                self.state(page).pin(false);
            }
        }
    }

    /// Says how pages are going to be touched.
    pub(crate) fn advise(&self, run: Run, access: Access) {
        run.numbers().for_each(|page| self.state(page).set_access(access));
    }

    /// Empties pages: they read as zeros.
    pub(crate) fn discard(&self, run: Run) {
        self.by_windows(run, |first, pages| {
            let takes_open = self.discard_open(first, pages);
            for page in first..first + pages as u64 {
                loop {
                    match self.state(page).get().place() {
                        Place::New | Place::Gone => break,
                        // It came meanwhile.
                        Place::In if takes_open && self.discard_open(page, 1) => {}
                        Place::In if self.evict(page..=page, Leave::Discard) > 0 => break,
                        // The kernel transfers data to it, or a thread is at it.
                        Place::In => {
                            self.zero(page);
                            break;
                        }
                        place @ (Place::Out | Place::Bad | Place::Waiting) => {
                            if let Some(copied) = self.state(page).start_discard(place) {
                                self.empty(page, place, copied);
                                self.end(page, Place::New, false);
                            }
                        }
                        place @ (Place::Loading | Place::Leaving) => self.wait_while(page, place),
                    }
                }
            }
        });
        self.note_change(Instant::now);
    }

    /// Empties those of up to [`MOST_PAGES`] pages that are in memory. Returns false if the trap does not
    /// take them as they are.
    fn discard_open(&self, first: u64, pages: usize) -> bool {
        let mut nth = 0;
        while nth < pages {
            let (mut copied, mut count) = ([false; MOST_PAGES], 0);
            let at = first + nth as u64;
            while nth + count < pages {
                let Some(is_copied) = self.state(at + count as u64).start_discard(Place::In) else { break };
                copied[count] = is_copied;
                count += 1;
            }
            let is_done = count == 0 || self.trap.discard(Run::new(at, count));
            if is_done && count > 0 {
                let copies = copied[..count].iter().filter(|is_copied| **is_copied).count();
                if copies > 0 {
                    self.store.discard_pages(Run::new(at, count).numbers());
                }
                self.copied_pages.sub(copies as u64);
                self.leave_lru(at, count);
                self.room.left(count, true);
            }
            for (nth, is_copied) in copied[..count].iter().enumerate() {
                let (place, is_copied) = if is_done { (Place::New, false) } else { (Place::In, *is_copied) };
                self.end(at + nth as u64, place, is_copied);
            }
            if !is_done {
                return false;
            }
            nth += count + 1;
        }
        true
    }

    /// Frees the contents of a page that the caller owns, and that was at this place.
    fn empty(&self, page: u64, was: Place, copied: bool) {
        match was {
            Place::Bad => self.trap.find(page),
            Place::Waiting => {
                self.slots[page as usize].store(0, Ordering::Release);
                self.trap.forget(page);
                self.lru.remove(page as u32);
                self.copied_pages.sub(u64::from(copied));
            }
            _ => {}
        }
        self.store.discard(PageNo::from_number(page));
        match was {
            Place::Waiting => self.room.left(1, true),
            _ => self.room.forgotten(1),
        }
    }

    /// Writes zeros to a page that is in memory.
    fn zero(&self, page: u64) {
        // SAFETY: the page is mapped and writable; the program lets it be emptied, and expects other threads'
        // accesses to see either contents.
        unsafe { self.trap.space().address(page).write_bytes(0, PAGE_SIZE) };
    }

    /// Maps memory of `len` bytes, all new pages. Errors: `NoSpace`, `NoMemory`.
    pub(crate) fn map(&self, len: usize) -> Result<Run> {
        let run = self.take_addresses(len).or_else(|_| {
            self.clean();
            self.take_addresses(len)
        })?;
        if let Err(error) = self.trap.map(run) {
            self.trap.unmap(run);
            lock(&self.areas).free(self.with_guard(run));
            return Err(error);
        }
        self.open(run);
        Ok(run)
    }

    /// Takes addresses for so many bytes, and the page behind them. Errors: `NoSpace`.
    fn take_addresses(&self, len: usize) -> Result<Run> {
        let full = || {
            let what = "the pager has no address space for a region of this size";
            Error::new(ErrorKind::NoSpace, what).with_setting("capacity")
        };
        let pages = bytes_to_pages(len as u64);
        let mut areas = lock(&self.areas);
        let first = areas.find(pages + 1, 1, 0).ok_or_else(full)?;
        let run = Run { first, pages: pages as usize };
        areas.set(self.with_guard(run), Use::Managed(Protection::READ_WRITE));
        self.bar(first + pages);
        Ok(run)
    }

    /// Returns a region's pages with the one behind them, which stays unmapped.
    fn with_guard(&self, run: Run) -> Run {
        Run { pages: run.pages + 1, ..run }
    }

    /// Has no window reach to a page that is not mapped, or beyond.
    pub(crate) fn bar(&self, page: u64) {
        self.state(page).close();
    }

    /// Makes mapped pages new.
    pub(crate) fn open(&self, run: Run) {
        run.numbers().for_each(|page| self.state(page).reopen());
        self.mapped_pages.add(run.pages as u64);
    }

    /// Notes that pages are mapped, all new: some may be in memory, see [`Core::note_present`].
    pub(crate) fn adopted(&self, run: Run) {
        self.mapped_pages.add(run.pages as u64);
    }

    /// Notes that pages are in memory that were not said to be.
    pub(crate) fn note_present(&self, run: Run) {
        for page in run.numbers() {
            if self.state(page).start_load().is_some() {
                self.room.came(true);
                self.lru.add(page as u32);
                self.end(page, Place::In, false);
            }
        }
    }

    /// Unmaps a region.
    pub(crate) fn unmap(&self, run: Run) {
        self.detach(run);
        self.clean_later(run, self.with_guard(run));
    }

    /// Has the contents of pages that were detached freed by the evictor, and then some addresses.
    pub(crate) fn clean_later(&self, contents: Run, addresses: Run) {
        lock(&self.closed).push(Closed { contents, addresses });
        self.room.wake_evictor();
    }

    /// Unmaps pages, which the program does not use any more. Their contents are still to be freed.
    pub(crate) fn detach(&self, run: Run) {
        let (mut resident, mut gone, mut copied) = (0, 0, 0);
        for page in run.numbers() {
            let was = loop {
                if let Some(was) = self.state(page).close() {
                    break was;
                }
                self.wait_while(page, Place::Loading);
                self.wait_while(page, Place::Leaving);
            };
            if was.place() == Place::Waiting {
                self.slots[page as usize].store(0, Ordering::Release);
            }
            match was.place() {
                Place::In | Place::Waiting => {
                    resident += 1;
                    copied += u64::from(was.is_copied());
                }
                Place::Out | Place::Bad => gone += 1,
                _ => {}
            }
        }
        self.trap.unmap(run);
        self.room.left(resident, true);
        self.room.forgotten(gone);
        self.copied_pages.sub(copied);
        self.mapped_pages.sub(run.pages as u64);
    }

    /// Frees the contents of what was unmapped.
    pub(crate) fn clean(&self) {
        let _cleaning = lock(&self.cleaning);
        loop {
            let closed = lock(&self.closed).pop();
            let Some(Closed { contents, addresses }) = closed else { return };
            self.free_contents(contents);
            lock(&self.areas).free(addresses);
        }
    }

    /// Frees the contents of pages that were detached.
    pub(crate) fn free_contents(&self, run: Run) {
        self.by_windows(run, |first, pages| self.leave_lru(first, pages));
        self.store.discard_pages(run.numbers());
    }

    /// Removes up to [`MOST_PAGES`] pages from the LRU, whose contents are gone.
    fn leave_lru(&self, first: u64, pages: usize) {
        let (mut dead, mut count) = ([0; MOST_PAGES], 0);
        for page in first as u32..first as u32 + pages as u32 {
            if self.lru.mark_dead(page) {
                dead[count] = page;
                count += 1;
            }
        }
        self.lru.remove_dead(&mut dead[..count]);
    }

    /// Returns what is outside memory.
    pub(crate) fn stored(&self) -> Stored {
        let (store, spill) = (self.store.stats(), self.store.backing_stats());
        Stored {
            compressed_pages: store.pages_stored.saturating_sub(spill.pages + store.same_pages),
            compressed_bytes: store.compr_data_bytes,
            spilled_pages: spill.pages,
            spill_written_bytes: spill.written_bytes,
        }
    }

    /// Returns the most of that so far, for each figure; of compressed memory, its pages and bytes at the
    /// same time.
    pub(crate) fn most_stored(&self) -> Stored {
        let (now, mut most) = (self.stored(), lock(&self.most_stored));
        if now.compressed_pages > most.compressed_pages {
            (most.compressed_pages, most.compressed_bytes) = (now.compressed_pages, now.compressed_bytes);
        }
        most.spilled_pages = most.spilled_pages.max(now.spilled_pages);
        most.spill_written_bytes = now.spill_written_bytes;
        *most
    }

    /// Has pages stay where they are, in memory or not, or ends that.
    pub(crate) fn keep(&self, run: Run, keeps: bool) {
        run.numbers().for_each(|page| self.state(page).pin(keeps));
    }

    /// Calls `f` with the first page and the number of pages of each part of a run, up to [`MOST_PAGES`].
    fn by_windows(&self, run: Run, f: impl Fn(u64, usize)) {
        for first in run.numbers().step_by(MOST_PAGES) {
            f(first, MOST_PAGES.min((run.end() - first) as usize));
        }
    }
}

impl Core<crate::trap::uffd::Uffd> {
    /// Registers all shelves in a child. Errors: `NoMemory`.
    pub(crate) fn renew_shelves(&self) -> Result<()> {
        self.benches.for_each_free(|bench| self.trap.renew_shelf(&bench.shelf))?;
        self.shelves.iter().try_for_each(|shelf| self.trap.renew_shelf(shelf))
    }
}

impl<T: Trap> Core<T> {
    /// Writes all that is not in memory to where it belongs, in a child in which no touch is trapped. The
    /// pages are mapped, and may be written. Returns false if something cannot be read.
    pub(crate) fn bring_all(&self, run: Run) -> bool {
        let mut bench = self.benches.take();
        run.numbers().all(|page| {
            let buffer = &mut bench.buffer[..1];
            let contents = match self.state(page).get().place() {
                Place::Out => {
                    if self.store.read_once(PageNo::from_number(page), &mut buffer[0]).is_err() {
                        return false;
                    }
                    &*buffer
                }
                Place::Waiting => {
                    let (shelf, nth) = self.slot(page);
                    match self.trap.read(shelf, nth, Run::new(page, 1), buffer) {
                        Some(contents) => contents,
                        None => return false,
                    }
                }
                Place::Bad => return false,
                _ => return true,
            };
            // SAFETY: the page may be written, and the program does not run.
            unsafe {
                let to = self.trap.space().address(page);
                to.copy_from_nonoverlapping(contents.as_flattened().as_ptr(), PAGE_SIZE);
            }
            true
        })
    }
}

/// Locks what is valid even if a thread that held the lock has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread that brings or evicts pages. If it panics, which is a defect, the process ends: its memory
/// would be out of reach, and threads would wait for ever.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let run = || {
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            std::process::abort();
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(run).map_err(|error| {
        Error::new(ErrorKind::NoMemory, format!("cannot start the thread '{name}': {error}"))
    })
}
