//! Batch locks: a page in the middle of a batch is taken out under one lock of many ("lru_lock
//! scalability", D. Jordan and S. Sistare, 2018).
//!
//! ```text
//! head ── * o o o o * ── * o o o * ── * o * ── head        * sentinel   o other
//!         └ tag 5 ──┘    └ tag 0 ┘    └ 5 ┘
//! ```
//!
//! A list is a row of *batches*, each with a *tag*, which is the number of a batch lock. The first and the
//! last of a batch are *sentinels*. Then:
//!
//! 1. Both neighbours of a page that is no sentinel have its tag. So its batch lock protects all links that
//!    taking it out changes.
//! 2. A link to a page of another batch, or to the head, is one between sentinels, and needs `lru_lock`.
//!    Taking a sentinel out needs both locks, and makes its neighbours sentinels.
//! 3. A state's place changes from or to a list only under these locks, and its tag only while it is in no
//!    list. A sentinel becomes none only under `lru_lock`, and a page becomes a sentinel only under its batch
//!    lock and `lru_lock`. So what was found before locking is looked at again afterwards.
//!
//! Pages come to the front of a list as a whole row of batches, under one hold of `lru_lock`, which changes
//! four links; or, without [`Batching::splice`], one after another into the *open* batch, in which all are
//! sentinels until it is complete.
//!
//! Lock order: batch locks by ascending number, then `lru_lock`.

use crate::base::cpu::{Padded, PerCpu};
use crate::base::sync::{Counter, Mutex, MutexGuard, classes};

use super::Options;
use super::counts::LruGuard;
use super::design::{All, Design, Lists};
use super::node::{DOOMED, LISTS, List, OPEN, PROMOTED, Place, SENTINEL, State};

/// Parameters of [`Batched`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// Batch locks, 1 to 256.
    pub locks: u16,
    /// The most pages of a batch that is put in.
    pub max_pages: u32,
    /// Take those out first that are no sentinels: later, their neighbours may have become some.
    pub two_passes: bool,
    /// Put all pages of a pagevec in at once.
    pub splice: bool,
}

impl Default for Batching {
    /// The series': 32 locks, batches of 14 pages, two passes, splicing.
    fn default() -> Self {
        Batching { locks: 32, max_pages: 14, two_passes: true, splice: true }
    }
}

/// Pages that are activated under one hold of `lru_lock`, and so the most batch locks held for that.
const AT_ONCE: usize = 16;

/// `lru_lock` and batch locks.
pub struct Batched {
    batch_locks: Box<[Padded<Mutex<()>>]>,
    lru_lock: Mutex<Fronts>,
    /// For each CPU how many tags it gave out: they go round.
    tags: PerCpu<Counter>,
    batching: Batching,
}

/// The open batches at the fronts of the lists.
#[derive(Debug, Default)]
struct Fronts {
    open: [Open; 2],
}

#[derive(Clone, Copy, Debug, Default)]
struct Open {
    tag: u8,
    pages: u32,
}

/// All locks of a [`Batched`].
pub struct AllLocked<'a> {
    design: &'a Batched,
    lists: &'a Lists,
    // Before the batch locks: it is let go first, and they in reverse.
    fronts: LruGuard<'a, Fronts>,
    _batches: Reversed<'a>,
}

/// Batch locks in the order they were taken in, to be let go in reverse.
struct Reversed<'a>(Vec<MutexGuard<'a, ()>>);

impl Drop for Reversed<'_> {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// The locks that one who takes pages out has now.
struct Taken<'a> {
    design: &'a Batched,
    lists: &'a Lists,
    fronts: Option<LruGuard<'a, Fronts>>,
    batch: Option<(u8, MutexGuard<'a, ()>)>,
}

impl<'a> Taken<'a> {
    /// Has the batch lock of `tag`, and `lru_lock` only if it had both before.
    fn lock_batch(&mut self, tag: u8) {
        if self.batch.as_ref().is_some_and(|(held, _)| *held == tag) {
            return;
        }
        (self.fronts, self.batch) = (None, None);
        self.batch = Some((tag, self.design.lock_batch(self.lists, tag)));
    }

    fn lock_lru(&mut self) -> &mut Fronts {
        let (design, lists) = (self.design, self.lists);
        self.fronts.get_or_insert_with(|| design.lock_lru(lists))
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

    fn lock_batches<'a>(&'a self, lists: &'a Lists, tags: impl Iterator<Item = u8>) -> Reversed<'a> {
        Reversed(tags.map(|tag| self.lock_batch(lists, tag)).collect())
    }

    fn fresh_tag(&self) -> u8 {
        (self.tags.local().add(1) % self.batch_locks.len() as u64) as u8
    }

    /// Takes a page out of its list. Its batch is locked, and `lru_lock` if it is a sentinel.
    fn unlink(lists: &Lists, fronts: Option<&mut Fronts>, page: u32, state: State) {
        let Place::On(list) = state.place() else { return };
        if let Some(fronts) = fronts.filter(|_| state.has(SENTINEL)) {
            if state.has(OPEN) {
                fronts.open[list as usize].pages -= 1;
            }
            // One that was none is of the same batch.
            lists.nodes.set(lists.nodes.prev(page), SENTINEL);
            lists.nodes.set(lists.nodes.next(page), SENTINEL);
        }
        lists.unlink(page, list);
    }

    /// Links pages, which are in no list, with each other, the last in front, as batches.
    fn chain(&self, lists: &Lists, pages: &[u32]) {
        for batch in pages.chunks(self.batching.max_pages as usize) {
            let tag = self.fresh_tag();
            for (at, page) in batch.iter().enumerate() {
                let edge = if at == 0 || at + 1 == batch.len() { SENTINEL } else { 0 };
                let tagged = |state: State| Some(state.without(SENTINEL | OPEN).tagged(tag).with(edge));
                lists.nodes.change(*page, tagged);
            }
        }
        for pair in pages.windows(2) {
            lists.nodes.link(pair[1], pair[0]);
        }
    }

    /// Puts what [`Batched::chain`] linked at the front of a list.
    fn splice(&self, lists: &Lists, fronts: &mut Fronts, list: List, pages: &[u32]) {
        if let [last, .., first] | [last @ first] = pages {
            self.close(lists, fronts, list);
            lists.nodes.link_at_front(list, *first, *last);
        }
    }

    /// Puts a page that is in no list into the open batch of a list.
    fn push(&self, lists: &Lists, fronts: &mut Fronts, list: List, page: u32) {
        let open = &mut fronts.open[list as usize];
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

    /// Makes the open batch of a list, if there is one, a complete one.
    fn close(&self, lists: &Lists, fronts: &mut Fronts, list: List) {
        let nodes = &lists.nodes;
        let pages = std::mem::take(&mut fronts.open[list as usize].pages);
        let mut page = nodes.next(nodes.head(list));
        for at in 0..pages {
            // A page that is no sentinel may be gone at once: what follows it is looked up before.
            let next = nodes.next(page);
            let is_edge = at == 0 || at + 1 == pages;
            nodes.clear(page, if is_edge { OPEN } else { OPEN | SENTINEL });
            page = next;
        }
    }

    /// One pass of taking doomed pages out: those that are no sentinels, or all.
    fn pass(&self, lists: &Lists, pages: &[u32], sentinels: bool, revived: &mut Vec<u32>) {
        let mut taken = Taken { design: self, lists, fronts: None, batch: None };
        let is_due =
            |state: State| state.is_on_list() && state.has(DOOMED) && (sentinels || !state.has(SENTINEL));
        for page in pages {
            loop {
                let state = lists.nodes.state(*page);
                if !is_due(state) {
                    break;
                }
                let tag = state.tag();
                taken.lock_batch(tag);
                if lists.nodes.state(*page).has(SENTINEL) && sentinels {
                    taken.lock_lru();
                }
                // It may have gone, or come anew. It has become a sentinel at most before its batch was locked.
                let state = lists.nodes.state(*page);
                if !is_due(state) || state.tag() != tag {
                    continue;
                }
                if !state.has(SENTINEL) {
                    taken.fronts = None;
                } else if taken.fronts.is_none() {
                    continue;
                }
                Batched::unlink(lists, taken.fronts.as_deref_mut(), *page, state);
                if lists.unlinked_doomed(*page) {
                    revived.push(*page);
                }
                break;
            }
        }
    }
}

impl All for AllLocked<'_> {
    fn unlink(&mut self, page: u32) {
        Batched::unlink(self.lists, Some(&mut self.fronts), page, self.lists.nodes.state(page));
    }

    fn put_front(&mut self, list: List, page: u32) {
        self.design.push(self.lists, &mut self.fronts, list, page);
    }
}

impl Design for Batched {
    const NAME: &'static str = "batched";
    type All<'a> = AllLocked<'a>;

    fn new(options: &Options) -> Self {
        let batching = options.batching;
        let lock = |_| Padded(Mutex::new(&classes::LRU_BATCH, ()));
        Batched {
            batch_locks: (0..batching.locks.clamp(1, 256)).map(lock).collect(),
            lru_lock: Mutex::new(&classes::LRU_LOCK, Fronts::default()),
            tags: PerCpu::new(|cpu| Counter::new(cpu as u64 * 7)),
            batching: Batching { max_pages: batching.max_pages.max(1), ..batching },
        }
    }

    fn add(&self, lists: &Lists, pages: [&[u32]; 2]) -> Vec<u32> {
        let mut doomed = Vec::new();
        if !self.batching.splice {
            let mut fronts = self.lock_lru(lists);
            for (list, pages) in LISTS.into_iter().zip(pages) {
                for page in pages {
                    self.push(lists, &mut fronts, list, *page);
                    doomed.extend(lists.linked(*page, list).then_some(*page));
                }
            }
            return doomed;
        }
        pages.iter().for_each(|pages| self.chain(lists, pages));
        let mut fronts = self.lock_lru(lists);
        self.splice(lists, &mut fronts, List::Inactive, pages[0]);
        self.splice(lists, &mut fronts, List::Active, pages[1]);
        drop(fronts);
        // Nobody takes a page out before this.
        for (list, pages) in LISTS.into_iter().zip(pages) {
            doomed.extend(pages.iter().filter(|page| lists.linked(**page, list)));
        }
        doomed
    }

    fn activate(&self, lists: &Lists, pages: &[u32]) -> Vec<u32> {
        let mut doomed = Vec::new();
        for pages in pages.chunks(AT_ONCE) {
            let mut tags = [None; AT_ONCE];
            for (tag, page) in tags.iter_mut().zip(pages) {
                let state = lists.nodes.state(*page);
                *tag = (state.place() == Place::On(List::Inactive)).then(|| state.tag());
            }
            let mut ascending = tags;
            ascending.sort_unstable();
            let mut batches = [const { None }; AT_ONCE];
            let mut last = None;
            for (batch, tag) in batches.iter_mut().zip(ascending) {
                if let Some(tag) = tag.filter(|tag| last != Some(*tag)) {
                    *batch = Some(self.lock_batch(lists, tag));
                    last = Some(tag);
                }
            }
            let mut fronts = self.lock_lru(lists);
            for page in pages {
                let state = lists.nodes.state(*page);
                if state.place() != Place::On(List::Inactive) || !state.has(PROMOTED) {
                    continue;
                }
                if !ascending.contains(&Some(state.tag())) {
                    // It has gone and come meanwhile: the next use promotes it again.
                    lists.nodes.clear(*page, PROMOTED);
                    continue;
                }
                lists.claim_promoted(*page);
                Batched::unlink(lists, Some(&mut fronts), *page, state);
                self.push(lists, &mut fronts, List::Active, *page);
                lists.counts.local().activated.add(1);
                doomed.extend(lists.linked(*page, List::Active).then_some(*page));
            }
        }
        doomed
    }

    fn remove(&self, lists: &Lists, pages: &[u32]) -> Vec<u32> {
        let mut revived = Vec::new();
        if self.batching.two_passes {
            self.pass(lists, pages, false, &mut revived);
        }
        self.pass(lists, pages, true, &mut revived);
        revived
    }

    fn lock_all<'a>(&'a self, lists: &'a Lists) -> AllLocked<'a> {
        let batches = self.lock_batches(lists, (0..self.batch_locks.len()).map(|tag| tag as u8));
        AllLocked { design: self, lists, fronts: self.lock_lru(lists), _batches: batches }
    }
}
