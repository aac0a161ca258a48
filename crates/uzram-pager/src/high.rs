//! Descriptors that a program which does not know of them must not come across: at high numbers, as a program
//! gets its own from below, and noted, so that a library can spare them when the program closes all.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use uzram::sync::{AtomicU64, Ordering};

/// The first number, where the limit on descriptors allows it, and how many there are.
const FIRST: RawFd = 900;
const COUNT: RawFd = 64;
/// No kept descriptor has this number, or a higher one.
pub const ABOVE_ALL: RawFd = FIRST + COUNT;

/// A bit for each number that is in use, from the first one that was.
static IN_USE: AtomicU64 = AtomicU64::new(0);
static BASE: AtomicU64 = AtomicU64::new(0);

fn base() -> RawFd {
    match BASE.load(Ordering::Relaxed) {
        0 => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            let below = limit.unwrap_or(u64::MAX).saturating_sub(COUNT as u64).clamp(3, FIRST as u64);
            let base = BASE.compare_exchange(0, below, Ordering::Relaxed, Ordering::Relaxed);
            base.map_or_else(|there| there, |_| below) as RawFd
        }
        base => base as RawFd,
    }
}

/// Moves a descriptor to a high number, where the program does not close it. Where none is free, it stays as
/// it is.
pub fn keep(fd: OwnedFd) -> OwnedFd {
    let base = base();
    // SAFETY: the call duplicates a descriptor, or fails.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, base) };
    if high < 0 {
        return fd;
    }
    if high < base + COUNT {
        IN_USE.fetch_or(1 << (high - base), Ordering::Relaxed);
    }
    // SAFETY: a new descriptor, which nobody else has.
    unsafe { OwnedFd::from_raw_fd(high) }
}

/// Returns whether a descriptor is one of those that a program must not close.
#[inline]
pub fn is_kept(fd: RawFd) -> bool {
    let in_use = IN_USE.load(Ordering::Relaxed);
    in_use != 0 && (0..COUNT).contains(&fd.wrapping_sub(base())) && in_use >> (fd - base()) & 1 != 0
}

/// Closes a descriptor that was moved up.
pub fn close(fd: OwnedFd) {
    let nth = fd.as_raw_fd().wrapping_sub(base());
    if (0..COUNT).contains(&nth) {
        IN_USE.fetch_and(!(1 << nth), Ordering::Relaxed);
    }
    // Not by the C library's function, whose place another may have taken, that spares such descriptors.
    // SAFETY: nobody else has it, and it is not used any more.
    unsafe { libc::syscall(libc::SYS_close, std::os::fd::IntoRawFd::into_raw_fd(fd)) };
}
