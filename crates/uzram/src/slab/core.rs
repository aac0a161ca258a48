//! SLUB: active slabs, CPU partial lists, and the node partial list.
//!
//! | state | frozen | on_partial | who allocates from it |
//! |---|---|---|---|
//! | active | yes | no | one CPU, which has its free objects as a free list of its own |
//! | CPU partial | no (eager: yes) | no | that CPU, when its active slab is used up |
//! | node partial | no | yes | every CPU, under `list_lock` |
//! | full | no | no | none, until one of its objects is freed |
//!
//! A freed object goes to the free list of this CPU if it is of the CPU's active slab. Otherwise the
//! slab's word is exchanged: the first free of a full slab moves the slab to this CPU's partial list;
//! a free that empties a slab takes `list_lock`, and discards the slab if it is on the node partial
//! list and that is long enough. All other frees take no lock.
//!
//! Without CPU slabs ([`Freeze::CPU_SLABS`]) there are no active and no CPU partial ones: the first free of a full slab moves it to
//! the node partial list.
//!
//! Locks: each CPU's slow lock protects its active slab and its partial list; under it only
//! `list_lock` is taken. Slabs are made and discarded with neither held.

mod from_node;

use std::marker::PhantomData;

use crate::base::cpu::{self, PerCpu, Restartable};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::{Arc, Counter, Mutex, classes};

use super::CacheConfig;
use super::barn::BARN_SHEAVES;
use super::cpu_list::{CpuLists, FreeList, Word};
use super::cpu_word::{Opening, lock_local};
use super::node::{ListLock, Node};
use super::slabs::{Chain, Layout, NO_SLAB, Slabs};
use super::stats::{Counters, Stat};
use super::word::{NONE, State};

/// When slabs are frozen: one type for each step of the series.
pub trait Freeze: Send + Sync + Sized + 'static {
    /// The name in statistics, without sheaves.
    const NAME: &'static str;
    /// Whether a flag tells that a slab is on the node partial list, so that frees leave slabs that are
    /// not on it alone (patches 1 and 2).
    const ON_PARTIAL: bool;
    /// Whether a slab is unfrozen before `list_lock` is taken to put it on the node partial list (patch 3).
    const UNFREEZE_FIRST: bool;
    /// Whether slabs on a CPU partial list are not frozen (patches 4 and 5).
    const DELAYED: bool;
    /// Whether CPUs have slabs: an active one and a partial list. Linux 7.0 has none, and allocates from the node
    /// partial list.
    const CPU_SLABS: bool = true;
}

/// The counters of the fast paths.
const FAST_PATHS: [Stat; 2] = [Stat::AllocFastpath, Stat::FreeFastpath];

/// A CPU's slabs. Protected by the CPU's slow lock.
struct CpuSlabs {
    /// The active slab, or [`NO_SLAB`].
    active: u32,
    /// The first slab of the CPU partial list, which is linked through the slabs' `next`.
    partial: u32,
    nr_partial: usize,
    opening: Opening,
}

/// See the [module's documentation](self).
pub struct Core<F> {
    pub(super) options: CacheConfig,
    pub(super) slabs: Slabs,
    pub(super) counters: Counters,
    pub(super) rseq: Option<Restartable>,
    lists: CpuLists,
    cpus: PerCpu<Mutex<CpuSlabs>>,
    node: Node,
    /// Times corruption was found.
    pub(super) corrupted: Counter,
    /// Objects lost by corruption.
    pub(super) lost: Counter,
    /// A CPU partial list of this many slabs is moved to the node's.
    cpu_partial_slabs: usize,
    freeze: PhantomData<F>,
}

impl<F: Freeze> Core<F> {
    pub(super) fn new(arena: Arc<Arena>, options: CacheConfig, hardened: bool) -> Result<Self> {
        let layout = Layout::new(options.size_bytes, options.align_bytes)?;
        let table = options.slab_table.as_ref();
        let slabs = Slabs::new(arena, layout, max_slabs(&options, layout), hardened, table)?;
        let rseq = if options.restartable { Restartable::get() } else { None };
        let cpu = |_| {
            let none =
                CpuSlabs { active: NO_SLAB, partial: NO_SLAB, nr_partial: 0, opening: Opening::default() };
            Mutex::new(&classes::SLAB_CPU, none)
        };
        Ok(Core {
            lists: CpuLists::new(rseq),
            cpus: PerCpu::new(cpu),
            node: Node::new(),
            counters: Counters::new(),
            corrupted: Counter::default(),
            lost: Counter::default(),
            cpu_partial_slabs: if F::CPU_SLABS { cpu_partial_slabs(&options, layout) } else { 0 },
            rseq,
            slabs,
            options,
            freeze: PhantomData,
        })
    }

    /// Adds claimed slabs of another process to this cache. `is_used` returns whether the object of a slab and index is
    /// in use. No other thread uses the cache yet.
    #[cfg(not(loom))]
    pub(super) fn adopt(&self, slabs: &[u32], is_used: impl Fn(u32, u16) -> bool) {
        for &slab in slabs {
            if self.slabs.adopt(slab, |index| is_used(slab, index)) {
                self.node.lock(&self.counters).add(&self.slabs, slab, false);
            }
        }
        self.slabs.end_adoption(slabs.iter().max().map_or(0, |last| last + 1));
    }

    /// Takes an object from this CPU's free list.
    #[inline]
    pub(super) fn pop(&self) -> Option<u32> {
        self.lists.pop(&self.slabs)
    }

    /// Puts an object on this CPU's free list, if it is of its active slab.
    #[inline]
    pub(super) fn push(&self, object: u32) -> bool {
        self.lists.push(&self.slabs, object)
    }

    /// Takes 1 to `objects.len()` objects without the fast path; returns how many.
    ///
    /// # Errors
    /// As the arena; `NoSpace` when the cache is full, `Corrupt` when a free list is damaged. No object is
    /// taken then.
    #[cold]
    pub(super) fn alloc_slow(&self, objects: &mut [u32], gfp: Gfp) -> Result<usize> {
        let mut made = NO_SLAB;
        let taken = loop {
            let taken = match F::CPU_SLABS {
                true => self.take_some(objects, &mut made),
                false => self.take_from_node(objects, &mut made),
            };
            match taken {
                Ok(0) => {}
                done => break done,
            }
            // No free object is left: make a slab, without locks, for the CPU this thread is on then.
            made = match self.slabs.make(&self.options, gfp) {
                Ok(slab) => slab,
                Err(error) => break Err(error),
            };
            self.counters.count(Stat::AllocSlab);
        };
        if made != NO_SLAB {
            // The slab was not needed: another thread had freed objects. A new list is not damaged.
            let _ = self.deactivate(made, FreeList { first: 0, len: self.slabs.layout.objects });
        }
        let taken = taken?;
        self.counters.add(Stat::AllocSlowpath, taken as u64);
        Ok(taken)
    }

    /// Takes objects from this CPU's list and from existing slabs, from that of `made` last; returns how
    /// many.
    ///
    /// # Errors
    /// `Corrupt` when a free list is damaged. No object is taken then.
    fn take_some(&self, objects: &mut [u32], made: &mut u32) -> Result<usize> {
        let (cpu, mut own, word) = lock_local(&self.cpus, |cpu| self.lists.close_local(cpu));
        let mut list = self.closed(cpu, &own, word);
        let mut taken = 0;
        let done = loop {
            let (n, result) = self.take_from(own.active, &mut list, &mut objects[taken..]);
            taken += n;
            if result.is_err() || taken == objects.len() {
                break result;
            }
            match self.next_list(&mut own, made) {
                Some(next) => list = next,
                None => break Ok(()),
            }
        };
        self.open(cpu, &mut own, list);
        drop(own);
        if done.is_err() {
            // This cannot fail: the objects were free until now.
            let _ = self.free_many(&mut objects[..taken]);
        }
        done.map(|()| taken)
    }

    /// Frees a chain of objects of a slab without the fast path. Returns false, and frees none, if the slab has
    /// fewer objects in use or its free list starts with the same object: then one of them is free already.
    #[cold]
    fn free_slow(&self, slab: u32, chain: Chain) -> bool {
        let done = self.put_back(slab, chain);
        if done {
            self.counters.add(Stat::FreeSlowpath, u64::from(chain.len));
        }
        done
    }

    /// As [`Core::free_slow`], for objects that no user had.
    fn put_back(&self, slab: u32, chain: Chain) -> bool {
        let word = &self.slabs.get(slab).word;
        let (old, new, list_lock) = loop {
            let old = word.load();
            if old.inuse < chain.len || old.free == chain.first {
                return false;
            }
            let mut new = State { free: chain.first, inuse: old.inuse - chain.len, ..old };
            self.slabs.set_next(slab, chain.last, old.free);
            let mut list_lock = None;
            if !old.frozen {
                if old.is_full() && self.cpu_partial_slabs > 0 {
                    // The slab goes to this CPU's partial list.
                    new.frozen = !F::DELAYED;
                } else if old.is_full() || new.inuse == 0 {
                    list_lock = Some(self.node.lock(&self.counters));
                }
            }
            if self.exchange(slab, old, new) {
                break (old, new, list_lock);
            }
        };
        match list_lock {
            Some(list_lock) => self.freed_under_list_lock(slab, old, new, list_lock),
            None if old.frozen => self.counters.count(Stat::FreeFrozen),
            None if old.is_full() => {
                self.counters.count(Stat::CpuPartialFree);
                self.put_cpu_partial(slab);
            }
            None => {}
        }
        true
    }

    /// Frees an object that the fast path has refused.
    ///
    /// # Errors
    /// `Corrupt` when `object` is found to be no object in use.
    pub(super) fn free_one(&self, object: u32) -> Result<()> {
        self.check_is_object(object)?;
        if self.lists.head(&self.slabs) == Some(object) {
            return Err(self.corrupt(object, "freed twice: it was freed last on this CPU"));
        }
        self.free_alone(object)
    }

    fn free_alone(&self, object: u32) -> Result<()> {
        let (slab, at) = self.slabs.split(object);
        let done = self.free_slow(slab, Chain { first: at, last: at, len: 1 });
        if done { Ok(()) } else { Err(self.corrupt(object, "freed twice: its slab has it already")) }
    }

    /// Frees objects of any slabs; sorts them, to free those of a slab together. Skips numbers that are
    /// found to be no object in use.
    ///
    /// # Errors
    /// `Corrupt` for the first one skipped.
    pub(super) fn free_many(&self, objects: &mut [u32]) -> Result<()> {
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
            result = result.and(self.free_of_slab(&of_slab[..sound]));
        }
        result
    }

    /// Frees different objects of one slab, in one exchange unless one of them is free already.
    fn free_of_slab(&self, objects: &[u32]) -> Result<()> {
        let [first, rest @ ..] = objects else { return Ok(()) };
        let (slab, first) = self.slabs.split(*first);
        let last = rest.iter().fold(first, |last, object| {
            let at = self.slabs.split(*object).1;
            self.slabs.set_next(slab, last, at);
            at
        });
        if self.free_slow(slab, Chain { first, last, len: objects.len() as u16 }) {
            return Ok(());
        }
        objects.iter().map(|object| self.free_alone(*object)).fold(Ok(()), Result::and)
    }

    /// Moves a slab to the list that it belongs on after a free that took `list_lock`.
    fn freed_under_list_lock(&self, slab: u32, old: State, new: State, mut list_lock: ListLock<'_>) {
        let on_partial = list_lock.contains(&self.slabs, slab);
        debug_assert!(F::ON_PARTIAL || on_partial != old.is_full());
        if F::ON_PARTIAL && !old.is_full() && !on_partial {
            // A CPU has the slab, or is moving it to a list.
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

    /// Takes every slab from the CPUs and discards the empty ones. Sorts the node partial list, the
    /// fullest slabs first, so that the emptiest are allocated from last.
    ///
    /// # Errors
    /// `Corrupt` when a CPU's free list is damaged; the rest is done all the same.
    pub(super) fn shrink(&self) -> Result<()> {
        let mut result = Ok(());
        for cpu in 0..self.cpus.len() {
            let mut own = self.cpus.of(cpu).lock();
            let partial = self.take_cpu_partial(&mut own);
            let active = std::mem::replace(&mut own.active, NO_SLAB);
            if active == NO_SLAB {
                // The CPU's list is empty: its word can stay open.
                drop(own);
            } else {
                let list = self.closed(cpu, &own, self.lists.close(cpu));
                self.open(cpu, &mut own, FreeList::EMPTY);
                drop(own);
                self.counters.count(Stat::CpuslabFlush);
                result = result.and(self.deactivate(active, list));
            }
            self.put_partials(partial);
        }
        // The slabs by number of objects in use, linked as on a CPU partial list.
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
        result
    }

    /// Returns the number of objects in the CPUs' free lists. Updates the counters of fast paths in `stats`.
    pub(super) fn in_lists(&self, stats: &mut [[u64; Stat::COUNT]]) -> u64 {
        let mut free = 0;
        for (cpu, stats) in stats.iter_mut().enumerate() {
            // Under the lock no slow path adds this word's operations to the counters.
            let own = self.cpus.of(cpu).lock();
            let word = self.lists.peek(cpu);
            free += u64::from(word.list.len);
            self.counters.read_with(cpu, FAST_PATHS, own.since_open(word), stats);
        }
        free
    }

    /// # Errors
    /// `Corrupt` when `object` is no object of this cache.
    pub(super) fn check_is_object(&self, object: u32) -> Result<()> {
        match self.slabs.is_object(object) {
            true => Ok(()),
            false => Err(self.corrupt(object, "freed, but it is no object of this cache")),
        }
    }

    /// Counts corruption; returns an error that names the cache, the object and how the corruption was found.
    #[cold]
    pub(super) fn corrupt(&self, object: u32, how: &str) -> Error {
        self.corrupted.add(1);
        let name = &self.options.name;
        Error::new(ErrorKind::Corrupt, format!("slab cache '{name}', object {object}: {how}"))
    }

    /// As [`Core::corrupt`], for corruption that loses `len` objects: their slab counts them as in use for good.
    #[cold]
    fn lose(&self, object: u32, len: u16, how: &str) -> Error {
        self.lost.add(len.into());
        self.corrupt(object, how)
    }

    /// Counts the operations since a word, which is closed now, was opened; returns its list.
    fn closed(&self, cpu: usize, own: &CpuSlabs, word: Word) -> FreeList {
        self.counters.add_all_for(cpu, FAST_PATHS, own.since_open(word));
        word.list
    }

    fn open(&self, cpu: usize, own: &mut CpuSlabs, list: FreeList) {
        let operations = self.lists.open(cpu, &self.slabs, own.active, list);
        own.opening = Opening { len: list.len.into(), operations };
    }

    /// Takes objects from a list of `slab`; returns how many. Corruption ends the list.
    fn take_from(&self, slab: u32, list: &mut FreeList, objects: &mut [u32]) -> (usize, Result<()>) {
        let wanted = objects.len().min(usize::from(list.len));
        for (taken, object) in objects[..wanted].iter_mut().enumerate() {
            let at = list.first;
            *object = self.slabs.name(slab, at);
            // Only the last object's link ends the list.
            let next = self.slabs.next(slab, at).filter(|next| (*next == NONE) == (list.len == 1));
            let Some(next) = next else {
                let error = self.lose(*object, list.len, "its link to the next free object was overwritten");
                *list = FreeList::EMPTY;
                return (taken, Err(error));
            };
            *list = FreeList { first: next, len: list.len - 1 };
        }
        (wanted, Ok(()))
    }

    /// Returns the next list to allocate from, once the current one is used up, and makes its slab the
    /// active one. Takes the slab in `made` last.
    fn next_list(&self, own: &mut CpuSlabs, made: &mut u32) -> Option<FreeList> {
        if own.active != NO_SLAB {
            if let Some(list) = self.refill(own.active) {
                self.counters.count(Stat::AllocRefill);
                return Some(list);
            }
            self.counters.count(Stat::DeactivateBypass);
            own.active = NO_SLAB;
        }
        if own.partial != NO_SLAB {
            own.active = self.pop_cpu_partial(own);
            self.counters.count(Stat::CpuPartialAlloc);
            return Some(self.freeze(own.active));
        }
        if let Some(list) = self.take_partial(own) {
            return Some(list);
        }
        if *made == NO_SLAB {
            return None;
        }
        own.active = std::mem::replace(made, NO_SLAB);
        let objects = self.slabs.layout.objects;
        self.slabs.get(own.active).word.store(State::full(objects, true));
        Some(FreeList { first: 0, len: objects })
    }

    /// Takes the objects that other CPUs freed into the active slab; if there are none, unfreezes the
    /// slab, which is full.
    fn refill(&self, slab: u32) -> Option<FreeList> {
        loop {
            let old = self.slabs.get(slab).word.load();
            let new = State::full(old.objects, !old.is_full());
            if self.exchange(slab, old, new) {
                return (!old.is_full())
                    .then_some(FreeList { first: old.free, len: old.objects - old.inuse });
            }
        }
    }

    /// Freezes a slab, which has free objects and is on no list, to make it active; returns its free
    /// objects. With eager freezing it is frozen already.
    fn freeze(&self, slab: u32) -> FreeList {
        loop {
            let old = self.slabs.get(slab).word.load();
            debug_assert!(!old.is_full() && old.frozen != F::DELAYED);
            if self.exchange(slab, old, State::full(old.objects, true)) {
                return FreeList { first: old.free, len: old.objects - old.inuse };
            }
        }
    }

    /// Takes slabs from the node partial list: one to allocate from, and half a CPU partial list of
    /// others.
    fn take_partial(&self, own: &mut CpuSlabs) -> Option<FreeList> {
        if self.node.nr_partial() == 0 {
            return None;
        }
        let mut list_lock = self.node.lock(&self.counters);
        let mut active = None;
        while let Some(slab) = list_lock.first() {
            if !F::DELAYED && !self.freeze_on_list(slab, &mut active) {
                // Another thread is freeing into the slab: release `list_lock` rather than retry.
                break;
            }
            list_lock.remove(&self.slabs, slab);
            if own.active == NO_SLAB {
                own.active = slab;
                self.counters.count(Stat::AllocFromPartial);
            } else {
                self.push_cpu_partial(own, slab);
                self.counters.count(Stat::CpuPartialNode);
            }
            if own.nr_partial > self.cpu_partial_slabs / 2 || self.cpu_partial_slabs == 0 {
                break;
            }
        }
        drop(list_lock);
        if F::DELAYED && own.active != NO_SLAB {
            active = Some(self.freeze(own.active));
        }
        active
    }

    /// Tries once to freeze a slab of the node partial list, under `list_lock`. Takes the free objects of
    /// the first one.
    fn freeze_on_list(&self, slab: u32, active: &mut Option<FreeList>) -> bool {
        let old = self.slabs.get(slab).word.load();
        let first = active.is_none();
        let new = if first { State::full(old.objects, true) } else { State { frozen: true, ..old } };
        let done = self.exchange(slab, old, new);
        if done && first {
            *active = Some(FreeList { first: old.free, len: old.objects - old.inuse });
        }
        done
    }

    /// Gives up an active slab: the rest of the CPU's list goes back to it.
    ///
    /// # Errors
    /// `Corrupt` when the list is damaged. Its objects are lost then.
    fn deactivate(&self, slab: u32, list: FreeList) -> Result<()> {
        let mut returned = None;
        let mut result = Ok(());
        if list.len > 0 {
            // Other CPUs lower `inuse` only by objects that are not in the list.
            let fits = list.len <= self.slabs.get(slab).word.load().inuse;
            returned = self.slabs.last_of(slab, list.first, list.len).filter(|_| fits);
            if returned.is_none() {
                let first = self.slabs.name(slab, list.first);
                result =
                    Err(self.lose(first, list.len, "a link after it was overwritten, or it was freed twice"));
            }
        }
        loop {
            let old = self.slabs.get(slab).word.load();
            let mut new = State { frozen: false, ..old };
            if let Some(last) = returned {
                self.slabs.set_next(slab, last, old.free);
                new.free = list.first;
                new.inuse -= list.len;
            }
            let drops = new.inuse == 0 && self.node.nr_partial() >= self.options.min_partial as u64;
            let lists = !drops && !new.is_full();
            let list_lock = (lists && !F::UNFREEZE_FIRST).then(|| self.node.lock(&self.counters));
            if !self.exchange(slab, old, new) {
                continue;
            }
            let remote = !old.is_full();
            if remote {
                self.counters.count(Stat::DeactivateRemoteFrees);
            }
            if drops {
                self.counters.count(Stat::DeactivateEmpty);
                self.discard(slab);
            } else if lists {
                self.counters.count(if remote { Stat::DeactivateToTail } else { Stat::DeactivateToHead });
                let mut list_lock = list_lock.unwrap_or_else(|| self.node.lock(&self.counters));
                list_lock.add(&self.slabs, slab, !remote);
            } else {
                self.counters.count(Stat::DeactivateFull);
            }
            return result;
        }
    }

    /// Puts a slab on this CPU's partial list; if that is full, moves it to the node's first.
    fn put_cpu_partial(&self, slab: u32) {
        let mut own = self.cpus.local().lock();
        let mut drained = NO_SLAB;
        if own.nr_partial >= self.cpu_partial_slabs {
            drained = self.take_cpu_partial(&mut own);
            self.counters.count(Stat::CpuPartialDrain);
        }
        self.push_cpu_partial(&mut own, slab);
        drop(own);
        self.put_partials(drained);
    }

    /// Moves a CPU partial list, which the caller has taken, to the node partial list; discards empty
    /// slabs if that is long enough.
    fn put_partials(&self, first: u32) {
        if first == NO_SLAB {
            return;
        }
        let mut empty = NO_SLAB;
        let mut list_lock = self.node.lock(&self.counters);
        self.for_each_from(first, |slab| {
            let state = if F::DELAYED { self.slabs.get(slab).word.load() } else { self.unfreeze(slab) };
            if state.inuse == 0 && list_lock.len() >= self.options.min_partial as u64 {
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

    /// Unfreezes a slab of a CPU partial list.
    fn unfreeze(&self, slab: u32) -> State {
        loop {
            let old = self.slabs.get(slab).word.load();
            let new = State { frozen: false, ..old };
            if self.exchange(slab, old, new) {
                return new;
            }
        }
    }

    fn discard(&self, slab: u32) {
        self.counters.count(Stat::FreeSlab);
        self.slabs.discard(slab);
    }

    #[inline]
    fn exchange(&self, slab: u32, old: State, new: State) -> bool {
        self.counters.count(Stat::CmpxchgDouble);
        let done = self.slabs.get(slab).word.exchange(old, new);
        if !done {
            self.counters.count(Stat::CmpxchgDoubleFail);
        }
        done
    }

    fn push_cpu_partial(&self, own: &mut CpuSlabs, slab: u32) {
        self.set_following(slab, own.partial);
        own.partial = slab;
        own.nr_partial += 1;
    }

    fn pop_cpu_partial(&self, own: &mut CpuSlabs) -> u32 {
        let slab = own.partial;
        own.partial = self.following(slab);
        own.nr_partial -= 1;
        slab
    }

    fn take_cpu_partial(&self, own: &mut CpuSlabs) -> u32 {
        own.nr_partial = 0;
        std::mem::replace(&mut own.partial, NO_SLAB)
    }

    /// Calls `f` with each slab of a list that belongs to the caller. `f` may put the slab on another list.
    fn for_each_from(&self, mut first: u32, mut f: impl FnMut(u32)) {
        while first != NO_SLAB {
            let slab = first;
            first = self.following(slab);
            f(slab);
        }
    }

    /// Returns the slab linked after one that belongs to the caller.
    fn following(&self, slab: u32) -> u32 {
        // SAFETY: a slab on a CPU partial list belongs to the holder of that CPU's lock, one on no
        // list to the thread that took it off; the caller is that thread.
        unsafe { self.slabs.get(slab).next.with_mut(|next| *next) }
    }

    fn set_following(&self, slab: u32, next: u32) {
        // SAFETY: as in `following`.
        unsafe { self.slabs.get(slab).next.with_mut(|own| *own = next) }
    }
}

/// Returns the most slabs of a CPU partial list, by the kernel's rule: half full slabs have
/// `cpu_partial_objects` free objects.
fn cpu_partial_slabs(options: &CacheConfig, layout: Layout) -> usize {
    (options.cpu_partial_objects * 2).div_ceil(usize::from(layout.objects))
}

/// Returns the most slabs of a cache: those for objects in use, and those that each CPU may keep from the others,
/// which are its active slab, its partial list, one that it is making, and the slabs of its sheaves; and as many
/// for the barn as for a CPU.
pub(super) fn max_slabs(options: &CacheConfig, layout: Layout) -> u64 {
    let in_use = options.max_objects.div_ceil(u64::from(layout.objects));
    if cfg!(loom) {
        // Models have exactly as many as they ask for.
        return in_use;
    }
    let sheaves = (BARN_SHEAVES * options.sheaf_objects).div_ceil(usize::from(layout.objects));
    let kept = (cpu::possible() + 1) * (2 + cpu_partial_slabs(options, layout) + sheaves);
    in_use.saturating_add(kept as u64).min(u32::MAX.into())
}

impl CpuSlabs {
    /// Returns the allocations and frees on the fast path since the word was opened.
    fn since_open(&self, word: Word) -> [u64; 2] {
        self.opening.since(word.list.len.into(), word.operations)
    }
}
