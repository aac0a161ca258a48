//! Zspages and the lists that a size class keeps of them. The class's lock protects all of it.
//!
//! A zspage is one run of pages, so an object is always contiguous in memory. Objects that were
//! never used lie at or beyond `fresh`: they need no free list, and pages that only they span are
//! not committed yet. Freed objects form a list through their own first bytes.
//!
//! While a zspage is *held*, none of its objects is moved: the kernel's zspage read lock. A hold is
//! taken where the lock design excludes moves, so a mover only needs to check for holds.

use crate::base::sync::{AtomicU32, Guarded, Ordering};
use crate::slab::TypedCache;

use super::class::SizeClass;

/// Fullness groups: 0 is empty, 11 is full, and group `g` in between holds zspages from `(g - 1) * 10`
/// to below `g * 10` percent full.
pub const FULLNESS_GROUPS: usize = 12;
pub(super) const GROUP_FULL: usize = FULLNESS_GROUPS - 1;
/// Zspages that are being emptied for their memory: nothing is allocated in them.
pub(super) const GROUP_ISOLATED: usize = FULLNESS_GROUPS;
const LISTS: usize = FULLNESS_GROUPS + 1;

/// No object, or no zspage.
pub(super) const NONE_INDEX: u16 = u16::MAX;
pub(super) const NONE: u32 = u32::MAX;

/// The mutable state of a zspage.
#[derive(Debug)]
pub struct Zspage {
    pub(super) page: u32,
    /// Neighbours in the circular list of its group.
    prev: u32,
    next: u32,
    /// The freed object to use next.
    pub(super) free: u16,
    /// Objects from this index on were never used.
    pub(super) fresh: u16,
    pub(super) inuse: u16,
    group: u8,
    pub(super) committed: u8,
}

#[inline]
pub(super) fn fullness_group(inuse: u16, objs: u16) -> usize {
    match inuse {
        0 => 0,
        all if all == objs => GROUP_FULL,
        some => (100 * u32::from(some) / u32::from(objs) / 10 + 1) as usize,
    }
}

/// A zspage's descriptor.
#[derive(Debug)]
#[cfg_attr(not(loom), repr(align(32)))]
pub struct Descriptor {
    /// Protected by the class's lock.
    guarded: Guarded<Zspage>,
    holds: AtomicU32,
    /// The handle of a huge object, which has no header.
    huge_handle: AtomicU32,
    pub(super) class: u8,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Descriptor>() == 32);

impl Descriptor {
    /// Makes an empty zspage whose run starts at `page`, held once.
    pub(super) fn new(page: u32, class: u8) -> Self {
        let zspage = Zspage {
            page,
            prev: NONE,
            next: NONE,
            free: NONE_INDEX,
            fresh: 0,
            inuse: 0,
            group: 0,
            committed: 0,
        };
        Descriptor {
            guarded: Guarded::new(zspage),
            holds: AtomicU32::new(1),
            huge_handle: AtomicU32::new(NONE),
            class,
        }
    }

    /// Keeps the zspage's objects in place. Call it where they cannot be moved.
    #[inline]
    pub(super) fn hold(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends a hold: what was done under it is visible to a thread that then finds the zspage not held.
    #[inline]
    pub(super) fn let_go(&self) {
        self.holds.fetch_sub(1, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.holds.load(Ordering::Acquire) > 0
    }

    #[inline]
    pub(super) fn huge_handle(&self) -> u32 {
        self.huge_handle.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn set_huge_handle(&self, handle: u32) {
        self.huge_handle.store(handle, Ordering::Relaxed);
    }
}

/// A pool's descriptors. One that is [got](TypedCache::get) stays in use for as long as an object of its
/// zspage is in use, or the zspage is on lists whose lock is held. One that is removed is on no list.
pub(super) type Descriptors = TypedCache<Descriptor>;

/// A class's zspages by fullness, and its counts.
#[derive(Debug)]
pub struct Lists {
    /// The first zspage of each circular list.
    heads: [u32; LISTS],
    pub(super) lengths: [u32; LISTS],
    /// A bit for each group that has zspages.
    groups: u16,
    pub(super) objs_used: u64,
    pub(super) pages_used: u64,
}

impl Lists {
    pub(super) fn new() -> Self {
        Lists { heads: [NONE; LISTS], lengths: [0; LISTS], groups: 0, objs_used: 0, pages_used: 0 }
    }

    /// Runs `f` on a zspage of the class of these lists. A caller that has the lists holds the class's lock.
    #[inline]
    pub(super) fn with<R>(&mut self, all: &Descriptors, id: u32, f: impl FnOnce(&mut Zspage) -> R) -> R {
        // SAFETY: a zspage that the class's lists or the page table name keeps its descriptor until it is
        // taken off them. The class's lock is held, and `f` cannot call this again: it has no `Lists`.
        unsafe { all.get(id).guarded.with_mut(f) }
    }

    pub(super) fn zspages(&self) -> u64 {
        self.lengths.iter().map(|len| u64::from(*len)).sum()
    }

    /// Returns the number of zspages by fullness; isolated ones count as empty.
    pub(super) fn by_fullness(&self) -> [u32; FULLNESS_GROUPS] {
        let mut counts = [0; FULLNESS_GROUPS];
        counts.copy_from_slice(&self.lengths[..FULLNESS_GROUPS]);
        counts[0] += self.lengths[GROUP_ISOLATED];
        counts
    }

    #[inline]
    pub(super) fn fullest_with_room(&self) -> Option<u32> {
        let room = self.groups & ((1 << GROUP_FULL) - 1);
        (room != 0).then(|| self.heads[room.ilog2() as usize])
    }

    /// Returns the last zspage of the emptiest group between empty and full. Compaction moves objects from
    /// the last to the first, so that it does not move the same ones repeatedly.
    pub(super) fn emptiest(&mut self, all: &Descriptors) -> Option<u32> {
        let some = self.groups & ((1 << GROUP_FULL) - 2);
        let first = (some != 0).then(|| self.heads[some.trailing_zeros() as usize])?;
        Some(self.with(all, first, |zspage| zspage.prev))
    }

    pub(super) fn move_to_back(&mut self, all: &Descriptors, id: u32) {
        let group = self.with(all, id, |zspage| usize::from(zspage.group));
        self.remove(all, id);
        self.insert(all, id, group);
        self.rotate(all, group);
    }

    /// Makes the last zspage of the group of [`Lists::emptiest`] its first.
    pub(super) fn rotate_emptiest(&mut self, all: &Descriptors) {
        if let Some(last) = self.emptiest(all) {
            let group = self.with(all, last, |zspage| usize::from(zspage.group));
            self.heads[group] = last;
        }
    }

    pub(super) fn fullest_but(&mut self, all: &Descriptors, other: u32) -> Option<u32> {
        (1..GROUP_FULL).rev().find_map(|group| {
            let first = self.heads[group];
            if first != other {
                return (first != NONE).then_some(first);
            }
            let next = self.with(all, first, |zspage| zspage.next);
            (next != other).then_some(next)
        })
    }

    /// Returns the number of zspages that packing the objects would free: the kernel's `zs_can_compact`.
    pub(super) fn freeable_zspages(&self, class: &SizeClass) -> u64 {
        let objs = u64::from(class.objs_per_zspage);
        (self.zspages() * objs).saturating_sub(self.objs_used) / objs
    }

    /// Returns the number of pages that the objects would take without gaps.
    pub(super) fn ideal_pages(&self, class: &SizeClass) -> u64 {
        let objs = u64::from(class.objs_per_zspage);
        let rest = class.pages_for((self.objs_used % objs) as usize) as u64;
        self.objs_used / objs * u64::from(class.pages_per_zspage) + rest
    }

    pub(super) fn rotate(&mut self, all: &Descriptors, group: usize) -> Option<u32> {
        let first = self.heads[group];
        if first == NONE {
            return None;
        }
        self.heads[group] = self.with(all, first, |zspage| zspage.next);
        Some(first)
    }

    /// Calls `f` with the first `most` zspages of each group that has room, fullest group first, until it
    /// returns `Some`.
    pub(super) fn find_with_room<R>(
        &mut self,
        all: &Descriptors,
        most: usize,
        mut f: impl FnMut(&mut Self, u32) -> Option<R>,
    ) -> Option<R> {
        for group in (1..GROUP_FULL).rev() {
            let mut id = self.heads[group];
            for _ in 0..most.min(self.lengths[group] as usize) {
                if let Some(found) = f(self, id) {
                    return Some(found);
                }
                id = self.with(all, id, |zspage| zspage.next);
            }
        }
        None
    }

    pub(super) fn insert(&mut self, all: &Descriptors, id: u32, group: usize) {
        let next = self.heads[group];
        let (prev, next) = if next == NONE {
            (id, id)
        } else {
            (self.with(all, next, |zspage| std::mem::replace(&mut zspage.prev, id)), next)
        };
        if prev != id {
            self.with(all, prev, |zspage| zspage.next = id);
        }
        self.with(all, id, |zspage| (zspage.prev, zspage.next, zspage.group) = (prev, next, group as u8));
        self.heads[group] = id;
        self.groups |= 1 << group;
        self.lengths[group] += 1;
    }

    pub(super) fn remove(&mut self, all: &Descriptors, id: u32) {
        let (prev, next, group) = self.with(all, id, |zspage| (zspage.prev, zspage.next, zspage.group));
        let group = usize::from(group);
        self.lengths[group] -= 1;
        if next == id {
            self.heads[group] = NONE;
            self.groups &= !(1 << group);
            return;
        }
        self.with(all, prev, |zspage| zspage.next = next);
        self.with(all, next, |zspage| zspage.prev = prev);
        if self.heads[group] == id {
            self.heads[group] = next;
        }
    }

    /// Moves a zspage to the list of its fullness, unless it is there already or is isolated.
    #[inline]
    pub(super) fn regroup(&mut self, all: &Descriptors, id: u32, objs_per_zspage: u16) {
        let (old, inuse) = self.with(all, id, |zspage| (usize::from(zspage.group), zspage.inuse));
        let new = fullness_group(inuse, objs_per_zspage);
        if new != old && old != GROUP_ISOLATED {
            self.remove(all, id);
            self.insert(all, id, new);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::mem::{Arena, Gfp};
    use crate::base::random::Random;
    use crate::base::sync::Arc;

    #[test]
    fn fullness_groups_are_the_kernels() {
        let groups = [(0, 0), (1, 1), (9, 1), (10, 2), (89, 9), (90, 10), (99, 10), (100, 11)];
        for (percent, group) in groups {
            assert_eq!(fullness_group(percent, 100), group, "{percent} %");
        }
        assert_eq!((fullness_group(0, 1), fullness_group(1, 1)), (0, 11));
    }

    #[test]
    fn lists_agree_with_queues() {
        use std::collections::VecDeque;
        let arena = Arc::new(Arena::new(16 << 20).expect("address space"));
        let all = Descriptors::new(arena, Descriptors::options("lists", 1000)).expect("descriptors");
        for seed in 0..20 {
            let (mut random, mut lists) = (Random::new(seed), Lists::new());
            let mut model: [VecDeque<u32>; LISTS] = Default::default();
            for page in 0..2000 {
                let (from, to) = (random.below(LISTS), random.below(LISTS));
                match random.below(5) {
                    0 => {
                        let id = all.insert(Descriptor::new(page, 0), Gfp::MayWait).expect("memory");
                        lists.insert(&all, id, to);
                        model[to].push_front(id);
                    }
                    1 if !model[from].is_empty() => {
                        let at = random.below(model[from].len());
                        let id = model[from].remove(at).expect("in range");
                        lists.remove(&all, id);
                        // SAFETY: the zspage is this test's and on no list.
                        unsafe { all.remove(id) }.expect("in use");
                    }
                    2 if !model[from].is_empty() => {
                        let at = random.below(model[from].len());
                        let id = model[from].remove(at).expect("in range");
                        lists.remove(&all, id);
                        lists.insert(&all, id, to);
                        model[to].push_front(id);
                    }
                    3 => {
                        lists.rotate_emptiest(&all);
                        if let Some(group) = (1..GROUP_FULL).find(|group| !model[*group].is_empty()) {
                            model[group].rotate_right(1);
                        }
                    }
                    _ => {
                        assert_eq!(lists.rotate(&all, from), model[from].front().copied(), "seed {seed}");
                        if let Some(id) = model[from].pop_front() {
                            model[from].push_back(id);
                        }
                    }
                }
                let groups = 1..GROUP_FULL;
                let first = |group: usize| model[group].front().copied();
                let last = |group: usize| model[group].back().copied();
                let emptiest = groups.clone().find_map(last);
                assert_eq!(lists.emptiest(&all), emptiest, "seed {seed}");
                assert_eq!(lists.fullest_with_room(), (0..GROUP_FULL).rev().find_map(first));
                let other = |group: usize| model[group].iter().find(|id| Some(**id) != emptiest).copied();
                let but = emptiest.and_then(|emptiest| lists.fullest_but(&all, emptiest));
                let others = groups.rev().find_map(other);
                assert_eq!(but, emptiest.and(others), "seed {seed}");
            }
            for (group, ids) in model.iter_mut().enumerate() {
                assert_eq!(lists.lengths[group] as usize, ids.len(), "seed {seed}");
                for id in ids.drain(..) {
                    assert_eq!(lists.rotate(&all, group), Some(id), "seed {seed}");
                    lists.remove(&all, id);
                    // SAFETY: as above.
                    unsafe { all.remove(id) }.expect("in use");
                }
            }
            assert_eq!((lists.zspages(), lists.groups), (0, 0));
        }
    }
}
