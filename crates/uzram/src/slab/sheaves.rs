//! Sheaves: arrays of free objects, so that a CPU allocates and frees whatever slab an object is of
//! without touching the slab.
//!
//! Each CPU has a *main* sheaf that its fast paths use, and a *spare* one beside it; the *barn* has some
//! more for all of them, filled and empty ones. A CPU whose main sheaf has run empty fills half of it from
//! the spare, whose main sheaf is full empties half of it into the spare; where the spare is empty, or
//! full, it changes it for one of the barn, or turns to slabs. Threads that allocate what others free so
//! hand over whole sheaves. The idea is Vlastimil Babka's ("SLUB percpu sheaves", 2025), and Bonwick's and
//! Adams's magazines before it.
//!
//! Locks: each CPU's sheaf lock, then the barn's. Slabs are turned to without either.

use crate::base::cpu::{self, PerCpu};
use crate::base::error::{Error, Result};
use crate::base::mem::Gfp;
use crate::base::sync::{Mutex, MutexGuard, classes};

use super::core::{Core, Freeze};
use super::cpu_word::{Opening, lock_local};
use super::policy::FastPath;
use super::sheaf_cells::{Cells, Word};
use super::stats::Stat;

/// The most objects of a sheaf.
pub(super) const MAX_SHEAF_OBJECTS: usize = 256;
/// Sheaves of the barn: the kernel has up to ten full and ten empty ones.
pub(super) const BARN_SHEAVES: usize = if cfg!(loom) { 1 } else { 10 };

/// What a CPU's sheaf lock protects, beside its main sheaf while the word is closed.
struct Pair {
    spare: usize,
    spare_len: u32,
    opening: Opening,
}

/// Sheaves that no CPU has.
struct Barn {
    /// With how many objects there are in each.
    filled: Vec<(usize, u32)>,
    empty: Vec<usize>,
}

/// See the [module's documentation](self).
pub struct Sheaved {
    cells: Cells,
    pairs: PerCpu<Mutex<Pair>>,
    barn: Mutex<Barn>,
}

/// The counters of the fast paths.
const FAST_PATHS: [Stat; 2] = [Stat::AllocPcs, Stat::FreePcs];

impl<F: Freeze> FastPath<F> for Sheaved {
    fn new(core: &Core<F>) -> Result<Self> {
        let capacity = core.options.sheaf_objects;
        if !(1..=MAX_SHEAF_OBJECTS).contains(&capacity) {
            return Err(Error::invalid(format!("a sheaf has 1 to {MAX_SHEAF_OBJECTS} objects")));
        }
        let cpus = cpu::possible();
        let cells = Cells::new(2 * cpus + BARN_SHEAVES, capacity as u32, core.rseq)?;
        let pair = |cpu| {
            let pair = Pair { spare: cpus + cpu, spare_len: 0, opening: Opening::default() };
            Mutex::new(&classes::SLAB_SHEAF, pair)
        };
        let empty = (2 * cpus..2 * cpus + BARN_SHEAVES).collect();
        Ok(Sheaved {
            pairs: PerCpu::new(pair),
            barn: Mutex::new(&classes::SLAB_BARN, Barn { filled: Vec::with_capacity(BARN_SHEAVES), empty }),
            cells,
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
        let mut objects = [0; MAX_SHEAF_OBJECTS];
        let wanted = self.half() as usize;
        let taken = core.alloc_slow(&mut objects[..wanted], gfp)?;
        core.counters.count(Stat::SheafRefill);
        core.counters.add(Stat::AllocPcs, 1);
        let kept = self.keep(core, &objects[1..taken]);
        // Another thread filled the sheaf meanwhile. Objects that were just taken are not refused.
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
        let mut barn = self.barn.lock();
        while let Some((sheaf, len)) = barn.filled.pop() {
            all.extend(self.objects(sheaf, 0..len));
            barn.empty.push(sheaf);
        }
        all
    }

    fn cached(&self, core: &Core<F>, stats: &mut [[u64; Stat::COUNT]]) -> u64 {
        let mut objects = 0;
        for (cpu, stats) in stats.iter_mut().enumerate() {
            // Under the lock nobody counts what this CPU's word says.
            let pair = self.pairs.of(cpu).lock();
            let word = self.cells.peek(cpu);
            objects += u64::from(word.len) + u64::from(pair.spare_len);
            let lacking = pair.opening.since(word.len, word.operations);
            core.counters.read_with(cpu, FAST_PATHS, lacking, stats);
        }
        objects + self.barn.lock().filled.iter().map(|(_, len)| u64::from(*len)).sum::<u64>()
    }

    fn capacity(&self) -> u32 {
        self.cells.capacity()
    }
}

impl Sheaved {
    /// Takes an object of the main sheaf after all, or fills half of it from the spare; where that is
    /// empty, from a sheaf of the barn, which is the spare then.
    fn take_from_spare<F: Freeze>(&self, core: &Core<F>) -> Option<u32> {
        let (cpu, mut pair, mut len) = self.close_local(core);
        if len == 0 && pair.spare_len == 0 {
            let mut barn = self.barn.lock();
            if let Some((sheaf, len)) = barn.filled.pop() {
                barn.empty.push(std::mem::replace(&mut pair.spare, sheaf));
                pair.spare_len = len;
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

    /// Puts as many objects into this CPU's main sheaf as it has room for, and returns how many.
    fn keep<F: Freeze>(&self, core: &Core<F>, objects: &[u32]) -> usize {
        let (cpu, mut pair, len) = self.close_local(core);
        let kept = objects.len().min((self.cells.capacity() - len) as usize);
        for (i, object) in (len..).zip(&objects[..kept]) {
            self.cells.set(cpu, i, *object);
        }
        self.open(cpu, &mut pair, len + kept as u32);
        kept
    }

    /// Puts an object into the main sheaf, once the older half of that has gone to the spare. Where there
    /// is no room, the spare goes to the barn for an empty one; if that has none, the older half goes to
    /// `flushed`. Returns how many these are.
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
                let mut barn = self.barn.lock();
                if let Some(empty) = barn.empty.pop() {
                    barn.filled.push((std::mem::replace(&mut pair.spare, empty), pair.spare_len));
                    pair.spare_len = 0;
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

    /// Copies `len` objects from one sheaf, from a cell on, to another, or downwards in the same.
    fn copy(&self, (from, from_at): (usize, u32), (to, to_at): (usize, u32), len: u32) {
        for (i, object) in (to_at..).zip(self.objects(from, from_at..from_at + len)) {
            self.cells.set(to, i, object);
        }
    }

    /// How many objects move at a time: a CPU that allocates and frees fewer in turn than this then does
    /// not come back soon.
    fn half(&self) -> u32 {
        self.cells.capacity().div_ceil(2)
    }

    fn objects(&self, sheaf: usize, range: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
        range.map(move |i| self.cells.get(sheaf, i))
    }

    /// Closes the word of this thread's CPU; returns which that is, what its sheaf lock protects, and
    /// the objects of its main sheaf.
    fn close_local<F: Freeze>(&self, core: &Core<F>) -> (usize, MutexGuard<'_, Pair>, u32) {
        let (cpu, pair, word) = lock_local(&self.pairs, |cpu| self.cells.close_local(cpu));
        let len = self.closed(core, cpu, &pair, word);
        (cpu, pair, len)
    }

    /// Counts what happened since a word, now closed, was opened; returns the objects of its main sheaf.
    fn closed<F: Freeze>(&self, core: &Core<F>, cpu: usize, pair: &Pair, word: Word) -> u32 {
        core.counters.add_all_for(cpu, FAST_PATHS, pair.opening.since(word.len, word.operations));
        word.len
    }

    /// Opens a closed word with `len` objects in its main sheaf.
    fn open(&self, cpu: usize, pair: &mut Pair, len: u32) {
        pair.opening = Opening { len, operations: self.cells.open(cpu, len) };
    }
}
