//! The lock designs' interface, the steps that they share, and pagevecs: small arrays of pages.

use super::LruConfig;
use super::counts::Counts;
use super::node::{DEAD, LISTS, List, Nodes, OPEN, PROMOTED, Place, SENTINEL, State};

/// The lists and counts, which all designs share.
pub struct Lists {
    pub(super) nodes: Nodes,
    pub(super) counts: Counts,
}

/// A way to lock the lists. Pages that are passed in to be put at the front are in the place `Linking`, so
/// that no other thread takes them out.
pub trait LruLocks: Sized + Send + Sync + 'static {
    /// The name in settings.
    const NAME: &'static str;
    type LockedLists<'a>: LockedLists;

    /// Makes the locks; takes the parameters that the design has.
    fn new(options: &LruConfig) -> Self;

    /// Claims the pages of a drained pagevec that must be put into a list.
    fn claim(&self, lists: &Lists, pagevec: &Pagevec) -> Claimed {
        lists.claim(pagevec, |_, _| 0)
    }

    /// Puts claimed pages at the front of the inactive and of the active list, the last of each in front;
    /// returns those that were marked dead meanwhile.
    fn add(&self, lists: &Lists, pages: [&[u32]; 2]) -> Pagevec;

    /// Moves those of the pages that are in the inactive list and promoted to the front of the active list;
    /// returns those that were marked dead meanwhile.
    fn activate(&self, lists: &Lists, pages: &[u32]) -> Pagevec;

    /// Removes those of the pages that are in a list and dead. Moves those that got contents meanwhile, which
    /// must be added again, to the front of `pages`; returns how many.
    fn remove(&self, lists: &Lists, pages: &mut [u32]) -> usize;

    /// Returns the bits of a page's state for its place in a list that is linked from its cold end on, whose
    /// nth page it is, from 0 on.
    fn batch_bits(&self, _nth: usize, _is_last: bool) -> u32 {
        0
    }

    /// Takes all locks, for scans.
    fn lock_all<'a>(&'a self, lists: &'a Lists) -> Self::LockedLists<'a>;
}

/// The guard of all locks of a design.
pub trait LockedLists {
    fn unlink(&mut self, page: u32);

    /// Puts a page that is in no list at the front of one.
    fn put_front(&mut self, list: List, page: u32);
}

/// The pages of a drained pagevec, sorted by the action they need.
pub struct Claimed {
    /// Pages to put into each list: no other thread takes them out meanwhile.
    pub(super) lists: [Pagevec; 2],
    pub(super) promoted: Pagevec,
}

impl Lists {
    /// Claims the pages of a drained pagevec that must be put into a list. Sets the bits that `nth` returns
    /// for the nth page of a list in its state with the same exchange.
    pub(super) fn claim(&self, pagevec: &Pagevec, mut nth: impl FnMut(List, usize) -> u32) -> Claimed {
        let mut claimed = Claimed { lists: [Pagevec::EMPTY; 2], promoted: Pagevec::EMPTY };
        for page in pagevec.pages() {
            let mut list = List::Inactive;
            let claim = |state: State| {
                list = if state.has(PROMOTED) { List::Active } else { List::Inactive };
                let mut bits = || nth(list, claimed.lists[list as usize].len());
                (state.place() == Place::Pending).then(|| state.at(Place::Linking).with(bits()))
            };
            if self.nodes.change(*page, claim).is_some() {
                claimed.lists[list as usize].push(*page);
            } else if self.nodes.state(*page).has(PROMOTED) {
                claimed.promoted.push(*page);
            }
        }
        claimed
    }

    /// Sets the place of a page that was linked to `list`; returns whether it was marked dead meanwhile.
    pub(super) fn linked(&self, page: u32, list: List) -> bool {
        let on = |state: State| Some(state.at(Place::On(list)).without(PROMOTED));
        self.nodes.change(page, on).is_some_and(|state| state.has(DEAD))
    }

    /// Puts pages into their lists by `put`, and sets their places; returns those that were marked dead
    /// meanwhile.
    pub(super) fn link_each(&self, pages: [&[u32]; 2], mut put: impl FnMut(List, u32)) -> Pagevec {
        let mut dead = Pagevec::EMPTY;
        for (list, pages) in LISTS.into_iter().zip(pages) {
            for page in pages {
                put(list, *page);
                if self.linked(*page, list) {
                    dead.push(*page);
                }
            }
        }
        dead
    }

    /// Sets the place of a dead page that was unlinked to [`Place::Out`], or to [`Place::Pending`] if it got
    /// contents again; returns whether it did.
    pub(super) fn unlinked_dead(&self, page: u32) -> bool {
        let out = |state: State| {
            let dead = state.has(DEAD);
            Some(State::only(if dead { Place::Out } else { Place::Pending }))
        };
        self.nodes.change(page, out).is_some_and(|state| !state.has(DEAD))
    }

    /// Returns the last page of a locked list, unless that is empty or another thread is still adding the
    /// page.
    pub(super) fn coldest(&self, list: List) -> Option<(u32, State)> {
        let last = self.nodes.last(list)?;
        let state = self.nodes.state(last);
        (state.place() == Place::On(list)).then_some((last, state))
    }

    /// Claims a promoted page of the inactive list, to move it to the active one: no other thread takes it
    /// out then. Returns whether it was one.
    pub(super) fn claim_promoted(&self, page: u32) -> bool {
        let claim = |state: State| {
            let promoted = state.place() == Place::On(List::Inactive) && state.has(PROMOTED);
            promoted.then(|| state.at(Place::Linking).without(OPEN | SENTINEL))
        };
        self.nodes.change(page, claim).is_some()
    }
}

/// The most pages of a pagevec.
pub const MAX_PAGEVEC_PAGES: usize = 128;

/// Pages that are waiting to be put into the lists.
#[derive(Clone, Copy)]
pub struct Pagevec {
    pages: [u32; MAX_PAGEVEC_PAGES],
    len: usize,
}

impl Pagevec {
    pub(super) const EMPTY: Pagevec = Pagevec { pages: [0; MAX_PAGEVEC_PAGES], len: 0 };

    #[inline]
    pub(super) fn push(&mut self, page: u32) {
        self.pages[self.len] = page;
        self.len += 1;
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn pages_mut(&mut self) -> &mut [u32] {
        &mut self.pages[..self.len]
    }

    /// Returns the pages in the order in which they were added.
    #[inline]
    pub(super) fn pages(&self) -> &[u32] {
        &self.pages[..self.len]
    }
}
