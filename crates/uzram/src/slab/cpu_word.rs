//! A CPU's word: fast paths change it without a lock, slow paths close it under the CPU's slow lock.
//!
//! Fast paths change the word of their CPU by a restartable sequence, or without those ([`Restartable`]) by a
//! compare-exchange, and leave a closed word alone. Its upper bits count operations, so that it does not soon
//! have the same value again. The holder of the slow lock closes the word, then owns all that it guards, and
//! opens it again.
//!
//! With restartable sequences, closing the word on its own CPU is a sequence too. From another CPU it takes a
//! mark and a system call, before which a sequence that is under way may still overwrite the mark.

use crate::base::cpu::{self, PerCpu, Restartable};
use crate::base::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// See the [module's documentation](self). Closing a word clears the bits that are not in `KEPT` and sets
/// those in `CLOSED`: each user chooses a value at which its fast paths give up.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct CpuWord<const KEPT: u64, const CLOSED: u64>(AtomicU64);

impl<const KEPT: u64, const CLOSED: u64> CpuWord<KEPT, CLOSED> {
    #[cfg(any(loom, feature = "designs"))]
    pub(super) fn new(value: u64) -> Self {
        CpuWord(AtomicU64::new(value))
    }

    const fn closed(value: u64) -> u64 {
        value & KEPT | CLOSED
    }

    pub(super) const fn is_closed(value: u64) -> bool {
        value == Self::closed(value)
    }

    pub(super) fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// As [`CpuWord::load`], but waits until the word is open: a fast path may close it for a moment. The
    /// caller holds the slow lock and has not closed the word.
    pub(super) fn load_open(&self) -> u64 {
        loop {
            let value = self.load();
            if !Self::is_closed(value) {
                return value;
            }
            cpu::relax();
        }
    }

    /// Changes the word if it is `old`, which is open. Only if sequences are not used.
    #[inline]
    pub(super) fn exchange(&self, old: u64, new: u64) -> bool {
        // Acquire: the links of the free list. Release: the links just written.
        self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Closes the word if it is `old`, which is open. Only if sequences are not used.
    pub(super) fn close_if(&self, old: u64) -> bool {
        self.exchange(old, Self::closed(old))
    }

    /// Closes the word of `cpu`; returns its value. The caller holds the slow lock. From another CPU this
    /// takes a system call.
    pub(super) fn close(&self, cpu: usize, rseq: Option<Restartable>) -> u64 {
        match rseq {
            None => self.close_by_exchange(),
            Some(rseq) => self.close_here(cpu, rseq).unwrap_or_else(|| self.close_from_afar(rseq)),
        }
    }

    /// As [`CpuWord::close`], for a thread that ran on `cpu` a moment ago. Returns `None` if it no longer
    /// does, so that it can use the CPU it is on now.
    pub(super) fn close_local(&self, cpu: usize, rseq: Option<Restartable>) -> Option<u64> {
        match rseq {
            None => Some(self.close_by_exchange()),
            Some(rseq) if rseq.works_here() => self.close_here(cpu, rseq),
            Some(rseq) => Some(self.close_from_afar(rseq)),
        }
    }

    #[inline]
    pub(super) fn open(&self, value: u64) {
        debug_assert!(!Self::is_closed(value) && Self::is_closed(self.load()), "{value:#x}");
        self.0.store(value, Ordering::Release);
    }

    /// Marks the word as closed until no sequence has overwritten the mark.
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

    /// Closes the word; waits while a fast path has it closed.
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
        // on, which is the word's CPU.
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
        // All ones if the sequence left; no open word has that value.
        (value != u64::MAX).then_some(value)
    }

    #[cfg(not(all(target_arch = "x86_64", target_env = "gnu", not(loom))))]
    fn close_here(&self, _cpu: usize, _rseq: Restartable) -> Option<u64> {
        None
    }
}

/// The state of a CPU's word when it was last opened, to compute what fast paths did since.
#[derive(Debug, Default)]
pub(super) struct Opening {
    pub(super) len: u32,
    pub(super) operations: u32,
}

impl Opening {
    /// Returns the allocations and frees since then, for a word that has `len` objects and `operations`
    /// operations now. Their sum is the number of operations, their difference the growth of the list.
    pub(super) fn since(&self, len: u32, operations: u32) -> [u64; 2] {
        let operations = i64::from(operations.wrapping_sub(self.operations));
        let growth = i64::from(len) - i64::from(self.len);
        [operations - growth, operations + growth].map(|twice| (twice / 2).max(0) as u64)
    }
}

/// Takes the slow lock of the CPU this thread runs on and closes its word by `close`; if the thread has moved
/// to another CPU, tries again there. Returns the CPU, the lock's guard, and the word's value.
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
