//! Zspages and the lists that a size class keeps of them. The class's lock protects all of it.
//!
//! A zspage is one run of pages, so an object is always contiguous in memory. Objects that were
//! never used lie beyond `fresh`: they need no free list, and the pages only they would reach are
//! not committed yet. Objects that were freed form a list through their own first bytes.

use crate::base::error::Result;
use crate::base::mem::{Arena, Gfp, Run};
use crate::base::sync::{Arc, Guarded};
use crate::slab::{Options, Typed};

/// Fullness groups: 0 is empty, 11 full, and group `g` between holds zspages from `(g - 1) * 10`
/// to below `g * 10` percent full.
pub const FULLNESS_GROUPS: usize = 12;
pub(super) const GROUP_FULL: usize = FULLNESS_GROUPS - 1;

/// No object, or no zspage.
pub(super) const NONE_INDEX: u16 = u16::MAX;
pub(super) const NONE: u32 = u32::MAX;

/// A zspage's descriptor.
#[derive(Debug, Default)]
pub(super) struct Zspage {
    /// The run's first page.
    pub(super) page: u32,
    /// Neighbours in the list of its fullness group.
    pub(super) prev: u32,
    pub(super) next: u32,
    /// The freed object to use next.
    pub(super) free: u16,
    /// Objects from here on were never used.
    pub(super) fresh: u16,
    pub(super) inuse: u16,
    pub(super) class: u8,
    pub(super) group: u8,
    /// Pages of the run.
    pub(super) pages: u8,
    /// Pages committed so far.
    pub(super) committed: u8,
}

impl Zspage {
    pub(super) fn run(&self) -> Run {
        Run { page: self.page, pages: self.pages }
    }
}

/// The group of a zspage with `inuse` of `objs` objects in use.
#[inline]
pub(super) fn fullness_group(inuse: u16, objs: u16) -> usize {
    match inuse {
        0 => 0,
        all if all == objs => GROUP_FULL,
        some => (100 * u32::from(some) / u32::from(objs) / 10 + 1) as usize,
    }
}

/// A descriptor in its slab. Its class's lock guards it.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "loom"), repr(align(32)))]
pub(super) struct Descriptor(Guarded<Zspage>);

#[cfg(not(feature = "loom"))]
const _: () = assert!(size_of::<Descriptor>() == 32);

/// All descriptors of a pool.
pub(super) struct Descriptors(Typed<Descriptor>);

impl Descriptors {
    pub(super) fn new(pool_name: &str, arena: Arc<Arena>, max_zspages: u64) -> Result<Self> {
        let name = format!("zspage-{pool_name}");
        // A pool ends with what is stored in it.
        let options = Options { dropped_whole: true, ..Typed::<Descriptor>::options(name, max_zspages) };
        Typed::new(arena, options).map(Descriptors)
    }

    /// Takes a descriptor for `zspage`, which nobody else knows yet.
    pub(super) fn alloc(&self, zspage: Zspage, gfp: Gfp) -> Result<u32> {
        self.0.insert(Descriptor(Guarded::new(zspage)), gfp)
    }

    /// Gives back a descriptor that is in no list.
    ///
    /// # Errors
    /// `Corrupt` when it is found that it is none, or free already.
    ///
    /// # Safety
    /// [`Descriptors::alloc`] answered it, and nobody uses it any more.
    pub(super) unsafe fn free(&self, id: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.remove(id) }
    }

    /// Runs `f` on the descriptor of a zspage of the class that `_lists` belongs to: whoever has
    /// its lists has the class's lock.
    #[inline]
    pub(super) fn with<R>(&self, _lists: &mut Lists, id: u32, f: impl FnOnce(&mut Zspage) -> R) -> R {
        // SAFETY: a zspage that the class's lists or its page table lead to has its descriptor until
        // it is taken off them. The class's lock is held, and `f` cannot come back: it has no `Lists`.
        unsafe { self.0.get(id).0.with_mut(f) }
    }

    #[cfg(test)]
    pub(super) fn in_use(&self) -> u64 {
        self.0.info().active_objs
    }

    #[cfg(not(feature = "loom"))]
    pub(super) fn table_resident_bytes(&self) -> usize {
        self.0.table_resident_bytes()
    }
}

/// A class's zspages by fullness, and its counts.
#[derive(Debug)]
pub(super) struct Lists {
    heads: [u32; FULLNESS_GROUPS],
    pub(super) zspages: [u32; FULLNESS_GROUPS],
    /// A bit for each group that has zspages.
    groups: u16,
    pub(super) objs_used: u64,
    pub(super) pages_used: u64,
}

impl Lists {
    pub(super) fn new() -> Self {
        let (heads, zspages) = ([NONE; FULLNESS_GROUPS], [0; FULLNESS_GROUPS]);
        Lists { heads, zspages, groups: 0, objs_used: 0, pages_used: 0 }
    }

    /// The first zspage of the fullest group that has room.
    #[inline]
    pub(super) fn fullest_with_room(&self) -> Option<u32> {
        let room = self.groups & ((1 << GROUP_FULL) - 1);
        (room != 0).then(|| self.heads[room.ilog2() as usize])
    }

    /// The first `most` zspages of each group that has room, fullest group first, as long as
    /// `f` does not answer.
    pub(super) fn find_with_room<R>(
        &mut self,
        all: &Descriptors,
        most: usize,
        mut f: impl FnMut(&mut Self, u32) -> Option<R>,
    ) -> Option<R> {
        for group in (1..GROUP_FULL).rev() {
            let mut id = self.heads[group];
            for _ in 0..most {
                if id == NONE {
                    break;
                }
                if let Some(found) = f(self, id) {
                    return Some(found);
                }
                id = all.with(self, id, |zspage| zspage.next);
            }
        }
        None
    }

    /// Puts a zspage at the front of `group`.
    pub(super) fn insert(&mut self, all: &Descriptors, id: u32, group: usize) {
        let next = self.heads[group];
        all.with(self, id, |zspage| (zspage.prev, zspage.next, zspage.group) = (NONE, next, group as u8));
        if next != NONE {
            all.with(self, next, |zspage| zspage.prev = id);
        }
        self.heads[group] = id;
        self.groups |= 1 << group;
        self.zspages[group] += 1;
    }

    /// Takes a zspage out of the list of its group.
    pub(super) fn remove(&mut self, all: &Descriptors, id: u32) {
        let (prev, next, group) = all.with(self, id, |zspage| (zspage.prev, zspage.next, zspage.group));
        let group = usize::from(group);
        if prev == NONE {
            self.heads[group] = next;
        } else {
            all.with(self, prev, |zspage| zspage.next = next);
        }
        if next != NONE {
            all.with(self, next, |zspage| zspage.prev = prev);
        }
        self.zspages[group] -= 1;
        if self.heads[group] == NONE {
            self.groups &= !(1 << group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fullness_groups_are_the_kernels() {
        let groups = [(0, 0), (1, 1), (9, 1), (10, 2), (89, 9), (90, 10), (99, 10), (100, 11)];
        for (percent, group) in groups {
            assert_eq!(fullness_group(percent, 100), group, "{percent} %");
        }
        assert_eq!((fullness_group(0, 1), fullness_group(1, 1)), (0, 11));
    }
}
