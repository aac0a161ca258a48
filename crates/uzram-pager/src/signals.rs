//! The program's signals, which a thread does not take while it moves pages.
//!
//! The program's handler may touch memory that is not there; a thread that was interrupted in the pager would
//! then wait for what it does itself. So the program's threads block signals while they are in the pager, and
//! the pager's own threads always: a signal that is sent to a process, such as a timer's, goes to any thread
//! that does not block it. A thread inherits what the one that starts it blocks.

use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// What a thread's own instructions cause: that ends the process though it is blocked, without a message.
const OF_FAULTS: [libc::c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];

/// Blocks all signals but those of faults in this thread until it is dropped.
pub(crate) struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    pub(crate) fn new() -> Blocked {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: the first call makes the set, and the last one that of before. All arguments are valid.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for signal in OF_FAULTS {
                libc::sigdelset(all.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
            Blocked { before: before.assume_init() }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is this thread's of before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, null_mut()) };
    }
}
