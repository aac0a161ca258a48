//! A fork: libc's fork() calls the handlers here, and what lies between them is watched by syscall user
//! dispatch, which hands each system call of the thread to [`on_system_call`].
//!
//! Locks: [`Control::forking`], held from the first handler until the pager knows how the fork has ended. It
//! names its holder: a signal handler that forks amidst a fork of its thread goes on without it. It protects
//! [`DEPTH`] and what follows.

use crate::control::{Call, Control, STACK_BYTES, fork_as, state};
use crate::start;
use crate::sys::{self, Action, errno, flags::*, nr};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

/// The control page; null if this process has no pager.
pub static CONTROL: AtomicPtr<Control> = AtomicPtr::new(core::ptr::null_mut());

/// Where libc keeps the thread's `rseq`, from the thread pointer: the kernel writes there in a child at once.
pub static RSEQ_OFFSET: AtomicUsize = AtomicUsize::new(0);

/// How many threads wait for the lock.
static WAITERS: AtomicU32 = AtomicU32::new(0);
/// How many forks of the thread have been interrupted by the one that begins.
static DEPTH: AtomicU32 = AtomicU32::new(0);
/// The pager has been asked, and not been told of the end.
static IS_ASKED: AtomicBool = AtomicBool::new(false);
static STAGE: AtomicU32 = AtomicU32::new(stage::NONE);
/// What the program set for this thread, and for SIGSYS, while something else is set for the dispatch.
static PROGRAM_MASK: AtomicU64 = AtomicU64::new(0);
static mut PROGRAM_ACTION: Action = Action::DEFAULT;
/// The address to go on at, for [`in_place`].
static RESUME: AtomicUsize = AtomicUsize::new(0);

mod stage {
    /// No fork, or one that needs nothing, or the pager has not answered yet.
    pub const NONE: u32 = 0;
    /// All memory is in place until the pager hears of the end.
    pub const UNMANAGED: u32 = 1;
    /// The thread's system calls are dispatched.
    pub const DISPATCHED: u32 = 2;
}

/// The kernel's `siginfo_t` of a SIGSYS; the words of it that matter.
type Info = [u32; 8];
const CODE: usize = 2;
const SYSTEM_CALL: usize = 6;
const ARCHITECTURE: usize = 7;

/// The kernel's `ucontext_t`, up to the mask of signals; registers, and that, by their words.
type Context = [usize; 38];
const RAX: usize = 18;
const RIP: usize = 21;
const MASK: usize = 37;
/// RDI, RSI, RDX, R10, R8, R9.
const ARGUMENTS: [usize; 6] = [13, 14, 17, 7, 5, 6];

const SYS_BIT: u64 = 1 << (SIGSYS - 1);
/// What a thread's own instructions raise: SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV.
const OF_INSTRUCTIONS: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10;
/// SIGKILL and SIGSTOP.
const NEVER_BLOCKED: u64 = 1 << 8 | 1 << 18;

fn control() -> Option<&'static Control> {
    // SAFETY: null, or the page that lives as long as the process.
    unsafe { CONTROL.load(Acquire).as_ref() }
}

/// Calls the pager: it returns when that has answered, or nobody will. The page may be there though nobody
/// has called, as after mlockall(2): the pager takes it away soon, and the call is made again. No system call
/// else: the program may allow none.
fn call(control: &Control, call: Call) {
    loop {
        let number = control.asked.fetch_add(1, SeqCst).wrapping_add(1);
        // SAFETY: the page may be read; the pager makes it one of zeros.
        unsafe { (control.call(call) as *const u8).read_volatile() };
        if control.answered.load(SeqCst) == number || !is_own(control) {
            return;
        }
        sys::sleep_ms(1);
    }
}

/// Whether the pager is this process's: one that was forked without the handlers has none.
fn is_own(control: &Control) -> bool {
    control.program.load(Relaxed) == sys::getpid()
}

fn is_held(control: &Control) -> bool {
    control.forking.load(Relaxed) == sys::thread_pointer()
}

/// Returns false if the pager is another process's, as then the holder may be, too. No system call if the
/// lock is free.
fn lock(control: &Control) -> bool {
    let thread = sys::thread_pointer();
    let take = || control.forking.compare_exchange(0, thread, SeqCst, SeqCst);
    if take().is_ok() {
        return true;
    }
    WAITERS.fetch_add(1, SeqCst);
    let is_locked = loop {
        match take() {
            Ok(_) => break true,
            Err(_) if !is_own(control) => break false,
            Err(holder) => sys::futex_wait(lower_half(control), holder as u32),
        }
    };
    WAITERS.fetch_sub(1, SeqCst);
    is_locked
}

fn unlock(control: &Control) {
    control.forking.store(0, SeqCst);
    if WAITERS.load(SeqCst) > 0 {
        sys::futex_wake(lower_half(control));
    }
}

fn lower_half(control: &Control) -> &AtomicU32 {
    // SAFETY: x86_64 has the lower half first; the kernel alone uses it.
    unsafe { AtomicU32::from_ptr(control.forking.as_ptr().cast()) }
}

/// Asks the pager how to fork; `preset` says what is possible.
fn ask(control: &Control, preset: u32) -> u32 {
    if IS_ASKED.swap(true, Relaxed) {
        tell_end(control, -errno::EAGAIN);
        IS_ASKED.store(true, Relaxed);
    }
    control.fork_as.store(preset, Relaxed);
    call(control, Call::ForkAsks);
    control.fork_as.load(Acquire)
}

fn tell_end(control: &Control, child: i32) {
    control.child.store(child, Relaxed);
    call(control, Call::ForkEnds);
    IS_ASKED.store(false, Relaxed);
}

/// The last handler before the fork. No system call unless the pager has it so.
pub extern "C" fn prepare() {
    let Some(control) = control() else { return };
    if is_held(control) {
        DEPTH.fetch_add(1, Relaxed);
        // All is in place for the fork that was interrupted, and so for this one.
        if STAGE.load(Relaxed) == stage::UNMANAGED {
            return;
        }
    } else if !lock(control) {
        return;
    }
    loop {
        STAGE.store(stage::NONE, Relaxed);
        let mut answer = ask(control, fork_as::UNANSWERED);
        if answer == fork_as::MANAGED {
            if dispatch() {
                return;
            }
            // As by a seccomp list. The pager is asked again, for what needs no help.
            answer = ask(control, fork_as::UNMANAGED);
        }
        // Otherwise nobody answers: this process was forked without the handlers.
        if answer == fork_as::UNMANAGED {
            STAGE.store(stage::UNMANAGED, Relaxed);
        }
        // A fork that interrupted this one may have ended, and told the pager so.
        if IS_ASKED.load(Relaxed) {
            return;
        }
    }
}

/// The first handler in the parent, whether or not there is a child.
pub extern "C" fn parent() {
    let Some(control) = control() else { return };
    // A fork with dispatch has ended already, unless another was within it, or no system call was a fork.
    if !is_held(control) {
        return;
    }
    let is_outermost = DEPTH.load(Relaxed) == 0;
    let stage = STAGE.load(Relaxed);
    let mask = (stage == stage::DISPATCHED).then(undispatch);
    if mask.is_some() || is_outermost && stage == stage::UNMANAGED {
        STAGE.store(stage::NONE, Relaxed);
        tell_end(control, if mask.is_some() { -errno::EAGAIN } else { 0 });
    }
    if is_outermost {
        unlock(control);
    } else {
        DEPTH.fetch_sub(1, Relaxed);
    }
    if let Some(mask) = mask {
        sys::signal_mask(SIG_SETMASK, mask);
    }
}

/// The first handler in the child.
pub extern "C" fn child() {
    // A child with a pager has been made one before, in `begin_child`: it does not hold the lock.
    if control().is_some_and(is_held) {
        CONTROL.store(core::ptr::null_mut(), Release);
    }
}

/// The program ends: the pager is told.
pub fn end() {
    let Some(control) = control() else { return };
    // A thread that ends the program amidst its own fork holds the lock already.
    if is_held(control) {
        return call(control, Call::Ends);
    }
    if lock(control) {
        call(control, Call::Ends);
        unlock(control);
    }
}

/// From here on, the system calls of this thread go to [`on_system_call`]; all signals but those of its own
/// instructions wait, as their handlers may block SIGSYS, which would be the end. Whether the kernel does it.
fn dispatch() -> bool {
    let mask = sys::signal_mask(SIG_BLOCK, 0);
    PROGRAM_MASK.store(sys::signal_mask(SIG_SETMASK, !(SYS_BIT | OF_INSTRUCTIONS & !mask)), Relaxed);
    let begun = Action::of(SIGSYS).is_ok_and(|action| {
        // Before it is another one: other threads may have a SIGSYS of their own.
        // SAFETY: this thread holds the lock.
        unsafe { PROGRAM_ACTION = action };
        let is_set = Action::new(on_system_call as *const () as usize, 0, !0).set(SIGSYS);
        let (start, end): (usize, usize);
        // The library's own text: its system calls are not dispatched.
        // SAFETY: it takes two addresses, which the linker sets.
        unsafe {
            core::arch::asm!("lea {}, [rip + __ehdr_start]", "lea {}, [rip + etext]", out(reg) start,
                             out(reg) end, options(nomem, nostack, preserves_flags));
        }
        is_set && set_dispatch(1, start, end - start)
    });
    if begun {
        STAGE.store(stage::DISPATCHED, Relaxed);
    } else {
        let mask = undispatch();
        sys::signal_mask(SIG_SETMASK, mask);
    }
    begun
}

/// Ends the dispatch; the mask of signals that the program has set for this thread.
fn undispatch() -> u64 {
    set_dispatch(0, 0, 0);
    // SAFETY: this thread holds the lock.
    let action = unsafe { PROGRAM_ACTION };
    // It can fail only as it did before.
    let _ = action.set(SIGSYS);
    STAGE.store(stage::NONE, Relaxed);
    PROGRAM_MASK.load(Relaxed)
}

fn set_dispatch(on: usize, start: usize, bytes: usize) -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
    // SAFETY: it takes no pointer; calls from the text given are not dispatched.
    unsafe { sys::call(nr::PRCTL, [PR_SET_SYSCALL_USER_DISPATCH, on, start, bytes, 0]) }.is_ok()
}

/// A system call of the thread that forks: it is made for the thread, with what else its kind needs.
extern "C" fn on_system_call(signal: i32, info: *const Info, context: *mut Context) {
    const USER_DISPATCH: u32 = 2;
    const X86_64: u32 = 0xc000_003e;
    // SAFETY: the kernel gives both for this call.
    let (info, context) = unsafe { (&*info, &mut *context) };
    let control = match control() {
        Some(control) if info[CODE] == USER_DISPATCH && is_held(control) => control,
        // SIGSYS of another origin, as of a seccomp list: the program's own matter.
        _ => return pass_signal(signal, info, context),
    };
    let number = info[SYSTEM_CALL] as usize;
    if info[ARCHITECTURE] != X86_64 {
        context[RAX] = -errno::ENOSYS as usize;
        return;
    }
    let arguments = ARGUMENTS.map(|register| context[register]);
    // The flags of a call that makes a process, and where the kernel writes the id.
    let clone = match number {
        nr::FORK => Some((0, 0)),
        nr::VFORK => Some((CLONE_VM, 0)),
        nr::CLONE => Some((arguments[0], arguments[3])),
        // SAFETY: the program gives it to the kernel: `struct clone_args`, whose first words these are.
        nr::CLONE3 => Some(unsafe { (arguments[0] as *const [usize; 3]).read() })
            .map(|[flags, _, child_tid]| (flags, child_tid)),
        _ => None,
    };
    let result = match (number, clone) {
        (_, Some((flags, child_tid))) if flags & CLONE_VM == 0 => {
            let sets = flags & (CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID) != 0 && child_tid != 0;
            let result = fork(control, sets.then_some(child_tid), number, arguments);
            context[MASK] = PROGRAM_MASK.load(Relaxed) as usize;
            // Of a child this thread is the only one, and holds no lock.
            if result != 0 && DEPTH.load(Relaxed) == 0 {
                unlock(control);
            }
            result
        }
        // What returns twice, or not here, is made with the registers as they are, from text of the library.
        (nr::RT_SIGRETURN, _) | (_, Some(_)) => {
            RESUME.store(context[RIP], Relaxed);
            context[RIP] = in_place as *const () as usize;
            number as isize
        }
        (nr::RT_SIGPROCMASK, _) => change_mask(arguments),
        (nr::RT_SIGACTION, _) if arguments[0] == SIGSYS => change_action(arguments),
        // SAFETY: the program makes the call.
        _ => unsafe { sys::raw(number, arguments) },
    };
    context[RAX] = result as usize;
}

/// The fork itself: the pager rests, and a child gets a pager before anything else.
fn fork(control: &'static Control, tid: Option<usize>, number: usize, arguments: [usize; 6]) -> isize {
    call(control, Call::ForkBegins);
    touch(tid);
    // SAFETY: the program makes the call.
    let result = unsafe { sys::raw(number, arguments) };
    // In a child the kernel has ended the dispatch.
    undispatch();
    match result {
        0 => begin_child(control),
        _ => tell_end(control, result as i32),
    }
    result
}

/// Has what the child uses before it has a pager in place: its stack, and where the kernel writes.
#[inline(never)]
fn touch(tid: Option<usize>) {
    let mut room = [0u8; 12 << 10];
    for at in (0..room.len()).step_by(1 << 10) {
        // SAFETY: within the room.
        unsafe { room.as_mut_ptr().add(at).write_volatile(0) };
    }
    let thread = sys::thread_pointer();
    for address in [thread, thread.wrapping_add(RSEQ_OFFSET.load(Relaxed)), tid.unwrap_or(thread)] {
        // SAFETY: the thread's control block, and what the program has the kernel write to.
        unsafe { (address as *const u8).read_volatile() };
    }
}

/// A child begins: it starts its pager, from the image that was copied with all memory.
fn begin_child(control: &'static Control) {
    DEPTH.store(0, Relaxed);
    WAITERS.store(0, Relaxed);
    IS_ASKED.store(false, Relaxed);
    control.forking.store(0, Relaxed);
    control.state.store(state::STARTS, Relaxed);
    control.program.store(sys::getpid(), Relaxed);
    control.tid_address.store(sys::tid_address(), Relaxed);
    let (page, entry) = (&raw const *control as usize, control.child_entry.load(Relaxed));
    // SAFETY: the image has set this for it; its own process is not in this memory.
    match unsafe { start::launch(control, page + start::CHILD_STACK + STACK_BYTES, entry, page) } {
        Ok(state::RUNS) => return crate::predecessor::note(control),
        Ok(state::IN_PLACE) => return CONTROL.store(core::ptr::null_mut(), Release),
        _ => {}
    }
    sys::say("no pager for a child, whose memory is compressed", ": it ends");
    sys::exit_group(70);
}

/// rt_sigprocmask(2), of the mask that the program sees.
fn change_mask([how, set, old, bytes, ..]: [usize; 6]) -> isize {
    if bytes != size_of::<u64>() {
        return -errno::EINVAL as isize;
    }
    let before = PROGRAM_MASK.load(Relaxed);
    if set != 0 {
        // SAFETY: the program gives it to the kernel.
        let set = unsafe { (set as *const u64).read_unaligned() };
        let mask = match how {
            SIG_BLOCK => before | set,
            SIG_UNBLOCK => before & !set,
            SIG_SETMASK => set,
            _ => return -errno::EINVAL as isize,
        };
        PROGRAM_MASK.store(mask & !NEVER_BLOCKED, Relaxed);
    }
    if old != 0 {
        // SAFETY: as above.
        unsafe { (old as *mut u64).write_unaligned(before) };
    }
    0
}

/// rt_sigaction(2) for SIGSYS, of the action that the program sees.
fn change_action([_, new, old, ..]: [usize; 6]) -> isize {
    // SAFETY: this thread holds the lock; and the program gives the pointers to the kernel.
    unsafe {
        let before = PROGRAM_ACTION;
        if new != 0 {
            PROGRAM_ACTION = (new as *const Action).read_unaligned();
        }
        if old != 0 {
            (old as *mut Action).write_unaligned(before);
        }
    }
    0
}

/// Has the program's own handler handle a SIGSYS, or the kernel, which ends the program.
fn pass_signal(signal: i32, info: &Info, context: &mut Context) {
    // SAFETY: another thread may hold the lock: then it is read as it was, or is becoming by that one's
    // rt_sigaction(2), which has no order with this signal.
    let action = unsafe { PROGRAM_ACTION };
    if action.handler > 1 {
        // SAFETY: the program has set the handler, for signals of this number.
        let handler: extern "C" fn(i32, *const Info, *mut Context) =
            unsafe { core::mem::transmute(action.handler) };
        handler(signal, info, context);
    } else {
        let _ = Action::DEFAULT.set(SIGSYS);
        context[MASK] &= !SYS_BIT as usize;
        // SAFETY: no pointers. The signal waits until the handler returns.
        unsafe { sys::raw(nr::TGKILL, [sys::getpid() as usize, sys::raw(nr::GETTID, []) as usize, SIGSYS]) };
    }
}

/// The program's system call, with its registers, and back.
#[unsafe(naked)]
extern "C" fn in_place() {
    core::arch::naked_asm!("syscall", "jmp qword ptr [rip + {}]", sym RESUME);
}
