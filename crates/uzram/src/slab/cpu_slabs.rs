//! SLUB's CPU slabs, in the steps of "slub: Delay freezing of CPU partial slabs" (Chengming Zhou, 2023).
//!
//! | state | frozen | on_partial | who allocates from it |
//! |---|---|---|---|
//! | active | yes | no | one CPU, which has its free objects as a free list of its own |
//! | CPU partial | no (eager: yes) | no | that CPU, when its active slab is used up |
//! | node partial | no | yes | every CPU, under `list_lock` |
//! | full | no | no | none, until one of its objects is freed |
//!
//! A freed object goes to the free list of this CPU if it is of the CPU's active slab. Otherwise the slab's
//! word is exchanged, and the first free of a full slab moves the slab to this CPU's partial list. The rest
//! is as in `core`.
//!
//! Locks: each CPU's slow lock protects its active slab and its partial list; under it only
//! `list_lock` is taken. Slabs are made and discarded with neither held.

use crate::base::cpu::PerCpu;
use crate::base::error::Result;
use crate::base::mem::Gfp;
use crate::base::sync::{Mutex, classes};

use super::config::cpu_partial_slabs;
use super::core::Core;
use super::cpu_list::{CpuLists, Word};
use super::cpu_word::{Opening, lock_local};
use super::policy::{CpuLayer, Policy};
use super::slabs::{Chain, NO_SLAB};
use super::stats::Stat;
use super::word::{FreeList, State};

/// Slabs are frozen as after so many steps of the series; see the names of the numbers.
#[derive(Debug)]
pub struct FreezeSteps<const STEPS: u8>;

/// Before the series: slabs are frozen from when they leave the node partial list until they return to it.
pub type EagerFreeze = FreezeSteps<0>;
/// Patches 1 and 2: a flag tells that a slab is on the node partial list, so that frees leave slabs that are
/// not on it alone.
pub type OnPartial = FreezeSteps<1>;
/// And patch 3: slabs are unfrozen before `list_lock` is taken to put them on the node partial list.
pub type UnfreezeFirst = FreezeSteps<2>;
/// And patches 4 and 5: slabs are frozen only while a CPU allocates from them.
pub type DelayedFreeze = FreezeSteps<3>;

impl<const STEPS: u8> Policy for FreezeSteps<STEPS> {
    type Layer = CpuSlabs<STEPS>;
    const NAME: &'static str = match STEPS {
        0 => "eager",
        1 => "on-partial",
        2 => "unfreeze-first",
        _ => "delayed",
    };
}

const FAST_PATHS: [Stat; 2] = [Stat::AllocFastpath, Stat::FreeFastpath];

/// A CPU's slabs. Protected by the CPU's slow lock.
struct Own {
    /// The active slab, or [`NO_SLAB`].
    active: u32,
    /// The first slab of the CPU partial list, which is linked through the slabs' `next`.
    partial: u32,
    nr_partial: usize,
    opening: Opening,
}

/// See the [module's documentation](self).
pub struct CpuSlabs<const STEPS: u8> {
    lists: CpuLists,
    cpus: PerCpu<Mutex<Own>>,
    /// A CPU partial list of this many slabs is moved to the node's.
    cpu_partial_slabs: usize,
}

impl<const STEPS: u8> CpuLayer for CpuSlabs<STEPS> {
    fn new(core: &Core) -> Result<Self> {
        let none = || Own { active: NO_SLAB, partial: NO_SLAB, nr_partial: 0, opening: Opening::default() };
        Ok(CpuSlabs {
            lists: CpuLists::new(core.rseq),
            cpus: PerCpu::new(|_| Mutex::new(&classes::SLAB_CPU, none())),
            cpu_partial_slabs: cpu_partial_slabs(&core.options, core.slabs.layout),
        })
    }

    fn pop(&self, core: &Core) -> Option<u32> {
        self.lists.pop(&core.slabs)
    }

    fn push(&self, core: &Core, object: u32, _: bool) -> bool {
        self.lists.push(&core.slabs, object)
    }

    fn alloc_slow(&self, core: &Core, gfp: Gfp) -> Result<u32> {
        let mut object = [0];
        core.alloc_by(&mut object, gfp, |objects, made| self.take(core, objects, made))?;
        Ok(object[0])
    }

    fn free_slow(&self, core: &Core, object: u32) -> Result<()> {
        core.check_is_object(object)?;
        if self.lists.head(&core.slabs) == Some(object) {
            return Err(core.corrupt(object, "freed twice: it was freed last on this CPU"));
        }
        self.free_many(core, &mut [object])
    }

    fn drain(&self, core: &Core) -> Result<()> {
        let mut result = Ok(());
        for cpu in 0..self.cpus.len() {
            let mut own = self.cpus.of(cpu).lock();
            let partial = Self::take_cpu_partial(&mut own);
            let active = std::mem::replace(&mut own.active, NO_SLAB);
            if active == NO_SLAB {
                // The CPU's list is empty: its word can stay open.
                drop(own);
            } else {
                let list = Self::closed(core, cpu, &own, self.lists.close(cpu));
                self.open(core, cpu, &mut own, FreeList::EMPTY);
                drop(own);
                core.counters.count(Stat::CpuslabFlush);
                result = result.and(Self::deactivate(core, active, list));
            }
            Self::put_partials(core, partial);
        }
        result
    }

    fn cached(&self, core: &Core, stats: &mut [[u64; Stat::COUNT]]) -> u64 {
        let mut free = 0;
        for (cpu, stats) in stats.iter_mut().enumerate() {
            // Under the lock no slow path adds this word's operations to the counters.
            let own = self.cpus.of(cpu).lock();
            let word = self.lists.peek(cpu);
            free += u64::from(word.list.len);
            core.counters.read_with(cpu, FAST_PATHS, own.since_open(word), stats);
        }
        free
    }
}

impl<const STEPS: u8> CpuSlabs<STEPS> {
    const ON_PARTIAL: bool = STEPS >= 1;
    const UNFREEZE_FIRST: bool = STEPS >= 2;
    const DELAYED: bool = STEPS >= 3;

    fn free_many(&self, core: &Core, objects: &mut [u32]) -> Result<()> {
        core.free_by(objects, |slab, chain| self.put_back(core, slab, chain))
    }

    /// Takes objects from this CPU's list and from existing slabs, from that of `made` last; returns how
    /// many. Fails with `Corrupt` when a free list is damaged. No object is taken then.
    fn take(&self, core: &Core, objects: &mut [u32], made: &mut u32) -> Result<usize> {
        let (cpu, mut own, word) = lock_local(&self.cpus, |cpu| self.lists.close_local(cpu));
        let mut list = Self::closed(core, cpu, &own, word);
        let (mut taken, mut result) = (0, Ok(()));
        loop {
            taken += core.take_from(own.active, &mut list, &mut objects[taken..], &mut result);
            if result.is_err() || taken == objects.len() {
                break;
            }
            match self.next_list(core, &mut own, made) {
                Some(next) => list = next,
                None => break,
            }
        }
        self.open(core, cpu, &mut own, list);
        drop(own);
        if result.is_err() {
            // This cannot fail: the objects were free until now.
            let _ = self.free_many(core, &mut objects[..taken]);
        }
        result.map(|()| taken)
    }

    fn put_back(&self, core: &Core, slab: u32, chain: Chain) -> bool {
        let (old, new, list_lock) = loop {
            let Some((old, mut new)) = core.with_chain(slab, chain) else { return false };
            let mut list_lock = None;
            if !old.frozen {
                if old.is_full() && self.cpu_partial_slabs > 0 {
                    // The slab goes to this CPU's partial list.
                    new.frozen = !Self::DELAYED;
                } else if old.is_full() || new.inuse == 0 {
                    list_lock = Some(core.node.lock(&core.counters));
                }
            }
            if core.exchange(slab, old, new) {
                break (old, new, list_lock);
            }
        };
        match list_lock {
            Some(list_lock) => {
                debug_assert!(Self::ON_PARTIAL || list_lock.contains(&core.slabs, slab) != old.is_full());
                core.relist(slab, old, new, list_lock);
            }
            None if old.frozen => core.counters.count(Stat::FreeFrozen),
            None if old.is_full() => {
                core.counters.count(Stat::CpuPartialFree);
                self.put_cpu_partial(core, slab);
            }
            None => {}
        }
        true
    }

    /// Counts the operations since a word, which is closed now, was opened; returns its list.
    fn closed(core: &Core, cpu: usize, own: &Own, word: Word) -> FreeList {
        core.counters.add_all_for(cpu, FAST_PATHS, own.since_open(word));
        word.list
    }

    fn open(&self, core: &Core, cpu: usize, own: &mut Own, list: FreeList) {
        let operations = self.lists.open(cpu, &core.slabs, own.active, list);
        own.opening = Opening { len: list.len.into(), operations };
    }

    /// Returns the next list to allocate from, once the current one is used up, and makes its slab the
    /// active one. Takes the slab in `made` last.
    fn next_list(&self, core: &Core, own: &mut Own, made: &mut u32) -> Option<FreeList> {
        if own.active != NO_SLAB {
            if let Some(list) = Self::refill(core, own.active) {
                core.counters.count(Stat::AllocRefill);
                return Some(list);
            }
            core.counters.count(Stat::DeactivateBypass);
            own.active = NO_SLAB;
        }
        if own.partial != NO_SLAB {
            own.active = own.partial;
            own.partial = core.following(own.active);
            own.nr_partial -= 1;
            core.counters.count(Stat::CpuPartialAlloc);
            return Some(core.take_list(own.active, true));
        }
        if let Some(list) = self.take_partial(core, own) {
            return Some(list);
        }
        if *made == NO_SLAB {
            return None;
        }
        own.active = std::mem::replace(made, NO_SLAB);
        let objects = core.slabs.layout.objects;
        core.slabs.get(own.active).word.store(State::full(objects, true));
        Some(FreeList { first: 0, len: objects })
    }

    /// Takes the objects that other CPUs freed into the active slab; if there are none, unfreezes the
    /// slab, which is full.
    fn refill(core: &Core, slab: u32) -> Option<FreeList> {
        loop {
            let old = core.slabs.get(slab).word.load();
            if core.exchange(slab, old, State::full(old.objects, !old.is_full())) {
                return (!old.is_full()).then(|| old.free_list());
            }
        }
    }

    /// Takes slabs from the node partial list: one to allocate from, and half a CPU partial list of others.
    fn take_partial(&self, core: &Core, own: &mut Own) -> Option<FreeList> {
        if core.node.nr_partial.get() == 0 {
            return None;
        }
        let mut list_lock = core.node.lock(&core.counters);
        let mut active = None;
        while let Some(slab) = list_lock.first() {
            if !Self::DELAYED && !Self::freeze_on_list(core, slab, &mut active) {
                // Another thread is freeing into the slab: release `list_lock` rather than retry.
                break;
            }
            list_lock.remove(&core.slabs, slab);
            if own.active == NO_SLAB {
                own.active = slab;
                core.counters.count(Stat::AllocFromPartial);
            } else {
                Self::push_cpu_partial(core, own, slab);
                core.counters.count(Stat::CpuPartialNode);
            }
            if own.nr_partial > self.cpu_partial_slabs / 2 || self.cpu_partial_slabs == 0 {
                break;
            }
        }
        drop(list_lock);
        if Self::DELAYED && own.active != NO_SLAB {
            active = Some(core.take_list(own.active, true));
        }
        active
    }

    /// Tries once to freeze a slab of the node partial list, under `list_lock`. Takes the free objects of
    /// the first one.
    fn freeze_on_list(core: &Core, slab: u32, active: &mut Option<FreeList>) -> bool {
        let old = core.slabs.get(slab).word.load();
        let first = active.is_none();
        let new = if first { State::full(old.objects, true) } else { State { frozen: true, ..old } };
        let done = core.exchange(slab, old, new);
        if done && first {
            *active = Some(old.free_list());
        }
        done
    }

    /// Gives up an active slab: the rest of the CPU's list goes back to it. Fails with `Corrupt` when the
    /// list is damaged. Its objects are lost then.
    fn deactivate(core: &Core, slab: u32, list: FreeList) -> Result<()> {
        let mut returned = None;
        let mut result = Ok(());
        if list.len > 0 {
            // Other CPUs lower `inuse` only by objects that are not in the list.
            let fits = list.len <= core.slabs.get(slab).word.load().inuse;
            returned = core.slabs.last_of(slab, list.first, list.len).filter(|_| fits);
            if returned.is_none() {
                result = Err(core.lose_list(slab, list));
            }
        }
        loop {
            let old = core.slabs.get(slab).word.load();
            let mut new = State { frozen: false, ..old };
            if let Some(last) = returned {
                core.slabs.set_next(slab, last, old.free);
                new.free = list.first;
                new.inuse -= list.len;
            }
            let drops = new.inuse == 0 && core.node.nr_partial.get() >= core.options.min_partial as u64;
            let lists = !drops && !new.is_full();
            let list_lock = (lists && !Self::UNFREEZE_FIRST).then(|| core.node.lock(&core.counters));
            if !core.exchange(slab, old, new) {
                continue;
            }
            let remote = !old.is_full();
            if drops {
                core.counters.count(Stat::DeactivateEmpty);
                core.discard(slab);
            } else if lists {
                core.counters.count(if remote { Stat::DeactivateToTail } else { Stat::DeactivateToHead });
                let mut list_lock = list_lock.unwrap_or_else(|| core.node.lock(&core.counters));
                list_lock.add(&core.slabs, slab, !remote);
            } else {
                core.counters.count(Stat::DeactivateFull);
            }
            return result;
        }
    }

    /// Puts a slab on this CPU's partial list; if that is full, moves it to the node's first.
    fn put_cpu_partial(&self, core: &Core, slab: u32) {
        let mut own = self.cpus.local().lock();
        let mut drained = NO_SLAB;
        if own.nr_partial >= self.cpu_partial_slabs {
            drained = Self::take_cpu_partial(&mut own);
            core.counters.count(Stat::CpuPartialDrain);
        }
        Self::push_cpu_partial(core, &mut own, slab);
        drop(own);
        Self::put_partials(core, drained);
    }

    fn put_partials(core: &Core, first: u32) {
        core.put_partials(first, |slab| {
            loop {
                let old = core.slabs.get(slab).word.load();
                let new = State { frozen: false, ..old };
                if Self::DELAYED || core.exchange(slab, old, new) {
                    return new;
                }
            }
        });
    }

    fn push_cpu_partial(core: &Core, own: &mut Own, slab: u32) {
        core.set_following(slab, own.partial);
        own.partial = slab;
        own.nr_partial += 1;
    }

    fn take_cpu_partial(own: &mut Own) -> u32 {
        own.nr_partial = 0;
        std::mem::replace(&mut own.partial, NO_SLAB)
    }
}

impl Own {
    fn since_open(&self, word: Word) -> [u64; 2] {
        self.opening.since(word.list.len.into(), word.operations)
    }
}
