//! Allocation without CPU slabs, as in Linux 7.0: objects come from the slabs of the node partial list.
//!
//! A single object is taken under `list_lock`, and its slab stays on the list while it has another. For several,
//! slabs leave the list under one hold of the lock; then the free objects of each are taken together, and those
//! left over go back to the last slab. No slab is frozen.

use super::*;

impl<F: Freeze> Core<F> {
    /// Takes objects from the slabs of the node partial list; if there are none, from the slab `made`. Returns how
    /// many.
    ///
    /// # Errors
    /// `Corrupt` when a free list is damaged. No object is taken then.
    pub(super) fn take_from_node(&self, objects: &mut [u32], made: &mut u32) -> Result<usize> {
        let (mut taken, mut result) = match &mut *objects {
            [object] => self.take_one(object),
            several => self.take_several(several),
        };
        if taken == 0 && result.is_ok() && *made != NO_SLAB {
            let list = FreeList { first: 0, len: self.slabs.layout.objects };
            (taken, result) = self.take_of_list(std::mem::replace(made, NO_SLAB), list, objects);
        }
        if result.is_err() {
            // This cannot fail: the objects were free until now.
            let _ = self.free_many(&mut objects[..taken]);
        }
        result.map(|()| taken)
    }

    /// Takes the first object of the node partial list's first slab; returns the number taken, 0 or 1.
    fn take_one(&self, object: &mut u32) -> (usize, Result<()>) {
        if self.node.nr_partial() == 0 {
            return (0, Ok(()));
        }
        let mut list_lock = self.node.lock(&self.counters);
        let Some(slab) = list_lock.first() else { return (0, Ok(())) };
        loop {
            let old = self.slabs.get(slab).word.load();
            debug_assert!(!old.is_full() && !old.frozen);
            let len = old.objects - old.inuse;
            // Only frees change the word meanwhile, and they leave this link alone. Only the last object's ends
            // the list.
            let next = self.slabs.next(slab, old.free).filter(|next| (*next == NONE) == (len == 1));
            let new = match next {
                Some(next) => State { free: next, inuse: old.inuse + 1, ..old },
                None => State::full(old.objects, false),
            };
            if !self.exchange(slab, old, new) {
                continue;
            }
            if new.is_full() {
                list_lock.remove(&self.slabs, slab);
            }
            drop(list_lock);
            *object = self.slabs.name(slab, old.free);
            return match next {
                Some(_) => (1, Ok(())),
                None => (0, Err(self.lose(*object, len, "its link to the next free object was overwritten"))),
            };
        }
    }

    /// Takes objects from as many slabs of the node partial list as it takes; returns how many.
    fn take_several(&self, objects: &mut [u32]) -> (usize, Result<()>) {
        let mut rest = self.take_slabs(objects.len());
        let (mut taken, mut result) = (0, Ok(()));
        while rest != NO_SLAB && taken < objects.len() && result.is_ok() {
            let slab = rest;
            // Once the slab is full, a free puts it on the node partial list.
            rest = self.following(slab);
            let list = self.take_list(slab);
            let (n, done) = self.take_of_list(slab, list, &mut objects[taken..]);
            taken += n;
            result = done;
        }
        self.put_partials(rest);
        (taken, result)
    }

    /// Removes slabs with `wanted` free objects, or all, from the node partial list; returns the first of a list
    /// of them in the same order.
    fn take_slabs(&self, wanted: usize) -> u32 {
        let (mut first, mut last, mut free) = (NO_SLAB, NO_SLAB, 0);
        if self.node.nr_partial() == 0 {
            return first;
        }
        let mut list_lock = self.node.lock(&self.counters);
        while free < wanted
            && let Some(slab) = list_lock.first()
        {
            list_lock.remove(&self.slabs, slab);
            self.counters.count(Stat::AllocFromPartial);
            let state = self.slabs.get(slab).word.load();
            free += usize::from(state.objects - state.inuse);
            self.set_following(slab, NO_SLAB);
            match last {
                NO_SLAB => first = slab,
                before => self.set_following(before, slab),
            }
            last = slab;
        }
        first
    }

    /// Takes all free objects of a slab that is on no list and has some.
    fn take_list(&self, slab: u32) -> FreeList {
        loop {
            let old = self.slabs.get(slab).word.load();
            debug_assert!(!old.is_full() && !old.frozen);
            if self.exchange(slab, old, State::full(old.objects, false)) {
                return FreeList { first: old.free, len: old.objects - old.inuse };
            }
        }
    }

    /// Takes objects from a list of `slab`, which is not frozen, and puts the rest of the list back into it;
    /// returns how many.
    fn take_of_list(&self, slab: u32, mut list: FreeList, objects: &mut [u32]) -> (usize, Result<()>) {
        let (taken, result) = self.take_from(slab, &mut list, objects);
        let FreeList { first, len } = list;
        if len == 0 {
            return (taken, result);
        }
        let last = self.slabs.last_of(slab, first, len);
        if last.is_some_and(|last| self.put_back(slab, Chain { first, last, len })) {
            return (taken, result);
        }
        let first = self.slabs.name(slab, first);
        (taken, Err(self.lose(first, len, "a link after it was overwritten, or it was freed twice")))
    }
}
