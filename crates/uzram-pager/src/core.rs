//! Loading and evicting. A page's [`State`] says where its contents
//! are, and which thread may move them.
//!
//! **A fault** ([`Core::fault`]):
//! 1. If memory is above the limit, the touch waits until the evictor has made room.
//! 2. The state says what to do: the thread that makes it `Loading` loads the page, others wait for that.
//! 3. The neighbours that are to come along are claimed in the same way.
//! 4. Their contents are read from the store into the bench's buffer, and placed all at once. The threads
//!    that wait for them run.
//! 5. The store's copies are freed, or kept if the touch was a read.
//! 6. The pages enter the LRU, and their states become `In`.
//!
//! Lock order: waiting; cleaning, or a bench; the map; closed. Nobody holds the map's lock who waits for a
//! touch, or gives memory of a shelf back: the thread that reads messages, which takes it alone, may be what
//! he waits for.

mod evict;

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::Instant;

use uzram::cpu::PerCpu;
use uzram::lru::{Batched, Lru, LruConfig};
use uzram::mem::{FoundPages, Table, Wanted, scan_page_table};
use uzram::store::{PageNo, Store};
use uzram::sync::{Arc, AtomicU32, Counter};
use uzram::units::{PAGE_SHIFT, PAGE_SIZE, Page, bytes_to_pages, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use crate::MOST_PAGES;
use crate::bell::Bell;
use crate::figures::Figures;
use crate::map::{Map, Part};
use crate::room::Room;
use crate::spill::Spill;
use crate::state::{Access, Place, State, Touched};
use crate::stats::{PagerStats, Share, sum};
use crate::system::{lock, read, write};
use crate::uffd::{self, Staging, Tells, Uffd};
use crate::waiting::Waiting;
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
/// How often a thread tries to have the map before it sleeps: nearly always the other has done by then.
const MAP_TURNS: usize = 3000;
/// Groups of pages, for each of which threads wait together.
const GROUPS: usize = 64;

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

/// Who has a page brought.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// A thread that needs it, and waits until it is there.
    Toucher,
    /// The thread that reads messages, which waits for nothing.
    Reader,
    /// The same, whether there is room or not. No neighbours come along: their memory may be changing.
    ReaderAnyway,
}

/// Which pages count as brought that are there already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum There {
    /// Who brings them waits for all.
    All,
    Touched,
    /// What is there may be about to be emptied.
    None,
}

/// What has become of a touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The page is there, or comes: the thread that touched it goes on.
    Done,
    /// It can come when others have left.
    NoRoom,
    /// The memory map is changing, or another thread was faster: the touch is to be repeated.
    Changing,
    /// Its contents are lost.
    Lost,
    /// There is no page at this address.
    Unknown,
}

/// What a thread moves pages with: where those lie that it takes, and contents on their way.
struct Bench {
    shelf: Staging,
    buffer: Box<[Page]>,
}

pub(crate) struct Core {
    uffd: Arc<Uffd>,
    pub(crate) store: Arc<Store>,
    pub(crate) spill: Option<Arc<Spill>>,
    pub(crate) map: RwLock<Map>,
    /// How many threads are about to change the map: who takes pages lets them go first.
    changers: AtomicU32,
    states: Table<State>,
    lru: Lru<Batched>,
    windows: Windows,
    /// For threads that wait for a page of a group.
    bells: [Bell; GROUPS],
    /// As many as threads may need; made beforehand, as a signal handler cannot make one.
    benches: Box<[Mutex<Bench>]>,
    /// Pages that are to leave, and the shelves for them. Protected by the lock: which batch is on which.
    waiting: Mutex<Waiting>,
    shelves: Box<[Staging]>,
    /// Where each page that waits lies, or is being opened from; 0 for others. Written by the page's owner.
    slots: Table<AtomicU32>,
    pub(crate) room: Room,
    shares: PerCpu<Share>,
    /// Pages whose copy in the store is kept while they are in memory.
    copied_pages: Counter,
    /// What was unmapped, and has contents in the store still.
    closed: Mutex<Vec<Part>>,
    /// Held while such contents are freed.
    cleaning: Mutex<()>,
    /// The figures when the evictor looked last, with the most so far.
    last: Mutex<Figures>,
    /// The most pages that the store takes while the spill file is full, and while it has room.
    most_compressed: [u64; 2],
    /// The limit cannot be kept: nothing can leave.
    pub(crate) is_exceeded: AtomicBool,
    /// No thread waits any more: the pager is being dropped, or rests.
    pub(crate) ends: AtomicBool,
}

impl Core {
    /// Errors: `NoMemory`.
    pub(crate) fn new(
        uffd: Arc<Uffd>,
        store: Arc<Store>,
        spill: Option<Arc<Spill>>,
        limit_pages: u64,
        most_compressed: [u64; 2],
    ) -> Result<Self> {
        let pages = store.pages();
        let room = Room::new(limit_pages, Arc::clone(&store))?;
        let shelves = (limit_pages / WAITING_SHARE) as usize / room.batch_pages();
        let shelves = shelves.clamp(1, MOST_SHELVES);
        let benches = 2 * std::thread::available_parallelism().map_or(1, usize::from) + 2;
        let bench = |_| {
            let buffer = vec![[0; PAGE_SIZE]; MOST_PAGES].into();
            Staging::new(&uffd).map(|shelf| Mutex::new(Bench { shelf, buffer }))
        };
        Ok(Core {
            benches: (0..benches).map(bench).collect::<Result<_>>()?,
            waiting: Mutex::new(Waiting::new(shelves)),
            shelves: (0..shelves).map(|_| Staging::new(&uffd)).collect::<Result<_>>()?,
            slots: Table::new(pages as usize)?,
            uffd,
            map: RwLock::new(Map::new(pages)),
            changers: AtomicU32::new(0),
            states: Table::new(pages as usize)?,
            lru: Lru::new(&LruConfig::new(pages))?,
            windows: Windows::default(),
            bells: std::array::from_fn(|_| Bell::default()),
            room,
            shares: PerCpu::new(|_| Share::default()),
            copied_pages: Counter::new(0),
            closed: Mutex::default(),
            cleaning: Mutex::default(),
            last: Mutex::default(),
            most_compressed,
            is_exceeded: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            store,
            spill,
        })
    }

    fn state(&self, page: u64) -> &State {
        &self.states[page as usize]
    }

    fn bell(&self, page: u64) -> &Bell {
        &self.bells[page as usize % GROUPS]
    }

    pub(crate) fn stats(&self) -> PagerStats {
        PagerStats {
            limit_pages: self.room.limit_pages.get(),
            resident_pages: self.room.resident_pages.get(),
            compressed_pages: self.store.charged_pages(),
            used_pages: self.room.used_pages(),
            used_pages_max: self.room.most_used_pages(),
            mapped_pages: self.map().all().map(|part| part.pages as u64).sum(),
            ..sum(&self.shares)
        }
    }

    /// Brings the page at an address that was touched.
    pub(crate) fn fault(&self, address: usize, writes: bool, by: By) -> Fault {
        let waits = by == By::Toucher;
        loop {
            let Some(part) = self.part_at(address) else { return Fault::Unknown };
            let page = part.first;
            let number = self.bell(page).number();
            let needs_room = matches!(self.state(page).get().place(), Place::New | Place::Out);
            if by == By::Reader && needs_room && !self.has_room() {
                return Fault::NoRoom;
            }
            match self.state(page).touch() {
                Touched::Load { stored, given_back } => {
                    let start = Instant::now();
                    if waits && !self.has_room() {
                        self.note_wait();
                        self.room.wait_for_page();
                    }
                    let counts = match by {
                        By::Toucher => There::All,
                        _ if given_back => There::None,
                        _ => There::Touched,
                    };
                    let loaded = self.load(part, stored, writes, by, counts);
                    self.room.most_used_pages();
                    let share = self.shares.local();
                    share.faults.add(1);
                    share.fault_us.add(start.elapsed().as_micros() as u64);
                    return loaded;
                }
                Touched::Open { copied } => return self.reopen(page, copied, waits),
                Touched::In => return self.look(page),
                Touched::Busy if waits => self.bell(page).wait(number, None),
                Touched::Busy => return Fault::Done,
                Touched::Lost => return Fault::Lost,
            }
        }
    }

    pub(crate) fn part_at(&self, address: usize) -> Option<Part> {
        self.map().at(address & !(PAGE_SIZE - 1), MOST_PAGES)
    }

    pub(crate) fn map(&self) -> RwLockReadGuard<'_, Map> {
        tried(|| self.map.try_read().ok()).unwrap_or_else(|| read(&self.map))
    }

    /// Locks the memory map to change it. No thread moves pages then.
    pub(crate) fn change_map(&self) -> RwLockWriteGuard<'_, Map> {
        self.changers.fetch_add(1, Ordering::Relaxed);
        let map = tried(|| self.map.try_write().ok()).unwrap_or_else(|| write(&self.map));
        self.changers.fetch_sub(1, Ordering::Relaxed);
        map
    }

    /// Has room made for a page. Returns whether one may come now: also if nobody makes room any more.
    fn has_room(&self) -> bool {
        if self.room.has(1) || self.room.gives_up() || self.ends.load(Ordering::Relaxed) {
            return true;
        }
        // While the evictor rests: to trap a page interrupts each CPU on which a thread of this process runs.
        if self.uffd.tells != Tells::Changes
            && let Some(mut waiting) = try_lock(&self.waiting)
        {
            self.take_cold(&mut waiting, false);
        }
        self.room.evictor.ring();
        self.room.may_bring()
    }

    pub(crate) fn note_wait(&self) {
        self.shares.local().waits_for_room.add(1);
    }

    fn wait_while(&self, page: u64, place: Place) {
        loop {
            let number = self.bell(page).number();
            if !self.state(page).want(place) {
                return;
            }
            self.bell(page).wait(number, None);
        }
    }

    /// Loads the first page of a part, which the caller owns, and the neighbours that are to come along.
    fn load(&self, part: Part, stored: bool, writes: bool, by: By, counts: There) -> Fault {
        let page = part.first;
        let come = match self.state(page).get().access() {
            _ if by == By::ReaderAnyway => page..page + 1,
            Access::Normal if !stored && self.room.is_half_free() => {
                self.windows.next(page, NEW_AT_ONCE - page % NEW_AT_ONCE)
            }
            Access::Normal => self.windows.next(page, 1),
            Access::Random => page..page + 1,
            Access::Sequential => page..page + MOST_PAGES as u64,
        };
        // Those below may be another part's, with other pages in between.
        let is_one =
            || self.map().of(come.start, MOST_PAGES).is_some_and(|all| all.numbers().contains(&page));
        let start = if come.start < page && is_one() { come.start } else { page };
        let end = come.end.min(part.numbers().end);
        let (mut pages, at) = ([stored; MOST_PAGES], (page - start) as usize);
        let (below, above) = pages.split_at_mut(at);
        let has_room = |more: usize| self.room.has(1 + more);
        let below = self.claim((start..page).rev().zip(below.iter_mut().rev()), has_room);
        let above = self.claim((page + 1..end).zip(&mut above[1..]), has_room);
        self.bring(page - below as u64, &pages[at - below..=at + above], below, writes, counts)
    }

    /// Claims pages to load them, as long as none is in memory, or another thread's, and `may` allows
    /// another. Notes whether the store has contents of each. Returns how many.
    fn claim<'a>(
        &self,
        pages: impl Iterator<Item = (u64, &'a mut bool)>,
        may: impl Fn(usize) -> bool,
    ) -> usize {
        let mut count = 0;
        for (page, stored) in pages {
            let state = self.state(page);
            // What is pinned comes alone, or may not be touched at all.
            match (may(count) && !state.get().is_pinned()).then(|| state.start_load()).flatten() {
                Some(is_stored) => *stored = is_stored,
                None => break,
            }
            count += 1;
        }
        count
    }

    /// Brings neighbours that the caller owns, of which the `touched`th is needed. `stored`: whether the
    /// store has contents of each.
    fn bring(&self, first: u64, stored: &[bool], touched: usize, writes: bool, counts: There) -> Fault {
        let mut bench = take_one(&self.benches);
        let mut read = |nth: &usize| {
            let page = PageNo::from_number(first + *nth as u64);
            let buffer = &mut bench.buffer[*nth];
            if !stored[*nth] {
                buffer.fill(0);
            }
            !stored[*nth] || self.store.read_once(page, buffer).is_ok()
        };
        // Whatever the others are like, the one that is needed comes.
        let mut good = touched..touched;
        if read(&touched) {
            good.start -= (0..touched).rev().take_while(&mut read).count();
            good.end += 1 + (touched + 1..stored.len()).take_while(&mut read).count();
        }
        let contents = &bench.buffer[good.clone()];
        let placed = self.place(contents, first + good.start as u64, touched - good.start, counts);
        let placed = good.start..good.start + placed;
        drop(bench);
        // Those of a share of the pages in memory keep their copy, and all while there is memory in plenty.
        let may_copy = || {
            let is_in_share = COPIED_SHARE * self.copied_pages.get() <= self.room.resident_pages.get();
            (is_in_share && !self.room.gives_up()) || self.room.is_half_free()
        };
        // The pages that came along were not touched, so not written to either.
        let mut keeps = [false; MOST_PAGES];
        for nth in placed.clone() {
            keeps[nth] = stored[nth] && (!writes || nth != touched) && may_copy();
            self.copied_pages.add(u64::from(keeps[nth]));
        }
        self.free_copies(first + placed.start as u64, &stored[placed.clone()], &keeps[placed.clone()]);
        let share = self.shares.local();
        for (nth, stored) in stored.iter().enumerate() {
            let page = first + nth as u64;
            if placed.contains(&nth) {
                if *stored { &share.pages_in } else { &share.pages_new }.add(1);
                self.room.resident_pages.add(1);
                self.room.touched_pages.add(u64::from(!stored));
                self.lru.add(page as u32);
                self.end(page, Place::In, keeps[nth]);
            } else if nth == touched
                && good.is_empty()
                && self.map().of(page, 1).is_none_or(|page| self.uffd.lose(page))
            {
                share.pages_lost.add(1);
                self.end(page, Place::Bad, false);
            } else {
                // What is there is not known.
                self.end(page, if *stored { Place::Out } else { Place::New }, !stored);
            }
        }
        if placed.contains(&touched) {
            Fault::Done
        } else if good.is_empty() && self.state(first + touched as u64).get().place() == Place::Bad {
            Fault::Lost
        } else {
            Fault::Changing
        }
    }

    /// Frees the store's copies of pages next to each other that are in memory, and do not keep them.
    fn free_copies(&self, first: u64, stored: &[bool], keeps: &[bool]) {
        let mut nth = 0;
        let goes = |nth: usize| stored[nth] && !keeps[nth];
        while nth < stored.len() {
            let count = (nth..stored.len()).take_while(|nth| goes(*nth)).count();
            if count > 0 {
                let first = first + nth as u64;
                self.store.discard_pages(first..first + count as u64);
            }
            nth += count + 1;
        }
    }

    /// Places pages that the caller owns, of which the `touched`th is needed, and returns how many. Those
    /// that are not mapped any more count.
    fn place(&self, contents: &[Page], first: u64, touched: usize, counts: There) -> usize {
        let mut done = 0;
        while done < contents.len() {
            let map = self.map();
            let Some(part) = map.of(first + done as u64, contents.len() - done) else {
                done += 1;
                continue;
            };
            let touched = match counts {
                There::All => 0,
                There::Touched => touched.wrapping_sub(done),
                There::None => usize::MAX,
            };
            let placed = self.uffd.copy(part.address, &contents[done..done + part.pages], touched);
            drop(map);
            done += placed;
            if placed < part.pages {
                if counts != There::All {
                    break;
                }
                std::thread::yield_now();
            }
        }
        done
    }

    /// Ends a state that the caller owns, and has threads that wait for the page touch it again.
    fn end(&self, page: u64, place: Place, copied: bool) {
        if self.end_quietly(page, place, copied) {
            self.wake(&self.map(), page);
        }
    }

    fn wake(&self, map: &Map, page: u64) {
        self.bell(page).ring();
        map.of(page, 1).into_iter().for_each(|part| self.uffd.wake_at(part.address, 1));
    }

    /// Ends a state that the caller owns. Returns whether threads wait for the page.
    fn end_quietly(&self, page: u64, mut place: Place, mut copied: bool) -> bool {
        loop {
            if let Some(is_wanted) = self.state(page).end(place, copied) {
                return is_wanted;
            }
            self.empty(page, place, copied);
            (place, copied) = (Place::New, true);
        }
    }

    /// Brings a page that is said to be in memory, as zeros, if the program has given its memory back.
    fn look(&self, page: u64) -> Fault {
        let Some(copied) = self.state(page).start(Place::In, Place::Loading) else { return Fault::Changing };
        let mut bench = take_one(&self.benches);
        bench.buffer[0].fill(0);
        let placed = self.place(&bench.buffer[..1], page, 0, There::Touched);
        drop(bench);
        self.end(page, Place::In, copied);
        if placed == 0 { Fault::Changing } else { Fault::Done }
    }

    pub(crate) fn prefetch(&self, part: Part) {
        for part in part.chunks(MOST_PAGES) {
            let mut at = 0;
            while at < part.pages && self.room.has(MOST_PAGES) {
                let (first, mut stored) = (part.first + at as u64, [false; MOST_PAGES]);
                let count = self.claim((first..part.numbers().end).zip(&mut stored), |_| true);
                if count > 0 {
                    self.bring(first, &stored[..count], 0, false, There::All);
                }
                at += count + 1;
            }
        }
    }

    /// Pins pages, so that they are in memory and stay there. Returns false if one cannot be read.
    pub(crate) fn pin(&self, part: Part) -> bool {
        part.numbers().for_each(|page| self.state(page).pin(true));
        part.chunks(1).fold(true, |all, Part { address, first: page, .. }| {
            // An eviction that had begun ends, and then the page is loaded again.
            let place = loop {
                match self.state(page).get().place() {
                    place @ (Place::In | Place::Bad) => break place,
                    _ => _ = self.fault(address, true, By::Toucher),
                }
            };
            if place == Place::In {
                let byte: *const u8 = std::ptr::with_exposed_provenance(address);
                // SAFETY: a byte of the region's. A page that the program has emptied by madvise(2) comes.
                let _ = unsafe { byte.read_volatile() };
            }
            all && place == Place::In
        })
    }

    /// Ends [`Core::pin`] for the pages of a part for which `is_pinned` returns false.
    pub(crate) fn unpin(&self, part: Part, is_pinned: impl Fn(u64) -> bool) {
        part.numbers().filter(|page| !is_pinned(*page)).for_each(|page| self.state(page).pin(false));
    }

    pub(crate) fn advise(&self, part: Part, access: Access) {
        part.numbers().for_each(|page| self.state(page).set_access(access));
    }

    /// Empties pages of a region: they read as zeros.
    pub(crate) fn discard(&self, part: Part) {
        for part in part.chunks(MOST_PAGES) {
            self.discard_open(part);
            for page in part.chunks(1) {
                let mut has_tried = false;
                loop {
                    match self.state(page.first).get().place() {
                        Place::New => break,
                        // It came meanwhile.
                        Place::In if !std::mem::replace(&mut has_tried, true) => self.discard_open(page),
                        // It is pinned, or cannot be trapped.
                        Place::In => {
                            let start: *mut u8 = std::ptr::with_exposed_provenance_mut(page.address);
                            // SAFETY: it is mapped, and the program expects to see either contents.
                            unsafe { start.write_bytes(0, PAGE_SIZE) };
                            break;
                        }
                        place @ (Place::Loading | Place::Leaving) => self.wait_while(page.first, place),
                        place @ (Place::Out | Place::Bad | Place::Waiting) => {
                            if let Some(copied) = self.state(page.first).start(place, Place::Loading) {
                                if place == Place::Bad {
                                    self.uffd.discard(page);
                                }
                                self.empty(page.first, place, copied);
                                self.end(page.first, Place::New, false);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Empties those of up to [`MOST_PAGES`] pages that are in memory, as far as the system takes them.
    fn discard_open(&self, part: Part) {
        let mut nth = 0;
        while nth < part.pages {
            let (mut copied, mut count) = ([false; MOST_PAGES], 0);
            let at = part.first + nth as u64;
            while nth + count < part.pages {
                let claimed = self.state(at + count as u64).start(Place::In, Place::Leaving);
                let Some(is_copied) = claimed else { break };
                copied[count] = is_copied;
                count += 1;
            }
            let is_done = count > 0 && self.uffd.discard(part.from(nth, count));
            for (page, is_copied) in (at..).zip(&copied[..count]) {
                if is_done {
                    self.empty(page, Place::In, *is_copied);
                    self.end(page, Place::New, false);
                } else {
                    self.end(page, Place::In, *is_copied);
                }
            }
            nth += count + 1;
        }
    }

    /// Frees the contents of a page that the caller owns, and that was at this place.
    fn empty(&self, page: u64, was: Place, copied: bool) {
        match was {
            Place::In | Place::Waiting => {
                if was == Place::Waiting {
                    self.slots[page as usize].store(0, Ordering::Release);
                }
                self.lru.remove(page as u32);
                self.copied_pages.sub(u64::from(copied));
                self.room.resident_pages.sub(1);
            }
            Place::Out | Place::Bad => {}
            Place::New | Place::Loading | Place::Leaving => return,
        }
        self.room.touched_pages.sub(1);
        if copied || !matches!(was, Place::In | Place::Waiting) {
            self.store.discard(PageNo::from_number(page));
        }
    }

    /// Maps memory of `len` bytes, all new pages. Errors: `NoSpace`, `NoMemory`.
    pub(crate) fn map_new(&self, len: usize) -> Result<Part> {
        let full = || {
            let what = "the pager has no address space for a region of this size";
            Error::new(ErrorKind::NoSpace, what).with_setting("capacity")
        };
        let pages = bytes_to_pages(len as u64) as usize;
        if pages as u64 > self.store.pages() {
            return Err(full());
        }
        let address = uffd::reserve(pages << PAGE_SHIFT)?;
        let insert = || self.change_map().insert(address, pages);
        let freed = || {
            self.clean();
            insert()
        };
        let Some(part) = insert().or_else(freed) else {
            uffd::unmap(Part { address, first: 0, pages });
            return Err(full());
        };
        self.uffd.map(part).inspect_err(|_| self.unmap(part))?;
        Ok(part)
    }

    pub(crate) fn unmap(&self, part: Part) {
        let mut map = self.change_map();
        self.uffd.unmap(part);
        let gone = map.remove(part.addresses());
        drop(map);
        self.removed(&gone, true);
    }

    /// Notes that the contents of pages are gone. `unmapped`: the pages, too; otherwise they are given back.
    pub(crate) fn removed(&self, parts: &[Part], unmapped: bool) {
        for page in parts.iter().flat_map(|part| part.numbers()) {
            loop {
                let is_done = match self.state(page).get().place() {
                    Place::New => unmapped || self.state(page).give_back(),
                    // The owner does it.
                    Place::Loading | Place::Leaving => self.state(page).discard_later(),
                    // That takes a while.
                    Place::Out if unmapped => true,
                    place => self.state(page).start(place, Place::Loading).is_some_and(|copied| {
                        self.empty(page, place, copied);
                        // Nobody waits: the caller alone reads messages.
                        self.end_quietly(page, Place::New, true);
                        true
                    }),
                };
                if is_done {
                    break;
                }
            }
        }
        if unmapped {
            lock(&self.closed).extend(parts);
            self.room.evictor.ring();
        }
    }

    /// Frees what is left of pages that were unmapped.
    pub(crate) fn clean(&self) {
        let _cleaning = lock(&self.cleaning);
        loop {
            let Some(part) = lock(&self.closed).pop() else { return };
            for page in part.numbers() {
                while self.state(page).get().is_owned() {
                    std::thread::yield_now();
                }
                if let Some(copied) = self.state(page).start(Place::Out, Place::Loading) {
                    self.empty(page, Place::Out, copied);
                }
                self.state(page).reset();
            }
            self.change_map().free(part);
        }
    }

    /// Notes which pages of a part are in memory, of those that are new; of what was given back, if `anyway`.
    /// Errors: those of the page table.
    pub(crate) fn note_present(&self, table: &File, part: Part, anyway: bool) -> std::io::Result<()> {
        let mut found = [FoundPages { start: 0, end: 0, categories: 0 }; 64];
        let mut from = part.address;
        while from < part.end() {
            let range = from as u64..part.end() as u64;
            let count = scan_page_table(table, range, Wanted::Present, &mut found)?;
            for pages in &found[..count] {
                let there = part.within(&(pages.start as usize..pages.end as usize));
                for page in there.into_iter().flat_map(Part::numbers) {
                    if self.state(page).start_present(anyway) {
                        self.room.resident_pages.add(1);
                        self.room.touched_pages.add(1);
                        self.lru.add(page as u32);
                        self.end(page, Place::In, false);
                    }
                }
            }
            if count < found.len() {
                break;
            }
            from = found[count - 1].end as usize;
        }
        Ok(())
    }

    pub(crate) fn is_away(&self, address: usize) -> bool {
        let part = self.part_at(address);
        part.is_some_and(|part| matches!(self.state(part.first).get().place(), Place::Out | Place::Waiting))
    }

    /// Hands all contents outside memory to `each`. No thread evicts. Returns false if some cannot be read.
    pub(crate) fn each_away(&self, mut each: impl FnMut(usize, &Page)) -> bool {
        let mut bench = take_one(&self.benches);
        let map = self.map();
        let mut pages = map.all().flat_map(|part| part.chunks(1));
        pages.all(|page| {
            let buffer = &mut bench.buffer[0];
            let contents = match self.state(page.first).get().place() {
                Place::Out => {
                    let read = self.store.read_once(PageNo::from_number(page.first), buffer);
                    read.is_ok().then_some(&*buffer)
                }
                Place::Waiting => {
                    let (shelf, nth) = self.slot(page.first);
                    Some(shelf.page(nth))
                }
                Place::Bad => None,
                _ => return true,
            };
            contents.inspect(|contents| each(page.address, contents)).is_some()
        })
    }

    /// Notes that a page of a shelf was touched by something else.
    pub(crate) fn touched_shelf(&self, address: usize) {
        self.shelves.iter().for_each(|staging| staging.touched(address));
    }

    pub(crate) fn each_shelf(&self, mut each: impl FnMut(&Staging) -> Result<()>) -> Result<()> {
        self.shelves.iter().try_for_each(&mut each)?;
        self.benches.iter().try_for_each(|bench| each(&lock(bench).shelf))
    }

    /// Returns the figures, but for the process and the limit that was asked for. Notes the most that was
    /// outside memory; of compressed memory, when there were most pages.
    pub(crate) fn figures(&self) -> Figures {
        let (counts, store, spill) = (sum(&self.shares), self.store.stats(), self.store.backing_stats());
        let mut last = lock(&self.last);
        let mut now = Figures {
            limit_now_bytes: pages_to_bytes(self.room.limit_pages.get()),
            runs: 1,
            used_bytes: pages_to_bytes(self.room.used_pages()),
            used_max_bytes: pages_to_bytes(self.room.most_used_pages()),
            resident_bytes: pages_to_bytes(self.room.resident_pages.get()),
            stored_bytes: pages_to_bytes(store.pages_stored.saturating_sub(spill.pages + store.same_pages)),
            compressed_bytes: store.compr_data_bytes,
            spilled_bytes: pages_to_bytes(spill.pages),
            spill_written_bytes: spill.written_bytes,
            faults: counts.faults,
            fault_us: counts.fault_us,
            ..*last
        };
        if now.stored_bytes > now.stored_max_bytes {
            (now.stored_max_bytes, now.compressed_max_bytes) = (now.stored_bytes, now.compressed_bytes);
        }
        now.spilled_max_bytes = now.spilled_max_bytes.max(now.spilled_bytes);
        *last = now;
        now
    }
}

/// Tries to have the map for as long as another thread has it: to sleep, and be woken, takes longer.
fn tried<T>(mut lock: impl FnMut() -> Option<T>) -> Option<T> {
    (0..MAP_TURNS).inspect(|_| std::hint::spin_loop()).find_map(|_| lock())
}

/// Locks what no thread has; `None` if one has.
fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Takes one that no other thread has; waits for that. A thread takes no second one, and waits for no page
/// then.
pub(crate) fn take_one<T>(stock: &[Mutex<T>]) -> MutexGuard<'_, T> {
    loop {
        if let Some(one) = stock.iter().find_map(try_lock) {
            return one;
        }
        std::thread::yield_now();
    }
}
