//! Restartable sequences: a few instructions that take effect on one CPU as a whole or not at all,
//! without an atomic instruction.
//!
//! The kernel guarantees that a thread which is preempted, migrated or interrupted by a signal inside
//! such a sequence continues at the sequence's abort handler, which restarts it. So nothing else runs
//! on the CPU between the sequence's first instruction and its last, which is the store that commits
//! it (rseq(2); Desnoyers and Turner). glibc, from 2.35 on, registers every thread; the layout of the
//! area and the signature are the kernel's ABI.
//!
//! A thread that is about to change what sequences read publishes that first and then calls
//! [`Restartable::interrupt_all`]: all sequences under way are restarted, and read what it published.

use std::num::NonZeroIsize;
use std::sync::OnceLock;

use rustix::thread::{MembarrierCommand, membarrier};

/// The most CPUs of any machine: the kernel's limit, NR_CPUS. In models two are enough for every
/// interleaving of two and three threads; up to two threads each have a CPU of their own.
pub(crate) const MAX_CPUS: usize = if cfg!(loom) { 2 } else { 8192 };

/// Proof that this process can use restartable sequences.
#[derive(Clone, Copy, Debug)]
pub struct Restartable {
    area: NonZeroIsize,
}

impl Restartable {
    /// Returns `None` where glibc registers no threads, or the kernel cannot interrupt sequences on
    /// other CPUs (before 5.10, or in a sandbox that forbids membarrier), or CPU numbers may exceed
    /// 8191, the highest of Linux.
    pub fn get() -> Option<Self> {
        static FOUND: OnceLock<Option<Restartable>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let area = area_offset().and_then(NonZeroIsize::new)?;
            // By system calls: in a container, files in /sys may be faked.
            allowed_cpus(0)?;
            membarrier(MembarrierCommand::RegisterPrivateExpeditedRseq).ok()?;
            Some(Restartable { area })
        })
    }

    /// Returns the offset of a thread's area from its thread pointer. Never 0.
    #[inline]
    pub fn area_offset(self) -> isize {
        self.area.get()
    }

    /// Restarts every sequence that is under way in any thread of this process: a sequence that
    /// commits after this has read everything that the caller wrote before. Aborts if the system call,
    /// which must stay allowed once [`Restartable::get`] has returned, fails.
    pub fn interrupt_all(self) {
        if let Err(error) = membarrier(MembarrierCommand::PrivateExpeditedRseq) {
            eprintln!("uzram: membarrier was allowed at first and now fails: {error}");
            std::process::abort();
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
pub(super) fn area_offset() -> Option<isize> {
    let (size, offset) = glibc_variables();
    // SAFETY: glibc declares the variables with these types, and changes neither after startup.
    unsafe { if size.is_null() || offset.is_null() || *size == 0 { None } else { Some(*offset) } }
}

/// Returns the addresses of glibc's `__rseq_size` and `__rseq_offset`; null before 2.35.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(target_feature = "crt-static"), not(loom)))]
fn glibc_variables() -> (*const u32, *const isize) {
    // SAFETY: both names are NUL-terminated.
    unsafe {
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr());
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr());
        (size.cast(), offset.cast())
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", target_feature = "crt-static", not(loom)))]
std::arch::global_asm!(".weak __rseq_size", ".weak __rseq_offset");

/// The same where glibc is linked statically, so that `dlsym` finds no symbol: by weak references.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", target_feature = "crt-static", not(loom)))]
fn glibc_variables() -> (*const u32, *const isize) {
    let (size, offset);
    // SAFETY: this reads two entries of the global offset table; the entry of an undefined weak symbol is
    // null.
    unsafe {
        std::arch::asm!(
            "mov {0}, qword ptr [rip + __rseq_size@GOTPCREL]",
            "mov {1}, qword ptr [rip + __rseq_offset@GOTPCREL]",
            out(reg) size, out(reg) offset, options(nostack, readonly, preserves_flags, pure));
    }
    (size, offset)
}

#[cfg(not(all(target_arch = "x86_64", target_env = "gnu", not(loom))))]
pub(super) fn area_offset() -> Option<isize> {
    None
}

/// Returns the number of the CPU this thread runs on; negative if the thread is not registered.
///
/// # Safety
/// [`area_offset`] returned `area`.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
#[inline]
pub(super) unsafe fn cpu_id(area: isize) -> i32 {
    let cpu: i32;
    // SAFETY: each thread has an area at this offset from its fs base (the caller's promise), with `cpu_id`
    // at 4, which the kernel changes only while the thread does not run.
    unsafe {
        std::arch::asm!("mov {0:e}, dword ptr fs:[{1} + 4]", out(reg) cpu, in(reg) area,
            options(nostack, readonly, preserves_flags));
    }
    cpu
}

#[cfg(not(all(target_arch = "x86_64", target_env = "gnu", not(loom))))]
#[allow(clippy::missing_safety_doc)]
pub(super) unsafe fn cpu_id(_area: isize) -> i32 {
    -1
}

/// Returns the CPUs that a process (0: this thread) may run on, a bit each. `None` if CPU numbers may reach
/// `MAX_CPUS`: the kernel refuses a set that is too small for all its CPUs.
pub(super) fn allowed_cpus(process: i32) -> Option<[u64; MAX_CPUS / u64::BITS as usize]> {
    let mut set = [0; MAX_CPUS / u64::BITS as usize];
    // SAFETY: the kernel writes a set of CPUs of at most this size.
    let written =
        unsafe { libc::syscall(libc::SYS_sched_getaffinity, process, size_of_val(&set), set.as_mut_ptr()) };
    (written > 0).then_some(set)
}

/// Makes a restartable sequence of x86-64 instructions: adds the prologue and the abort handler.
///
/// The sequence starts with the number of the CPU in `{cpu}`, below [`MAX_CPUS`]; it is
/// -1 or -2 in a thread that is not registered, and then the sequence must leave. Its last instruction is
/// the store that commits it. It leaves by a jump to `43b`, which puts -1 into `{result}` or, with
/// `restartable!(or "{label}": …)`, jumps to that label. `{rseq}` is [`Restartable::area_offset`].
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
macro_rules! restartable {
    (or $label:literal: $($sequence:tt)*) => {
        $crate::base::cpu::restartable!(@leaving concat!("jmp ", $label), $($sequence)*)
    };
    (@leaving $leave:expr, $($instructions:expr,)+ => $($operands:tt)*) => {
        std::arch::asm!(
            // struct rseq_cs: version, flags, start, length up to the commit, abort handler.
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "76:",
            ".long 0, 0",
            ".quad 22f, (32f - 22f), 54f",
            ".popsection",
            // Out of line: the abort handler, after the signature that the kernel checks for (as the
            // operand of an undefined instruction), and the exit without a commit.
            ".pushsection __rseq_failure, \"ax\"",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "54:",
            "jmp 65f",
            "43:",
            $leave,
            ".popsection",
            "65:",
            "lea {cpu}, [rip + 76b]",
            "mov fs:[{rseq} + 8], {cpu}",
            "22:",
            "movsxd {cpu}, dword ptr fs:[{rseq} + 4]",
            $($instructions,)+
            "32:",
            "99:",
            $($operands)*
        )
    };
    ($($sequence:tt)*) => {
        $crate::base::cpu::restartable!(@leaving "mov {result}, -1\njmp 99f", $($sequence)*)
    };
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
pub(crate) use restartable;
