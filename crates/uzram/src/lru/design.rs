//! How the lists are locked.

use super::LruConfig;
use super::counts::Counts;
use super::node::{DEAD, List, Nodes, OPEN, PROMOTED, Place, SENTINEL, State};
use super::pagevec::Pagevec;

/// What every design works on.
pub struct Lists {
    pub(super) nodes: Nodes,
    pub(super) counts: Counts,
}

/// A way to lock the lists. Pages that are handed in to be put at the front are in a place of their own, so
/// that nobody else takes them out.
pub trait LruLocks: Sized + Send + Sync + 'static {
    /// How it is called.
    const NAME: &'static str;
    /// All locks at once.
    type LockedLists<'a>: LockedLists;

    /// A design with these parameters, as far as it has them.
    fn new(options: &LruConfig) -> Self;

    /// Claims the pages of a drained pagevec that are to be put into a list.
    fn claim(&self, lists: &Lists, pagevec: &Pagevec) -> Claimed {
        lists.claim(pagevec, |_, _| 0)
    }

    /// Puts claimed pages at the front of the inactive and of the active list, the last of each in front, and
    /// returns those that were dead meanwhile.
    fn add(&self, lists: &Lists, pages: [&[u32]; 2]) -> Pagevec;

    /// Moves those of the pages that are in the inactive list and promoted to the front of the active
    /// list, and returns those that were dead meanwhile.
    fn activate(&self, lists: &Lists, pages: &[u32]) -> Pagevec;

    /// Takes those of the pages that are in a list and dead out of it, and brings those to the front of
    /// `pages` that got contents meanwhile, to be added again: returns how many.
    fn remove(&self, lists: &Lists, pages: &mut [u32]) -> usize;

    /// Takes all locks, for scans.
    fn lock_all<'a>(&'a self, lists: &'a Lists) -> Self::LockedLists<'a>;
}

/// All locks of a design.
pub trait LockedLists {
    /// Takes a page out of its list.
    fn unlink(&mut self, page: u32);

    /// Puts a page that is in no list at the front of one.
    fn put_front(&mut self, list: List, page: u32);
}

/// The pages of a pagevec, by what is to be done with them.
pub struct Claimed {
    /// To be put into each list: nobody else takes them out meanwhile.
    pub(super) lists: [Pagevec; 2],
    /// In a list, to be activated.
    pub(super) promoted: Pagevec,
}

impl Lists {
    /// Claims the pages of a drained pagevec that are to be put into a list. The state of the nth for a list
    /// has what `nth` returns at once.
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

    /// Makes a page that was linked one of `list`, and says whether it was dead meanwhile.
    pub(super) fn linked(&self, page: u32, list: List) -> bool {
        let on = |state: State| Some(state.at(Place::On(list)).without(PROMOTED));
        self.nodes.change(page, on).is_some_and(|state| state.has(DEAD))
    }

    /// Makes a page that was unlinked one without contents, unless it got new ones: says whether it did.
    pub(super) fn unlinked_dead(&self, page: u32) -> bool {
        let out = |state: State| {
            let dead = state.has(DEAD);
            Some(State::only(if dead { Place::Out } else { Place::Pending }))
        };
        self.nodes.change(page, out).is_some_and(|state| !state.has(DEAD))
    }

    /// Makes the neighbours of a page neighbours of each other.
    pub(super) fn unlink(&self, page: u32) {
        self.nodes.link(self.nodes.prev(page), self.nodes.next(page));
    }

    /// The last page of a list that is locked, unless there is none, or who puts it there has not done yet.
    pub(super) fn coldest(&self, list: List) -> Option<(u32, State)> {
        let last = self.nodes.last(list)?;
        let state = self.nodes.state(last);
        (state.place() == Place::On(list)).then_some((last, state))
    }

    /// A page of the inactive list that is to be moved to the active one: nobody else takes it out then.
    pub(super) fn claim_promoted(&self, page: u32) -> bool {
        let claim = |state: State| {
            let promoted = state.place() == Place::On(List::Inactive) && state.has(PROMOTED);
            promoted.then(|| state.at(Place::Linking).without(OPEN | SENTINEL))
        };
        self.nodes.change(page, claim).is_some()
    }
}
