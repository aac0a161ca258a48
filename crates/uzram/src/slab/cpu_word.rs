//! A CPU's own word: the place that fast paths change without a lock, and its lock for slow ones.
//!
//! Fast paths change the word of the CPU they run on, by a restartable sequence where there are
//! some ([`Restartable`]) and by a compare-exchange elsewhere; the operations they have done so far
//! stand in the upper bits, so that a word never has the same value twice soon. Neither touches a
//! closed word. Whoever holds the CPU's slow lock closes it, owns then all that it guards, and opens
//! it again.
//!
//! With restartable sequences closing is one too, on the word's own CPU: nobody else is inside
//! there. From another CPU it takes a mark and a system call: a sequence that had read the word
//! before may still commit, and so wipe out the mark, but none can after the call; so whoever
//! closes looks once more.

use crate::base::cpu::{self, PerCpu, Restartable};
use crate::base::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// See the [module's documentation](self). A closed word is what an open one was, but for the bits that
/// are not in `KEPT`, and those in `CLOSED`: the word's owner chooses what its fast paths turn away from.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct CpuWord<const KEPT: u64, const CLOSED: u64>(AtomicU64);

impl<const KEPT: u64, const CLOSED: u64> CpuWord<KEPT, CLOSED> {
    pub(super) fn new(value: u64) -> Self {
        CpuWord(AtomicU64::new(value))
    }

    /// What a word is while a slow path owns it.
    const fn closed(value: u64) -> u64 {
        value & KEPT | CLOSED
    }

    /// Whether a slow path owns the word that is this.
    #[inline]
    pub(super) const fn is_closed(value: u64) -> bool {
        value == Self::closed(value)
    }

    /// The value now; with fast paths going on it is old at once.
    #[inline]
    pub(super) fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// [`CpuWord::load`] for the holder of the slow lock, who has not closed the word: a fast path may
    /// have, for a moment.
    pub(super) fn load_open(&self) -> u64 {
        loop {
            let value = self.load();
            if !Self::is_closed(value) {
                return value;
            }
            cpu::relax();
        }
    }

    /// Changes the word if it is `old`, which is open. Only where sequences are not used.
    #[inline]
    pub(super) fn exchange(&self, old: u64, new: u64) -> bool {
        // Acquire: what the free list leads to. Release: what was linked.
        self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Closes the word if it is `old`, which is open. Only where sequences are not used.
    #[inline]
    pub(super) fn close_if(&self, old: u64) -> bool {
        self.exchange(old, Self::closed(old))
    }

    /// Closes the word, which is `cpu`'s, and returns its value. The caller holds the slow lock. From
    /// another CPU this takes a system call.
    pub(super) fn close(&self, cpu: usize, rseq: Option<Restartable>) -> u64 {
        match rseq {
            None => self.close_by_exchange(),
            Some(rseq) => self.close_here(cpu, rseq).unwrap_or_else(|| self.close_from_afar(rseq)),
        }
    }

    /// [`CpuWord::close`] for a thread that ran on `cpu` a moment ago: `None` if it no longer does,
    /// so that it may turn to the CPU it is on now.
    pub(super) fn close_local(&self, cpu: usize, rseq: Option<Restartable>) -> Option<u64> {
        match rseq {
            None => Some(self.close_by_exchange()),
            Some(rseq) if rseq.works_here() => self.close_here(cpu, rseq),
            Some(rseq) => Some(self.close_from_afar(rseq)),
        }
    }

    /// Opens the word with `value`.
    #[inline]
    pub(super) fn open(&self, value: u64) {
        debug_assert!(!Self::is_closed(value) && Self::is_closed(self.load()), "{value:#x}");
        self.0.store(value, Ordering::Release);
    }

    /// Marks the word as closed until no sequence has wiped the mark out.
    fn close_from_afar(&self, rseq: Restartable) -> u64 {
        let mut value = self.load();
        loop {
            while let Err(now) =
                self.0.compare_exchange(value, Self::closed(value), Ordering::SeqCst, Ordering::SeqCst)
            {
                value = now;
            }
            rseq.interrupt_all();
            let now = self.0.load(Ordering::SeqCst);
            if Self::is_closed(now) {
                return value;
            }
            value = now;
        }
    }

    /// Closes the word while it is open; it may be closed for a moment by a fast path.
    fn close_by_exchange(&self) -> u64 {
        loop {
            let value = self.load();
            if !Self::is_closed(value) && self.close_if(value) {
                return value;
            }
            cpu::relax();
        }
    }

    /// Closes the word if this thread runs on its CPU.
    #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
    fn close_here(&self, cpu: usize, rseq: Restartable) -> Option<u64> {
        let value: u64;
        // SAFETY: the sequence reads and writes only this word; it commits on the CPU it started
        // on, which is the word's.
        unsafe {
            cpu::restartable!(
                "cmp {cpu}, {wanted}",
                "jne 43b",
                "mov {result}, [{word}]",
                "mov {cpu}, {result}",
                "and {cpu}, {kept}",
                "or {cpu}, {closed}",
                "mov [{word}], {cpu}",
                => cpu = out(reg) _,
                rseq = in(reg) rseq.area_offset(),
                wanted = in(reg) cpu,
                word = in(reg) &raw const self.0,
                kept = in(reg) KEPT,
                closed = in(reg) CLOSED,
                result = out(reg) value,
                options(nostack)
            );
        }
        // Not here: all ones, which no open word is.
        (value != u64::MAX).then_some(value)
    }

    #[cfg(not(all(target_arch = "x86_64", target_env = "gnu", not(loom))))]
    fn close_here(&self, _cpu: usize, _rseq: Restartable) -> Option<u64> {
        None
    }
}

/// How a CPU's word was when it was opened last, so that what fast paths did since is known.
#[derive(Debug, Default)]
pub(super) struct Opening {
    /// Objects in the CPU's list.
    pub(super) len: u32,
    pub(super) operations: u32,
}

impl Opening {
    /// Allocations and frees since, of a word that has `len` objects now and has seen so many operations:
    /// how many there were, and by how much the list has grown, tell both.
    pub(super) fn since(&self, len: u32, operations: u32) -> [u64; 2] {
        let operations = i64::from(operations.wrapping_sub(self.operations));
        let growth = i64::from(len) - i64::from(self.len);
        [operations - growth, operations + growth].map(|twice| (twice / 2).max(0) as u64)
    }
}

/// Takes the slow lock of the CPU this thread runs on and closes its word, which `close` does unless the
/// thread has moved on; then that CPU's. Returns the CPU, and what the word was.
pub(super) fn lock_local<T, W>(
    locks: &PerCpu<Mutex<T>>,
    close: impl Fn(usize) -> Option<W>,
) -> (usize, MutexGuard<'_, T>, W) {
    loop {
        let cpu = cpu::current();
        let lock = locks.of(cpu).lock();
        if let Some(word) = close(cpu) {
            return (cpu, lock, word);
        }
    }
}
