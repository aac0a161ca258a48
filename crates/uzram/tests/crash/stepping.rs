//! Death at a chosen store: all memory that outlives the process is made read-only, so that each store to it faults;
//! the fault's handler counts it, and lets it happen alone by single-stepping. What is checked is the code that
//! ships, every instruction of it.
//!
//! A copy by `rep movs` counts as one store. Memory that an operation makes usable is not watched.

use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};

const MAX_RANGES: usize = 64;
const PAGE: usize = 4096;
/// The CPU's trap flag.
const TRAP_FLAG: i64 = 0x100;
/// The exit status of a process that died at the store that was chosen.
pub const DIED: i32 = 42;

static RANGES: [(AtomicUsize, AtomicUsize); MAX_RANGES] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MAX_RANGES];
/// Stores so far, and the one not to be carried out.
static COUNT: AtomicU64 = AtomicU64::new(0);
static STOP_AT: AtomicU64 = AtomicU64::new(0);
/// Stores that others carry out after that, until the process ends. At 0 it ends at once.
static OTHERS: AtomicU64 = AtomicU64::new(0);
/// The thread that is stepping, 0 for none; its instruction, and what is writable for it.
static STEPPER: AtomicI32 = AtomicI32::new(0);
static INSTRUCTION: AtomicUsize = AtomicUsize::new(0);
static WRITABLE: (AtomicUsize, AtomicUsize) = (AtomicUsize::new(0), AtomicUsize::new(0));

/// Has the thread that comes to the store of that number, from 1 on, stop for ever instead of carrying it out, and the
/// process exit with [`DIED`] when others have carried out `others` more.
pub fn die_at_store(number: u64, others: u64) {
    OTHERS.store(others, SeqCst);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let shared = maps.lines().filter(|line| line.contains("/memfd:uzram-") && line.contains(" rw-s "));
    let ranges: Vec<(usize, usize)> = shared
        .map(|line| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap())
        })
        .collect();
    assert!(!ranges.is_empty() && ranges.len() <= MAX_RANGES);
    STOP_AT.store(number, SeqCst);
    for (signal, handler) in [(libc::SIGSEGV, on_fault as *const ()), (libc::SIGTRAP, on_step as *const ())] {
        // SAFETY: zeros are a valid `sigaction`, and the handlers only do what is safe in one.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
        }
    }
    for (range, (start, end)) in RANGES.iter().zip(ranges) {
        range.0.store(start, SeqCst);
        range.1.store(end, SeqCst);
        protect(start, end, libc::PROT_READ);
    }
}

/// How many stores there were.
pub fn stores() -> u64 {
    COUNT.load(SeqCst)
}

fn protect(start: usize, end: usize, protection: i32) {
    // SAFETY: the range is mapped, by the engine, and stays so; more or less access changes no contents.
    let done = unsafe { libc::mprotect(start as *mut libc::c_void, end - start, protection) };
    assert_eq!(done, 0);
}

fn this_thread() -> i32 {
    // SAFETY: it has no arguments.
    unsafe { libc::gettid() }
}

extern "C" fn on_fault(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes both.
    let (address, registers) =
        unsafe { ((*info).si_addr() as usize, &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs) };
    let range = RANGES.iter().find(|(start, end)| (start.load(SeqCst)..end.load(SeqCst)).contains(&address));
    let Some((_, end)) = range else {
        // A real fault: it comes again, and ends the process.
        // SAFETY: restoring the default is safe in a handler.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        return;
    };
    let (first, last) = (address & !(PAGE - 1), end.load(SeqCst).min((address & !(PAGE - 1)) + 2 * PAGE));
    if STEPPER.load(SeqCst) == this_thread() {
        // A copy goes on in another page.
        protect(first, last, libc::PROT_READ | libc::PROT_WRITE);
        WRITABLE.0.fetch_min(first, SeqCst);
        WRITABLE.1.fetch_max(last, SeqCst);
        return;
    }
    let (count, stop_at, others) =
        (COUNT.fetch_add(1, SeqCst) + 1, STOP_AT.load(SeqCst), OTHERS.load(SeqCst));
    if count == stop_at + others {
        // SAFETY: it ends the process at once.
        unsafe { libc::_exit(DIED) };
    }
    if count == stop_at {
        loop {
            // SAFETY: it has no arguments.
            unsafe { libc::pause() };
        }
    }
    while STEPPER.compare_exchange(0, this_thread(), SeqCst, SeqCst).is_err() {
        std::hint::spin_loop();
    }
    protect(first, last, libc::PROT_READ | libc::PROT_WRITE);
    WRITABLE.0.store(first, SeqCst);
    WRITABLE.1.store(last, SeqCst);
    INSTRUCTION.store(registers[libc::REG_RIP as usize] as usize, SeqCst);
    registers[libc::REG_EFL as usize] |= TRAP_FLAG;
}

extern "C" fn on_step(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes it.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    if registers[libc::REG_RIP as usize] as usize == INSTRUCTION.load(SeqCst) {
        // A copy that is not done.
        return;
    }
    registers[libc::REG_EFL as usize] &= !TRAP_FLAG;
    protect(WRITABLE.0.load(SeqCst), WRITABLE.1.load(SeqCst), libc::PROT_READ);
    STEPPER.store(0, SeqCst);
}
