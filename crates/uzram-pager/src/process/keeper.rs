//! Keeps userfaultfd when the pager dies: a process that shares the pager's descriptors and memory, and does
//! nothing but wait.
//!
//! The kernel kills the program when the pager ends, by its exit signal. Until that has arrived, touches of
//! memory that is away wait for ever, instead of finding zeros. As the first process of a pid namespace no
//! signal ends the program: then its memory is unmapped, so that touches fail.
//!
//! It has the pager's thread-local storage, which it must not use: it makes system calls alone.

use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use uzram_run::sys;

use super::Process;

const STACK_BYTES: usize = 16 << 10;

/// The flags of clone(2) by which it is started. It gets the pager's exit signal.
pub(super) const FLAGS: usize = (libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_PARENT) as usize
    | sys::flags::CLONE_VM
    | sys::flags::CLONE_UNTRACED;

static mut STACK: [u128; STACK_BYTES / 16] = [0; STACK_BYTES / 16];
/// The pager ends, and has nothing of the program's any more.
static LETS_GO: AtomicBool = AtomicBool::new(false);

/// Says that the pager's end is not a death.
pub(super) fn let_go() {
    LETS_GO.store(true, Ordering::SeqCst);
}

/// Starts it, for the pager's process, whose descriptors are the keeper's, too. Without one, the program ends
/// with the pager all the same.
pub(super) fn start(process: &Process) {
    LETS_GO.store(false, Ordering::SeqCst);
    let (stack, function) = ((&raw mut STACK).addr() + STACK_BYTES, keep as *const () as usize);
    let argument = (&raw const *process).expose_provenance();
    // SAFETY: the stack is its own, and the function never returns. Its argument is not 0, and stays.
    if let Ok(keeper) = unsafe { sys::clone_with_memory(FLAGS, stack, 0, function, argument) } {
        process.control.keeper.store(keeper as i32, Ordering::Relaxed);
    }
}

/// Returns whether a process has ended, by its pidfd; waits for that at most so long, or for ever.
fn has_ended(pidfd: i32, most_ms: isize) -> bool {
    let mut fd = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
    let arguments = [(&raw mut fd).addr(), 1, most_ms.cast_unsigned()];
    // SAFETY: the kernel writes to what it is given.
    unsafe { sys::raw(libc::SYS_poll as usize, arguments) > 0 }
}

extern "C" fn keep(process: *const Process) -> ! {
    // SAFETY: the process is never dropped, and what is read here never changes.
    let (pager, program, control) =
        unsafe { ((*process).own.as_raw_fd(), (*process).program.as_raw_fd(), (*process).control) };
    // SAFETY: these take a string and nothing.
    unsafe {
        sys::raw(sys::nr::PRCTL, [libc::PR_SET_NAME as usize, c"uzram-keeper".as_ptr().addr()]);
        sys::raw(libc::SYS_setsid as usize, []);
    }
    while !has_ended(pager, -1) {}
    if LETS_GO.load(Ordering::SeqCst) {
        sys::exit_group(0);
    }
    // The pager has died: so does the program.
    if !has_ended(program, 200) {
        let arguments = [program as usize, sys::flags::SIGKILL, 0, 0];
        // SAFETY: the descriptor is the program's pidfd.
        unsafe { sys::raw(libc::SYS_pidfd_send_signal as usize, arguments) };
    }
    if !has_ended(program, 200) {
        // SAFETY: the process is never dropped, and its pager does nothing any more.
        super::unmap_all(unsafe { &*process });
    }
    let mut line = [0; 96];
    let mut rest = &mut line[..];
    let id = control.program.load(Ordering::Relaxed);
    let _ = writeln!(rest, "uzram: the pager of process {id} died: it was ended");
    let bytes = 96 - rest.len();
    // SAFETY: the line outlives the call.
    unsafe { sys::raw(sys::nr::WRITE, [super::ERRORS as usize, line.as_ptr().addr(), bytes]) };
    sys::exit_group(0)
}
