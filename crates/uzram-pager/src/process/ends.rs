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

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::futex::{ClockId, Wait, WaitFlags, WaitPtr, WaitvFlags, waitv};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use uzram::Result;
use uzram::units::pages_to_bytes;

use crate::system::{stat_field, text_of};

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

/// Returns a descriptor that can be read when one of some can be. Errors: `Io`.
pub(super) fn any_of<const N: usize>(fds: [BorrowedFd<'_>; N]) -> Result<OwnedFd> {
    let failed = |error| super::system("epoll", error);
    let any = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
    for fd in fds {
        epoll::add(&any, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(failed)?;
    }
    Ok(any)
}

/// Returns a timer that can be read so much later. Errors: `Io`.
pub(super) fn new_timer(later: Duration) -> Result<OwnedFd> {
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC);
    timer.inspect(|timer| set_timer(timer, later)).map_err(|error| super::system("timerfd", error))
}

/// Has a timer be read so much later, and not before.
pub(super) fn set_timer(timer: &OwnedFd, later: Duration) {
    let it_value = later.try_into().unwrap_or_default();
    let value = Itimerspec { it_interval: Timespec::default(), it_value };
    let set = timerfd_settime(timer, TimerfdTimerFlags::empty(), &value);
    debug_assert!(set.is_ok(), "{set:?}");
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

/// Waits, after the main thread's id was cleared, until the pager may leave. Returns false if the program has
/// not executed another one: its main thread has ended, and others may run. The files are the program's
/// `stat` and `status`, and the pager's own `statm`.
pub(super) fn wait_for_exec(stat: &File, status: &File, statm: &File) -> bool {
    // Who ends is marked so before his id is cleared.
    if is_exiting(stat) {
        return false;
    }
    while is_executing(status, statm) {
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Returns whether a program's main thread ends (proc_pid_stat(5)).
fn is_exiting(stat: &File) -> bool {
    const PF_EXITING: u64 = 4;
    let mut room = [0; 1024];
    let text = text_of(stat, &mut room).unwrap_or_default();
    let flags: u64 = stat_field(text, 9).and_then(|flags| flags.parse().ok()).unwrap_or(0);
    flags & PF_EXITING != 0 || matches!(stat_field(text, 3), Some("X" | "Z"))
}

/// Returns whether a program has this memory still, or new memory without code: the kernel closes files in
/// between, which may take long, counts the exec, and maps the new program then (begin_new_exec() in
/// fs/exec.c). A program that has ended has no memory.
fn is_executing(status: &File, statm: &File) -> bool {
    let own_kib = || {
        let mut room = [0; 128];
        let pages: u64 = text_of(statm, &mut room)?.split(' ').next()?.parse().ok()?;
        Some(pages_to_bytes(pages) >> 10)
    };
    let (mut room, before) = ([0; 4096], own_kib());
    let text = text_of(status, &mut room).unwrap_or_default();
    let kib =
        |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().split(' ').next()?.parse().ok());
    match (kib("VmSize:"), kib("VmExe:")) {
        (size @ Some(_), Some(code)) => code == 0 || size == before || size == own_kib(),
        _ => false,
    }
}
