//! The handler of SIGBUS, one for all pagers of a process.
//!
//! A touch of a trapped page is a SIGBUS in the thread that touched it. The handler finds the pager by the
//! address, has it bring the page, and returns: the thread touches the page again. Any other SIGBUS goes to
//! whoever had the signal before.
//!
//! The thread may have been interrupted anywhere in the program, also in its allocator: the handler allocates
//! nothing, and takes no lock but the engine's and the memory map's, which no thread holds when it touches a
//! program's memory. Others it only tries. It works on one of a fixed number of stacks, as alternate signal
//! stacks are small.

use std::mem::MaybeUninit;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use rustix::mm::{MprotectFlags, mprotect};
use uzram::sync::Arc;
use uzram::{Error, ErrorKind, Result};

use crate::core::{By, Core, Fault, take_one};
use crate::uffd;

/// The most pagers of a process that trap touches in this way.
const MOST_PAGERS: usize = 64;
/// Stacks: threads that are in the handler at once. More wait.
const COUNT: usize = 64;
const STACK_BYTES: usize = 128 << 10;
/// At the low end of a stack, without access.
const STACK_GUARD_BYTES: usize = 4096;

/// One registered pager.
struct Entry {
    /// Null if the entry is free, or about to be.
    core: AtomicPtr<Core>,
    /// Threads that use `core`, in the handler.
    users: AtomicU32,
    /// The process that registered it: a child has none of its memory.
    process: AtomicU32,
}

static ENTRIES: [Entry; MOST_PAGERS] = [const {
    Entry { core: AtomicPtr::new(null_mut()), users: AtomicU32::new(0), process: AtomicU32::new(0) }
}; MOST_PAGERS];

/// What had the signal before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A registration, which ends when this is dropped.
pub(crate) struct Registered(&'static Entry);

/// Has the handler bring a pager's pages. Errors: `NoMemory`; `Busy`: there are too many pagers.
pub(crate) fn register(core: Arc<Core>) -> Result<Registered> {
    install()?;
    let core = Arc::into_raw(core).cast_mut();
    let take = |entry: &&Entry| {
        entry.core.compare_exchange(null_mut(), core, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    if let Some(entry) = ENTRIES.iter().find(take) {
        entry.process.store(std::process::id(), Ordering::SeqCst);
        return Ok(Registered(entry));
    }
    // SAFETY: made above, and not published.
    drop(unsafe { Arc::from_raw(core) });
    let what = format!("a process has at most {MOST_PAGERS} pagers whose touches are signals");
    Err(Error::new(ErrorKind::Busy, what).with_setting("trap"))
}

impl Drop for Registered {
    fn drop(&mut self) {
        let Registered(entry) = self;
        entry.process.store(0, Ordering::SeqCst);
        let core = entry.core.swap(null_mut(), Ordering::SeqCst);
        // A thread counts itself as a user before it looks for the core.
        while entry.users.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        // SAFETY: made by `register`, and no thread uses it or can find it.
        drop(unsafe { Arc::from_raw(core) });
    }
}

impl Entry {
    /// Has the core do something, if there is one. Returns what it returns.
    fn with(&self, use_it: impl FnOnce(&Core) -> bool) -> bool {
        self.users.fetch_add(1, Ordering::SeqCst);
        // SAFETY: while a user is counted, a core that is not null is there.
        let result = unsafe { self.core.load(Ordering::SeqCst).as_ref() }.is_some_and(use_it);
        self.users.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

/// Installs the handler, once.
fn install() -> Result<()> {
    static INSTALLED: OnceLock<Result<()>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            let stacks = map_stacks()?;
            STACKS.get_or_init(|| stacks);
            // SAFETY: all fields are integers, or an optional function.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = on_signal as extern "C" fn(_, _, _) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            // SAFETY: the set is the action's.
            unsafe { libc::sigfillset(&raw mut action.sa_mask) };
            let mut before = MaybeUninit::uninit();
            // SAFETY: both actions are valid, and the handler is safe to run anywhere in the program.
            let installed = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, before.as_mut_ptr()) };
            if installed != 0 {
                let error = std::io::Error::last_os_error();
                return Err(Error::new(ErrorKind::Unsupported, format!("sigaction: {error}")));
            }
            // SAFETY: the call succeeded.
            let _ = BEFORE.set(unsafe { before.assume_init() });
            Ok(())
        })
        .clone()
}

extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the location is this thread's, and the kernel passes the signal's information.
    let (errno, code, address) =
        unsafe { (libc::__errno_location(), (*info).si_code, (*info).si_addr().addr()) };
    // SAFETY: as above.
    let kept = unsafe { *errno };
    let bring = |core: &Core| {
        if core.part_at(address).is_none() {
            return false;
        }
        let Some(stacks) = STACKS.get() else { unreachable!("mapped before the handler was installed") };
        let stack = take_one(stacks);
        let mut touch = Touch { core, address, writes: is_write(context), is_done: false };
        // SAFETY: the stack is this thread's until it is given back.
        unsafe { call_on(*stack, &raw mut touch) };
        touch.is_done
    };
    // A page whose contents are lost has another code, and a signal that was sent has no address.
    let process = std::process::id();
    let is_own = |entry: &&Entry| entry.process.load(Ordering::SeqCst) == process;
    if code != libc::BUS_ADRERR || !ENTRIES.iter().filter(is_own).any(|entry| entry.with(bring)) {
        pass_on(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = kept };
}

struct Touch<'a> {
    core: &'a Core,
    address: usize,
    writes: bool,
    is_done: bool,
}

/// Brings a page, on a stack of its own.
extern "C" fn bring(touch: *mut Touch<'_>) {
    // SAFETY: the caller's, which waits.
    let touch = unsafe { &mut *touch };
    let fault = touch.core.fault(touch.address, touch.writes, By::Toucher);
    touch.is_done = matches!(fault, Fault::Done | Fault::Changing);
}

/// Returns whether the touch was a write; true if that is not known.
fn is_write(context: *mut libc::c_void) -> bool {
    // The error code of a page fault: bit 1 is set for a write (Intel SDM, volume 3, 4.7).
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: the kernel passes a context of this type.
        let context = unsafe { &*context.cast::<libc::ucontext_t>() };
        context.uc_mcontext.gregs[libc::REG_ERR as usize] & 2 != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        true
    }
}

/// Has whoever had the signal before handle it.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return end_by(signal) };
    match before.sa_sigaction {
        libc::SIG_DFL => end_by(signal),
        // SAFETY: the kernel's information. It ignores a signal that was sent, and ends a process that
        // touches.
        libc::SIG_IGN if unsafe { (*info).si_code } <= 0 => {}
        libc::SIG_IGN => end_by(signal),
        handler => {
            // SAFETY: the kernel passes a context of this type. It has the thread's mask of before.
            let mut mask = unsafe { (*context.cast::<libc::ucontext_t>()).uc_sigmask };
            let mut ours = MaybeUninit::uninit();
            // SAFETY: the sets are valid, and the handler is what the program installed.
            unsafe {
                for other in 1..=libc::SIGRTMAX() {
                    if libc::sigismember(&raw const before.sa_mask, other) == 1 {
                        libc::sigaddset(&raw mut mask, other);
                    }
                }
                if before.sa_flags & libc::SA_NODEFER == 0 {
                    libc::sigaddset(&raw mut mask, signal);
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, ours.as_mut_ptr());
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(handler);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                    handler(signal);
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, ours.as_ptr(), null_mut());
            }
        }
    }
}

/// Restores the default: the thread makes the same touch again, and the process ends as without a pager.
fn end_by(signal: libc::c_int) {
    // SAFETY: resets the signal, and sends it again if it was sent: it arrives when the handler returns.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// The upper ends of stacks, aligned to pages. Mapped before the handler is installed, they stay for as long
/// as the process lives, as the handler does.
static STACKS: OnceLock<Box<[Mutex<usize>]>> = OnceLock::new();

fn map_stacks() -> Result<Box<[Mutex<usize>]>> {
    let start = uffd::reserve(COUNT * STACK_BYTES)?;
    let access = MprotectFlags::READ | MprotectFlags::WRITE;
    let stack = |nth| {
        let (low, end) = (start + nth * STACK_BYTES + STACK_GUARD_BYTES, start + (nth + 1) * STACK_BYTES);
        // SAFETY: inside the new mapping, which nobody uses yet.
        unsafe { mprotect(with_exposed_provenance_mut(low), end - low, access) }.map_err(uffd::no_memory)?;
        Ok(Mutex::new(end))
    };
    (0..COUNT).map(stack).collect()
}

/// Calls [`bring`] on another stack; on CPUs without code for that here, on the signal's.
///
/// # Safety
/// `top` is the upper end of a stack that nobody uses, aligned to 16 bytes.
unsafe fn call_on(top: usize, touch: *mut Touch<'_>) {
    // SAFETY: the stack pointer is kept in a register that calls preserve; others are clobbered as said.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {bring}",
            "mov rsp, r12",
            top = in(reg) top,
            out("r12") _,
            bring = sym bring,
            inout("rdi") touch => _,
            clobber_abi("C"),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = top;
        bring(touch);
    }
}
