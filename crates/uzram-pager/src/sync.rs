//! Atomics and futexes: the system's, or models of them when built with `--cfg loom`, so that loom checks the
//! code that ships.

#[cfg(loom)]
mod model;

#[cfg(loom)]
pub(crate) use self::model::Futex;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// A number that threads of this process wait for: futex(2).
#[cfg(not(loom))]
#[derive(Default)]
pub(crate) struct Futex {
    pub(crate) number: AtomicU32,
}

#[cfg(not(loom))]
impl Futex {
    /// Sleeps if this is the number, until it is woken, or for so long. May return for no reason.
    pub(crate) fn wait(&self, number: u32, most: Option<std::time::Duration>) {
        use rustix::thread::futex;
        let most = most.and_then(|most| most.try_into().ok());
        let _ = futex::wait(&self.number, futex::Flags::PRIVATE, number, most.as_ref());
    }

    pub(crate) fn wake_all(&self) {
        use rustix::thread::futex;
        let _ = futex::wake(&self.number, futex::Flags::PRIVATE, u32::MAX >> 1);
    }
}
