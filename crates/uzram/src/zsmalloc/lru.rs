//! A pool's zspages in the order in which they were last stored into, for reclaim of the coldest.
//!
//! A circular list through a table with an entry per page, of which only the entries of zspages' first
//! pages are used: `[page after | page before]`. Another table has the zspages' classes, so that reclaim
//! can lock the class of a listed zspage. The list's lock comes after a class's.

use std::ops::Range;

use crate::base::error::Result;
use crate::base::mem::Table;
use crate::base::sync::{AtomicU32, AtomicU64, Mutex, Ordering, classes};

/// See the [module's documentation](self).
pub(super) struct Lru {
    order: Mutex<Order>,
    links: Table<AtomicU64>,
    /// For each page on the list, its class plus one; else 0.
    classes: Table<AtomicU32>,
}

#[derive(Default)]
struct Order {
    /// The zspage stored into last; the one before it in the circle is the coldest.
    hottest: Option<u32>,
    len: u64,
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
        Ok(Lru {
            order: Mutex::new(&classes::ZS_LRU, Order::default()),
            links: Table::new(pages)?,
            classes: Table::new(pages)?,
        })
    }

    pub(super) fn populate(&self, pages: Range<usize>) -> Result<()> {
        self.links.populate_range(pages.clone())?;
        self.classes.populate_range(pages)
    }

    pub(super) fn len(&self) -> u64 {
        self.order.lock().len
    }

    /// Makes the zspage that starts at `page` the hottest. Its class is locked.
    pub(super) fn touch(&self, page: u32, class: u8) {
        let mut order = self.order.lock();
        if order.hottest == Some(page) {
            return;
        }
        self.unlink(&mut order, page);
        self.link(&mut order, page, class, End::Hottest);
    }

    /// Inserts a zspage if it is not on the list. Its class is locked.
    pub(super) fn insert(&self, page: u32, class: u8, end: End) {
        let mut order = self.order.lock();
        if self.class_of(page).is_none() {
            self.link(&mut order, page, class, end);
        }
    }

    /// Removes a zspage; returns whether it was on the list. Its class is locked.
    pub(super) fn remove(&self, page: u32) -> bool {
        let mut order = self.order.lock();
        self.unlink(&mut order, page)
    }

    /// Returns the zspage that was stored into longest ago, and its class. Unless the class is locked, the
    /// zspage may be gone already.
    pub(super) fn coldest(&self) -> Option<(u32, u8)> {
        let order = self.order.lock();
        let (coldest, _) = self.neighbours(order.hottest?);
        Some((coldest, self.class_of(coldest)?))
    }

    /// Returns whether a zspage of this class is on the list. If so, and the class is locked, it is in use.
    pub(super) fn contains(&self, page: u32, class: u8) -> bool {
        let _order = self.order.lock();
        self.class_of(page) == Some(class)
    }

    fn class_of(&self, page: u32) -> Option<u8> {
        self.classes[page as usize].load(Ordering::Relaxed).checked_sub(1).map(|class| class as u8)
    }

    fn neighbours(&self, page: u32) -> (u32, u32) {
        let links = self.links[page as usize].load(Ordering::Relaxed);
        (links as u32, (links >> u32::BITS) as u32)
    }

    fn set_neighbours(&self, page: u32, before: u32, after: u32) {
        let links = u64::from(after) << u32::BITS | u64::from(before);
        self.links[page as usize].store(links, Ordering::Relaxed);
    }

    fn link(&self, order: &mut Order, page: u32, class: u8, end: End) {
        self.classes[page as usize].store(u32::from(class) + 1, Ordering::Relaxed);
        order.len += 1;
        let Some(hottest) = order.hottest else {
            self.set_neighbours(page, page, page);
            order.hottest = Some(page);
            return;
        };
        // Insert between the coldest and the hottest; `end` decides which of the two it becomes.
        let (coldest, _) = self.neighbours(hottest);
        self.set_neighbours(page, coldest, hottest);
        let (before, _) = self.neighbours(coldest);
        self.set_neighbours(coldest, if coldest == hottest { page } else { before }, page);
        let (_, after) = self.neighbours(hottest);
        self.set_neighbours(hottest, page, if coldest == hottest { page } else { after });
        if end == End::Hottest {
            order.hottest = Some(page);
        }
    }

    fn unlink(&self, order: &mut Order, page: u32) -> bool {
        if self.class_of(page).is_none() {
            return false;
        }
        self.classes[page as usize].store(0, Ordering::Relaxed);
        order.len -= 1;
        let (before, after) = self.neighbours(page);
        if after == page {
            order.hottest = None;
            return true;
        }
        let (before_that, after_before) = self.neighbours(before);
        debug_assert_eq!(after_before, page);
        self.set_neighbours(before, if before == after { before } else { before_that }, after);
        let (_, after_that) = self.neighbours(after);
        self.set_neighbours(after, before, if before == after { after } else { after_that });
        if order.hottest == Some(page) {
            order.hottest = Some(after);
        }
        true
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
