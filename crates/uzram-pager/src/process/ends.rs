//! How a program ends.
//!
//! - Its exit: its pidfd can be read.
//! - exec: the kernel clears the id of the main thread, at an address that it was told, and wakes who waits
//!   for that. The memory is the pager's alone then. It leaves, but not before the program has counted the
//!   exec: until then its end would still kill it (`exit_notify()` in kernel/exit.c).
//! - The pager's own death: `keeper.rs`.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::futex::{ClockId, Wait, WaitFlags, WaitPtr, WaitvFlags, waitv};
use uzram::Result;

/// Returns a process's pidfd.
pub(super) fn pidfd(process: i32) -> Result<OwnedFd> {
    let process = Pid::from_raw(process).ok_or(rustix::io::Errno::SRCH);
    let opened = process.and_then(|process| pidfd_open(process, PidfdFlags::empty()));
    opened.map_err(|error| super::system("pidfd_open", error))
}

/// Waits until one of some descriptors can be read, for so long or for ever, and allocates nothing. Returns
/// whether one can be.
pub(super) fn wait<const N: usize>(fds: [BorrowedFd<'_>; N], most: Option<Duration>) -> bool {
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    poll(&mut fds, most.as_ref()).is_ok_and(|ready| ready > 0)
}

/// Returns whether a process has ended, by its pidfd; waits for that at most so long.
pub(super) fn has_ended(pidfd: &OwnedFd, most: Duration) -> bool {
    wait([pidfd.as_fd()], Some(most))
}

/// Returns whether the kernel has cleared the id of the program's main thread, which lies at an address.
pub(super) fn has_left(word: usize) -> bool {
    let word: *const AtomicU32 = std::ptr::with_exposed_provenance(word);
    // SAFETY: the C library's, which lives as long as the program.
    unsafe { word.as_ref() }.is_some_and(|word| word.load(Ordering::Acquire) == 0)
}

/// Waits until the kernel has cleared the id of the program's main thread, or `ends` is not 0:
/// futex_waitv(2), Linux 5.16. Returns whether it has; it may return for no reason.
pub(super) fn wait_until_left(word: usize, ends: &AtomicU32) -> bool {
    let word: *mut u32 = std::ptr::with_exposed_provenance_mut(word);
    // SAFETY: as above.
    let id = unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Acquire);
    let mut waits = [Wait::new(); 2];
    for (wait, (word, value)) in waits.iter_mut().zip([(word, id), (ends.as_ptr(), 0)]) {
        (wait.val, wait.uaddr, wait.flags) = (value.into(), WaitPtr::new(word.cast()), WaitFlags::SIZE_U32);
    }
    id == 0 || {
        let _ = waitv(&waits, WaitvFlags::empty(), None, ClockId::Monotonic);
        has_left(word.addr())
    }
}

/// What the program's /proc/PID/stat tells (proc_pid_stat(5)).
struct Stat {
    state: u8,
    /// The main thread ends.
    is_exiting: bool,
    user_time: u64,
    memory: u64,
}

impl Stat {
    fn of(file: &File) -> Option<Stat> {
        const PF_EXITING: u64 = 4;
        let mut room = [0; 1024];
        let (_, fields) = super::text_of(file, &mut room)?.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        let number = |nth: usize| -> Option<u64> { fields.get(nth - 3)?.parse().ok() };
        let state = *fields.first()?.as_bytes().first()?;
        let is_exiting = number(9)? & PF_EXITING != 0 || matches!(state, b'X' | b'Z');
        Some(Stat { state, is_exiting, user_time: number(14)?, memory: number(23)? })
    }
}

/// Waits, after the main thread's id was cleared, until the pager may leave. Returns false if the program has
/// not executed another one: its main thread has ended, and others may run.
pub(super) fn wait_for_exec(stat: &File) -> bool {
    let Some(before) = Stat::of(stat) else { return true };
    if before.is_exiting {
        return false;
    }
    // The kernel counts the exec between the switch of the memory and the mapping of the new program, in one
    // go: whatever is seen to change comes after that.
    loop {
        let Some(now) = Stat::of(stat) else { return true };
        let has_run = now.memory != before.memory || now.user_time != before.user_time;
        if has_run || now.is_exiting || matches!(now.state, b'S' | b'T' | b't') {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
