//! Which pages are cold: an inactive and an active list, and who may change them at once.
//!
//! A page comes to the front of the inactive list. Its first use after that marks it, its second moves it to
//! the front of the active list; at the cold end of the inactive list a marked page moves there too, and any
//! other is given out to have its contents moved elsewhere. The active list's cold end goes to the front of the
//! inactive one as long as that is the shorter. A page that comes back after its contents went away is active
//! at once if fewer pages went or were promoted meanwhile than the active list has: a longer inactive list
//! would have kept it ("Refault Distance", J. Weiner, 2013).
//!
//! Uses only change a word of the page. Pages that come or are promoted are collected in each CPU's *pagevec*
//! first, so that the lists are locked once for many of them; how, is the [`LruLocks`]: [`SingleLock`] or
//! [`Batched`].
//!
//! What is returned about a page is a hint, as others go on meanwhile. Only this is promised: a page is given out
//! to one at a time; and one that [`Lru::add`] was told of later than of [`Lru::mark_dead`] is in the lists, or on its way.

mod any;
mod batched;
mod counts;
mod design;
#[cfg(all(test, loom))]
mod loom_tests;
mod node;
mod pagevec;
mod single_lock;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use any::AnyLru;
pub use any::LruDesign;
pub use batched::{Batched, Batching};
pub use counts::LruStats;
pub use design::{Claimed, Lists, LockedLists, LruLocks};
pub use node::List;
pub use single_lock::SingleLock;

use crate::base::cpu::PerCpu;
use crate::base::error::{Error, Result};
use crate::base::sync::{Counter, Mutex, classes};

use counts::Counts;
use node::{DEAD, LISTS, Nodes, OPEN, PROMOTED, Place, REFERENCED, SENTINEL, State};
use pagevec::Pagevec;

/// What a node takes: the fixed cost of a page.
pub const NODE_BYTES: usize = 12;
/// The most pages that an LRU can tell apart: two numbers are its lists'.
pub const MAX_PAGES: u64 = (1 << u32::BITS) - 2;
/// The most pages of a pagevec.
pub const MAX_PAGEVEC_PAGES: usize = 128;
/// Pages of a pagevec unless told otherwise: a batch.
pub const DEFAULT_PAGEVEC_PAGES: usize = 14;
/// Pages that are looked at under one hold of all locks.
const SCAN_PAGES: usize = 32;

/// What an LRU is made with.
#[derive(Clone, Copy, Debug)]
pub struct LruConfig {
    /// Pages there are. Those from [`MAX_PAGES`] on are never cold.
    pub pages: u64,
    /// Pages that a CPU collects, 1 to [`MAX_PAGEVEC_PAGES`].
    pub pagevec_pages: usize,
    /// For [`Batched`].
    pub batching: Batching,
    /// Whether [`LruStats::lru_lock_hold_ns`] is measured, which takes two looks at the clock each time.
    pub times_holds: bool,
}

impl LruConfig {
    /// For so many pages.
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
pub struct Lru<D: LruLocks> {
    lists: Lists,
    design: D,
    pagevecs: PerCpu<Mutex<Pagevec>>,
    pagevec_pages: Counter,
}

impl<D: LruLocks> Lru<D> {
    /// An LRU of no pages yet.
    ///
    /// # Errors
    /// `Invalid` for a pagevec of no or too many pages; `NoMemory` when there is none.
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

    /// Sets how many pages a CPU collects from now on.
    ///
    /// # Errors
    /// `Invalid` for none and for more than [`MAX_PAGEVEC_PAGES`].
    pub fn set_pagevec_pages(&self, pages: usize) -> Result<()> {
        if !(1..=MAX_PAGEVEC_PAGES).contains(&pages) {
            let range = format!("a pagevec has 1 to {MAX_PAGEVEC_PAGES} pages");
            return Err(Error::invalid(range).with_setting("lru_pagevec"));
        }
        self.pagevec_pages.set(pages as u64);
        Ok(())
    }

    /// A page got contents: it comes to the front of the inactive list. For one that has some, this is a use.
    pub fn add(&self, page: u32) {
        if self.arrive(page) {
            self.queue(page);
        }
    }

    /// The first part of [`Lru::add`], for who has a lock on the page, and returns whether [`Lru::queue`] is
    /// to follow once that is let go.
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
            // It has been on its way out.
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

    /// Whether an evicted page would still be there, had it had the active ones' memory: the kernel's refault distance.
    fn left_recently(&self, evicted: State) -> bool {
        u64::from(evicted.distance_to(self.age())) <= self.len(List::Active)
    }

    /// Asks for the cache line of a page's node.
    #[inline]
    pub fn prefetch(&self, page: u32) {
        if self.lists.nodes.has(page) {
            self.lists.nodes.prefetch(page);
        }
    }

    /// Has a page put into its list when this CPU has collected enough: the second part of [`Lru::add`].
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

    /// A page was used.
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

    /// A page's contents are gone. Returns whether it is in a list, so that [`Lru::remove_dead`] is to be
    /// told of it, sooner or later.
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

    /// Takes pages out of the lists that were marked dead, unless they have contents again. They are in another order
    /// afterwards.
    pub fn remove_dead(&self, pages: &mut [u32]) {
        if pages.is_empty() {
            return;
        }
        let revived = self.design.remove(&self.lists, pages);
        pages[..revived].iter().for_each(|page| self.queue(*page));
    }

    /// A page's contents are gone: it is in no list afterwards.
    pub fn remove(&self, page: u32) {
        if self.mark_dead(page) {
            self.remove_dead(&mut [page]);
        }
    }

    /// Takes up to `most` pages from the cold end, the coldest first, and appends them to `out`. Each is
    /// this caller's until it says [`Lru::put_back`] or [`Lru::evicted`], or another [`Lru::mark_dead`].
    ///
    /// Pages are looked at only once: where all are in use, it returns few or none.
    pub fn isolate(&self, most: usize, out: &mut Vec<u32>) {
        self.drain_all();
        let wanted = out.len().saturating_add(most);
        let mut scans = self.len(List::Inactive) + 2 * self.len(List::Active) + 1;
        while out.len() < wanted && scans > 0 {
            let scan_pages = SCAN_PAGES.min(usize::try_from(scans).unwrap_or(SCAN_PAGES));
            let mut dead = Vec::new();
            let mut all = self.design.lock_all(&self.lists);
            self.balance(&mut all, &mut dead);
            let before = out.len();
            let scanned = self.scan(&mut all, scan_pages, wanted, out, &mut dead);
            drop(all);
            self.remove_dead(&mut dead);
            let share = self.lists.counts.local();
            share.scanned.add(scanned as u64);
            share.isolated.add((out.len() - before) as u64);
            if scanned == 0 && self.len(List::Active) == 0 {
                break;
            }
            scans = scans.saturating_sub(scan_pages as u64);
        }
    }

    /// Whether a page is given out, and nothing was said of it since.
    pub fn is_isolated(&self, page: u32) -> bool {
        self.lists.nodes.has(page) && self.lists.nodes.state(page).place() == Place::Isolated
    }

    /// Gives back pages that [`Lru::isolate`] gave out, and that stay: they come to the front of their list.
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

    /// The contents of a page that [`Lru::isolate`] gave out went elsewhere.
    pub fn evicted(&self, page: u32) {
        let age = self.age();
        let gone = |state: State| (state.place() == Place::Isolated).then(|| State::evicted(age));
        if self.lists.nodes.change(page, gone).is_some() {
            self.lists.counts.local().evicted.add(1);
        }
    }

    /// The contents of a page went elsewhere, whether it was given out or not. Returns as [`Lru::mark_dead`].
    pub fn leave(&self, page: u32) -> bool {
        if self.is_isolated(page) {
            self.evicted(page);
            return false;
        }
        self.mark_dead(page)
    }

    /// A page was used whose contents are elsewhere. Returns whether it was not long ago that they went, or that
    /// it was used: then it is to come back.
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

    /// Puts what the CPUs have collected into the lists.
    pub fn drain_all(&self) {
        for pagevec in self.pagevecs.iter() {
            let full = std::mem::replace(&mut *pagevec.lock(), Pagevec::EMPTY);
            self.drain(&full);
        }
    }

    /// Pages of a list, an estimate while others change it.
    pub fn len(&self, list: List) -> u64 {
        self.lists.counts.len(list)
    }

    /// Whether both lists have no pages.
    pub fn is_empty(&self) -> bool {
        self.len(List::Inactive) + self.len(List::Active) == 0
    }

    /// What there is and was, each number for itself.
    pub fn stats(&self) -> LruStats {
        self.lists.counts.sum()
    }

    /// Has the nodes in memory from now on.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub fn populate(&self) -> Result<()> {
        self.lists.nodes.populate()
    }

    /// The memory that the nodes can take.
    pub fn max_bytes(&self) -> usize {
        self.lists.nodes.max_bytes()
    }

    /// The memory that the nodes take now.
    #[cfg(not(loom))]
    pub fn resident_bytes(&self) -> usize {
        self.lists.nodes.resident_bytes()
    }

    /// Pages evicted and activated so far: how far the cold end has moved.
    fn age(&self) -> u32 {
        let counts = &self.lists.counts;
        (counts.total(|share| &share.evicted) + counts.total(|share| &share.activated)) as u32
    }

    /// Puts pages into the lists that are to be there, and leaves the others.
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

    /// Moves pages from the cold end of the active list as long as the inactive one is shorter: those that
    /// were used go round.
    fn balance(&self, all: &mut D::LockedLists<'_>, dead: &mut Vec<u32>) {
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

    /// Looks at up to `most` pages at the cold end of the inactive list, and returns at how many it did: those
    /// that were used become active, the others go out until there are `wanted`.
    fn scan(
        &self,
        all: &mut D::LockedLists<'_>,
        most: usize,
        wanted: usize,
        out: &mut Vec<u32>,
        dead: &mut Vec<u32>,
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

    /// Moves a page to the front of a list, as one that was not used since.
    fn shift(&self, all: &mut D::LockedLists<'_>, page: u32, list: List, dead: &mut Vec<u32>) {
        let flags = OPEN | SENTINEL | REFERENCED | PROMOTED;
        all.unlink(page);
        self.lists.nodes.change(page, |state| Some(state.at(Place::Linking).without(flags)));
        all.put_front(list, page);
        self.lists.counts.came(list, 1);
        dead.extend(self.lists.linked(page, list).then_some(page));
    }
}
