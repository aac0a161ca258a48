//! Batch locks: a page in the middle of a batch is removed under one of many locks ("lru_lock
//! scalability", D. Jordan and S. Sistare, 2018).
//!
//! ```text
//! head ── * o o o o * ── * o o o * ── * o * ── head        * sentinel   o other
//!         └ tag 5 ──┘    └ tag 0 ┘    └ 5 ┘
//! ```
//!
//! A list is a sequence of *batches*, each with a *tag*, which is the number of a batch lock. The first and
//! the last page of a batch are *sentinels*. Then:
//!
//! 1. Both neighbours of a page that is no sentinel have its tag. So its batch lock protects all links that
//!    its removal changes.
//! 2. A link to a page of another batch, or to the head, is one between sentinels, and needs `lru_lock`.
//!    Removing a sentinel needs both locks, and makes its neighbours sentinels.
//! 3. A state's place changes from or to a list only under these locks, and its tag only while it is in no
//!    list. A page stops being a sentinel only under `lru_lock`, and becomes one only under its batch lock
//!    and `lru_lock`. So a state that was read before locking is read again afterwards.
//!
//! Pages are put at the front of a list as a chain of batches, under one acquisition of `lru_lock`, which
//! changes four links; or, without [`Batching::splice`], one by one into the *open* batch, in which all are
//! sentinels until it is complete.
//!
//! Lock order: batch locks by ascending number, then `lru_lock`.

use crate::base::cpu::{Padded, PerCpu};
use crate::base::sync::{Counter, Mutex, MutexGuard, classes};

use super::LruConfig;
use super::counts::LruGuard;
use super::design::{Claimed, Lists, LockedLists, LruLocks, Pagevec};
use super::node::{DEAD, LISTS, List, OPEN, PROMOTED, Place, SENTINEL, State};

/// Parameters of [`Batched`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// Batch locks, 1 to 32.
    pub locks: u16,
    /// The most pages of a new batch.
    pub max_pages: u32,
    /// Whether to remove pages that are no sentinels first: removing a sentinel makes its neighbours
    /// sentinels.
    pub two_passes: bool,
    /// Whether to put all pages of a pagevec in with one splice.
    pub splice: bool,
}

impl Default for Batching {
    /// Returns the series' parameters: 32 locks, batches of 14 pages, two passes, splicing.
    fn default() -> Self {
        Batching { locks: 32, max_pages: 14, two_passes: true, splice: true }
    }
}

/// Pages that are activated per acquisition of `lru_lock`, and so the most batch locks held for that.
const AT_ONCE: usize = 16;

/// `lru_lock` and batch locks.
pub struct Batched {
    batch_locks: Box<[Padded<Mutex<()>>]>,
    lru_lock: Mutex<Fronts>,
    /// The number of tags that each CPU has assigned; tags are assigned round-robin.
    tags: PerCpu<Counter>,
    batching: Batching,
}

/// The most batch locks. All are held at once.
const MOST_LOCKS: usize = 32;

/// The open batches of the lists.
type Fronts = [Open; LISTS.len()];

#[derive(Clone, Copy, Debug, Default)]
struct Open {
    tag: u8,
    pages: u32,
}

/// The guard of all locks of a [`Batched`].
pub struct AllLocked<'a> {
    design: &'a Batched,
    lists: &'a Lists,
    // Declared before the batch locks: it is released first.
    fronts: LruGuard<'a, Fronts>,
    _batches: [Option<MutexGuard<'a, ()>>; MOST_LOCKS],
}

/// The batch lock that a removal holds, and `lru_lock` if the current page needs it.
struct Taken<'a> {
    design: &'a Batched,
    lists: &'a Lists,
    fronts: Option<LruGuard<'a, Fronts>>,
    batch: Option<(u8, MutexGuard<'a, ()>)>,
}

impl Taken<'_> {
    /// Takes the batch lock of `tag` instead of the one held; returns whether it was held already.
    fn lock_batch(&mut self, tag: u8) -> bool {
        if self.batch.as_ref().is_some_and(|(held, _)| *held == tag) {
            return true;
        }
        (self.fronts, self.batch) = (None, None);
        self.batch = Some((tag, self.design.lock_batch(self.lists, tag)));
        false
    }
}

/// The batch locks of a few pages, and `lru_lock`.
struct FewLocked<'a> {
    tags: [Option<u8>; AT_ONCE],
    // Declared before the batch locks, as above.
    fronts: LruGuard<'a, Fronts>,
    _batches: [Option<MutexGuard<'a, ()>>; AT_ONCE],
}

impl FewLocked<'_> {
    /// Returns whether the batch lock of this tag is held. If not, the page's batch has changed.
    fn has(&self, tag: u8) -> bool {
        self.tags.contains(&Some(tag))
    }
}

impl Batched {
    fn lock_lru<'a>(&'a self, lists: &'a Lists) -> LruGuard<'a, Fronts> {
        lists.counts.lock_lru(&self.lru_lock)
    }

    fn lock_batch<'a>(&'a self, lists: &'a Lists, tag: u8) -> MutexGuard<'a, ()> {
        let share = lists.counts.local();
        share.batch_locks.add(1);
        self.batch_locks[usize::from(tag)].0.lock_noticing(|| {
            share.batch_locks_contended.add(1);
        })
    }

    fn fresh_tag(&self) -> u8 {
        (self.tags.local().add(1) % self.batch_locks.len() as u64) as u8
    }

    /// Takes the batch locks of up to [`AT_ONCE`] pages, as far as they are in lists, and `lru_lock`.
    fn lock_few<'a>(&'a self, lists: &'a Lists, pages: &[u32]) -> FewLocked<'a> {
        let mut tags = [None; AT_ONCE];
        for (tag, page) in tags.iter_mut().zip(pages) {
            let state = lists.nodes.state(*page);
            *tag = state.is_on_list().then(|| state.tag());
        }
        tags.sort_unstable();
        let mut batches = [const { None }; AT_ONCE];
        let mut last = None;
        for (batch, tag) in batches.iter_mut().zip(tags) {
            if let Some(tag) = tag.filter(|tag| last != Some(*tag)) {
                *batch = Some(self.lock_batch(lists, tag));
                last = Some(tag);
            }
        }
        FewLocked { tags, fronts: self.lock_lru(lists), _batches: batches }
    }

    /// Takes a page out of its list. Its batch is locked, and `lru_lock` if it is a sentinel.
    fn unlink(lists: &Lists, fronts: Option<&mut Fronts>, page: u32, state: State) {
        if let Some(fronts) = fronts.filter(|_| state.has(SENTINEL)) {
            if state.has(OPEN) {
                fronts[on(state)].pages -= 1;
            }
            // A neighbour that was no sentinel is of the same batch.
            lists.nodes.set(lists.nodes.prev(page), SENTINEL);
            lists.nodes.set(lists.nodes.next(page), SENTINEL);
        }
        lists.nodes.unlink(page);
    }

    /// Links [claimed](LruLocks::claim) pages to a chain of batches, the last page in front.
    fn chain(&self, lists: &Lists, pages: &[u32]) {
        for batch in pages.chunks(self.batching.max_pages as usize) {
            // The first page of a batch is a sentinel already.
            batch.last().iter().for_each(|last| lists.nodes.set(**last, SENTINEL));
        }
        for pair in pages.windows(2) {
            lists.nodes.link(pair[1], pair[0]);
        }
    }

    /// Puts a chain that [`Batched::chain`] made at the front of a list.
    fn splice(&self, lists: &Lists, fronts: &mut Fronts, list: List, pages: &[u32]) {
        if let [last, .., first] | [last @ first] = pages {
            self.close(lists, fronts, list);
            lists.nodes.link_at_front(list, *first, *last);
        }
    }

    /// Puts a page that is in no list into the open batch of a list.
    fn push(&self, lists: &Lists, fronts: &mut Fronts, list: List, page: u32) {
        let open = &mut fronts[list as usize];
        if open.pages == 0 {
            open.tag = self.fresh_tag();
        }
        open.pages += 1;
        let tag = open.tag;
        lists.nodes.change(page, |state| Some(state.tagged(tag).with(SENTINEL | OPEN)));
        lists.nodes.link_at_front(list, page, page);
        if open.pages >= self.batching.max_pages {
            self.close(lists, fronts, list);
        }
    }

    /// Completes the open batch of a list, if there is one.
    fn close(&self, lists: &Lists, fronts: &mut Fronts, list: List) {
        let nodes = &lists.nodes;
        let pages = std::mem::take(&mut fronts[list as usize].pages);
        let mut page = nodes.next(nodes.head(list));
        for at in 0..pages {
            // Look the next page up first: a page that is no sentinel may be removed at once.
            let next = nodes.next(page);
            let is_edge = at == 0 || at + 1 == pages;
            nodes.clear(page, if is_edge { OPEN } else { OPEN | SENTINEL });
            page = next;
        }
    }

    /// Removes dead pages, one batch after another: all, or only those that are no sentinels.
    fn remove_by_batch(&self, lists: &Lists, pages: &mut [u32], sentinels: bool, revived: &mut usize) {
        let mut taken = Taken { design: self, lists, fronts: None, batch: None };
        let mut left = [0; LISTS.len()];
        for at in *revived..pages.len() {
            let page = pages[at];
            let is_for_us = |state: State| is_due(state) && (sentinels || !state.has(SENTINEL));
            let mut state = lists.nodes.state(page);
            if !is_for_us(state) {
                continue;
            }
            let tag = state.tag();
            if !taken.lock_batch(tag) {
                state = lists.nodes.state(page);
                if state.tag() != tag || !is_for_us(state) {
                    continue;
                }
            }
            if !state.has(SENTINEL) {
                taken.fronts = None;
            } else if taken.fronts.is_none() {
                taken.fronts = Some(self.lock_lru(lists));
                // The batch may have been completed meanwhile, so that the page is no sentinel any more.
                state = lists.nodes.state(page);
            }
            Batched::unlink(lists, taken.fronts.as_deref_mut(), page, state);
            left[on(state)] += 1;
            if lists.unlinked_dead(page) {
                pages.swap(*revived, at);
                *revived += 1;
            }
        }
        lists.counts.removed(left);
    }

    /// Removes dead pages, sentinels or not, of several batches at a time.
    fn remove_edges(&self, lists: &Lists, pages: &mut [u32], revived: &mut usize) {
        let mut left = [0; LISTS.len()];
        let mut next = *revived;
        let (mut few, mut places) = ([0; AT_ONCE], [0; AT_ONCE]);
        loop {
            let mut count = 0;
            while count < AT_ONCE && next < pages.len() {
                if is_due(lists.nodes.state(pages[next])) {
                    (few[count], places[count]) = (pages[next], next);
                    count += 1;
                }
                next += 1;
            }
            if count == 0 {
                break;
            }
            let mut locked = self.lock_few(lists, &few[..count]);
            for (page, at) in few[..count].iter().zip(places) {
                let state = lists.nodes.state(*page);
                if !is_due(state) || !locked.has(state.tag()) {
                    continue;
                }
                Batched::unlink(lists, Some(&mut locked.fronts), *page, state);
                left[on(state)] += 1;
                if lists.unlinked_dead(*page) {
                    pages.swap(*revived, at);
                    *revived += 1;
                }
            }
        }
        lists.counts.removed(left);
    }
}

fn on(state: State) -> usize {
    usize::from(state.place() == Place::On(List::Active))
}

/// Returns whether a page must be removed. If its tag has changed by the time its batch lock is taken,
/// another thread removes it: the one that moved it, or that marked it dead after it was removed and added
/// again.
fn is_due(state: State) -> bool {
    state.is_on_list() && state.has(DEAD)
}

impl LockedLists for AllLocked<'_> {
    fn unlink(&mut self, page: u32) {
        let state = self.lists.nodes.state(page);
        if let Place::On(list) = state.place() {
            Batched::unlink(self.lists, Some(&mut self.fronts), page, state);
            self.lists.counts.left(list, 1);
        }
    }

    fn put_front(&mut self, list: List, page: u32) {
        self.design.push(self.lists, &mut self.fronts, list, page);
    }
}

impl LruLocks for Batched {
    const NAME: &'static str = "batched";
    type LockedLists<'a> = AllLocked<'a>;

    fn new(options: &LruConfig) -> Self {
        let batching = options.batching;
        let lock = |_| Padded(Mutex::new(&classes::LRU_BATCH, ()));
        Batched {
            batch_locks: (0..batching.locks.clamp(1, MOST_LOCKS as u16)).map(lock).collect(),
            lru_lock: Mutex::new(&classes::LRU_LOCK, Fronts::default()),
            tags: PerCpu::new(|cpu| Counter::new(cpu as u64 * 7)),
            batching: Batching { max_pages: batching.max_pages.max(1), ..batching },
        }
    }

    fn claim(&self, lists: &Lists, pagevec: &Pagevec) -> Claimed {
        if !self.batching.splice {
            return lists.claim(pagevec, |_, _| 0);
        }
        // Cuts each list's pages into batches: the tag of the current batch, and the index of its end.
        let mut batches = [(0, 0); LISTS.len()];
        let max_pages = self.batching.max_pages as usize;
        lists.claim(pagevec, |list, nth| {
            let (tag, end) = &mut batches[list as usize];
            if nth == *end {
                (*tag, *end) = (self.fresh_tag(), nth + max_pages);
            }
            State::batch_bits(*tag, nth + max_pages == *end)
        })
    }

    fn add(&self, lists: &Lists, pages: [&[u32]; 2]) -> Pagevec {
        if !self.batching.splice {
            let mut fronts = self.lock_lru(lists);
            return lists.link_each(pages, |list, page| self.push(lists, &mut fronts, list, page));
        }
        pages.iter().for_each(|pages| self.chain(lists, pages));
        let mut fronts = self.lock_lru(lists);
        self.splice(lists, &mut fronts, List::Inactive, pages[0]);
        self.splice(lists, &mut fronts, List::Active, pages[1]);
        drop(fronts);
        // Until this no other thread removes the pages.
        lists.link_each(pages, |_, _| ())
    }

    fn activate(&self, lists: &Lists, pages: &[u32]) -> Pagevec {
        let mut dead = Pagevec::EMPTY;
        for pages in pages.chunks(AT_ONCE) {
            let mut locked = self.lock_few(lists, pages);
            for page in pages {
                let state = lists.nodes.state(*page);
                if state.place() != Place::On(List::Inactive) || !state.has(PROMOTED) {
                    continue;
                }
                if !locked.has(state.tag()) {
                    // The page was removed and added again meanwhile: its next use promotes it again.
                    lists.nodes.clear(*page, PROMOTED);
                    continue;
                }
                lists.claim_promoted(*page);
                Batched::unlink(lists, Some(&mut locked.fronts), *page, state);
                self.push(lists, &mut locked.fronts, List::Active, *page);
                lists.counts.activated();
                if lists.linked(*page, List::Active) {
                    dead.push(*page);
                }
            }
        }
        dead
    }

    fn remove(&self, lists: &Lists, pages: &mut [u32]) -> usize {
        let mut revived = 0;
        self.remove_by_batch(lists, pages, !self.batching.two_passes, &mut revived);
        if self.batching.two_passes {
            self.remove_edges(lists, pages, &mut revived);
        }
        revived
    }

    fn batch_bits(&self, nth: usize, is_last: bool) -> u32 {
        let max_pages = self.batching.max_pages as usize;
        let (batch, at) = (nth / max_pages, nth % max_pages);
        let tag = (batch % self.batch_locks.len()) as u8;
        State::batch_bits(tag, at == 0 || at + 1 == max_pages || is_last)
    }

    fn lock_all<'a>(&'a self, lists: &'a Lists) -> AllLocked<'a> {
        // Not on the heap: a signal handler may be here.
        let lock = |tag: usize| (tag < self.batch_locks.len()).then(|| self.lock_batch(lists, tag as u8));
        let batches = std::array::from_fn(lock);
        AllLocked { design: self, lists, fronts: self.lock_lru(lists), _batches: batches }
    }
}
