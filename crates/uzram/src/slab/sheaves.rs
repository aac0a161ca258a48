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
//! The CPU's word:
//!
//! ```text
//! 63         32 31 0
//! [ operations | top ]
//! ```
//!
//! `top` is the place of the main sheaf's highest object among the cells of all sheaves. Below a sheaf's
//! lowest cell is one with the name of no object, and above its highest one that says so: where a fast
//! path finds those, the sheaf is empty or full. A closed word's `top` is the place of two such cells and
//! nothing between, so that it is both.
//!
//! Without restartable sequences a fast path closes the word for the few instructions it takes.
//!
//! Locks: each CPU's sheaf lock, then the barn's. Slabs are turned to without either.

use crate::base::cpu::{self, PerCpu, Restartable};
use crate::base::error::{Error, Result};
use crate::base::mem::Gfp;
use crate::base::sync::{AtomicU32, Mutex, MutexGuard, Ordering, classes};

use super::core::{Core, Freeze};
use super::cpu_word;
use super::policy::Front;
use super::stats::Stat;

/// The most objects of a sheaf.
pub(super) const MAX_SHEAF_OBJECTS: usize = 256;
/// Sheaves of the barn: the kernel has up to ten full and ten empty ones.
pub(super) const BARN_SHEAVES: usize = if cfg!(feature = "loom") { 1 } else { 10 };

const OPERATION: u64 = 1 << 32;
type CpuWord = cpu_word::CpuWord<{ !(OPERATION - 1) }, 0>;

/// A word's `top`.
#[inline]
fn top_of(word: u64) -> u32 {
    word as u32
}

/// What a CPU's sheaf lock protects.
struct Pair {
    main: u32,
    spare: u32,
    spare_len: u32,
    /// The main sheaf's length and the operations when the word was opened last.
    len_at_open: u32,
    operations_at_open: u32,
}

/// Sheaves that no CPU has.
struct Barn {
    /// With how many objects there are in each.
    filled: Vec<(u32, u32)>,
    empty: Vec<u32>,
}

/// See the [module's documentation](self).
pub struct Sheaved {
    cells: Cells,
    words: PerCpu<CpuWord>,
    pairs: PerCpu<Mutex<Pair>>,
    barn: Mutex<Barn>,
    rseq: Option<Restartable>,
}

/// The cells of all sheaves. A sheaf's belong to the CPU that has it, the barn's to nobody.
struct Cells {
    cells: Box<[AtomicU32]>,
    capacity: u32,
    /// Cells from one sheaf to the next: whole cache lines.
    stride: usize,
}

/// What no object is called: it is below a sheaf's lowest object.
const NOTHING: u32 = u32::MAX;
/// What no object is called either: it is above a sheaf's highest cell.
const FULL: u32 = u32::MAX - 1;
/// Cells of a cache line.
const LINE_CELLS: usize = if cfg!(feature = "loom") { 2 } else { 16 };

impl Cells {
    fn new(sheaves: usize, capacity: u32) -> Self {
        let stride = (capacity as usize + 2).next_multiple_of(LINE_CELLS);
        let cell = |at: usize| match at.checked_sub(LINE_CELLS) {
            // What the `top` of a closed word, 0, leads to.
            None => AtomicU32::new(if at == 1 { FULL } else { NOTHING }),
            Some(at) => AtomicU32::new(if at % stride == capacity as usize + 1 { FULL } else { NOTHING }),
        };
        Cells { cells: (0..LINE_CELLS + sheaves * stride).map(cell).collect(), capacity, stride }
    }

    /// The place below a sheaf's lowest object: the `top` of an empty one.
    fn bottom(&self, sheaf: u32) -> u32 {
        (LINE_CELLS + sheaf as usize * self.stride) as u32
    }

    fn at(&self, at: u32) -> &AtomicU32 {
        &self.cells[at as usize]
    }

    /// A sheaf's cells, for objects.
    fn of(&self, sheaf: u32) -> &[AtomicU32] {
        let first = self.bottom(sheaf) as usize + 1;
        &self.cells[first..first + self.capacity as usize]
    }
}

impl<F: Freeze> Front<F> for Sheaved {
    fn new(core: &Core<F>) -> Result<Self> {
        let capacity = core.options.sheaf_objects;
        if !(1..=MAX_SHEAF_OBJECTS).contains(&capacity) {
            return Err(Error::invalid(format!("a sheaf has 1 to {MAX_SHEAF_OBJECTS} objects")));
        }
        let capacity = capacity as u32;
        let cpus = cpu::possible();
        let cells = Cells::new(2 * cpus + BARN_SHEAVES, capacity);
        let pair = |cpu| {
            let (main, spare) = (cpu as u32, (cpus + cpu) as u32);
            let pair = Pair { main, spare, spare_len: 0, len_at_open: 0, operations_at_open: 0 };
            Mutex::new(&classes::SLAB_SHEAF, pair)
        };
        let empty = (0..BARN_SHEAVES).map(|sheaf| (2 * cpus + sheaf) as u32).collect();
        Ok(Sheaved {
            words: PerCpu::new(|cpu| CpuWord::new(cells.bottom(cpu as u32).into())),
            pairs: PerCpu::new(pair),
            barn: Mutex::new(&classes::SLAB_BARN, Barn { filled: Vec::with_capacity(BARN_SHEAVES), empty }),
            rseq: core.rseq,
            cells,
        })
    }

    #[inline]
    fn pop(&self, _: &Core<F>) -> Option<u32> {
        #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom")))]
        if let Some(rseq) = self.rseq {
            return self.pop_restartable(rseq);
        }
        self.pop_exclusively()
    }

    #[inline]
    fn push(&self, _: &Core<F>, object: u32) -> bool {
        #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom")))]
        if let Some(rseq) = self.rseq {
            return self.push_restartable(rseq, object);
        }
        self.push_exclusively(object)
    }

    #[cold]
    fn alloc_slow(&self, core: &Core<F>, gfp: Gfp) -> Result<u32> {
        if let Some(object) = self.take_from_spare(core) {
            return Ok(object);
        }
        let mut objects = [NOTHING; MAX_SHEAF_OBJECTS];
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
        if !core.slabs.is_object(object) {
            return Err(core.corrupt(object, "freed, but it is no object of this cache"));
        }
        let mut flushed = [NOTHING; MAX_SHEAF_OBJECTS];
        let count = self.put_into_spare(core, object, &mut flushed)?;
        core.free_many(&mut flushed[..count])
    }

    fn drain(&self, core: &Core<F>) -> Vec<u32> {
        let mut all = Vec::new();
        for cpu in 0..self.pairs.len() {
            let mut pair = self.pairs.of(cpu).lock();
            let word = self.words.of(cpu).close(cpu, self.rseq);
            let len = self.closed(core, cpu, &pair, word);
            all.extend(self.objects(pair.main, 0..len));
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
            let word = self.words.of(cpu).load_open();
            let len = self.len_of(&pair, word);
            objects += u64::from(len) + u64::from(pair.spare_len);
            let lacking = pair.since_open(word, len);
            core.counters.read_with(cpu, [Stat::AllocPcs, Stat::FreePcs], lacking, stats);
        }
        objects + self.barn.lock().filled.iter().map(|(_, len)| u64::from(*len)).sum::<u64>()
    }

    fn capacity(&self) -> u32 {
        self.cells.capacity
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
            self.copy((pair.spare, pair.spare_len), (pair.main, 0), len);
        }
        let object = len.checked_sub(1).map(|last| {
            len = last;
            core.counters.add_for(cpu, Stat::AllocPcs, 1);
            self.cells.of(pair.main)[last as usize].load(Ordering::Relaxed)
        });
        self.open(cpu, &mut pair, len);
        object
    }

    /// Puts as many objects into this CPU's main sheaf as it has room for, and answers how many.
    fn keep<F: Freeze>(&self, core: &Core<F>, objects: &[u32]) -> usize {
        let (cpu, mut pair, len) = self.close_local(core);
        let kept = objects.len().min((self.capacity() - len) as usize);
        for (cell, object) in self.cells.of(pair.main)[len as usize..].iter().zip(&objects[..kept]) {
            cell.store(*object, Ordering::Relaxed);
        }
        self.open(cpu, &mut pair, len + kept as u32);
        kept
    }

    /// Puts an object into the main sheaf, once the older half of that has gone to the spare. Where there
    /// is no room, the spare goes to the barn for an empty one; if that has none, the older half goes to
    /// `flushed`. Answers how many these are.
    fn put_into_spare<F: Freeze>(
        &self,
        core: &Core<F>,
        object: u32,
        flushed: &mut [u32; MAX_SHEAF_OBJECTS],
    ) -> Result<usize> {
        let (cpu, mut pair, mut len) = self.close_local(core);
        if self.cells.at(self.cells.bottom(pair.main) + len).load(Ordering::Relaxed) == object {
            self.open(cpu, &mut pair, len);
            return Err(core.corrupt(object, "freed twice: it was freed last on this CPU"));
        }
        let (capacity, half) = (self.capacity(), self.half());
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
                self.copy((pair.main, 0), (pair.spare, pair.spare_len), half);
                pair.spare_len += half;
            } else {
                core.counters.count(Stat::SheafFlush);
                flush = half as usize;
                flushed.iter_mut().zip(self.objects(pair.main, 0..half)).for_each(|(to, from)| *to = from);
            }
            len -= half;
            self.copy((pair.main, half), (pair.main, 0), len);
        }
        self.cells.of(pair.main)[len as usize].store(object, Ordering::Relaxed);
        core.counters.add_for(cpu, Stat::FreePcs, 1);
        self.open(cpu, &mut pair, len + 1);
        Ok(flush)
    }

    /// Copies `len` objects from one sheaf, from a cell on, to another, or downwards in the same.
    fn copy(&self, (from, from_at): (u32, u32), (to, to_at): (u32, u32), len: u32) {
        let cells = &self.cells.of(to)[to_at as usize..];
        for (cell, object) in cells.iter().zip(self.objects(from, from_at..from_at + len)) {
            cell.store(object, Ordering::Relaxed);
        }
    }

    /// How many objects move at a time: a CPU that allocates and frees fewer in turn than this then does
    /// not come back soon.
    fn half(&self) -> u32 {
        self.capacity().div_ceil(2)
    }

    fn objects(&self, sheaf: u32, range: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
        let range = range.start as usize..range.end as usize;
        self.cells.of(sheaf)[range].iter().map(|cell| cell.load(Ordering::Relaxed))
    }

    /// Closes the word of this thread's CPU; answers which that is, what its sheaf lock protects, and
    /// the objects of its main sheaf.
    fn close_local<F: Freeze>(&self, core: &Core<F>) -> (usize, MutexGuard<'_, Pair>, u32) {
        loop {
            let cpu = cpu::current();
            let pair = self.pairs.of(cpu).lock();
            if let Some(word) = self.words.of(cpu).close_local(cpu, self.rseq) {
                let len = self.closed(core, cpu, &pair, word);
                return (cpu, pair, len);
            }
        }
    }

    /// Counts what happened since a word, now closed, was opened; answers the objects of its main sheaf.
    fn closed<F: Freeze>(&self, core: &Core<F>, cpu: usize, pair: &Pair, word: u64) -> u32 {
        let len = self.len_of(pair, word);
        let [allocs, frees] = pair.since_open(word, len);
        core.counters.add_for(cpu, Stat::AllocPcs, allocs);
        core.counters.add_for(cpu, Stat::FreePcs, frees);
        len
    }

    /// Opens a closed word with `len` objects in its main sheaf.
    fn open(&self, cpu: usize, pair: &mut Pair, len: u32) {
        let word = self.words.of(cpu);
        let operations = word.load() & !(OPERATION - 1);
        pair.len_at_open = len;
        pair.operations_at_open = (operations / OPERATION) as u32;
        word.open(operations + u64::from(self.cells.bottom(pair.main) + len));
    }

    /// The objects of a main sheaf by its open word.
    fn len_of(&self, pair: &Pair, word: u64) -> u32 {
        top_of(word) - self.cells.bottom(pair.main)
    }

    fn capacity(&self) -> u32 {
        self.cells.capacity
    }

    #[cfg_attr(all(target_arch = "x86_64", target_env = "gnu"), cold)]
    fn pop_exclusively(&self) -> Option<u32> {
        let own = self.words.local();
        let word = own.load();
        if CpuWord::is_closed(word) || !own.close_if(word) {
            return None;
        }
        let object = self.cells.at(top_of(word)).load(Ordering::Relaxed);
        let taken = object != NOTHING;
        own.open(if taken { word.wrapping_add(OPERATION) - 1 } else { word });
        taken.then_some(object)
    }

    #[cfg_attr(all(target_arch = "x86_64", target_env = "gnu"), cold)]
    fn push_exclusively(&self, object: u32) -> bool {
        let own = self.words.local();
        let word = own.load();
        if CpuWord::is_closed(word) || !own.close_if(word) {
            return false;
        }
        let top = top_of(word);
        let above = self.cells.at(top + 1);
        let fits =
            above.load(Ordering::Relaxed) != FULL && self.cells.at(top).load(Ordering::Relaxed) != object;
        if fits {
            above.store(object, Ordering::Relaxed);
        }
        own.open(if fits { word.wrapping_add(OPERATION) + 1 } else { word });
        fits
    }
}

impl Pair {
    /// Allocations and frees on the fast path since the word was opened: how many there were, and by how
    /// much the sheaf has grown to `len`, tell both.
    fn since_open(&self, word: u64, len: u32) -> [u64; 2] {
        let operations = i64::from(((word / OPERATION) as u32).wrapping_sub(self.operations_at_open));
        let growth = i64::from(len) - i64::from(self.len_at_open);
        [operations - growth, operations + growth].map(|twice| (twice / 2).max(0) as u64)
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom")))]
mod sequences {
    use super::*;
    use crate::base::cpu::{Padded, restartable};

    // What the sequences below take for granted.
    const _: () = assert!(size_of::<Padded<CpuWord>>() == 128 && NOTHING as i32 == -1 && FULL as i32 == -2);

    impl Sheaved {
        #[inline(always)]
        pub(super) fn pop_restartable(&self, rseq: Restartable) -> Option<u32> {
            let object: u64;
            // SAFETY: the CPU's number is below the array's length, and `top` below the cells'. While the
            // word is open, the cell at `top` is this CPU's alone, or below its lowest.
            unsafe {
                restartable!(
                    "shl {cpu}, 7",
                    "add {cpu}, {words}",
                    "mov {word}, [{cpu}]",
                    "mov {result:e}, {word:e}",
                    "mov {result:e}, [{cells} + {result} * 4]",
                    "cmp {result:e}, -1",
                    "je 43b",
                    "add {word}, {change}",
                    "mov [{cpu}], {word}",
                    => cpu = out(reg) _,
                    cpus = in(reg) self.words.len(),
                    rseq = in(reg) rseq.area_offset(),
                    words = in(reg) self.words.as_ptr(),
                    cells = in(reg) self.cells.cells.as_ptr(),
                    change = in(reg) OPERATION - 1,
                    word = out(reg) _,
                    result = out(reg) object,
                    options(nostack)
                );
            }
            (object as u32 != NOTHING).then_some(object as u32)
        }

        #[inline(always)]
        pub(super) fn push_restartable(&self, rseq: Restartable, object: u32) -> bool {
            let top: u64;
            // SAFETY: as in `pop_restartable`; above `top` is another cell of this CPU's, or the one above
            // its highest, which is left alone.
            unsafe {
                restartable!(
                    "shl {cpu}, 7",
                    "add {cpu}, {words}",
                    "mov {word}, [{cpu}]",
                    "mov {result:e}, {word:e}",
                    "cmp dword ptr [{cells} + {result} * 4 + 4], -2",
                    "je 43b",
                    "cmp {object:e}, [{cells} + {result} * 4]",
                    "je 43b",
                    "mov [{cells} + {result} * 4 + 4], {object:e}",
                    "add {word}, {change}",
                    "mov [{cpu}], {word}",
                    => cpu = out(reg) _,
                    cpus = in(reg) self.words.len(),
                    rseq = in(reg) rseq.area_offset(),
                    words = in(reg) self.words.as_ptr(),
                    cells = in(reg) self.cells.cells.as_ptr(),
                    object = in(reg) object,
                    change = in(reg) OPERATION + 1,
                    word = out(reg) _,
                    result = out(reg) top,
                    options(nostack)
                );
            }
            top != u64::MAX
        }
    }
}
