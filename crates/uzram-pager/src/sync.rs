//! Atomics, locks and futexes: the system's, or models of them when built with `--cfg loom`, so that loom
//! checks the code that ships.

#[cfg(loom)]
mod model;

#[cfg(loom)]
pub(crate) use self::model::{Futex, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use loom::thread::yield_now;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(loom))]
pub(crate) use std::thread::yield_now;

/// A number that threads of this process wait for: futex(2).
#[cfg(not(loom))]
pub(crate) struct Futex(AtomicU32);

#[cfg(not(loom))]
impl Futex {
    pub(crate) fn new(number: u32) -> Futex {
        Futex(AtomicU32::new(number))
    }

    /// Sleeps if this is the number, until it is woken, or for so long. May return for no reason.
    pub(crate) fn wait(&self, number: u32, most: Option<std::time::Duration>) {
        use rustix::thread::futex;
        let most = most
            .map(|most| futex::Timespec { tv_sec: most.as_secs() as _, tv_nsec: most.subsec_nanos().into() });
        let _ = futex::wait(&self.0, futex::Flags::PRIVATE, number, most.as_ref());
    }

    /// Wakes one thread that sleeps.
    pub(crate) fn wake_one(&self) {
        self.wake(1);
    }

    /// Wakes all threads that sleep.
    pub(crate) fn wake_all(&self) {
        self.wake(u32::MAX >> 1);
    }

    fn wake(&self, threads: u32) {
        use rustix::thread::futex;
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, threads);
    }
}

#[cfg(not(loom))]
impl std::ops::Deref for Futex {
    type Target = AtomicU32;

    fn deref(&self) -> &AtomicU32 {
        &self.0
    }
}
