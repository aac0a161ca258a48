//! Sheaves: arrays of free objects, so that a CPU allocates and frees objects of any slab without touching
//! the slab.
//!
//! Each CPU has a *main* sheaf that its fast paths use, and a *spare* one; the *barn* has some more, filled
//! and empty ones, for all CPUs. If the main sheaf runs empty, the CPU fills half of it from the spare; if
//! it runs full, it empties half of it into the spare. If the spare is empty, or full, the CPU exchanges it
//! for one of the barn, or goes to the slabs. So threads that allocate what other threads free pass whole
//! sheaves to each other. The idea is Vlastimil Babka's ("SLUB percpu sheaves", 2025), after Bonwick's and
//! Adams's magazines.
//!
//! Locks: each CPU's sheaf lock, then the barn's. Neither is held during calls to the slabs.

use std::marker::PhantomData;

use crate::base::cpu::{self, PerCpu};
use crate::base::error::{Error, Result};
use crate::base::mem::Gfp;
use crate::base::sync::{Mutex, MutexGuard, classes};

use super::barn::{BARN_SHEAVES, Barn, most_sheaves};
use super::core::{Core, Freeze};
use super::cpu_word::{Opening, lock_local};
use super::policy::FastPath;
use super::sheaf_cells::{Cells, Word};
use super::stats::Stat;

/// The most objects of a sheaf.
pub(super) const MAX_SHEAF_OBJECTS: usize = 256;

/// What differs between the policies with sheaves.
pub trait SheafRules: Send + Sync + 'static {
    /// Whether the barn grows while CPUs need it.
    const ELASTIC: bool;
    /// Whether an allocation that may not wait fills a sheaf from slabs, if the barn has no filled one, or takes a
    /// single object.
    const NOWAIT_REFILLS: bool;
}

/// Protected by the CPU's sheaf lock, as is the main sheaf while the word is closed.
struct Pair {
    spare: usize,
    spare_len: u32,
    opening: Opening,
}

/// See the [module's documentation](self).
pub struct Sheaved<R> {
    cells: Cells,
    pairs: PerCpu<Mutex<Pair>>,
    barn: Barn,
    rules: PhantomData<fn() -> R>,
}

/// The counters of the fast paths.
const FAST_PATHS: [Stat; 2] = [Stat::AllocPcs, Stat::FreePcs];

impl<F: Freeze, R: SheafRules> FastPath<F> for Sheaved<R> {
    fn new(core: &Core<F>) -> Result<Self> {
        let capacity = core.options.sheaf_objects;
        if !(1..=MAX_SHEAF_OBJECTS).contains(&capacity) {
            return Err(Error::invalid(format!("a sheaf has 1 to {MAX_SHEAF_OBJECTS} objects")));
        }
        let cpus = cpu::possible();
        let sheaves = 2 * cpus + if R::ELASTIC { most_sheaves(cpus) } else { BARN_SHEAVES };
        let cells = Cells::new(sheaves, capacity as u32, core.rseq)?;
        let pair = |cpu| {
            let pair = Pair { spare: cpus + cpu, spare_len: 0, opening: Opening::default() };
            Mutex::new(&classes::SLAB_SHEAF, pair)
        };
        Ok(Sheaved {
            pairs: PerCpu::new(pair),
            barn: Barn::new(2 * cpus..sheaves),
            cells,
            rules: PhantomData,
        })
    }

    fn populate(&self) -> Result<()> {
        self.cells.populate()
    }

    #[inline]
    fn pop(&self, _: &Core<F>) -> Option<u32> {
        self.cells.pop()
    }

    #[inline]
    fn push(&self, _: &Core<F>, object: u32, hardened: bool) -> bool {
        self.cells.push(object, hardened)
    }

    #[cold]
    fn alloc_slow(&self, core: &Core<F>, gfp: Gfp) -> Result<u32> {
        if let Some(object) = self.cells.pop_after_all().or_else(|| self.take_from_spare(core)) {
            return Ok(object);
        }
        if gfp == Gfp::NoWait && !R::NOWAIT_REFILLS {
            let mut object = [0];
            core.alloc_slow(&mut object, gfp)?;
            return Ok(object[0]);
        }
        let mut objects = [0; MAX_SHEAF_OBJECTS];
        let wanted = self.half() as usize;
        let taken = core.alloc_slow(&mut objects[..wanted], gfp)?;
        core.counters.count(Stat::SheafRefill);
        core.counters.add(Stat::AllocPcs, 1);
        let kept = self.keep(core, &objects[1..taken]);
        // If another thread filled the sheaf meanwhile, free the rest. This cannot fail: they were just taken.
        let _ = core.free_many(&mut objects[1 + kept..taken]);
        Ok(objects[0])
    }

    #[cold]
    fn free_slow(&self, core: &Core<F>, object: u32) -> Result<()> {
        core.check_is_object(object)?;
        let mut flushed = [0; MAX_SHEAF_OBJECTS];
        let count = self.put_into_spare(core, object, &mut flushed)?;
        core.free_many(&mut flushed[..count])
    }

    fn drain(&self, core: &Core<F>) -> Vec<u32> {
        let mut all = Vec::new();
        for cpu in 0..self.pairs.len() {
            let mut pair = self.pairs.of(cpu).lock();
            let len = self.closed(core, cpu, &pair, self.cells.close(cpu));
            all.extend(self.objects(cpu, 0..len));
            all.extend(self.objects(pair.spare, 0..std::mem::take(&mut pair.spare_len)));
            self.open(cpu, &mut pair, 0);
        }
        self.barn.drain(|sheaf, len| all.extend(self.objects(sheaf, 0..len)));
        all
    }

    fn cached(&self, core: &Core<F>, stats: &mut [[u64; Stat::COUNT]]) -> u64 {
        let mut objects = 0;
        for (cpu, stats) in stats.iter_mut().enumerate() {
            // Under the lock no slow path adds this word's operations to the counters.
            let pair = self.pairs.of(cpu).lock();
            let word = self.cells.peek(cpu);
            objects += u64::from(word.len) + u64::from(pair.spare_len);
            let lacking = pair.opening.since(word.len, word.operations);
            core.counters.read_with(cpu, FAST_PATHS, lacking, stats);
        }
        objects + self.barn.objects()
    }

    fn capacity(&self) -> u32 {
        self.cells.capacity()
    }
}

impl<R: SheafRules> Sheaved<R> {
    /// Takes an object of the main sheaf. If that is empty, fills half of it from the spare first; if the
    /// spare is empty too, exchanges it for a filled sheaf of the barn.
    fn take_from_spare<F: Freeze>(&self, core: &Core<F>) -> Option<u32> {
        let (cpu, mut pair, mut len) = self.close_local(core);
        if len == 0 && pair.spare_len == 0 {
            if let Some(filled) = self.barn.get(pair.spare) {
                (pair.spare, pair.spare_len) = filled;
                core.counters.count(Stat::BarnGet);
            } else {
                core.counters.count(Stat::BarnGetFail);
            }
        }
        if len == 0 {
            len = pair.spare_len.min(self.half());
            pair.spare_len -= len;
            self.copy((pair.spare, pair.spare_len), (cpu, 0), len);
        }
        let object = len.checked_sub(1).map(|last| {
            len = last;
            core.counters.add_for(cpu, Stat::AllocPcs, 1);
            self.cells.get(cpu, last)
        });
        self.open(cpu, &mut pair, len);
        object
    }

    /// Puts as many objects into this CPU's main sheaf as it has room for; returns how many.
    fn keep<F: Freeze>(&self, core: &Core<F>, objects: &[u32]) -> usize {
        let (cpu, mut pair, len) = self.close_local(core);
        let kept = objects.len().min((self.cells.capacity() - len) as usize);
        for (i, object) in (len..).zip(&objects[..kept]) {
            self.cells.set(cpu, i, *object);
        }
        self.open(cpu, &mut pair, len + kept as u32);
        kept
    }

    /// Puts an object into the main sheaf. If that is full, moves its older half to the spare first. If the
    /// spare has no room, exchanges it for an empty sheaf of the barn; if there is none, moves the older half
    /// to `flushed`. Returns the number of objects in `flushed`.
    fn put_into_spare<F: Freeze>(
        &self,
        core: &Core<F>,
        object: u32,
        flushed: &mut [u32; MAX_SHEAF_OBJECTS],
    ) -> Result<usize> {
        let (cpu, mut pair, mut len) = self.close_local(core);
        if len.checked_sub(1).is_some_and(|last| self.cells.get(cpu, last) == object) {
            self.open(cpu, &mut pair, len);
            return Err(core.corrupt(object, "freed twice: it was freed last on this CPU"));
        }
        let (capacity, half) = (self.cells.capacity(), self.half());
        let mut flush = 0;
        if len == capacity {
            if pair.spare_len + half > capacity {
                if let Some(empty) = self.barn.put(pair.spare, pair.spare_len) {
                    (pair.spare, pair.spare_len) = (empty, 0);
                    core.counters.count(Stat::BarnPut);
                } else {
                    core.counters.count(Stat::BarnPutFail);
                }
            }
            if pair.spare_len + half <= capacity {
                self.copy((cpu, 0), (pair.spare, pair.spare_len), half);
                pair.spare_len += half;
            } else {
                core.counters.count(Stat::SheafFlush);
                flush = half as usize;
                flushed.iter_mut().zip(self.objects(cpu, 0..half)).for_each(|(to, from)| *to = from);
            }
            len -= half;
            self.copy((cpu, half), (cpu, 0), len);
        }
        self.cells.set(cpu, len, object);
        core.counters.add_for(cpu, Stat::FreePcs, 1);
        self.open(cpu, &mut pair, len + 1);
        Ok(flush)
    }

    /// Copies `len` objects from a cell of a sheaf on to another sheaf, or downwards in the same.
    fn copy(&self, (from, from_at): (usize, u32), (to, to_at): (usize, u32), len: u32) {
        for (i, object) in (to_at..).zip(self.objects(from, from_at..from_at + len)) {
            self.cells.set(to, i, object);
        }
    }

    /// Returns the number of objects that move at a time. A CPU that alternates between allocating and freeing
    /// fewer objects then stays on its fast paths.
    fn half(&self) -> u32 {
        self.cells.capacity().div_ceil(2)
    }

    fn objects(&self, sheaf: usize, range: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
        range.map(move |i| self.cells.get(sheaf, i))
    }

    /// Closes the word of this thread's CPU; returns the CPU, the guard of its sheaf lock, and the number of
    /// objects of its main sheaf.
    fn close_local<F: Freeze>(&self, core: &Core<F>) -> (usize, MutexGuard<'_, Pair>, u32) {
        let (cpu, pair, word) = lock_local(&self.pairs, |cpu| self.cells.close_local(cpu));
        let len = self.closed(core, cpu, &pair, word);
        (cpu, pair, len)
    }

    /// Counts the operations since a word, which is closed now, was opened; returns the number of objects of its
    /// main sheaf.
    fn closed<F: Freeze>(&self, core: &Core<F>, cpu: usize, pair: &Pair, word: Word) -> u32 {
        core.counters.add_all_for(cpu, FAST_PATHS, pair.opening.since(word.len, word.operations));
        word.len
    }

    /// Opens a closed word with `len` objects in its main sheaf.
    fn open(&self, cpu: usize, pair: &mut Pair, len: u32) {
        pair.opening = Opening { len, operations: self.cells.open(cpu, len) };
    }
}
