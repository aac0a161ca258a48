//! What several parts of a pager ask the system for.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use uzram::thread::spawn_relied_on;
use uzram::{Error, ErrorKind, Result};

/// Locks what is valid even if a thread that held the lock has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same for readers.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// The same for a writer.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the text of a file of /proc, as far as there is room for it.
pub(crate) fn text_of<'a>(file: &File, room: &'a mut [u8]) -> Option<&'a str> {
    let len = file.read_at(room, 0).ok()?;
    str::from_utf8(&room[..len]).ok()
}

/// Returns a field of a text of proc_pid_stat(5), from the third on. The second may have spaces.
pub(crate) fn stat_field(stat: &str, nth: usize) -> Option<&str> {
    stat.rsplit_once(") ")?.1.split(' ').nth(nth - 3)
}

/// Starts a thread that brings or evicts pages. If it panics, which is a defect, the process ends: its memory
/// would be out of reach, and threads would wait for ever. Errors: `NoMemory`.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    spawn_relied_on(name, (), |()| run(), |(), _| std::process::abort())
}

/// Errors: `NoMemory`.
pub(crate) fn new_eventfd() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| Error::new(ErrorKind::NoMemory, format!("eventfd: {error}")))
}

/// Puts another descriptor in the place of one. Errors: `Io`.
#[cfg(feature = "image")]
pub(crate) fn renew(old: std::os::fd::BorrowedFd<'_>, new: OwnedFd) -> Result<()> {
    use std::os::fd::AsRawFd;
    if old.as_raw_fd() == new.as_raw_fd() {
        // It is in its place already.
        std::mem::forget(new);
        return Ok(());
    }
    // SAFETY: the number is the old one's, whose owner goes on with what it means now.
    match unsafe { libc::dup3(new.as_raw_fd(), old.as_raw_fd(), libc::O_CLOEXEC) } {
        -1 => Err(Error::new(ErrorKind::Io, format!("a descriptor: {}", std::io::Error::last_os_error()))),
        _ => Ok(()),
    }
}
