//! Restartable sequences: a few instructions that take effect on one CPU as a whole or not at all,
//! without an atomic instruction.
//!
//! The kernel promises that a thread which is preempted, moved or interrupted by a signal inside
//! such a sequence continues at the sequence's abort handler, which starts it again. So nothing
//! else runs on the CPU between the sequence's first instruction and its last, which is the store
//! that makes its effect visible (rseq(2); Desnoyers and Turner). glibc, from 2.35 on, registers
//! every thread; the layout of the area and the signature are the kernel's ABI.
//!
//! Another CPU that must know that no sequence is under way, because it is about to change what
//! they read, publishes that first and then calls [`Restartable::interrupt_all`]: sequences that
//! started before are started again.

use std::sync::OnceLock;

/// That this process can use restartable sequences.
#[derive(Clone, Copy, Debug)]
pub struct Restartable {
    area: isize,
}

impl Restartable {
    /// `None` where glibc registers no threads, or the kernel cannot interrupt sequences on other
    /// CPUs (before 5.10, or a sandbox that forbids membarrier).
    pub fn get() -> Option<Self> {
        static FOUND: OnceLock<Option<Restartable>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let area = area_offset()?;
            imp::register().then_some(Restartable { area })
        })
    }

    /// Where a thread's area lies, from its thread pointer. Never 0.
    #[inline]
    pub fn area_offset(self) -> isize {
        self.area
    }

    /// Whether sequences work in this thread, on this CPU: glibc registered it, and there is a place
    /// for the CPU in a [`PerCpu`](super::PerCpu). Where not, each leaves without a commit.
    pub fn works_here(self) -> bool {
        usize::try_from(imp::cpu_id(self.area)).is_ok_and(|cpu| cpu < super::possible())
    }

    /// Starts every sequence again that is under way in any thread of this process: whoever
    /// commits after this has read everything that the caller wrote before it. A system call, which
    /// must stay allowed once [`Restartable::get`] has answered; there is no going on without.
    pub fn interrupt_all(self) {
        imp::interrupt_all();
    }
}

/// The offset of glibc's area from the thread pointer, where it registers threads.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom")))]
pub(super) fn area_offset() -> Option<isize> {
    // SAFETY: both names are NUL-terminated, and glibc declares the variables with these types.
    unsafe {
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()).cast::<u32>();
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>();
        if size.is_null() || offset.is_null() || *size == 0 { None } else { Some(*offset) }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom"))))]
pub(super) fn area_offset() -> Option<isize> {
    None
}

#[cfg(not(feature = "loom"))]
mod imp {
    use rustix::thread::{MembarrierCommand, membarrier};

    /// The CPU number in this thread's area; negative if the thread is not registered.
    #[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
    pub(super) fn cpu_id(area: isize) -> i32 {
        let cpu: i32;
        // SAFETY: glibc has an area of that offset for each thread; `cpu_id` is at 4.
        unsafe {
            std::arch::asm!("mov {0:e}, dword ptr fs:[{1} + 4]", out(reg) cpu, in(reg) area,
                options(nostack, readonly, preserves_flags));
        }
        cpu
    }

    #[cfg(not(all(target_arch = "x86_64", target_env = "gnu")))]
    pub(super) fn cpu_id(_area: isize) -> i32 {
        -1
    }

    pub(super) fn register() -> bool {
        membarrier(MembarrierCommand::RegisterPrivateExpeditedRseq).is_ok()
    }

    pub(super) fn interrupt_all() {
        let done = membarrier(MembarrierCommand::PrivateExpeditedRseq);
        if let Err(error) = done {
            eprintln!("uzram: membarrier was allowed at first and is no longer: {error}");
            std::process::abort();
        }
    }
}

#[cfg(feature = "loom")]
mod imp {
    pub(super) fn cpu_id(_area: isize) -> i32 {
        -1
    }

    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn interrupt_all() {}
}

/// A restartable sequence of x86-64 instructions, between the two halves that surround each.
///
/// The sequence starts with the number of the CPU in `{cpu}`, and its last instruction is the store
/// that commits it. It may leave by a jump to `43b`, which puts -1 into `{result}`. `{rseq}` is
/// [`Restartable::area_offset`]. A thread on a CPU from `{cpus}` on leaves that way too, and so does
/// one that is not registered, whose CPU is -1 or -2.
#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom")))]
macro_rules! restartable {
    ($($instruction:literal,)+ => $($operands:tt)*) => {
        std::arch::asm!(
            // struct rseq_cs: version, flags, start, length up to the commit, abort handler.
            ".pushsection __rseq_cs, \"aw\"",
            ".balign 32",
            "76:",
            ".long 0, 0",
            ".quad 22f, (32f - 22f), 54f",
            ".popsection",
            // Out of the way: the abort handler, behind the signature that the kernel looks for
            // (as the operand of an undefined instruction), and the way out without a commit.
            ".pushsection __rseq_failure, \"ax\"",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "54:",
            "jmp 65f",
            "43:",
            "mov {result}, -1",
            "jmp 99f",
            ".popsection",
            "65:",
            "lea {cpu}, [rip + 76b]",
            "mov fs:[{rseq} + 8], {cpu}",
            "22:",
            "mov {cpu:e}, fs:[{rseq} + 4]",
            "cmp {cpu:e}, {cpus:e}",
            "jae 43b",
            $($instruction,)+
            "32:",
            "99:",
            $($operands)*
        )
    };
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(feature = "loom")))]
pub(crate) use restartable;
