//! A pool's zspages in the order in which they were last stored into, for reclaim of the coldest.
//!
//! A list of the nodes of zspages' first pages, whose states have the zspages' classes, so that reclaim can
//! lock the class of a listed zspage. The list's lock comes after a class's.

use std::ops::Range;

use crate::base::error::Result;
use crate::base::sync::{Mutex, MutexGuard, classes};
use crate::lru::List;
use crate::lru::node::{Nodes, Place, State};

/// The one of the nodes' lists that is used.
const LIST: List = List::Inactive;

/// See the [module's documentation](self).
pub(super) struct Lru {
    /// Protects the list; its length.
    len: Mutex<u64>,
    nodes: Nodes,
}

/// The end at which a new zspage is inserted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// For a zspage that was just stored into.
    Hottest,
    /// For a zspage that compaction filled.
    Coldest,
}

impl Lru {
    pub(super) fn new(pages: usize) -> Result<Self> {
        Ok(Lru { len: Mutex::new(&classes::ZS_LRU, 0), nodes: Nodes::new(pages as u32)? })
    }

    pub(super) fn populate(&self, pages: Range<usize>) -> Result<()> {
        self.nodes.table.populate_range(pages)
    }

    pub(super) fn len(&self) -> u64 {
        *self.len.lock()
    }

    /// Makes the zspage that starts at `page` the hottest. Its class is locked.
    pub(super) fn touch(&self, page: u32, class: u8) {
        let mut len = self.len.lock();
        if self.nodes.next(self.nodes.head(LIST)) != page {
            self.unlink(&mut len, page);
            self.link(&mut len, page, class, End::Hottest);
        }
    }

    /// Inserts a zspage if it is not on the list. Its class is locked.
    pub(super) fn insert(&self, page: u32, class: u8, end: End) {
        let mut len = self.len.lock();
        if !self.nodes.state(page).is_on_list() {
            self.link(&mut len, page, class, end);
        }
    }

    /// Removes a zspage; returns whether it was on the list. Its class is locked.
    pub(super) fn remove(&self, page: u32) -> bool {
        self.unlink(&mut self.len.lock(), page)
    }

    /// Returns the zspage that was stored into longest ago, and its class. Unless the class is locked, the
    /// zspage may be gone already.
    pub(super) fn coldest(&self) -> Option<(u32, u8)> {
        let _locked = self.len.lock();
        self.nodes.last(LIST).map(|page| (page, self.nodes.state(page).tag()))
    }

    /// Returns whether a zspage of this class is on the list. If so, and the class is locked, it is in use.
    pub(super) fn contains(&self, page: u32, class: u8) -> bool {
        let _locked = self.len.lock();
        let state = self.nodes.state(page);
        state.is_on_list() && state.tag() == class
    }

    fn link(&self, len: &mut MutexGuard<'_, u64>, page: u32, class: u8, end: End) {
        self.nodes.change(page, |_| Some(State::only(Place::On(LIST)).tagged(class)));
        match end {
            End::Hottest => self.nodes.link_at_front(LIST, page, page),
            End::Coldest => {
                let head = self.nodes.head(LIST);
                self.nodes.link(self.nodes.prev(head), page);
                self.nodes.link(page, head);
            }
        }
        **len += 1;
    }

    fn unlink(&self, len: &mut MutexGuard<'_, u64>, page: u32) -> bool {
        let is_on_list = self.nodes.state(page).is_on_list();
        if is_on_list {
            self.nodes.change(page, |_| Some(State::only(Place::Out)));
            self.nodes.unlink(page);
            **len -= 1;
        }
        is_on_list
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::random::Random;
    use std::collections::VecDeque;

    #[test]
    fn agrees_with_a_queue() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let lru = Lru::new(40).expect("memory");
            let mut model: VecDeque<u32> = VecDeque::new();
            for _ in 0..3000 {
                let page = random.below(40) as u32;
                let at = model.iter().position(|other| *other == page);
                match random.below(4) {
                    0 => {
                        assert_eq!(lru.remove(page), at.is_some(), "seed {seed}");
                        at.and_then(|at| model.remove(at));
                    }
                    1 => {
                        lru.insert(page, page as u8, End::Coldest);
                        if at.is_none() {
                            model.push_back(page);
                        }
                    }
                    2 => {
                        lru.insert(page, page as u8, End::Hottest);
                        if at.is_none() {
                            model.push_front(page);
                        }
                    }
                    _ => {
                        lru.touch(page, page as u8);
                        at.and_then(|at| model.remove(at));
                        model.push_front(page);
                    }
                }
                assert_eq!(lru.contains(page, page as u8), model.contains(&page), "seed {seed}");
                assert_eq!(lru.coldest().map(|(page, _)| page), model.back().copied(), "seed {seed}");
            }
            while let Some(page) = model.pop_back() {
                assert_eq!(
                    (lru.coldest(), lru.remove(page)),
                    (Some((page, page as u8)), true),
                    "seed {seed}"
                );
            }
            assert_eq!((lru.coldest(), lru.len()), (None, 0));
        }
    }
}
