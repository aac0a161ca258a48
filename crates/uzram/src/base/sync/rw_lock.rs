//! A readers-writer lock with a lock class.

use std::sync::{TryLockError, TryLockResult};

use super::Counter;
use super::class::LockClass;
use super::hold::Hold;
use super::imp::sync as imp;
use super::stats::{LastCpu, LockMode};

/// A lock that any number of readers or one writer holds. It does not contain the data it protects.
pub struct RwLock {
    class: &'static LockClass,
    last: LastCpu,
    waiters: Counter,
    inner: imp::RwLock<()>,
}

/// Keeps writers out until it is dropped.
pub struct ReadGuard<'a> {
    _guard: imp::RwLockReadGuard<'a, ()>,
    _hold: Hold,
}

/// Keeps readers and other writers out until it is dropped.
pub struct WriteGuard<'a> {
    _guard: imp::RwLockWriteGuard<'a, ()>,
    waiters: &'a Counter,
    _hold: Hold,
}

impl RwLock {
    /// Makes a free lock of `class`.
    pub fn new(class: &'static LockClass) -> Self {
        RwLock { class, last: LastCpu::new(), waiters: Counter::new(0), inner: imp::RwLock::new(()) }
    }

    /// Waits until no writer holds the lock.
    #[inline]
    pub fn read(&self) -> ReadGuard<'_> {
        let try_take = || taken(self.inner.try_read());
        #[cfg(not(tsan))]
        let wait = || self.inner.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        #[cfg(tsan)]
        let wait = || super::wait_visibly(try_take);
        let wait = || self.waiters.while_waiting(try_take, wait);
        let (guard, hold) = Hold::take(self.class, &self.last, LockMode::Shared, try_take, wait);
        ReadGuard { _guard: guard, _hold: hold }
    }

    /// Waits until no other thread holds the lock.
    pub fn write(&self) -> WriteGuard<'_> {
        let try_take = || taken(self.inner.try_write());
        #[cfg(not(tsan))]
        let wait = || self.inner.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        #[cfg(tsan)]
        let wait = || super::wait_visibly(try_take);
        let wait = || self.waiters.while_waiting(try_take, wait);
        let (guard, hold) = Hold::take(self.class, &self.last, LockMode::Exclusive, try_take, wait);
        WriteGuard { _guard: guard, waiters: &self.waiters, _hold: hold }
    }
}

impl WriteGuard<'_> {
    /// Returns whether other threads wait for the lock: a hint. Always false in models.
    #[inline]
    pub fn is_contended(&self) -> bool {
        self.waiters.get() > 0
    }
}

/// Returns the guard of a lock that was free, poisoned or not.
pub(super) fn taken<G>(tried: TryLockResult<G>) -> Option<G> {
    match tried {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::classes;
    use super::*;

    #[test]
    fn a_writer_is_alone_and_sees_who_waits() {
        let (lock, inside) = (RwLock::new(&classes::ZS_POOL), AtomicU32::new(0));
        let (one, two) = (lock.read(), lock.inner.try_read());
        assert!(two.is_ok() && lock.inner.try_write().is_err());
        drop((one, two));
        let writer = lock.write();
        assert!(!writer.is_contended());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _read = lock.read();
                inside.fetch_add(1, Ordering::Relaxed);
            });
            while !writer.is_contended() {
                std::thread::yield_now();
            }
            assert_eq!(inside.load(Ordering::Relaxed), 0);
            drop(writer);
        });
        assert_eq!(inside.load(Ordering::Relaxed), 1);
        assert!(!lock.write().is_contended());
    }
}
