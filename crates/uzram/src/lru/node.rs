//! Nodes of the lists, one for each page.
//!
//! A node's links are protected by the locks of its place in the lists. Any thread may change its state, by
//! atomic operations only.
//!
//! ```text
//! state   31      16 15      8   7          6        5            4      3          2      0
//!         [ unused ] [ tag   ] [ promoted | dead | referenced | open | sentinel | place  ]
//!         [ age              ] [ 0                                               | evicted ]
//! ```

use crate::base::cpu::prefetch_write;
use crate::base::error::Result;
use crate::base::mem::{Entry, Table};
use crate::base::sync::{AtomicU32, Ordering};

/// The lists of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Pages that were used at most once since they were added.
    Inactive,
    /// Pages that were used again.
    Active,
}

pub(crate) const LISTS: [List; 2] = [List::Inactive, List::Active];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Out,
    /// In a CPU's pagevec, to be put into a list.
    Pending,
    /// Being put into a list, or moved, by one thread: no other thread takes it out.
    Linking,
    On(List),
    /// Taken from the cold end by a caller that decides what to do with it.
    Isolated,
    /// The page's contents were moved elsewhere; the state also has the age at which.
    Evicted,
    Head,
}

/// The node is the first or last of a batch: its neighbours may be of other batches.
pub(crate) const SENTINEL: u32 = 1 << 3;
/// The node is in the open batch at the front of a list, which is not complete yet and has only sentinels.
pub(crate) const OPEN: u32 = 1 << 4;
/// The page was used since it came to its place.
pub(crate) const REFERENCED: u32 = 1 << 5;
/// The page's contents are gone, and the node must be removed.
pub(crate) const DEAD: u32 = 1 << 6;
/// The page must be put into the active list.
pub(crate) const PROMOTED: u32 = 1 << 7;
const PLACE_MASK: u32 = 7;
const TAG_SHIFT: u32 = 8;
const TAG_MASK: u32 = 0xff << TAG_SHIFT;
const FLAGS_MASK: u32 = (1 << TAG_SHIFT) - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(u32);

impl State {
    pub(crate) fn place(self) -> Place {
        match self.0 & PLACE_MASK {
            0 => Place::Out,
            1 => Place::Pending,
            2 => Place::Linking,
            3 => Place::On(List::Inactive),
            4 => Place::On(List::Active),
            5 => Place::Isolated,
            6 => Place::Evicted,
            _ => Place::Head,
        }
    }

    pub(crate) fn has(self, flag: u32) -> bool {
        self.0 & flag != 0
    }

    pub(crate) fn tag(self) -> u8 {
        (self.0 >> TAG_SHIFT) as u8
    }

    pub(crate) fn is_on_list(self) -> bool {
        matches!(self.place(), Place::On(_))
    }

    pub(crate) fn at(self, place: Place) -> Self {
        let place = match place {
            Place::Out => 0,
            Place::Pending => 1,
            Place::Linking => 2,
            Place::On(List::Inactive) => 3,
            Place::On(List::Active) => 4,
            Place::Isolated => 5,
            Place::Evicted => 6,
            Place::Head => 7,
        };
        State(self.0 & !PLACE_MASK | place)
    }

    pub(crate) fn with(self, flags: u32) -> Self {
        State(self.0 | flags)
    }

    pub(crate) fn without(self, flags: u32) -> Self {
        State(self.0 & !flags)
    }

    pub(crate) fn batch_bits(tag: u8, is_edge: bool) -> u32 {
        u32::from(tag) << TAG_SHIFT | if is_edge { SENTINEL } else { 0 }
    }

    pub(crate) fn tagged(self, tag: u8) -> Self {
        State(self.0 & !TAG_MASK | u32::from(tag) << TAG_SHIFT)
    }

    /// Returns the state of a page that was evicted at `age`, of which it keeps the lowest 24 bits.
    pub(crate) fn evicted(age: u32) -> Self {
        State(age << TAG_SHIFT).at(Place::Evicted)
    }

    /// Returns the difference of `age` to that of an evicted page, modulo 2^24.
    pub(crate) fn distance_to(self, age: u32) -> u32 {
        (age << TAG_SHIFT).wrapping_sub(self.0 & !FLAGS_MASK) >> TAG_SHIFT
    }

    pub(crate) fn only(place: Place) -> Self {
        State(0).at(place)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Node {
    prev: AtomicU32,
    next: AtomicU32,
    state: AtomicU32,
}

// SAFETY: the fields are atomic integers, which are zero by default and have no destructors.
unsafe impl Entry for Node {}

/// Bytes of a node: the fixed cost of a page.
pub const NODE_BYTES: usize = 12;
#[cfg(not(loom))]
const _: () = assert!(size_of::<Node>() == NODE_BYTES);

/// The nodes of all pages, followed by the heads of the lists, which are circular.
///
/// The locks that protect the links order their accesses, so these are relaxed.
pub(crate) struct Nodes {
    pub(crate) table: Table<Node>,
    pages: u32,
}

impl Nodes {
    pub(crate) fn new(pages: u32) -> Result<Self> {
        let nodes = Nodes { table: Table::new(pages as usize + LISTS.len())?, pages };
        for list in LISTS {
            let head = nodes.head(list);
            nodes.node(head).state.store(State::only(Place::Head).with(SENTINEL).0, Ordering::Relaxed);
            nodes.link(head, head);
        }
        Ok(nodes)
    }

    #[inline]
    pub(crate) fn has(&self, page: u32) -> bool {
        page < self.pages
    }

    #[inline]
    pub(crate) fn prefetch(&self, id: u32) {
        prefetch_write(self.node(id));
    }

    #[inline]
    fn node(&self, id: u32) -> &Node {
        &self.table[id as usize]
    }

    pub(crate) fn head(&self, list: List) -> u32 {
        self.pages + list as u32
    }

    pub(crate) fn prev(&self, id: u32) -> u32 {
        self.node(id).prev.load(Ordering::Relaxed)
    }

    pub(crate) fn next(&self, id: u32) -> u32 {
        self.node(id).next.load(Ordering::Relaxed)
    }

    pub(crate) fn link(&self, prev: u32, next: u32) {
        self.node(prev).next.store(next, Ordering::Relaxed);
        self.node(next).prev.store(prev, Ordering::Relaxed);
    }

    /// Sets the links and the state of a page of an LRU that no other thread uses yet.
    pub(crate) fn adopt(&self, page: u32, prev: u32, next: u32, state: State) {
        let node = self.node(page);
        node.prev.store(prev, Ordering::Relaxed);
        node.next.store(next, Ordering::Relaxed);
        node.state.store(state.0, Ordering::Relaxed);
    }

    pub(crate) fn unlink(&self, id: u32) {
        self.link(self.prev(id), self.next(id));
    }

    pub(crate) fn link_at_front(&self, list: List, first: u32, last: u32) {
        let head = self.head(list);
        self.link(last, self.next(head));
        self.link(head, first);
    }

    pub(crate) fn last(&self, list: List) -> Option<u32> {
        let last = self.prev(self.head(list));
        (last != self.head(list)).then_some(last)
    }

    #[inline]
    pub(crate) fn state(&self, id: u32) -> State {
        State(self.node(id).state.load(Ordering::Acquire))
    }

    /// Changes a state to what `f` returns, and returns the previous one; `None` if `f` returns `None`.
    #[inline]
    pub(crate) fn change(&self, id: u32, mut f: impl FnMut(State) -> Option<State>) -> Option<State> {
        let state = &self.node(id).state;
        let change = |old: u32| f(State(old)).map(|new| new.0);
        state.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).ok().map(State)
    }

    pub(crate) fn set(&self, id: u32, flag: u32) {
        if !self.state(id).has(flag) {
            self.node(id).state.fetch_or(flag, Ordering::AcqRel);
        }
    }

    pub(crate) fn clear(&self, id: u32, flags: u32) {
        self.node(id).state.fetch_and(!flags, Ordering::AcqRel);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_evicted_page_keeps_the_age_at_which() {
        for (age, now, distance) in [(0, 0, 0), (5, 9, 4), ((1 << 24) - 1, 1 << 24, 1), (u32::MAX, 3, 4)] {
            let state = State::evicted(age);
            assert_eq!((state.place(), state.distance_to(now)), (Place::Evicted, distance), "{age} {now}");
        }
    }
}

#[cfg(test)]
impl Nodes {
    /// Returns the pages of a list, the hottest first; checks that links agree both ways.
    pub(super) fn pages_of(&self, list: List) -> Vec<u32> {
        let (mut pages, mut at) = (Vec::new(), self.head(list));
        loop {
            let next = self.next(at);
            assert_eq!(self.prev(next), at, "links of {at} and {next}");
            if next == self.head(list) {
                return pages;
            }
            assert_eq!(self.state(next).place(), Place::On(list), "page {next}");
            pages.push(next);
            assert!(pages.len() <= self.pages as usize, "a circle without a head");
            at = next;
        }
    }

    /// Checks the invariants of batches, which `batched` lists.
    pub(super) fn check_batches(&self, list: List) {
        let mut open = true;
        for page in self.pages_of(list) {
            let (prev, state, next) = (self.prev(page), self.state(page), self.next(page));
            let [before, after] = [prev, next].map(|id| self.state(id));
            open &= state.has(OPEN);
            assert_eq!(state.has(OPEN), open, "page {page}: the open batch is the first");
            if !state.has(SENTINEL) {
                assert!(!open && before.tag() == state.tag() && after.tag() == state.tag(), "page {page}");
                assert!(before.place() != Place::Head && after.place() != Place::Head, "page {page}");
            } else {
                assert!(before.has(SENTINEL) || after.has(SENTINEL), "page {page} is within a batch");
            }
        }
    }
}
