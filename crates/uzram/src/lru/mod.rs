//! The LRU: an inactive and an active list of pages, which find the cold ones.
//!
//! A new page goes to the front of the inactive list. Its first use after that marks it referenced, its
//! second moves it to the front of the active list. At the cold end of the inactive list a referenced page
//! moves there too, and any other is isolated for reclaim. The active list's cold end moves to the front of
//! the inactive list as long as that is the shorter. An evicted page that comes back is active at once if,
//! since its eviction, no more pages were evicted or activated than the active list has: a longer inactive
//! list would have kept it ("Refault Distance", J. Weiner, 2013).
//!
//! A use only changes a word of the page. Pages that are added or promoted are collected in each CPU's
//! *pagevec* first, so that the lists are locked once for many of them. An [`LruLocks`] type locks the lists.
//!
//! What a method returns about a page is a hint, as other threads may change it. Only two things are
//! guaranteed: a page is isolated by one caller at a time; and a page whose last [`Lru::add`] came after its
//! last [`Lru::mark_dead`] is in a list or a pagevec.

#[cfg(feature = "designs")]
mod any;
mod batched;
mod counts;
mod design;
#[cfg(all(test, loom))]
mod loom_tests;
pub(crate) mod node;
#[cfg(feature = "designs")]
mod single_lock;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(feature = "designs")]
pub(crate) use any::AnyLru;
#[cfg(feature = "designs")]
pub use any::LruDesign;
pub use batched::{Batched, Batching};
pub use counts::LruStats;
pub use design::{Claimed, Lists, LockedLists, LruLocks, MAX_PAGEVEC_PAGES, Pagevec};
pub use node::{List, NODE_BYTES};
#[cfg(feature = "designs")]
pub use single_lock::SingleLock;

use crate::base::cpu::PerCpu;
use crate::base::error::{Error, Result};
use crate::base::sync::{Counter, Mutex, classes};

use counts::Counts;
use node::{DEAD, LISTS, Nodes, OPEN, PROMOTED, Place, REFERENCED, SENTINEL, State};

/// The most pages of an LRU: two numbers are the lists' heads.
pub const MAX_PAGES: u64 = (1 << u32::BITS) - 2;
/// The default size of a pagevec: a batch.
pub const DEFAULT_PAGEVEC_PAGES: usize = 14;
/// Pages that are scanned per acquisition of all locks.
const SCAN_PAGES: usize = 32;
// A scan, and the balancing before it, find so many dead pages at most.
const _: () = assert!(2 * SCAN_PAGES <= MAX_PAGEVEC_PAGES);

/// The settings of an LRU.
#[derive(Clone, Copy, Debug)]
pub struct LruConfig {
    /// The number of pages. Those from [`MAX_PAGES`] on are never cold.
    pub pages: u64,
    /// Pages of a CPU's pagevec, 1 to [`MAX_PAGEVEC_PAGES`].
    pub pagevec_pages: usize,
    /// Parameters of [`Batched`].
    pub batching: Batching,
    /// Whether to measure [`LruStats::lru_lock_hold_ns`], which costs two clock reads per acquisition.
    pub times_holds: bool,
}

impl LruConfig {
    /// Returns the default settings for `pages` pages.
    pub fn new(pages: u64) -> Self {
        LruConfig {
            pages,
            pagevec_pages: DEFAULT_PAGEVEC_PAGES,
            batching: Batching::default(),
            times_holds: false,
        }
    }
}

/// See the [module's documentation](self).
pub struct Lru<D: LruLocks = Batched> {
    lists: Lists,
    design: D,
    pagevecs: PerCpu<Mutex<Pagevec>>,
    pagevec_pages: Counter,
}

impl<D: LruLocks> Lru<D> {
    /// Makes an empty LRU. Fails with `Invalid` for a pagevec of no or too many pages; `NoMemory` when there
    /// is none.
    pub fn new(options: &LruConfig) -> Result<Self> {
        let pages = options.pages.min(MAX_PAGES) as u32;
        let empty = |_| Mutex::new(&classes::LRU_PAGEVEC, Pagevec::EMPTY);
        let lru = Lru {
            lists: Lists { nodes: Nodes::new(pages)?, counts: Counts::new(options.times_holds) },
            design: D::new(options),
            pagevecs: PerCpu::new(empty),
            pagevec_pages: Counter::default(),
        };
        lru.set_pagevec_pages(options.pagevec_pages)?;
        Ok(lru)
    }

    /// Sets the size of the CPUs' pagevecs. Fails with `Invalid` for 0 and for more than
    /// [`MAX_PAGEVEC_PAGES`].
    pub fn set_pagevec_pages(&self, pages: usize) -> Result<()> {
        if !(1..=MAX_PAGEVEC_PAGES).contains(&pages) {
            let range = format!("a pagevec has 1 to {MAX_PAGEVEC_PAGES} pages");
            return Err(Error::invalid(range).with_setting("lru_pagevec"));
        }
        self.pagevec_pages.set(pages as u64);
        Ok(())
    }

    /// Adds a page that got contents to the front of the inactive list. If it is in the LRU already, marks it
    /// as used.
    pub fn add(&self, page: u32) {
        if self.arrive(page) {
            self.queue(page);
        }
    }

    /// Does the first part of [`Lru::add`], for callers that hold a lock on the page; returns whether they
    /// must call [`Lru::queue`] once that is released.
    #[inline]
    pub fn arrive(&self, page: u32) -> bool {
        let nodes = &self.lists.nodes;
        let mut is_recent = false;
        let come = |state: State| match state.place() {
            Place::Out => Some(State::only(Place::Pending)),
            Place::Evicted => {
                is_recent = self.left_recently(state);
                Some(State::only(Place::Pending).with(if is_recent { PROMOTED } else { 0 }))
            }
            // Revives a page that was to be removed.
            _ => state.has(DEAD).then(|| state.without(DEAD | REFERENCED)),
        };
        if !nodes.has(page) {
            return false;
        }
        match nodes.change(page, come).map(State::place) {
            None => self.mark(page),
            Some(Place::Out) => return true,
            Some(Place::Evicted) => {
                if is_recent {
                    self.lists.counts.local().refaulted.add(1);
                }
                return true;
            }
            Some(_) => {}
        }
        false
    }

    /// Returns whether the page's refault distance is at most the length of the active list.
    fn left_recently(&self, evicted: State) -> bool {
        u64::from(evicted.distance_to(self.age())) <= self.len(List::Active)
    }

    /// Prefetches the cache line of a page's node.
    #[inline]
    pub fn prefetch(&self, page: u32) {
        if self.lists.nodes.has(page) {
            self.lists.nodes.prefetch(page);
        }
    }

    /// Adds the page to this CPU's pagevec; drains it when full. The second part of [`Lru::add`].
    pub fn queue(&self, page: u32) {
        let full = {
            let mut pagevec = self.pagevecs.local().lock();
            pagevec.push(page);
            if pagevec.len() < self.pagevec_pages.get() as usize {
                return;
            }
            std::mem::replace(&mut *pagevec, Pagevec::EMPTY)
        };
        self.drain(&full);
    }

    /// Marks a page as used.
    #[inline]
    pub fn mark(&self, page: u32) {
        let nodes = &self.lists.nodes;
        if !nodes.has(page) {
            return;
        }
        let state = nodes.state(page);
        let is_inactive = state.place() == Place::On(List::Inactive);
        if state.has(DEAD) || state.has(REFERENCED) && (!is_inactive || state.has(PROMOTED)) {
            return;
        }
        let mut promotes = false;
        let used = |state: State| match state.place() {
            Place::Out | Place::Evicted | Place::Head => None,
            place => {
                promotes =
                    state.has(REFERENCED) && place == Place::On(List::Inactive) && !state.has(PROMOTED);
                Some(state.with(if promotes { PROMOTED } else { REFERENCED }))
            }
        };
        if nodes.change(page, used).is_some() && promotes {
            self.queue(page);
        }
    }

    /// Marks a page as dead, as its contents are gone. Returns whether it is in a list, so that the caller
    /// must pass it to [`Lru::remove_dead`] sooner or later.
    #[inline]
    pub fn mark_dead(&self, page: u32) -> bool {
        let gone = |state: State| match state.place() {
            Place::Out | Place::Head => None,
            Place::Pending | Place::Isolated | Place::Evicted => Some(State::only(Place::Out)),
            Place::Linking | Place::On(_) => Some(state.with(DEAD)),
        };
        let nodes = &self.lists.nodes;
        nodes.has(page) && nodes.change(page, gone).is_some_and(State::is_on_list)
    }

    /// Removes pages that were marked dead from the lists, unless they have contents again. Reorders `pages`.
    pub fn remove_dead(&self, pages: &mut [u32]) {
        if pages.is_empty() {
            return;
        }
        let revived = self.design.remove(&self.lists, pages);
        pages[..revived].iter().for_each(|page| self.queue(*page));
    }

    /// Removes a page, as its contents are gone: it is in no list afterwards.
    pub fn remove(&self, page: u32) {
        if self.mark_dead(page) {
            self.remove_dead(&mut [page]);
        }
    }

    /// Isolates up to `most` pages from the cold end, the coldest first, and appends them to `out`. Each
    /// belongs to the caller until it calls [`Lru::put_back`] or [`Lru::evicted`], or another thread
    /// [`Lru::mark_dead`].
    ///
    /// Scans each page only about once: if all are in use, it returns few or none.
    pub fn isolate(&self, most: usize, out: &mut Vec<u32>) {
        self.drain_all();
        let wanted = out.len().saturating_add(most);
        let mut scans = self.len(List::Inactive) + 2 * self.len(List::Active) + 1;
        while out.len() < wanted && scans > 0 {
            let scan_pages = SCAN_PAGES.min(usize::try_from(scans).unwrap_or(SCAN_PAGES));
            let mut dead = Pagevec::EMPTY;
            let mut all = self.design.lock_all(&self.lists);
            self.balance(&mut all, &mut dead);
            let before = out.len();
            let scanned = self.scan(&mut all, scan_pages, wanted, out, &mut dead);
            drop(all);
            self.remove_dead(dead.pages_mut());
            let share = self.lists.counts.local();
            share.scanned.add(scanned as u64);
            share.isolated.add((out.len() - before) as u64);
            if scanned == 0 && self.len(List::Active) == 0 {
                break;
            }
            scans = scans.saturating_sub(scan_pages as u64);
        }
    }

    /// Isolates those of some pages that are in the inactive list and were not used since they came there,
    /// and moves them to the front. Returns how many.
    pub fn isolate_inactive(&self, pages: &mut [u32]) -> usize {
        let nodes = &self.lists.nodes;
        let is_unused = |state: State| state.place() == Place::On(List::Inactive) && !state.has(REFERENCED);
        let leaves = |page| nodes.has(page) && is_unused(nodes.state(page)) && self.mark_dead(page);
        let count = to_front(pages, leaves);
        self.remove_dead(&mut pages[..count]);
        let isolated = |state: State| (state.place() == Place::Out).then(|| State::only(Place::Isolated));
        to_front(&mut pages[..count], |page| nodes.change(page, isolated).is_some())
    }

    /// Returns whether a page is isolated.
    pub fn is_isolated(&self, page: u32) -> bool {
        self.lists.nodes.has(page) && self.lists.nodes.state(page).place() == Place::Isolated
    }

    /// Puts isolated pages that stay back at the front of a list: the active one if they were used meanwhile.
    pub fn put_back(&self, pages: &[u32]) {
        for page in pages {
            let back = |state: State| {
                let promoted = if state.has(REFERENCED) { PROMOTED } else { 0 };
                let isolated = state.place() == Place::Isolated;
                isolated.then(|| State::only(Place::Pending).with(promoted))
            };
            if self.lists.nodes.change(*page, back).is_some() {
                self.lists.counts.local().put_back.add(1);
                self.queue(*page);
            }
        }
    }

    /// Marks an isolated page as evicted: its contents were moved elsewhere.
    pub fn evicted(&self, page: u32) {
        let age = self.age();
        let gone = |state: State| (state.place() == Place::Isolated).then(|| State::evicted(age));
        if self.lists.nodes.change(page, gone).is_some() {
            self.lists.counts.local().evicted.add(1);
        }
    }

    /// Marks a page as evicted if it is isolated, else as dead, as its contents were moved elsewhere. Returns
    /// as [`Lru::mark_dead`].
    pub fn leave(&self, page: u32) -> bool {
        if self.is_isolated(page) {
            self.evicted(page);
            return false;
        }
        self.mark_dead(page)
    }

    /// Notes the use of a page whose contents are elsewhere. Returns whether its eviction or its last use is
    /// recent, so that it should come back.
    pub fn refault(&self, page: u32) -> bool {
        let age = self.age();
        let mut is_recent = false;
        let used = |state: State| match state.place() {
            Place::Evicted => {
                is_recent = self.left_recently(state);
                (!is_recent).then(|| State::evicted(age))
            }
            Place::Out => Some(State::evicted(age)),
            _ => None,
        };
        if self.lists.nodes.has(page) {
            self.lists.nodes.change(page, used);
        }
        is_recent
    }

    /// Drains the pagevecs of all CPUs into the lists.
    pub fn drain_all(&self) {
        for pagevec in self.pagevecs.iter() {
            let full = std::mem::replace(&mut *pagevec.lock(), Pagevec::EMPTY);
            self.drain(&full);
        }
    }

    /// Adds pages that another process wrote, coldest first, each once. The LRU is empty, and no other thread
    /// uses it yet: so the pages are linked in one pass, without locks.
    pub fn adopt(&self, pages: impl Iterator<Item = u32>) {
        let Lists { nodes, counts } = &self.lists;
        debug_assert!(self.is_empty());
        let head = nodes.head(List::Inactive);
        let mut pages = pages.filter(|page| nodes.has(*page)).peekable();
        let Some(coldest) = pages.peek().copied() else { return };
        let (mut colder, mut added) = (head, 0);
        while let Some(page) = pages.next() {
            let hotter = pages.peek().copied();
            let bits = self.design.batch_bits(added, hotter.is_none());
            let state = State::only(Place::On(List::Inactive)).with(bits);
            nodes.adopt(page, hotter.unwrap_or(head), colder, state);
            (colder, added) = (page, added + 1);
        }
        nodes.link(head, colder);
        nodes.link(coldest, head);
        counts.came(List::Inactive, added);
        counts.local().added.add(added as u64);
    }

    /// Returns the number of pages of a list, an estimate while other threads change it.
    pub fn len(&self, list: List) -> u64 {
        self.lists.counts.len(list)
    }

    /// Returns whether both lists are empty.
    pub fn is_empty(&self) -> bool {
        self.len(List::Inactive) + self.len(List::Active) == 0
    }

    /// Returns the statistics. The numbers are not read atomically together.
    pub fn stats(&self) -> LruStats {
        self.lists.counts.sum()
    }

    /// Makes the nodes resident. Fails with `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.lists.nodes.table.populate()
    }

    /// Returns the bytes of all nodes.
    pub fn max_bytes(&self) -> usize {
        self.lists.nodes.table.max_bytes()
    }

    /// Returns the resident bytes of the nodes.
    pub fn resident_bytes(&self) -> usize {
        self.lists.nodes.table.resident_bytes()
    }

    /// Returns the number of pages evicted and activated so far: how far the cold end has moved.
    fn age(&self) -> u32 {
        let counts = &self.lists.counts;
        (counts.total(|share| &share.evicted) + counts.total(|share| &share.activated)) as u32
    }

    /// Puts the pages of a drained pagevec into the lists, except those that no longer belong there.
    fn drain(&self, pagevec: &Pagevec) {
        let Claimed { lists: [inactive, active], promoted } = self.design.claim(&self.lists, pagevec);
        let added = inactive.len() + active.len();
        if added > 0 {
            let counts = &self.lists.counts;
            counts.local().added.add(added as u64);
            for (list, pages) in LISTS.into_iter().zip([&inactive, &active]) {
                counts.came(list, pages.len());
            }
            let mut dead = self.design.add(&self.lists, [inactive.pages(), active.pages()]);
            self.remove_dead(dead.pages_mut());
        }
        if promoted.len() > 0 {
            let mut dead = self.design.activate(&self.lists, promoted.pages());
            self.remove_dead(dead.pages_mut());
        }
    }

    /// Moves pages from the cold end of the active list to the inactive one as long as that is shorter; pages
    /// that were used go to the front of the active list.
    fn balance(&self, all: &mut D::LockedLists<'_>, dead: &mut Pagevec) {
        let lists = &self.lists;
        let mut short = self.len(List::Active).saturating_sub(self.len(List::Inactive)).div_ceil(2);
        for _ in 0..SCAN_PAGES {
            let Some((page, state)) = lists.coldest(List::Active).filter(|_| short > 0) else { return };
            let was_used = state.has(REFERENCED);
            let list = if was_used { List::Active } else { List::Inactive };
            if !was_used {
                short -= 1;
                lists.counts.local().demoted.add(1);
            }
            self.shift(all, page, list, dead);
        }
    }

    /// Scans up to `most` pages at the cold end of the inactive list; returns how many it scanned. Referenced
    /// pages become active; others are isolated until `out` has `wanted`.
    fn scan(
        &self,
        all: &mut D::LockedLists<'_>,
        most: usize,
        wanted: usize,
        out: &mut Vec<u32>,
        dead: &mut Pagevec,
    ) -> usize {
        let lists = &self.lists;
        for scanned in 0..most {
            let Some((page, state)) = lists.coldest(List::Inactive).filter(|_| out.len() < wanted) else {
                return scanned;
            };
            if state.has(REFERENCED) {
                lists.counts.local().activated.add(1);
                self.shift(all, page, List::Active, dead);
                continue;
            }
            all.unlink(page);
            let isolated = |state: State| {
                let place = if state.has(DEAD) { Place::Out } else { Place::Isolated };
                Some(State::only(place))
            };
            match lists.nodes.change(page, isolated) {
                Some(state) if !state.has(DEAD) => out.push(page),
                _ => {
                    lists.counts.local().removed.add(1);
                }
            }
        }
        most
    }

    /// Moves a page to the front of a list, and clears its referenced mark.
    fn shift(&self, all: &mut D::LockedLists<'_>, page: u32, list: List, dead: &mut Pagevec) {
        let flags = OPEN | SENTINEL | REFERENCED | PROMOTED;
        all.unlink(page);
        self.lists.nodes.change(page, |state| Some(state.at(Place::Linking).without(flags)));
        all.put_front(list, page);
        self.lists.counts.came(list, 1);
        if self.lists.linked(page, list) {
            dead.push(page);
        }
    }
}

/// Moves the pages for which `goes` returns true to the front. Returns how many.
fn to_front(pages: &mut [u32], goes: impl Fn(u32) -> bool) -> usize {
    let mut count = 0;
    for nth in 0..pages.len() {
        if goes(pages[nth]) {
            pages.swap(count, nth);
            count += 1;
        }
    }
    count
}
