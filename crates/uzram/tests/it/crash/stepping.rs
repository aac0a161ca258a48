//! The stores of a process, one after another: all memory that outlives the process is made read-only, so
//! that each store to it faults; the fault's handler counts it, and lets it happen alone by single-stepping.
//! What is checked is the code that ships, every instruction of it. Before a store that was chosen the
//! process stops, so that its parent can look at what a death there would leave, and goes on; or it dies.
//!
//! A copy by `rep movsb` counts as a store for each half of what is left, down to [`COPIED_AT_ONCE`] bytes;
//! the handler makes it, as the CPU's trap flag would stop it at each byte. One by other string instructions
//! is one store. Memory that an operation makes usable is not watched.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};

use super::memory;

const MAX_RANGES: usize = 64;
const PAGE: usize = 4096;
const TRAP_FLAG: i64 = 0x100;
const DIRECTION_FLAG: i64 = 0x400;
const REP_MOVSB: [u8; 2] = [0xf3, 0xa4];
/// Bytes of which a copy counts as one store.
const COPIED_AT_ONCE: usize = 1024;
/// The exit status of a process that died at the store that was chosen.
pub const DIED: i32 = 42;

static RANGES: [(AtomicUsize, AtomicUsize); MAX_RANGES] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; MAX_RANGES];
/// Before which stores the process stops; it is not set if before none.
static STOPS: OnceLock<Box<Stops>> = OnceLock::new();
/// Stores so far, and the one not to be carried out.
static COUNT: AtomicU64 = AtomicU64::new(0);
static DIE_AT: AtomicU64 = AtomicU64::new(u64::MAX);
/// Stores that others carry out after that, until the process ends. At 0 it ends at once.
static OTHERS: AtomicU64 = AtomicU64::new(0);
/// The thread that is stepping, 0 for none; its instruction, and what is writable for it.
static STEPPER: AtomicI32 = AtomicI32::new(0);
static INSTRUCTION: AtomicUsize = AtomicUsize::new(0);
static WRITABLE: (AtomicUsize, AtomicUsize) = (AtomicUsize::new(0), AtomicUsize::new(0));

/// Whether the process stops before the store of a number, from 1 on.
pub type Stops = dyn Fn(u64) -> bool + Send + Sync;

/// Stops this process before stores, each time after the number of the store was [reported](memory::report),
/// until its parent has it [go on](memory::resume). A process that dies there leaves what the parent finds
/// meanwhile.
pub fn stop_before(stops: Box<Stops>) {
    assert!(STOPS.set(stops).is_ok(), "once a process");
    watch();
}

/// Has the thread that comes to the store of that number, from 1 on, stop for ever instead of carrying it
/// out, and the process exit with [`DIED`] when others have carried out `others` more.
pub fn die_at_store(number: u64, others: u64) {
    OTHERS.store(others, SeqCst);
    DIE_AT.store(number, SeqCst);
    watch();
}

/// Counts the stores: each faults from now on.
pub fn watch() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let shared = maps.lines().filter(|line| line.contains("/memfd:uzram-") && line.contains(" rw-s "));
    let ranges: Vec<(usize, usize)> = shared
        .map(|line| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap())
        })
        .collect();
    assert!(!ranges.is_empty() && ranges.len() <= MAX_RANGES);
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
    let (first, end) = (address & !(PAGE - 1), end.load(SeqCst));
    let last = end.min(first + 2 * PAGE);
    if STEPPER.load(SeqCst) == this_thread() {
        // A copy goes on in another page.
        protect(first, last, libc::PROT_READ | libc::PROT_WRITE);
        WRITABLE.0.fetch_min(first, SeqCst);
        WRITABLE.1.fetch_max(last, SeqCst);
        return;
    }
    let count = COUNT.fetch_add(1, SeqCst) + 1;
    if STOPS.get().is_some_and(|stops| stops(count)) {
        memory::report(count);
        // To this thread, so that it is the one that stops at once.
        // SAFETY: numbers only.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), this_thread(), libc::SIGSTOP) };
    }
    let (die_at, others) = (DIE_AT.load(SeqCst), OTHERS.load(SeqCst));
    if count == die_at.saturating_add(others) {
        // SAFETY: it ends the process at once.
        unsafe { libc::_exit(DIED) };
    }
    if count == die_at {
        loop {
            // SAFETY: it has no arguments.
            unsafe { libc::pause() };
        }
    }
    while STEPPER.compare_exchange(0, this_thread(), SeqCst, SeqCst).is_err() {
        std::hint::spin_loop();
    }
    // SAFETY: the thread was running these instructions.
    let instruction = unsafe { (registers[libc::REG_RIP as usize] as *const [u8; 2]).read() };
    if instruction == REP_MOVSB && registers[libc::REG_EFL as usize] & DIRECTION_FLAG == 0 {
        copy(registers, first, end);
        STEPPER.store(0, SeqCst);
        return;
    }
    protect(first, last, libc::PROT_READ | libc::PROT_WRITE);
    WRITABLE.0.store(first, SeqCst);
    WRITABLE.1.store(last, SeqCst);
    INSTRUCTION.store(registers[libc::REG_RIP as usize] as usize, SeqCst);
    registers[libc::REG_EFL as usize] |= TRAP_FLAG;
}

/// Does a part of what `rep movsb` has left to do, in memory from `first` to `end`.
fn copy(registers: &mut [i64], first: usize, end: usize) {
    let [to, from, left] = [libc::REG_RDI, libc::REG_RSI, libc::REG_RCX].map(|at| at as usize);
    let (start, bytes) = (registers[to] as usize, registers[left] as usize);
    let most = if bytes > COPIED_AT_ONCE { bytes / 2 } else { bytes };
    let bytes = most.min(end - start);
    let last = (start + bytes).next_multiple_of(PAGE);
    protect(first, last, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the instruction copies these bytes, and the destination was just made writable. The trap is as
    // the kernel's at this instruction: nobody else relies on anything here.
    unsafe { std::ptr::copy(registers[from] as *const u8, start as *mut u8, bytes) };
    protect(first, last, libc::PROT_READ);
    registers[to] += bytes as i64;
    registers[from] += bytes as i64;
    registers[left] -= bytes as i64;
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
