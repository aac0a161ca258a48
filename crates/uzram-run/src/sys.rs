//! System calls without libc: the library has none of its own, and the image's memory layer runs before its
//! libc is ready.

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU32, Ordering};

/// System calls by their numbers.
#[allow(missing_docs)]
pub mod nr {
    pub const WRITE: usize = 1;
    pub const OPEN: usize = 2;
    pub const CLOSE: usize = 3;
    pub const LSEEK: usize = 8;
    pub const MMAP: usize = 9;
    pub const MPROTECT: usize = 10;
    pub const MUNMAP: usize = 11;
    pub const RT_SIGACTION: usize = 13;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const RT_SIGRETURN: usize = 15;
    pub const IOCTL: usize = 16;
    pub const PREAD64: usize = 17;
    pub const WRITEV: usize = 20;
    pub const MADVISE: usize = 28;
    pub const MUNLOCK: usize = 150;
    pub const GETPID: usize = 39;
    pub const CLONE: usize = 56;
    pub const FORK: usize = 57;
    pub const VFORK: usize = 58;
    pub const PRCTL: usize = 157;
    pub const ARCH_PRCTL: usize = 158;
    pub const GETTID: usize = 186;
    pub const FUTEX: usize = 202;
    pub const EXIT_GROUP: usize = 231;
    pub const WAITID: usize = 247;
    pub const NANOSLEEP: usize = 35;
    pub const TGKILL: usize = 234;
    pub const PRLIMIT64: usize = 302;
    pub const GETRANDOM: usize = 318;
    pub const USERFAULTFD: usize = 323;
    pub const CLONE3: usize = 435;
}

/// Errors by their numbers.
#[allow(missing_docs)]
pub mod errno {
    pub const ENOENT: i32 = 2;
    pub const EAGAIN: i32 = 11;
    pub const ENOMEM: i32 = 12;
    pub const EACCES: i32 = 13;
    pub const EINVAL: i32 = 22;
    pub const ENOSYS: i32 = 38;
}

#[allow(missing_docs)]
pub mod flags {
    pub const PROT_NONE: usize = 0;
    pub const PROT_READ: usize = 1;
    pub const PROT_WRITE: usize = 2;
    pub const PROT_EXEC: usize = 4;
    pub const MAP_PRIVATE: usize = 0x2;
    pub const MAP_FIXED: usize = 0x10;
    pub const MAP_ANONYMOUS: usize = 0x20;
    pub const MAP_NORESERVE: usize = 0x4000;
    pub const MADV_DONTDUMP: usize = 16;
    pub const O_RDWR: usize = 0o2;
    pub const O_CLOEXEC: usize = 0o2000000;
    pub const CLONE_VM: usize = 0x100;
    pub const CLONE_SETTLS: usize = 0x8_0000;
    pub const CLONE_CHILD_CLEARTID: usize = 0x20_0000;
    pub const CLONE_UNTRACED: usize = 0x80_0000;
    pub const CLONE_CHILD_SETTID: usize = 0x100_0000;
    pub const SIGKILL: usize = 9;
    pub const SIGSYS: usize = 31;
    pub const SIG_BLOCK: usize = 0;
    pub const SIG_UNBLOCK: usize = 1;
    pub const SIG_SETMASK: usize = 2;
}

use flags::*;

/// Makes a system call. What the kernel returns: a value, or the negative number of an error.
///
/// # Safety
/// That of the call: its pointers are valid, and nothing that Rust knows of changes under it.
#[inline(always)]
pub unsafe fn raw<const N: usize>(number: usize, arguments: [usize; N]) -> isize {
    let at = |n: usize| if n < N { arguments[n] } else { 0 };
    let mut result = number as isize;
    // SAFETY: as the caller says; the kernel changes rax, rcx and r11 alone.
    unsafe {
        asm!("syscall", inlateout("rax") result, in("rdi") at(0), in("rsi") at(1), in("rdx") at(2),
             in("r10") at(3), in("r8") at(4), in("r9") at(5), lateout("rcx") _, lateout("r11") _,
             options(nostack));
    }
    result
}

/// As [`raw`], with the error apart.
///
/// # Safety
/// As for [`raw`].
#[inline(always)]
pub unsafe fn call<const N: usize>(number: usize, arguments: [usize; N]) -> Result<usize, i32> {
    // SAFETY: as the caller says.
    let result = unsafe { raw(number, arguments) };
    if result < 0 { Err(-result as i32) } else { Ok(result as usize) }
}

/// Starts a process that shares this memory: it calls `function(argument)` on the stack that ends at
/// `stack`, a multiple of 16, and never returns from that. Its id, or an error.
///
/// # Safety
/// Stack, thread pointer and function must be valid for as long as the process lives.
pub unsafe fn clone_with_memory(
    flags: usize,
    stack: usize,
    thread_pointer: usize,
    function: usize,
    argument: usize,
) -> Result<usize, i32> {
    let mut result = nr::CLONE as isize;
    // SAFETY: the new process leaves this function at once, by the call; the old one goes on as after any
    // system call. An ELF image begins with the stack pointer of `stack`, so it is jumped to.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "xor edx, edx",
            "mov rdi, r13",
            "test r13, r13",
            "jz 3f",
            "call r12",
            "ud2",
            "3:",
            "jmp r12",
            "2:",
            inlateout("rax") result, in("rdi") flags, in("rsi") stack, in("rdx") 0, in("r10") 0,
            in("r8") thread_pointer, in("r12") function, in("r13") argument,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    if result < 0 { Err(-result as i32) } else { Ok(result as usize) }
}

/// Ends the process.
pub fn exit_group(status: usize) -> ! {
    loop {
        // SAFETY: it takes no pointer.
        unsafe { raw(nr::EXIT_GROUP, [status]) };
    }
}

/// Waits so long.
pub fn sleep_ms(milliseconds: usize) {
    let time = [0usize, milliseconds * 1_000_000];
    // SAFETY: the time outlives the call.
    unsafe { raw(nr::NANOSLEEP, [time.as_ptr() as usize, 0]) };
}

/// Waits while `word` holds `value`. It may also return for no reason.
pub fn futex_wait(word: &AtomicU32, value: u32) {
    // SAFETY: the word outlives the call. FUTEX_WAIT, not private: the pager is another process.
    unsafe { raw(nr::FUTEX, [word.as_ptr() as usize, 0, value as usize, 0]) };
}

/// Wakes one waiter.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word outlives the call. FUTEX_WAKE.
    unsafe { raw(nr::FUTEX, [word.as_ptr() as usize, 1, 1]) };
}

/// Locks: 0 free, 1 held, 2 held and waited for. No system call if it is free.
pub fn lock(word: &AtomicU32) {
    if word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
        while word.swap(2, Ordering::Acquire) != 0 {
            futex_wait(word, 2);
        }
    }
}

/// Unlocks. No system call if nobody waits.
pub fn unlock(word: &AtomicU32) {
    if word.swap(0, Ordering::Release) == 2 {
        futex_wake(word);
    }
}

/// The kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Action {
    /// The address of the handler: 0 and 1 are the kernel's own.
    pub handler: usize,
    flags: usize,
    restorer: usize,
    mask: u64,
}

impl Action {
    /// What the kernel does by default.
    pub const DEFAULT: Action = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };

    /// Returns that of a handler of three arguments, with more flags. `mask` is blocked while it runs.
    pub fn new(handler: usize, flags: usize, mask: u64) -> Action {
        const SA_SIGINFO: usize = 0x4;
        const SA_RESTORER: usize = 0x0400_0000;
        let flags = flags | SA_SIGINFO | SA_RESTORER;
        Action { handler, flags, restorer: restore as *const () as usize, mask }
    }

    /// Returns the action of a signal.
    pub fn of(signal: usize) -> Result<Action, i32> {
        let mut action = Action::DEFAULT;
        // SAFETY: the action outlives the call.
        unsafe { call(nr::RT_SIGACTION, [signal, 0, &raw mut action as usize, 8]) }.map(|_| action)
    }

    /// Sets the action of a signal. Returns whether the kernel does.
    pub fn set(&self, signal: usize) -> bool {
        // SAFETY: the action outlives the call.
        unsafe { call(nr::RT_SIGACTION, [signal, &raw const *self as usize, 0, 8]) }.is_ok()
    }
}

/// Ends a signal handler.
#[unsafe(naked)]
extern "C" fn restore() {
    naked_asm!("mov eax, 15", "syscall");
}

/// Changes the mask of blocked signals; the old one.
pub fn signal_mask(how: usize, mask: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: both masks outlive the call.
    unsafe { raw(nr::RT_SIGPROCMASK, [how, &raw const mask as usize, &raw mut old as usize, 8]) };
    old
}

/// Opens a file. Its descriptor.
pub fn open(path: &core::ffi::CStr, flags: usize) -> Result<usize, i32> {
    // SAFETY: the path ends with a zero.
    unsafe { call(nr::OPEN, [path.as_ptr() as usize, flags]) }
}

/// Closes a descriptor of the caller's.
pub fn close(descriptor: usize) {
    // SAFETY: it takes no pointer.
    unsafe { raw(nr::CLOSE, [descriptor]) };
}

/// Says one line, `uzram: ` and two parts, by one call.
pub fn say(what: &str, how: &str) {
    let parts = ["uzram: ", what, how, "\n"].map(|part| [part.as_ptr() as usize, part.len()]);
    // SAFETY: the parts outlive the call.
    unsafe { raw(nr::WRITEV, [2, parts.as_ptr() as usize, parts.len()]) };
}

/// The address of the thread's control block, which tells threads apart without a system call.
pub fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: glibc keeps the address of the block in its first word.
    unsafe { asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, readonly, preserves_flags)) };
    pointer
}

/// The id of this process.
pub fn getpid() -> i32 {
    // SAFETY: it takes no pointer.
    unsafe { raw(nr::GETPID, []) as i32 }
}

/// Where the kernel clears the id of this thread; 0 if the kernel does not say.
pub fn tid_address() -> usize {
    const PR_GET_TID_ADDRESS: usize = 40;
    let mut word = 0usize;
    // SAFETY: the word outlives the call.
    unsafe { raw(nr::PRCTL, [PR_GET_TID_ADDRESS, &raw mut word as usize]) };
    word
}

/// Fresh memory for a range of its own: anonymous, private, in place of what is there.
///
/// # Safety
/// Nothing uses the range.
pub unsafe fn map_fixed(start: usize, bytes: usize, protection: usize) -> Result<usize, i32> {
    let reserve = if protection == PROT_NONE { MAP_NORESERVE } else { 0 };
    let kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | reserve;
    // SAFETY: as the caller says.
    unsafe { call(nr::MMAP, [start, bytes, protection, kind, usize::MAX, 0]) }
}
