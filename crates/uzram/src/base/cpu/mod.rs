//! The current CPU, and arrays with one entry per CPU.
//!
//! The kernel keeps the CPU number in each thread's area for restartable sequences: reading it is one load.
//! Without such areas (musl, glibc before 2.35, `GLIBC_TUNABLES=glibc.pthread.rseq=0`), the slower
//! `sched_getcpu` is called.
//!
//! A thread may move to another CPU at any time, so the number is a hint: a CPU's entry must be safe to use
//! from any thread.

mod restart;

use std::ops::Deref;

pub(crate) use restart::MAX_CPUS;
pub use restart::Restartable;
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
pub(crate) use restart::restartable;

pub use imp::{current, possible};

impl Restartable {
    /// Returns whether sequences work in this thread, on this CPU: glibc registered the thread, and a
    /// [`PerCpu`] has an entry for the CPU. If not, every sequence leaves without a commit.
    pub fn works_here(self) -> bool {
        // SAFETY: the area was found by [`Restartable::get`].
        let cpu = unsafe { restart::cpu_id(self.area_offset()) };
        usize::try_from(cpu).is_ok_and(|cpu| cpu < possible())
    }
}

/// Yields the CPU while another thread holds something for a few instructions, unless it was preempted.
pub fn relax() {
    #[cfg(not(loom))]
    std::thread::yield_now();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// Prefetches the cache line at `address`, which need not be valid: a hint, not an access.
#[inline]
pub fn prefetch<T>(address: *const T) {
    // SAFETY: the instruction never faults, whatever the address.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// As [`prefetch`], for writing.
#[inline]
pub fn prefetch_write<T>(address: *const T) {
    // SAFETY: the instruction never faults, whatever the address, and does nothing where the
    // processor does not have it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Reads eight bytes of unknown content, for a hint: the result may be any number. Returns `None` where
/// [`prefetch`] does nothing.
///
/// Other threads may write the bytes concurrently and non-atomically, so that any read in Rust, atomic or
/// not, would be a data race. To the compiler this is no read but an instruction that yields an unknown
/// number and changes no memory; no other thread can tell whether it was executed. To the processor it is a
/// plain load.
///
/// # Safety
/// The bytes are mapped.
#[inline]
pub unsafe fn read_for_hint(address: *const u64) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        let number: u64;
        // SAFETY: the load does not fault (the caller's promise), and changes nothing but its register.
        unsafe {
            std::arch::asm!(
                "mov {number}, [{address}]",
                number = out(reg) number,
                address = in(reg) address,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        Some(number)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = address;
        None
    }
}

/// Keeps its content on cache lines of its own: aligned to 128 bytes, as the prefetchers of x86-64
/// fetch lines in pairs.
#[repr(align(128))]
#[derive(Debug, Default)]
pub struct Padded<T>(pub T);

impl<T> Deref for Padded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// One `T` for each possible CPU, on separate cache lines.
#[derive(Debug)]
pub struct PerCpu<T> {
    entries: Box<[Padded<T>]>,
}

impl<T> PerCpu<T> {
    /// Makes each CPU's entry.
    pub fn new(entry: impl FnMut(usize) -> T) -> Self {
        PerCpu { entries: (0..possible()).map(entry).map(Padded).collect() }
    }

    /// Makes each CPU's entry. Fails with the first error of `entry`.
    pub fn try_new<E>(entry: impl FnMut(usize) -> Result<T, E>) -> Result<Self, E> {
        let entries = (0..possible()).map(entry).map(|made| made.map(Padded));
        Ok(PerCpu { entries: entries.collect::<Result<_, E>>()? })
    }

    /// Returns the entry of the CPU this thread runs on (at this moment: it may move).
    #[inline]
    pub fn local(&self) -> &T {
        &self.entries[current()]
    }

    /// Returns the entry of CPU `cpu`.
    pub fn of(&self, cpu: usize) -> &T {
        &self.entries[cpu]
    }

    /// Returns the address of CPU 0's entry; the others follow, each on cache lines of its own.
    pub fn as_ptr(&self) -> *const Padded<T> {
        self.entries.as_ptr()
    }

    /// Iterates over all entries, CPU 0 first.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|entry| &entry.0)
    }

    /// Returns the number of entries.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the bytes of the entries.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.entries)
    }
}

#[cfg(not(loom))]
mod imp {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicIsize, Ordering};

    /// The offset of glibc's rseq area, in which the kernel keeps the CPU number, from the thread pointer.
    static AREA_OFFSET: AtomicIsize = AtomicIsize::new(UNKNOWN);
    const UNKNOWN: isize = isize::MIN;
    const NONE: isize = isize::MAX;

    /// Returns the CPU this thread runs on, below [`possible`].
    #[inline]
    pub fn current() -> usize {
        let offset = AREA_OFFSET.load(Ordering::Relaxed);
        if offset != UNKNOWN && offset != NONE {
            // SAFETY: `area_offset` returned the offset.
            let cpu = unsafe { super::restart::cpu_id(offset) } as usize;
            // A thread without a registration reads -1 or -2, which fail this test.
            if cpu < possible() {
                return cpu;
            }
        }
        current_slow(offset)
    }

    #[cold]
    fn current_slow(offset: isize) -> usize {
        if offset == UNKNOWN {
            let offset = super::restart::area_offset().unwrap_or(NONE);
            AREA_OFFSET.store(offset, Ordering::Relaxed);
        }
        rustix::thread::sched_getcpu() % possible()
    }

    /// Returns the number of possible CPUs of this machine: the entries of a [`PerCpu`](super::PerCpu).
    #[inline]
    pub fn possible() -> usize {
        static POSSIBLE: OnceLock<usize> = OnceLock::new();
        *POSSIBLE.get_or_init(|| {
            let list = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
            last_cpu(&list).map_or_else(fallback_possible, |last| last + 1)
        })
    }

    /// Returns the last number of a CPU list such as `0-3` or `0,2-7`, if it is plausible.
    fn last_cpu(list: &str) -> Option<usize> {
        let last = list.trim().rsplit([',', '-']).next()?.parse().ok()?;
        (last < super::MAX_CPUS).then_some(last)
    }

    /// Returns one more than the highest CPU that this thread, the process or init may run on, for systems
    /// whose list of possible CPUs cannot be read. The highest counts, not their number: a container may have
    /// only CPU 7. A thread that runs on a higher CPU still works, but more slowly.
    fn fallback_possible() -> usize {
        let of_process = rustix::process::getpid();
        let init = rustix::process::Pid::INIT;
        let last = [None, Some(of_process), Some(init)].into_iter().filter_map(last_allowed_cpu).max();
        last.unwrap_or_else(|| rustix::thread::sched_getcpu() % super::MAX_CPUS) + 1
    }

    fn last_allowed_cpu(process: Option<rustix::process::Pid>) -> Option<usize> {
        let process = process.map_or(0, rustix::process::Pid::as_raw_pid);
        let mask = super::restart::allowed_cpus(process)?;
        let last = mask.iter().rposition(|word| *word != 0)?;
        Some(last * u64::BITS as usize + mask[last].ilog2() as usize)
    }

    #[cfg(test)]
    mod tests {
        use super::{current, fallback_possible, last_cpu};

        #[test]
        fn without_a_list_the_allowed_cpus_tell_how_many_there_are() {
            let only = crate::base::thread::allowed_cpus().pop().expect("one at least");
            rustix::thread::sched_setaffinity(None, &only).expect("bind");
            let (last, possible) = (current(), fallback_possible());
            if last == 0 {
                println!("skipped: there is one CPU only");
                return;
            }
            assert!(possible > last, "CPU {last} of {possible}");
            assert!(possible <= crate::base::cpu::MAX_CPUS);
        }

        #[test]
        fn cpu_lists_give_their_last_cpu() {
            assert_eq!(last_cpu("0\n"), Some(0));
            assert_eq!(last_cpu("0-63\n"), Some(63));
            assert_eq!(last_cpu("0,2-7\n"), Some(7));
            assert_eq!(last_cpu(""), None);
            assert_eq!(last_cpu("0-999999999"), None);
        }
    }
}

#[cfg(loom)]
mod imp {
    use super::MAX_CPUS;

    /// As without loom.
    pub fn possible() -> usize {
        MAX_CPUS
    }

    loom::lazy_static! {
        static ref NEXT: loom::sync::atomic::AtomicUsize = loom::sync::atomic::AtomicUsize::new(0);
    }
    loom::thread_local! {
        static CPU: usize = NEXT.fetch_add(1, loom::sync::atomic::Ordering::Relaxed) % MAX_CPUS;
    }

    /// As without loom.
    pub fn current() -> usize {
        CPU.with(|cpu| *cpu)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_current_cpu_is_the_one_this_thread_is_bound_to() {
        for only in crate::base::thread::allowed_cpus() {
            rustix::thread::sched_setaffinity(None, &only).expect("bind");
            assert!(only.is_set(current()) && only.is_set(current()));
        }
    }

    #[test]
    fn entries_do_not_share_cache_lines() {
        let array = PerCpu::new(|cpu| cpu as u8);
        assert_eq!(array.len(), possible());
        assert_eq!(array.bytes(), possible() * 128);
        assert!(array.iter().enumerate().all(|(cpu, entry)| cpu == *entry as usize));
        assert!(array.iter().any(|entry| std::ptr::eq(entry, array.local())));
    }
}
