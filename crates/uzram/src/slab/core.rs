//! Slabs below the CPUs' layer: those with free objects are on the node partial list.
//!
//! Several objects are allocated at a time: slabs leave the list under one hold of `list_lock`; then the free
//! objects of each are taken together, and those left over go back to the last slab. Objects are freed by one
//! exchange of their slab's word for all of a slab. The first free of a full slab puts it on the list. A free
//! that empties a slab takes `list_lock`, too, and discards the slab if the list is long enough. All other
//! frees take no lock.
//!
//! Locks: `list_lock`, a leaf. Slabs are made and discarded without it.

use crate::base::cpu::Restartable;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::{Arc, Counter};

use super::config::{CacheConfig, Layout, max_slabs};
use super::node::{ListLock, Node};
use super::slabs::{Chain, NO_SLAB, Slabs};
use super::stats::{Counters, Stat};
use super::word::{FreeList, NONE, State};

/// See the [module's documentation](self).
pub struct Core {
    pub(super) options: CacheConfig,
    pub(super) slabs: Slabs,
    pub(super) counters: Counters,
    pub(super) rseq: Option<Restartable>,
    pub(super) node: Node,
    pub(super) corrupted: Counter,
    /// Objects lost by corruption.
    pub(super) lost: Counter,
}

impl Core {
    pub(super) fn new(arena: Arc<Arena>, options: CacheConfig, hardened: bool) -> Result<Self> {
        let layout = Layout::new(options.size_bytes, options.align_bytes)?;
        let table = options.slab_table.as_ref();
        Ok(Core {
            slabs: Slabs::new(arena, layout, max_slabs(&options, layout), hardened, table)?,
            node: Node::new(),
            counters: Counters::new(),
            corrupted: Counter::default(),
            lost: Counter::default(),
            rseq: if options.restartable { Restartable::get() } else { None },
            options,
        })
    }

    /// Takes 1 to `objects.len()` objects from slabs; returns how many. Fails as the arena; `NoSpace` when
    /// the cache is full, `Corrupt` when a free list is damaged. No object is taken then.
    #[cold]
    pub(super) fn alloc(&self, objects: &mut [u32], gfp: Gfp) -> Result<usize> {
        self.alloc_by(objects, gfp, |objects, made| self.take(objects, made))
    }

    /// As [`Core::alloc`]. `take` takes objects from existing slabs, and last from the new slab that it is
    /// passed; it replaces that by [`NO_SLAB`] then.
    pub(super) fn alloc_by(
        &self,
        objects: &mut [u32],
        gfp: Gfp,
        mut take: impl FnMut(&mut [u32], &mut u32) -> Result<usize>,
    ) -> Result<usize> {
        let mut made = NO_SLAB;
        let taken = loop {
            match take(objects, &mut made) {
                Ok(0) => {}
                done => break done,
            }
            made = match self.slabs.make(&self.options, gfp) {
                Ok(slab) => slab,
                Err(error) => break Err(error),
            };
            self.counters.count(Stat::AllocSlab);
        };
        if made != NO_SLAB {
            // The slab was not needed: another thread had freed objects.
            self.give_back(made, FreeList { first: 0, len: self.slabs.layout.objects });
        }
        let taken = taken?;
        self.counters.add(Stat::AllocSlowpath, taken as u64);
        Ok(taken)
    }

    /// Takes objects from the slabs of the node partial list; if there are none, from the slab `made`.
    /// Returns how many.
    fn take(&self, objects: &mut [u32], made: &mut u32) -> Result<usize> {
        let mut slab = self.take_slabs(objects.len());
        let (mut taken, mut result) = (0, Ok(()));
        while slab != NO_SLAB && taken < objects.len() && result.is_ok() {
            // Once the slab is full, a free puts it on the node partial list.
            let rest = self.following(slab);
            let mut list = self.take_list(slab, false);
            taken += self.take_from(slab, &mut list, &mut objects[taken..], &mut result);
            self.give_back_if_any(slab, list, &mut result);
            slab = rest;
        }
        self.put_partials(slab, |slab| self.slabs.get(slab).word.load());
        if taken == 0 && result.is_ok() && *made != NO_SLAB {
            let slab = std::mem::replace(made, NO_SLAB);
            let mut list = FreeList { first: 0, len: self.slabs.layout.objects };
            taken = self.take_from(slab, &mut list, objects, &mut result);
            self.give_back_if_any(slab, list, &mut result);
        }
        if result.is_err() {
            // This cannot fail: the objects were free until now.
            let _ = self.free_many(&mut objects[..taken]);
        }
        result.map(|()| taken)
    }

    /// Removes slabs with `wanted` free objects, or all, from the node partial list; returns the first of a
    /// list of them in the same order.
    fn take_slabs(&self, wanted: usize) -> u32 {
        let (mut first, mut last, mut free) = (NO_SLAB, NO_SLAB, 0);
        if self.node.nr_partial.get() == 0 {
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

    /// Takes all free objects of a slab that is on no list and has some; freezes it if `frozen`.
    pub(super) fn take_list(&self, slab: u32, frozen: bool) -> FreeList {
        loop {
            let old = self.slabs.get(slab).word.load();
            debug_assert!(!old.is_full());
            if self.exchange(slab, old, State::full(old.objects, frozen)) {
                return old.free_list();
            }
        }
    }

    /// Takes objects from a list of `slab`; returns how many. Corruption ends the list, and sets `result`.
    pub(super) fn take_from(
        &self,
        slab: u32,
        list: &mut FreeList,
        objects: &mut [u32],
        result: &mut Result<()>,
    ) -> usize {
        let wanted = objects.len().min(usize::from(list.len));
        for (taken, object) in objects[..wanted].iter_mut().enumerate() {
            let at = list.first;
            *object = self.slabs.name(slab, at);
            // Only the last object's link ends the list.
            let next = self.slabs.next(slab, at).filter(|next| (*next == NONE) == (list.len == 1));
            let Some(next) = next else {
                *result =
                    Err(self.lose(*object, list.len, "its link to the next free object was overwritten"));
                *list = FreeList::EMPTY;
                return taken;
            };
            *list = FreeList { first: next, len: list.len - 1 };
        }
        wanted
    }

    /// Puts the rest of a taken list back. Sets `result` if the list is damaged: its objects are lost then.
    fn give_back_if_any(&self, slab: u32, list: FreeList, result: &mut Result<()>) {
        if list.len > 0 && !self.give_back(slab, list) {
            *result = Err(self.lose_list(slab, list));
        }
    }

    fn give_back(&self, slab: u32, FreeList { first, len }: FreeList) -> bool {
        let last = self.slabs.last_of(slab, first, len);
        last.is_some_and(|last| self.put_back(slab, Chain { first, last, len }))
    }

    /// Puts a chain of objects back into their slab. Returns false, and frees none, if the slab has fewer
    /// objects in use or its free list starts with the same object: then one of them is free already.
    fn put_back(&self, slab: u32, chain: Chain) -> bool {
        loop {
            let Some((old, new)) = self.with_chain(slab, chain) else { return false };
            let list_lock = (old.is_full() || new.inuse == 0).then(|| self.node.lock(&self.counters));
            if self.exchange(slab, old, new) {
                if let Some(list_lock) = list_lock {
                    self.relist(slab, old, new, list_lock);
                }
                return true;
            }
        }
    }

    /// Links a chain of objects with the free list of their slab. Returns the slab's state and the one with
    /// these objects; `None` if one of them is found to be free already.
    pub(super) fn with_chain(&self, slab: u32, chain: Chain) -> Option<(State, State)> {
        let old = self.slabs.get(slab).word.load();
        if old.inuse < chain.len || old.free == chain.first {
            return None;
        }
        self.slabs.set_next(slab, chain.last, old.free);
        Some((old, State { free: chain.first, inuse: old.inuse - chain.len, ..old }))
    }

    /// Moves a slab to the list that it belongs on after a free that took `list_lock`.
    pub(super) fn relist(&self, slab: u32, old: State, new: State, mut list_lock: ListLock<'_>) {
        let on_partial = list_lock.contains(&self.slabs, slab);
        if !old.is_full() && !on_partial {
            // A thread has the slab, or is moving it to a list.
            return;
        }
        if new.inuse == 0 && list_lock.len() >= self.options.min_partial as u64 {
            if on_partial {
                list_lock.remove(&self.slabs, slab);
                self.counters.count(Stat::FreeRemovePartial);
            }
            drop(list_lock);
            self.discard(slab);
        } else if !on_partial {
            list_lock.add(&self.slabs, slab, false);
            self.counters.count(Stat::FreeAddPartial);
        }
    }

    /// Frees objects of any slabs; sorts them, to free those of a slab together. Skips numbers that are found
    /// to be no object in use. Fails with `Corrupt` for the first one skipped.
    pub(super) fn free_many(&self, objects: &mut [u32]) -> Result<()> {
        self.free_by(objects, |slab, chain| self.put_back(slab, chain))
    }

    /// As [`Core::free_many`], by another [`Core::put_back`].
    pub(super) fn free_by(&self, objects: &mut [u32], put_back: impl Fn(u32, Chain) -> bool) -> Result<()> {
        let put_back = |slab, chain: Chain| {
            let done = put_back(slab, chain);
            if done {
                self.counters.add(Stat::FreeSlowpath, u64::from(chain.len));
            }
            done
        };
        objects.sort_unstable();
        let mut result = Ok(());
        let slab_of = |object: u32| self.slabs.split(object).0;
        for of_slab in objects.chunk_by_mut(|a, b| slab_of(*a) == slab_of(*b)) {
            let mut sound = 0;
            for i in 0..of_slab.len() {
                let object = of_slab[i];
                if sound > 0 && of_slab[sound - 1] == object {
                    result = result.and(Err(self.corrupt(object, "freed twice")));
                } else if let Err(error) = self.check_is_object(object) {
                    result = result.and(Err(error));
                } else {
                    of_slab[sound] = object;
                    sound += 1;
                }
            }
            result = result.and(self.free_of_slab(&of_slab[..sound], &put_back));
        }
        result
    }

    /// Frees different objects of one slab, in one exchange unless one of them is free already.
    fn free_of_slab(&self, objects: &[u32], put_back: &impl Fn(u32, Chain) -> bool) -> Result<()> {
        let [first, rest @ ..] = objects else { return Ok(()) };
        let (slab, first) = self.slabs.split(*first);
        let last = rest.iter().fold(first, |last, object| {
            let at = self.slabs.split(*object).1;
            self.slabs.set_next(slab, last, at);
            at
        });
        if put_back(slab, Chain { first, last, len: objects.len() as u16 }) {
            return Ok(());
        }
        if rest.is_empty() {
            return Err(self.corrupt(objects[0], "freed twice: its slab has it already"));
        }
        let alone = |object: &u32| self.free_of_slab(&[*object], put_back);
        objects.iter().map(alone).fold(Ok(()), Result::and)
    }

    /// Sorts the node partial list, the fullest slabs first, so that the emptiest are allocated from last;
    /// discards the empty ones.
    pub(super) fn shrink(&self) {
        let mut with_inuse = vec![NO_SLAB; usize::from(self.slabs.layout.objects) + 1];
        let mut list_lock = self.node.lock(&self.counters);
        while let Some(slab) = list_lock.first() {
            list_lock.remove(&self.slabs, slab);
            // Read `inuse` once: frees go on, except those that would empty a slab of this list.
            let others = &mut with_inuse[usize::from(self.slabs.get(slab).word.load().inuse)];
            self.set_following(slab, std::mem::replace(others, slab));
        }
        for first in with_inuse[1..].iter().rev() {
            self.for_each_from(*first, |slab| list_lock.add(&self.slabs, slab, false));
        }
        drop(list_lock);
        self.for_each_from(with_inuse[0], |slab| self.discard(slab));
    }

    /// Moves slabs that belong to the caller, from `first` on, to the node partial list; discards empty ones
    /// if that is long enough. `release` returns the state of each, and lets it go.
    pub(super) fn put_partials(&self, first: u32, release: impl Fn(u32) -> State) {
        if first == NO_SLAB {
            return;
        }
        let mut empty = NO_SLAB;
        let mut list_lock = self.node.lock(&self.counters);
        self.for_each_from(first, |slab| {
            if release(slab).inuse == 0 && list_lock.len() >= self.options.min_partial as u64 {
                self.set_following(slab, empty);
                empty = slab;
            } else {
                list_lock.add(&self.slabs, slab, false);
                self.counters.count(Stat::FreeAddPartial);
            }
        });
        drop(list_lock);
        self.for_each_from(empty, |slab| {
            self.counters.count(Stat::DeactivateEmpty);
            self.discard(slab);
        });
    }

    pub(super) fn check_is_object(&self, object: u32) -> Result<()> {
        match self.slabs.is_object(object) {
            true => Ok(()),
            false => Err(self.corrupt(object, "freed, but it is no object of this cache")),
        }
    }

    #[cold]
    pub(super) fn corrupt(&self, object: u32, how: &str) -> Error {
        self.corrupted.add(1);
        let name = &self.options.name;
        Error::new(ErrorKind::Corrupt, format!("slab cache '{name}', object {object}: {how}"))
    }

    /// As [`Core::corrupt`], for `len` lost objects: their slab counts them as in use for good.
    #[cold]
    fn lose(&self, object: u32, len: u16, how: &str) -> Error {
        self.lost.add(len.into());
        self.corrupt(object, how)
    }

    #[cold]
    pub(super) fn lose_list(&self, slab: u32, list: FreeList) -> Error {
        let first = self.slabs.name(slab, list.first);
        self.lose(first, list.len, "a link after it was overwritten, or it was freed twice")
    }

    pub(super) fn discard(&self, slab: u32) {
        self.counters.count(Stat::FreeSlab);
        self.slabs.discard(slab);
    }

    #[inline]
    pub(super) fn exchange(&self, slab: u32, old: State, new: State) -> bool {
        self.counters.count(Stat::CmpxchgDouble);
        let done = self.slabs.get(slab).word.exchange(old, new);
        if !done {
            self.counters.count(Stat::CmpxchgDoubleFail);
        }
        done
    }

    /// Calls `f` with each slab of a list that belongs to the caller. `f` may put the slab on another list.
    fn for_each_from(&self, mut first: u32, mut f: impl FnMut(u32)) {
        while first != NO_SLAB {
            let slab = first;
            first = self.following(slab);
            f(slab);
        }
    }

    pub(super) fn following(&self, slab: u32) -> u32 {
        // SAFETY: a slab on a CPU partial list belongs to the holder of that CPU's lock, one on no
        // list to the thread that took it off; the caller is that thread.
        unsafe { self.slabs.get(slab).next.with_mut(|next| *next) }
    }

    pub(super) fn set_following(&self, slab: u32, next: u32) {
        // SAFETY: as in `following`.
        unsafe { self.slabs.get(slab).next.with_mut(|own| *own = next) }
    }
}
