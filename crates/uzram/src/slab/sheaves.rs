//! Sheaves: arrays of free objects, so that a CPU allocates and frees whatever slab an object is of
//! without touching the slab.
//!
//! Each CPU has a *main* sheaf that its fast paths use, and a *spare* one to change it with; the
//! *barn* has some more for all of them, full and empty ones. A CPU whose main sheaf has run empty
//! takes the spare, else a full one from the barn, else it fills half of it from slabs; one whose
//! main sheaf is full goes the other way round. Threads that allocate what others free so hand over
//! whole sheaves. The idea is Vlastimil Babka's ("SLUB percpu sheaves", 2025), and Bonwick's and
//! Adams's magazines before it.
//!
//! The CPU's word, beside [`CpuWord`]'s bit:
//!
//! ```text
//! 63         17 16       15              0
//! [ operations | closed | objects in main ]
//! ```
//!
//! Without restartable sequences a fast path closes the word for the few instructions it takes.
//!
//! Locks: each CPU's sheaf lock, then the barn's. Slabs are turned to without either.

use crate::base::cpu::{self, PerCpu, Restartable};
use crate::base::error::{Error, Result};
use crate::base::mem::Gfp;
use crate::base::sync::{AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, classes};

use super::core::{Core, Freeze};
use super::cpu_word::{CLOSED, CpuWord};
use super::policy::Front;
use super::stats::Stat;

/// The most objects of a sheaf.
pub(super) const MAX_SHEAF_OBJECTS: usize = 256;
/// Sheaves of the barn: the kernel has up to ten full and ten empty ones.
pub(super) const BARN_SHEAVES: usize = if cfg!(feature = "loom") { 1 } else { 10 };

const LEN_MASK: u64 = CLOSED - 1;
const OPERATION: u64 = CLOSED << 1;

/// One CPU's main sheaf.
#[repr(C)]
struct Main {
    word: CpuWord,
    /// Where its first cell is. Changes while the word is closed, as does `sheaf`.
    cells: AtomicU64,
    capacity: u32,
    sheaf: AtomicU32,
}

/// What a CPU's sheaf lock protects.
struct Spare {
    sheaf: u32,
    len: u32,
    /// The main sheaf's length and the operations when the word was opened last.
    len_at_open: u32,
    operations_at_open: u64,
}

/// Sheaves that no CPU has.
struct Barn {
    full: Vec<u32>,
    empty: Vec<u32>,
}

/// See the [module's documentation](self).
pub struct Sheaved {
    cells: Cells,
    mains: PerCpu<Main>,
    spares: PerCpu<Mutex<Spare>>,
    barn: Mutex<Barn>,
    rseq: Option<Restartable>,
    capacity: u32,
}

/// The cells of all sheaves. A sheaf's belong to the CPU that has it, the barn's to nobody.
struct Cells {
    cells: Box<[AtomicU32]>,
    /// Cells from one sheaf to the next: whole cache lines, of which the first cell is no object's,
    /// so that a sheaf always has something below its lowest object.
    stride: usize,
}

/// What no object is called.
const NOTHING: u32 = u32::MAX;
/// Cells of a cache line.
const LINE_CELLS: usize = if cfg!(feature = "loom") { 1 } else { 16 };

impl Cells {
    fn new(sheaves: usize, capacity: u32) -> Self {
        let stride = (capacity as usize + 1).next_multiple_of(LINE_CELLS);
        Cells { cells: (0..sheaves * stride).map(|_| AtomicU32::new(NOTHING)).collect(), stride }
    }

    #[inline]
    fn of(&self, sheaf: u32) -> &[AtomicU32] {
        let start = sheaf as usize * self.stride;
        &self.cells[start + 1..start + self.stride]
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
        let main = |cpu| Main {
            word: CpuWord::new(0),
            cells: AtomicU64::new(address_of(&cells, cpu as u32)),
            capacity,
            sheaf: AtomicU32::new(cpu as u32),
        };
        let spare = |cpu| {
            let sheaf = (cpus + cpu) as u32;
            Mutex::new(&classes::SLAB_SHEAF, Spare { sheaf, len: 0, len_at_open: 0, operations_at_open: 0 })
        };
        let empty = (0..BARN_SHEAVES).map(|sheaf| (2 * cpus + sheaf) as u32).collect();
        Ok(Sheaved {
            mains: PerCpu::new(main),
            spares: PerCpu::new(spare),
            barn: Mutex::new(&classes::SLAB_BARN, Barn { full: Vec::with_capacity(BARN_SHEAVES), empty }),
            rseq: core.rseq,
            capacity,
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
        if let Some(object) = self.take_from_full(core) {
            return Ok(object);
        }
        let mut objects = [NOTHING; MAX_SHEAF_OBJECTS];
        let wanted = (self.capacity as usize / 2).max(1);
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
        let count = self.put_into_empty(core, object, &mut flushed)?;
        core.free_many(&mut flushed[..count])
    }

    fn drain(&self, core: &Core<F>) -> Vec<u32> {
        let mut all = Vec::new();
        for cpu in 0..self.spares.len() {
            let mut spare = self.spares.of(cpu).lock();
            let word = self.mains.of(cpu).word.close(cpu, self.rseq);
            let len = closed(core, cpu, &spare, word);
            let main = self.mains.of(cpu).sheaf.load(Ordering::Relaxed);
            all.extend(self.objects(main, 0..len));
            all.extend(self.objects(spare.sheaf, 0..std::mem::take(&mut spare.len)));
            self.open(cpu, &mut spare, main, 0);
        }
        let mut barn = self.barn.lock();
        while let Some(sheaf) = barn.full.pop() {
            all.extend(self.objects(sheaf, 0..self.capacity));
            barn.empty.push(sheaf);
        }
        all
    }

    fn cached(&self, core: &Core<F>, stats: &mut [[u64; Stat::COUNT]]) -> u64 {
        let mut objects = 0;
        for (cpu, stats) in stats.iter_mut().enumerate() {
            // Under the lock nobody counts what this CPU's word says.
            let spare = self.spares.of(cpu).lock();
            let word = self.mains.of(cpu).word.load();
            objects += (word & LEN_MASK) + u64::from(spare.len);
            core.counters.read_with(cpu, [Stat::AllocPcs, Stat::FreePcs], spare.since_open(word), stats);
        }
        objects + self.barn.lock().full.len() as u64 * u64::from(self.capacity)
    }

    fn capacity(&self) -> u32 {
        self.capacity
    }
}

impl Sheaved {
    /// Takes an object of the main sheaf after all, of the spare, or of a full one from the barn.
    fn take_from_full<F: Freeze>(&self, core: &Core<F>) -> Option<u32> {
        let (cpu, mut spare, mut len) = self.close_local(core);
        let mut main = self.mains.of(cpu).sheaf.load(Ordering::Relaxed);
        if len == 0 {
            std::mem::swap(&mut main, &mut spare.sheaf);
            std::mem::swap(&mut len, &mut spare.len);
        }
        if len == 0 {
            let mut barn = self.barn.lock();
            if let Some(full) = barn.full.pop() {
                barn.empty.push(main);
                (main, len) = (full, self.capacity);
                core.counters.count(Stat::BarnGet);
            } else {
                core.counters.count(Stat::BarnGetFail);
            }
        }
        let object = len.checked_sub(1).map(|last| {
            len = last;
            core.counters.add_for(cpu, Stat::AllocPcs, 1);
            self.cells.of(main)[last as usize].load(Ordering::Relaxed)
        });
        self.open(cpu, &mut spare, main, len);
        object
    }

    /// Puts as many objects into this CPU's main sheaf as it has room for, and answers how many.
    fn keep<F: Freeze>(&self, core: &Core<F>, objects: &[u32]) -> usize {
        let (cpu, mut spare, len) = self.close_local(core);
        let main = self.mains.of(cpu).sheaf.load(Ordering::Relaxed);
        let kept = objects.len().min((self.capacity - len) as usize);
        for (cell, object) in self.cells.of(main)[len as usize..].iter().zip(&objects[..kept]) {
            cell.store(*object, Ordering::Relaxed);
        }
        self.open(cpu, &mut spare, main, len + kept as u32);
        kept
    }

    /// Puts an object into the main sheaf after all, into the spare, into an empty one from the
    /// barn, or into the main sheaf from which it moves the older half to `flushed`; answers how
    /// many these are.
    fn put_into_empty<F: Freeze>(
        &self,
        core: &Core<F>,
        object: u32,
        flushed: &mut [u32; MAX_SHEAF_OBJECTS],
    ) -> Result<usize> {
        let (cpu, mut spare, mut len) = self.close_local(core);
        let mut main = self.mains.of(cpu).sheaf.load(Ordering::Relaxed);
        if len > 0 && self.cells.of(main)[len as usize - 1].load(Ordering::Relaxed) == object {
            self.open(cpu, &mut spare, main, len);
            return Err(core.corrupt(object, "freed twice: it was freed last on this CPU"));
        }
        let mut flush = 0;
        if len == self.capacity && spare.len < self.capacity {
            std::mem::swap(&mut main, &mut spare.sheaf);
            std::mem::swap(&mut len, &mut spare.len);
        }
        if len == self.capacity {
            let mut barn = self.barn.lock();
            if let Some(empty) = barn.empty.pop() {
                barn.full.push(main);
                (main, len) = (empty, 0);
                core.counters.count(Stat::BarnPut);
            } else {
                core.counters.count(Stat::BarnPutFail);
                core.counters.count(Stat::SheafFlush);
                flush = self.capacity.div_ceil(2);
                flushed.iter_mut().zip(self.objects(main, 0..flush)).for_each(|(to, from)| *to = from);
                for (to, from) in self.objects(main, flush..len).enumerate() {
                    self.cells.of(main)[to].store(from, Ordering::Relaxed);
                }
                len -= flush;
            }
        }
        self.cells.of(main)[len as usize].store(object, Ordering::Relaxed);
        core.counters.add_for(cpu, Stat::FreePcs, 1);
        self.open(cpu, &mut spare, main, len + 1);
        Ok(flush as usize)
    }

    fn objects(&self, sheaf: u32, range: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
        let range = range.start as usize..range.end as usize;
        self.cells.of(sheaf)[range].iter().map(|cell| cell.load(Ordering::Relaxed))
    }

    /// Closes the word of this thread's CPU; answers which that is, what its sheaf lock protects, and
    /// the objects of its main sheaf.
    fn close_local<F: Freeze>(&self, core: &Core<F>) -> (usize, MutexGuard<'_, Spare>, u32) {
        loop {
            let cpu = cpu::current();
            let spare = self.spares.of(cpu).lock();
            if let Some(word) = self.mains.of(cpu).word.close_local(cpu, self.rseq) {
                let len = closed(core, cpu, &spare, word);
                return (cpu, spare, len);
            }
        }
    }

    /// Opens a closed word with `len` objects in the sheaf `main`.
    fn open(&self, cpu: usize, spare: &mut Spare, main: u32, len: u32) {
        let own = self.mains.of(cpu);
        own.sheaf.store(main, Ordering::Relaxed);
        own.cells.store(address_of(&self.cells, main), Ordering::Relaxed);
        let operations = own.word.load() / OPERATION;
        spare.len_at_open = len;
        spare.operations_at_open = operations;
        own.word.open(operations * OPERATION + u64::from(len));
    }

    fn pop_exclusively(&self) -> Option<u32> {
        let own = self.mains.local();
        let word = own.word.load();
        if word & LEN_MASK == 0 || word & CLOSED != 0 || !own.word.exchange(word, word | CLOSED) {
            return None;
        }
        let last = (word & LEN_MASK) - 1;
        let object = self.cells.of(own.sheaf.load(Ordering::Relaxed))[last as usize].load(Ordering::Relaxed);
        own.word.open(word.wrapping_add(OPERATION) - 1);
        Some(object)
    }

    fn push_exclusively(&self, object: u32) -> bool {
        let own = self.mains.local();
        let word = own.word.load();
        let len = (word & LEN_MASK) as usize;
        if word & CLOSED != 0 || len >= self.capacity as usize || !own.word.exchange(word, word | CLOSED) {
            return false;
        }
        let cells = self.cells.of(own.sheaf.load(Ordering::Relaxed));
        let is_new = len == 0 || cells[len - 1].load(Ordering::Relaxed) != object;
        if is_new {
            cells[len].store(object, Ordering::Relaxed);
        }
        own.word.open(if is_new { word.wrapping_add(OPERATION) + 1 } else { word });
        is_new
    }
}

/// Counts what happened since a word, now closed, was opened; answers the objects of its main sheaf.
fn closed<F: Freeze>(core: &Core<F>, cpu: usize, spare: &Spare, word: u64) -> u32 {
    let [allocs, frees] = spare.since_open(word);
    core.counters.add_for(cpu, Stat::AllocPcs, allocs);
    core.counters.add_for(cpu, Stat::FreePcs, frees);
    (word & LEN_MASK) as u32
}

/// Where a sheaf's first cell is.
fn address_of(cells: &Cells, sheaf: u32) -> u64 {
    // Of all cells: the fast path looks at the one before, too.
    let first = sheaf as usize * cells.stride + 1;
    (cells.cells.as_ptr().expose_provenance() + first * size_of::<AtomicU32>()) as u64
}

impl Spare {
    /// Allocations and frees on the fast path since the word was opened.
    fn since_open(&self, word: u64) -> [u64; 2] {
        const MASK: u64 = u64::MAX / OPERATION;
        let operations = ((word / OPERATION).wrapping_sub(self.operations_at_open) & MASK) as i64;
        let growth = (word & LEN_MASK) as i64 - i64::from(self.len_at_open);
        [operations - growth, operations + growth].map(|twice| (twice / 2).max(0) as u64)
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom")))]
mod sequences {
    use super::*;
    use crate::base::cpu::{Padded, restartable};
    use std::mem::offset_of;

    // What the sequences below take for granted.
    const _: () = assert!(size_of::<Padded<Main>>() == 128);
    const _: () = assert!(offset_of!(Main, word) == 0 && offset_of!(Main, cells) == 8);
    const _: () = assert!(offset_of!(Main, capacity) == 16);
    const _: () = assert!(CLOSED == 0x10000 && OPERATION == 0x20000 && MAX_SHEAF_OBJECTS < 0xffff);

    impl Sheaved {
        #[inline(always)]
        pub(super) fn pop_restartable(&self, rseq: Restartable) -> Option<u32> {
            let object: u64;
            // SAFETY: the CPU's number is below the array's length. While the word is open, `cells` leads to
            // its main sheaf, which has as many objects as the word says and is this CPU's alone.
            unsafe {
                restartable!(
                    "shl {cpu}, 7",
                    "add {cpu}, {mains}",
                    "mov {word}, [{cpu}]",
                    "mov {cells}, [{cpu} + 8]",
                    "mov {result:e}, {word:e}",
                    "and {result:e}, 0x1ffff",
                    // One less than there are: too much if there are none or the word is closed.
                    "sub {result:e}, 1",
                    "cmp {result:e}, 0xffff",
                    "jae 43b",
                    "mov {result:e}, [{cells} + {result} * 4]",
                    "add {word}, 0x1ffff",
                    "mov [{cpu}], {word}",
                    => cpu = out(reg) _,
                    cpus = in(reg) self.mains.len(),
                    rseq = in(reg) rseq.area_offset(),
                    mains = in(reg) self.mains.as_ptr(),
                    word = out(reg) _,
                    cells = out(reg) _,
                    result = out(reg) object,
                    options(nostack)
                );
            }
            (object != u64::MAX).then_some(object as u32)
        }

        #[inline(always)]
        pub(super) fn push_restartable(&self, rseq: Restartable, object: u32) -> bool {
            let result: u64;
            // SAFETY: as in `pop_restartable`; the sheaf has a cell before its first one.
            unsafe {
                restartable!(
                    "shl {cpu}, 7",
                    "add {cpu}, {mains}",
                    "mov {word}, [{cpu}]",
                    "mov {cells}, [{cpu} + 8]",
                    "mov {result:e}, {word:e}",
                    "and {result:e}, 0x1ffff",
                    "cmp {result:e}, [{cpu} + 16]",
                    "jae 43b",
                    "cmp {object:e}, [{cells} + {result} * 4 - 4]",
                    "je 43b",
                    "mov [{cells} + {result} * 4], {object:e}",
                    "add {word}, 0x20001",
                    "mov [{cpu}], {word}",
                    => cpu = out(reg) _,
                    cpus = in(reg) self.mains.len(),
                    rseq = in(reg) rseq.area_offset(),
                    mains = in(reg) self.mains.as_ptr(),
                    object = in(reg) object,
                    word = out(reg) _,
                    cells = out(reg) _,
                    result = out(reg) result,
                    options(nostack)
                );
            }
            result != u64::MAX
        }
    }
}
