//! Marks threads while they are in the library: what the C library allocates for them meanwhile is the
//! library's own.
//!
//! The mark is read by each malloc(3), so it costs one instruction: it lies at a fixed place behind the
//! thread's pointer (the initial-exec model of thread-local storage), where a library that is loaded with the
//! program has room.

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .tbss, \"awT\", @nobits",
    ".p2align 2",
    ".globl uzram_run_inside",
    ".hidden uzram_run_inside",
    ".type uzram_run_inside, @object",
    ".size uzram_run_inside, 4",
    "uzram_run_inside:",
    ".zero 4",
    ".popsection",
);

/// Returns how often the thread has entered the library.
#[inline(always)]
pub fn depth() -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        let depth: u32;
        // SAFETY: the symbol is the one above, which each thread has; only its own thread changes it.
        unsafe {
            core::arch::asm!(
                "mov {at}, qword ptr [rip + uzram_run_inside@GOTTPOFF]",
                "mov {depth:e}, dword ptr fs:[{at}]",
                at = out(reg) _,
                depth = out(reg) depth,
                options(nostack, readonly, preserves_flags),
            );
        }
        depth
    }
    #[cfg(not(target_arch = "x86_64"))]
    DEPTH.get()
}

#[inline(always)]
fn add(more: i32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!(
            "mov {at}, qword ptr [rip + uzram_run_inside@GOTTPOFF]",
            "add dword ptr fs:[{at}], {more:e}",
            at = out(reg) _,
            more = in(reg) more,
            options(nostack),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    DEPTH.set(DEPTH.get().wrapping_add_signed(more));
}

#[cfg(not(target_arch = "x86_64"))]
std::thread_local! {
    static DEPTH: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// Marks the thread until it is dropped.
pub struct Inside(());

impl Inside {
    #[inline]
    pub fn enter() -> Inside {
        add(1);
        Inside(())
    }
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        add(-1);
    }
}
