//! The order in which a pool's zspages were last stored into, for those who empty the coldest.
//!
//! A circular list through a table with an entry for each page, of which those are used that zspages
//! start at: `[page after | page before]`, each one more than the page, and 0 for none. Another table has
//! the classes, so that a zspage of the list can be locked. The lock comes after a class's.

use std::ops::Range;

use crate::base::error::Result;
use crate::base::mem::Table;
use crate::base::sync::{AtomicU32, AtomicU64, Mutex, Ordering, classes};

/// See the [module's documentation](self).
pub(super) struct Lru {
    order: Mutex<Order>,
    links: Table<AtomicU64>,
    /// For each page in the list one more than the class; else 0.
    classes: Table<AtomicU32>,
}

#[derive(Default)]
struct Order {
    /// The one stored into last; before it, as the list is a circle, the coldest.
    hottest: Option<u32>,
    len: u64,
}

/// Where a zspage comes that is not in the list yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It was just stored into.
    Hottest,
    /// It was not.
    Coldest,
}

impl Lru {
    /// An empty list for an arena of so many pages.
    pub(super) fn new(pages: usize) -> Result<Self> {
        Ok(Lru {
            order: Mutex::new(&classes::ZS_LRU, Order::default()),
            links: Table::new(pages)?,
            classes: Table::new(pages)?,
        })
    }

    /// Has what belongs to these pages in memory from now on.
    pub(super) fn populate(&self, pages: Range<usize>) -> Result<()> {
        self.links.populate_range(pages.clone())?;
        self.classes.populate_range(pages)
    }

    /// How many zspages are in the list.
    pub(super) fn len(&self) -> u64 {
        self.order.lock().len
    }

    /// Notes that something was stored into the zspage that starts at `page`. Its class is locked.
    pub(super) fn touch(&self, page: u32, class: u8) {
        let mut order = self.order.lock();
        if order.hottest == Some(page) {
            return;
        }
        self.unlink(&mut order, page);
        self.link(&mut order, page, class, End::Hottest);
    }

    /// Puts a zspage in if it is not there. Its class is locked.
    pub(super) fn insert(&self, page: u32, class: u8, end: End) {
        let mut order = self.order.lock();
        if self.class_of(page).is_none() {
            self.link(&mut order, page, class, end);
        }
    }

    /// Takes a zspage out, and returns whether it was there. Its class is locked.
    pub(super) fn remove(&self, page: u32) -> bool {
        let mut order = self.order.lock();
        self.unlink(&mut order, page)
    }

    /// The zspage that was stored into longest ago, and its class: as long as that is not locked, it may
    /// be gone.
    pub(super) fn coldest(&self) -> Option<(u32, u8)> {
        let order = self.order.lock();
        let (coldest, _) = self.neighbours(order.hottest?);
        Some((coldest, self.class_of(coldest)?))
    }

    /// Whether a zspage of that class is in the list. With the class locked, it is in use then.
    pub(super) fn contains(&self, page: u32, class: u8) -> bool {
        let _order = self.order.lock();
        self.class_of(page) == Some(class)
    }

    fn class_of(&self, page: u32) -> Option<u8> {
        self.classes[page as usize].load(Ordering::Relaxed).checked_sub(1).map(|class| class as u8)
    }

    /// The pages before and after one of the list.
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
        // Between the coldest and the hottest, and then one of them.
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
