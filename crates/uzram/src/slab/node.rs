//! The node partial list: slabs with free objects that no CPU owns.
//!
//! `list_lock`, a leaf, protects the list and the on_partial flag of slabs.

use crate::base::cpu::Padded;
use crate::base::sync::{Counter, Mutex, MutexGuard, Timed, classes};

use super::slabs::{NO_SLAB, OFF_LIST, Slabs};
use super::stats::{Counters, Stat};

pub(super) struct Node {
    list: Padded<Mutex<Partial>>,
    /// Its length, for reading without the lock where a stale value will do.
    pub(super) nr_partial: Counter,
}

/// Protected by `list_lock`.
struct Partial {
    head: u32,
    tail: u32,
    len: u64,
}

pub(super) struct ListLock<'a> {
    partial: Timed<'a, MutexGuard<'a, Partial>>,
    node: &'a Node,
}

impl Node {
    pub(super) fn new() -> Self {
        let partial = Partial { head: NO_SLAB, tail: NO_SLAB, len: 0 };
        Node { list: Padded(Mutex::new(&classes::SLAB_LIST, partial)), nr_partial: Counter::default() }
    }

    #[inline]
    pub(super) fn lock<'a>(&'a self, counters: &'a Counters) -> ListLock<'a> {
        counters.count(Stat::ListLockAcquired);
        let partial = self.list.lock_noticing(|| counters.count(Stat::ListLockContended));
        ListLock { partial: Timed::new(partial, counters.get(Stat::ListLockHoldNs)), node: self }
    }
}

impl Drop for ListLock<'_> {
    fn drop(&mut self) {
        self.node.nr_partial.set(self.partial.len);
    }
}

impl ListLock<'_> {
    pub(super) fn len(&self) -> u64 {
        self.partial.len
    }

    pub(super) fn first(&self) -> Option<u32> {
        Some(self.partial.head).filter(|slab| *slab != NO_SLAB)
    }

    pub(super) fn contains(&self, slabs: &Slabs, slab: u32) -> bool {
        // SAFETY: `list_lock` is held.
        unsafe { slabs.get(slab).prev.with_mut(|prev| *prev != OFF_LIST) }
    }

    /// Adds a slab that is on no list, at the head if `first`, else at the tail.
    pub(super) fn add(&mut self, slabs: &Slabs, slab: u32, first: bool) {
        debug_assert!(!self.contains(slabs, slab), "slab {slab} is on the list already");
        let (prev, next) = if first { (NO_SLAB, self.partial.head) } else { (self.partial.tail, NO_SLAB) };
        self.link(slabs, prev, slab);
        self.link(slabs, slab, next);
        self.partial.len += 1;
    }

    pub(super) fn remove(&mut self, slabs: &Slabs, slab: u32) {
        debug_assert!(self.contains(slabs, slab), "slab {slab} is not on the list");
        // SAFETY: `list_lock` is held, and the slab is on the list.
        let (prev, next) = unsafe {
            let slab = slabs.get(slab);
            (slab.prev.with_mut(|prev| std::mem::replace(prev, OFF_LIST)), slab.next.with_mut(|next| *next))
        };
        self.link(slabs, prev, next);
        self.partial.len -= 1;
    }

    /// Links two slabs; [`NO_SLAB`] stands for the end of the list on its side.
    fn link(&mut self, slabs: &Slabs, prev: u32, next: u32) {
        // SAFETY: `list_lock` is held, and both slabs are on the list, or one of them is being added and so
        // on no other.
        unsafe {
            match prev {
                NO_SLAB => self.partial.head = next,
                before => slabs.get(before).next.with_mut(|own| *own = next),
            }
            match next {
                NO_SLAB => self.partial.tail = prev,
                after => slabs.get(after).prev.with_mut(|own| *own = prev),
            }
        }
    }
}
