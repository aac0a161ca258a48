//! One lock for both lists: what the batch locks replace.

use crate::base::sync::{Mutex, classes};

use super::LruConfig;
use super::counts::LruGuard;
use super::design::{Lists, LockedLists, LruLocks, Pagevec};
use super::node::{DEAD, LISTS, List, Place};

/// Pages that are removed per acquisition of `lru_lock`: the kernel's bulk size (`SWAP_CLUSTER_MAX`).
const HELD_PAGES: usize = 32;

/// `lru_lock` alone.
pub struct SingleLock {
    lru_lock: Mutex<()>,
}

/// The lists with `lru_lock` held.
pub struct Locked<'a> {
    lists: &'a Lists,
    _guard: LruGuard<'a, ()>,
}

impl SingleLock {
    fn lock<'a>(&'a self, lists: &'a Lists) -> Locked<'a> {
        Locked { lists, _guard: lists.counts.lock_lru(&self.lru_lock) }
    }
}

impl LockedLists for Locked<'_> {
    fn unlink(&mut self, page: u32) {
        if let Place::On(list) = self.lists.nodes.state(page).place() {
            self.lists.nodes.unlink(page);
            self.lists.counts.left(list, 1);
        }
    }

    fn put_front(&mut self, list: List, page: u32) {
        self.lists.nodes.link_at_front(list, page, page);
    }
}

impl LruLocks for SingleLock {
    const NAME: &'static str = "single-lock";
    type LockedLists<'a> = Locked<'a>;

    fn new(_: &LruConfig) -> Self {
        SingleLock { lru_lock: Mutex::new(&classes::LRU_LOCK, ()) }
    }

    fn add(&self, lists: &Lists, pages: [&[u32]; 2]) -> Pagevec {
        let mut locked = self.lock(lists);
        lists.link_each(pages, |list, page| locked.put_front(list, page))
    }

    fn activate(&self, lists: &Lists, pages: &[u32]) -> Pagevec {
        let mut dead = Pagevec::EMPTY;
        let mut locked = self.lock(lists);
        for page in pages {
            if !lists.claim_promoted(*page) {
                continue;
            }
            lists.nodes.unlink(*page);
            locked.put_front(List::Active, *page);
            lists.counts.activated();
            if lists.linked(*page, List::Active) {
                dead.push(*page);
            }
        }
        dead
    }

    fn remove(&self, lists: &Lists, pages: &mut [u32]) -> usize {
        let mut revived = 0;
        for start in (0..pages.len()).step_by(HELD_PAGES) {
            let _locked = self.lock(lists);
            let mut left = [0; LISTS.len()];
            for at in start..pages.len().min(start + HELD_PAGES) {
                let page = pages[at];
                let state = lists.nodes.state(page);
                let Place::On(list) = state.place() else { continue };
                if !state.has(DEAD) {
                    continue;
                }
                lists.nodes.unlink(page);
                left[list as usize] += 1;
                if lists.unlinked_dead(page) {
                    pages.swap(revived, at);
                    revived += 1;
                }
            }
            lists.counts.removed(left);
        }
        revived
    }

    fn lock_all<'a>(&'a self, lists: &'a Lists) -> Locked<'a> {
        self.lock(lists)
    }
}
