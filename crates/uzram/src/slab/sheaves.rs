//! Sheaves: arrays of free objects, so that a CPU allocates and frees objects of any slab without touching
//! the slab.
//!
//! Each CPU has a *main* sheaf that its fast paths use, and a *spare* one, to which and from which half a
//! sheaf moves. If the spare is empty, or full, the CPU exchanges it for one of the barn, or goes to the
//! slabs. The idea is Vlastimil Babka's ("SLUB percpu sheaves", 2025), after Bonwick's and Adams's magazines.
//!
//! Locks: each CPU's sheaf lock, then the barn's, a leaf. Neither is held during calls to the slabs.
//!
//! # The memory of sheaves
//!
//! The CPU's word:
//!
//! ```text
//! 63         32 31 0
//! [ operations | top ]
//! ```
//!
//! `top` is the index of the topmost object of the CPU's main sheaf, among the cells of all sheaves. The
//! cell below a sheaf's lowest one holds `NOTHING`, the one above its highest `FULL`: a fast path that
//! finds them knows that the sheaf is empty or full. A closed word's `top` is the index of a `NOTHING`
//! directly followed by a `FULL`, so that the sheaf looks both empty and full.
//!
//! Words and cells are one table, so that a fast path needs only one address:
//!
//! ```text
//! [ NOTHING, FULL | word of CPU -2 | -1 | 0 | 1 | ... | MAX_CPUS - 1 | sheaf 0 | sheaf 1 | ... ]
//! ```
//!
//! Each part is on cache lines of its own; only used parts take memory. The word of a CPU that this machine
//! does not have stays 0, which is closed; threads that are not registered for restartable sequences are on
//! CPU -1 or -2. A word is at the end of its lines, where its lowest 12 bits are not those of the start of an
//! object, to avoid 4K aliasing.
//!
//! Without restartable sequences a fast path closes the word for the few instructions it takes.

use std::ops::Range;

use crate::base::cpu::{self, PerCpu, Restartable};
use crate::base::error::{Error, Result};
use crate::base::mem::{Gfp, Table};
use crate::base::sync::{AtomicU32, Mutex, MutexGuard, Ordering, classes};

use super::config::BARN_SHEAVES;
use super::core::Core;
use super::cpu_word::{self, Opening, lock_local};
use super::policy::{CpuLayer, Policy};
use super::stats::Stat;

pub(super) const MAX_SHEAF_OBJECTS: usize = 256;

/// Per-CPU arrays of free objects, above the node partial list.
#[derive(Debug)]
pub struct Sheaves;

impl Policy for Sheaves {
    type Layer = Sheaved;
    const NAME: &'static str = "sheaves";
}

/// Protected by the CPU's sheaf lock, as is the main sheaf while the word is closed.
struct Pair {
    spare: usize,
    spare_len: u32,
    opening: Opening,
}

/// See the [module's documentation](self).
pub struct Sheaved {
    cells: Cells,
    pairs: PerCpu<Mutex<Pair>>,
    barn: Barn,
}

const FAST_PATHS: [Stat; 2] = [Stat::AllocPcs, Stat::FreePcs];

impl CpuLayer for Sheaved {
    fn new(core: &Core) -> Result<Self> {
        let capacity = core.options.sheaf_objects;
        if !(1..=MAX_SHEAF_OBJECTS).contains(&capacity) {
            return Err(Error::invalid(format!("a sheaf has 1 to {MAX_SHEAF_OBJECTS} objects")));
        }
        let cpus = cpu::possible();
        let sheaves = 2 * cpus + BARN_SHEAVES;
        let cells = Cells::new(sheaves, capacity as u32, core.rseq)?;
        let pair = |cpu| {
            let pair = Pair { spare: cpus + cpu, spare_len: 0, opening: Opening::default() };
            Mutex::new(&classes::SLAB_SHEAF, pair)
        };
        Ok(Sheaved { pairs: PerCpu::new(pair), barn: Barn::new(2 * cpus..sheaves), cells })
    }

    fn populate(&self) -> Result<()> {
        self.cells.populate()
    }

    #[inline]
    fn pop(&self, _: &Core) -> Option<u32> {
        self.cells.pop()
    }

    #[inline]
    fn push(&self, _: &Core, object: u32, hardened: bool) -> bool {
        self.cells.push(object, hardened)
    }

    #[cold]
    fn alloc_slow(&self, core: &Core, gfp: Gfp) -> Result<u32> {
        if let Some(object) = self.cells.pop_after_all().or_else(|| self.take_from_spare(core)) {
            return Ok(object);
        }
        let mut objects = [0; MAX_SHEAF_OBJECTS];
        let wanted = self.half() as usize;
        let taken = core.alloc(&mut objects[..wanted], gfp)?;
        core.counters.count(Stat::SheafRefill);
        core.counters.add(Stat::AllocPcs, 1);
        let kept = self.keep(core, &objects[1..taken]);
        // If another thread filled the sheaf meanwhile, free the rest. This cannot fail: they were just
        // taken.
        let _ = core.free_many(&mut objects[1 + kept..taken]);
        Ok(objects[0])
    }

    #[cold]
    fn free_slow(&self, core: &Core, object: u32) -> Result<()> {
        core.check_is_object(object)?;
        let mut flushed = [0; MAX_SHEAF_OBJECTS];
        let count = self.put_into_spare(core, object, &mut flushed)?;
        core.free_many(&mut flushed[..count])
    }

    fn drain(&self, core: &Core) -> Result<()> {
        let mut all = Vec::new();
        for cpu in 0..self.pairs.len() {
            let mut pair = self.pairs.of(cpu).lock();
            let len = self.closed(core, cpu, &pair, self.cells.close(cpu));
            all.extend(self.objects(cpu, 0..len));
            all.extend(self.objects(pair.spare, 0..std::mem::take(&mut pair.spare_len)));
            self.open(cpu, &mut pair, 0);
        }
        self.barn.drain(|sheaf, len| all.extend(self.objects(sheaf, 0..len)));
        core.free_many(&mut all)
    }

    fn cached(&self, core: &Core, stats: &mut [[u64; Stat::COUNT]]) -> u64 {
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
}

impl Sheaved {
    /// Takes an object of the main sheaf. If that is empty, fills half of it from the spare first; if the
    /// spare is empty too, exchanges it for a filled sheaf of the barn.
    fn take_from_spare(&self, core: &Core) -> Option<u32> {
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
    fn keep(&self, core: &Core, objects: &[u32]) -> usize {
        let (cpu, mut pair, len) = self.close_local(core);
        let kept = objects.len().min((self.cells.capacity - len) as usize);
        for (i, object) in (len..).zip(&objects[..kept]) {
            self.cells.set(cpu, i, *object);
        }
        self.open(cpu, &mut pair, len + kept as u32);
        kept
    }

    /// Puts an object into the main sheaf. If that is full, moves its older half to the spare first. If the
    /// spare has no room, exchanges it for an empty sheaf of the barn; if there is none, moves the older half
    /// to `flushed`. Returns the number of objects in `flushed`.
    fn put_into_spare(
        &self,
        core: &Core,
        object: u32,
        flushed: &mut [u32; MAX_SHEAF_OBJECTS],
    ) -> Result<usize> {
        let (cpu, mut pair, mut len) = self.close_local(core);
        if len.checked_sub(1).is_some_and(|last| self.cells.get(cpu, last) == object) {
            self.open(cpu, &mut pair, len);
            return Err(core.corrupt(object, "freed twice: it was freed last on this CPU"));
        }
        let (capacity, half) = (self.cells.capacity, self.half());
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

    /// Returns the number of objects that move at a time. A CPU that alternates between allocating and
    /// freeing fewer objects then stays on its fast paths.
    fn half(&self) -> u32 {
        self.cells.capacity.div_ceil(2)
    }

    fn objects(&self, sheaf: usize, range: Range<u32>) -> impl Iterator<Item = u32> {
        range.map(move |i| self.cells.get(sheaf, i))
    }

    /// Closes this thread's CPU's word; returns the CPU, its sheaf lock's guard, and the main sheaf's length.
    fn close_local(&self, core: &Core) -> (usize, MutexGuard<'_, Pair>, u32) {
        let (cpu, pair, word) = lock_local(&self.pairs, |cpu| self.cells.close_local(cpu));
        let len = self.closed(core, cpu, &pair, word);
        (cpu, pair, len)
    }

    /// Counts the operations since a word, which is closed now, was opened; returns its sheaf's length.
    fn closed(&self, core: &Core, cpu: usize, pair: &Pair, word: Word) -> u32 {
        core.counters.add_all_for(cpu, FAST_PATHS, pair.opening.since(word.len, word.operations));
        word.len
    }

    fn open(&self, cpu: usize, pair: &mut Pair, len: u32) {
        pair.opening = Opening { len, operations: self.cells.open(cpu, len) };
    }
}

/// The barn: the sheaves of a cache that no CPU holds, filled and empty ones, as many as the kernel's has.
struct Barn(Mutex<Barned>);

/// Protected by the barn's lock.
struct Barned {
    /// Each with its number of objects.
    filled: Vec<(usize, u32)>,
    empty: Vec<usize>,
}

impl Barn {
    fn new(sheaves: Range<usize>) -> Self {
        let inner = Barned { filled: Vec::with_capacity(sheaves.len()), empty: sheaves.collect() };
        Barn(Mutex::new(&classes::SLAB_BARN, inner))
    }

    /// Exchanges an empty sheaf for a filled one and its number of objects, if there is one.
    fn get(&self, empty: usize) -> Option<(usize, u32)> {
        let mut inner = self.0.lock();
        let filled = inner.filled.pop()?;
        inner.empty.push(empty);
        Some(filled)
    }

    /// Exchanges a filled sheaf of `len` objects for an empty one, if there is one.
    fn put(&self, filled: usize, len: u32) -> Option<usize> {
        let mut inner = self.0.lock();
        let empty = inner.empty.pop()?;
        inner.filled.push((filled, len));
        Some(empty)
    }

    /// Empties all sheaves: calls `each` with each filled one and its number of objects.
    fn drain(&self, mut each: impl FnMut(usize, u32)) {
        let mut inner = self.0.lock();
        while let Some((sheaf, len)) = inner.filled.pop() {
            each(sheaf, len);
            inner.empty.push(sheaf);
        }
    }

    fn objects(&self) -> u64 {
        self.0.lock().filled.iter().map(|(_, len)| u64::from(*len)).sum()
    }
}

const OPERATION: u64 = 1 << 32;
type CpuWord = cpu_word::CpuWord<{ !(OPERATION - 1) }, 0>;

/// Not an object's name: the cell below a sheaf's lowest object holds it.
const NOTHING: u32 = u32::MAX;
/// Not an object's name either: the cell above a sheaf's highest cell holds it.
const FULL: u32 = u32::MAX - 1;
const LINE_CELLS: usize = if cfg!(loom) { 2 } else { 16 };
/// Cells that a word occupies: two lines, as the prefetchers of x86-64 fetch them in pairs.
const WORD_CELLS: usize = 2 * LINE_CELLS;
/// The cell at which CPU 0's word starts.
#[cfg(not(loom))]
const FIRST_WORD: usize = 4 * WORD_CELLS - size_of::<CpuWord>() / size_of::<AtomicU32>();
const FIRST_CELL: usize = (3 + cpu::MAX_CPUS) * WORD_CELLS;

/// Numbered sheaves of the same capacity. Sheaf N is the main sheaf of CPU N if that exists; while the CPU's
/// word is open, the cells belong to its fast paths. The other sheaves belong to the caller.
struct Cells {
    cells: Table<AtomicU32>,
    /// loom's words are larger than cells.
    #[cfg(loom)]
    words: PerCpu<CpuWord>,
    capacity: u32,
    stride: usize,
    rseq: Option<Restartable>,
}

#[derive(Clone, Copy, Debug)]
struct Word {
    len: u32,
    /// Operations since the cache was made, modulo 2^32.
    operations: u32,
}

impl Cells {
    /// Makes empty sheaves, and opens the words. Fails with `NoMemory` when there is no address space.
    fn new(sheaves: usize, capacity: u32, rseq: Option<Restartable>) -> Result<Self> {
        let stride = (capacity as usize + 2).next_multiple_of(LINE_CELLS);
        let cells = Cells {
            cells: Table::new(FIRST_CELL + sheaves * stride)?,
            #[cfg(loom)]
            words: PerCpu::new(|_| CpuWord::new(0)),
            capacity,
            stride,
            rseq,
        };
        // The `top` of a closed word is 0.
        cells.cells[0].store(NOTHING, Ordering::Relaxed);
        cells.cells[1].store(FULL, Ordering::Relaxed);
        for sheaf in 0..sheaves {
            let bottom = cells.bottom(sheaf);
            cells.cells[bottom].store(NOTHING, Ordering::Relaxed);
            cells.cells[bottom + capacity as usize + 1].store(FULL, Ordering::Relaxed);
        }
        for cpu in 0..cpu::possible() {
            cells.open(cpu, 0);
        }
        Ok(cells)
    }

    /// Makes the words of this machine's CPUs and all sheaves resident.
    fn populate(&self) -> Result<()> {
        // The words of CPUs -2 and -1 and the cells of closed words come before the word of CPU 0.
        self.cells.populate_range(0..(3 + cpu::possible()) * WORD_CELLS)?;
        self.cells.populate_range(FIRST_CELL..self.cells.len())
    }

    /// Takes the topmost object of this CPU's main sheaf. If it fails, the slow path calls
    /// [`Cells::pop_after_all`] first.
    #[inline]
    fn pop(&self) -> Option<u32> {
        #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
        let object = self.rseq.map_or(NOTHING, |rseq| self.pop_restartable(rseq));
        #[cfg(not(all(target_arch = "x86_64", target_env = "gnu", not(loom))))]
        let object = self.pop_exclusively();
        (object != NOTHING).then_some(object)
    }

    /// As [`Cells::pop`], if the process has no restartable sequences though the build supports them.
    fn pop_after_all(&self) -> Option<u32> {
        #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
        if self.rseq.is_none() {
            let object = self.pop_exclusively();
            return (object != NOTHING).then_some(object);
        }
        None
    }

    /// Puts an object into this CPU's main sheaf, if that has room; if `hardened`, only if the object is not
    /// the topmost one.
    #[inline]
    fn push(&self, object: u32, hardened: bool) -> bool {
        #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
        if let Some(rseq) = self.rseq {
            return match hardened {
                true => self.push_restartable::<true>(rseq, object),
                false => self.push_restartable::<false>(rseq, object),
            };
        }
        self.push_exclusively(object, hardened)
    }

    fn close(&self, cpu: usize) -> Word {
        self.decode(cpu, self.word(cpu).close(cpu, self.rseq))
    }

    fn close_local(&self, cpu: usize) -> Option<Word> {
        self.word(cpu).close_local(cpu, self.rseq).map(|word| self.decode(cpu, word))
    }

    /// Opens a closed word with `len` objects in its sheaf. Returns its number of operations.
    fn open(&self, cpu: usize, len: u32) -> u32 {
        let word = self.word(cpu);
        let operations = word.load() & !(OPERATION - 1);
        word.open(operations + self.bottom(cpu) as u64 + u64::from(len));
        (operations / OPERATION) as u32
    }

    fn peek(&self, cpu: usize) -> Word {
        self.decode(cpu, self.word(cpu).load_open())
    }

    fn get(&self, sheaf: usize, i: u32) -> u32 {
        self.of(sheaf, i).load(Ordering::Relaxed)
    }

    fn set(&self, sheaf: usize, i: u32, object: u32) {
        self.of(sheaf, i).store(object, Ordering::Relaxed);
    }

    fn of(&self, sheaf: usize, i: u32) -> &AtomicU32 {
        debug_assert!(i < self.capacity);
        &self.cells[self.bottom(sheaf) + 1 + i as usize]
    }

    /// Returns the index below a sheaf's lowest object: the `top` of an empty sheaf.
    fn bottom(&self, sheaf: usize) -> usize {
        FIRST_CELL + sheaf * self.stride
    }

    fn decode(&self, cpu: usize, word: u64) -> Word {
        Word { len: top_of(word) as u32 - self.bottom(cpu) as u32, operations: (word / OPERATION) as u32 }
    }

    #[cfg(not(loom))]
    fn word(&self, cpu: usize) -> &CpuWord {
        let cell: *const AtomicU32 = &self.cells[FIRST_WORD + cpu * WORD_CELLS];
        // SAFETY: the table is page-aligned, so the word is 8-aligned; nothing else uses this cell or the
        // next, and zeros are a valid word.
        unsafe { &*cell.cast() }
    }

    #[cfg(loom)]
    fn word(&self, cpu: usize) -> &CpuWord {
        self.words.of(cpu)
    }

    #[cfg_attr(all(target_arch = "x86_64", target_env = "gnu"), cold)]
    fn pop_exclusively(&self) -> u32 {
        let own = self.word(cpu::current());
        let word = own.load();
        if CpuWord::is_closed(word) || !own.close_if(word) {
            return NOTHING;
        }
        let object = self.cells[top_of(word)].load(Ordering::Relaxed);
        let taken = object != NOTHING;
        own.open(if taken { word.wrapping_add(OPERATION) - 1 } else { word });
        object
    }

    #[cfg_attr(all(target_arch = "x86_64", target_env = "gnu"), cold)]
    fn push_exclusively(&self, object: u32, hardened: bool) -> bool {
        let own = self.word(cpu::current());
        let word = own.load();
        if CpuWord::is_closed(word) || !own.close_if(word) {
            return false;
        }
        let top = top_of(word);
        let above = &self.cells[top + 1];
        let is_highest = || self.cells[top].load(Ordering::Relaxed) == object;
        let fits = above.load(Ordering::Relaxed) != FULL && !(hardened && is_highest());
        if fits {
            above.store(object, Ordering::Relaxed);
        }
        own.open(if fits { word.wrapping_add(OPERATION) + 1 } else { word });
        fits
    }
}

#[inline]
fn top_of(word: u64) -> usize {
    word as u32 as usize
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
mod sequences {
    use super::*;
    use crate::base::cpu::restartable;

    // The sequences below hard-code these values.
    const _: () =
        assert!(WORD_CELLS * size_of::<AtomicU32>() == 1 << 7 && NOTHING as i32 == -1 && FULL as i32 == -2);

    /// The start of each sequence: loads this CPU's word into `{word}`, and its `top` into `{result}`.
    macro_rules! own_word {
        () => {
            "shl {cpu}, 7
            add {cpu}, {cells}
            mov {word}, [{cpu} + {first_word}]
            mov {result:e}, {word:e}"
        };
    }

    impl Cells {
        #[inline(always)]
        pub(super) fn pop_restartable(&self, rseq: Restartable) -> u32 {
            let object: u64;
            // SAFETY: there is a word for each possible CPU number, and `top` is below the number of cells.
            // While the word is open, the cell at `top` belongs to this CPU alone, or is the one below its
            // lowest.
            unsafe {
                restartable!(
                    own_word!(),
                    "mov {result:e}, [{cells} + {result} * 4]",
                    "cmp {result:e}, -1",
                    "je 43b",
                    "add {word}, {change}",
                    "mov [{cpu} + {first_word}], {word}",
                    => cpu = out(reg) _,
                    first_word = const FIRST_WORD * size_of::<AtomicU32>(),
                    rseq = in(reg) rseq.area_offset(),
                    cells = in(reg) self.cells.as_ptr(),
                    change = in(reg) OPERATION - 1,
                    word = out(reg) _,
                    result = out(reg) object,
                    options(nostack)
                );
            }
            object as u32
        }

        #[inline(always)]
        pub(super) fn push_restartable<const HARDENED: bool>(&self, rseq: Restartable, object: u32) -> bool {
            // SAFETY: as in `pop_restartable`; the cell above `top` is another one of this CPU, or the one
            // above its highest, which is not written.
            unsafe {
                restartable!(or "{full}":
                    own_word!(),
                    "cmp dword ptr [{cells} + {result} * 4 + 4], -2",
                    "je 43b",
                    ".if {hardened}",
                    "cmp {object:e}, [{cells} + {result} * 4]",
                    "je 43b",
                    ".endif",
                    "mov [{cells} + {result} * 4 + 4], {object:e}",
                    "add {word}, {change}",
                    "mov [{cpu} + {first_word}], {word}",
                    => cpu = out(reg) _,
                    first_word = const FIRST_WORD * size_of::<AtomicU32>(),
                    rseq = in(reg) rseq.area_offset(),
                    cells = in(reg) self.cells.as_ptr(),
                    object = in(reg) object,
                    hardened = const HARDENED as u8,
                    change = in(reg) OPERATION + 1,
                    word = out(reg) _,
                    result = out(reg) _,
                    full = label { return false },
                    options(nostack)
                );
            }
            true
        }
    }
}
