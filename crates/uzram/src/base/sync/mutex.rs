//! A mutual-exclusion lock with a lock class.

use std::ops::{Deref, DerefMut};

use super::Counter;
use super::class::LockClass;
use super::hold::{Hold, order};
use super::imp::sync as imp;
use super::stats::{LastCpu, LockMode};

/// A lock around a `T`. A panic of its holder does not poison it: only broken invariants panic in a
/// critical section, and each such point leaves the data valid.
pub struct Mutex<T> {
    class: &'static LockClass,
    last: LastCpu,
    waiters: Counter,
    inner: imp::Mutex<T>,
}

/// Holds a [`Mutex`] until it is dropped.
pub struct MutexGuard<'a, T> {
    // Declared before `hold`: the lock is released before its hold time is counted.
    guard: imp::MutexGuard<'a, T>,
    lock: &'a Mutex<T>,
    hold: Hold,
}

impl<T> Mutex<T> {
    /// Makes a free lock of `class` around `value`.
    pub fn new(class: &'static LockClass, value: T) -> Self {
        Mutex { class, last: LastCpu::new(), waiters: Counter::new(0), inner: imp::Mutex::new(value) }
    }

    /// Makes a free lock of a program over the engine, which the engine's lock order does not cover.
    pub fn unordered(value: T) -> Self {
        Mutex::new(&super::classes::PROGRAM, value)
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let wait = || self.waiters.while_waiting(|| self.try_inner(), || self.wait_inner());
        let mode = LockMode::Exclusive;
        let (guard, hold) = Hold::take(self.class, &self.last, mode, || self.try_inner(), wait);
        MutexGuard { guard, lock: self, hold }
    }

    #[cfg(not(tsan))]
    fn wait_inner(&self) -> imp::MutexGuard<'_, T> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    #[cfg(tsan)]
    fn wait_inner(&self) -> imp::MutexGuard<'_, T> {
        super::wait_visibly(|| self.try_inner())
    }

    /// As [`Mutex::lock`], but calls `contended` if the lock is not free at once.
    #[inline]
    pub fn lock_noticing(&self, contended: impl FnOnce()) -> MutexGuard<'_, T> {
        order::check(self.class);
        self.try_lock().unwrap_or_else(|| {
            contended();
            self.lock()
        })
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.try_inner()?;
        Some(MutexGuard { guard, lock: self, hold: Hold::new(self.class, &self.last, LockMode::Exclusive) })
    }

    fn try_inner(&self) -> Option<imp::MutexGuard<'_, T>> {
        super::rw_lock::taken(self.inner.try_lock())
    }
}

impl<'a, T> MutexGuard<'a, T> {
    /// Waits on `condvar` and releases the lock meanwhile. May return without a notification: under
    /// ThreadSanitizer, which does not see the standard library release and take the lock, it always does.
    pub fn wait(self, condvar: &super::Condvar) -> MutexGuard<'a, T> {
        #[cfg(tsan)]
        return self.wait_for(condvar, super::TSAN_NAP);
        #[cfg(not(tsan))]
        self.released(|guard, _| condvar.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// As [`MutexGuard::wait`], for `at_most` that long. Models have no time: there it only releases the lock
    /// briefly.
    pub fn wait_for(self, condvar: &super::Condvar, at_most: std::time::Duration) -> MutexGuard<'a, T> {
        #[cfg(tsan)]
        return self.released(|guard, lock| {
            drop((guard, condvar));
            std::thread::sleep(at_most.min(super::TSAN_NAP));
            lock.wait_inner()
        });
        #[cfg(not(tsan))]
        self.released(|guard, _| {
            condvar.wait_timeout(guard, at_most).unwrap_or_else(|poisoned| poisoned.into_inner()).0
        })
    }

    fn released(
        self,
        wait: impl FnOnce(imp::MutexGuard<'a, T>, &'a Mutex<T>) -> imp::MutexGuard<'a, T>,
    ) -> MutexGuard<'a, T> {
        let MutexGuard { guard, lock, mut hold } = self;
        hold.pause();
        let guard = wait(guard, lock);
        hold.resume(&lock.last);
        MutexGuard { guard, lock, hold }
    }

    /// Waits on `condvar` while `is_so` holds, for `at_most` that long.
    pub fn wait_while_for(
        mut self,
        condvar: &super::Condvar,
        at_most: std::time::Duration,
        mut is_so: impl FnMut(&mut T) -> bool,
    ) -> Self {
        let started = std::time::Instant::now();
        while is_so(&mut self) {
            let Some(left) = at_most.checked_sub(started.elapsed()) else { break };
            self = self.wait_for(condvar, left);
        }
        self
    }

    /// Returns whether other threads wait for the lock: a hint. Always false in models.
    pub fn is_contended(&self) -> bool {
        self.lock.waiters.get() > 0
    }
}

impl<T: Default> Default for Mutex<T> {
    /// As [`Mutex::unordered`].
    fn default() -> Self {
        Mutex::unordered(T::default())
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::classes;
    use super::*;

    #[test]
    fn try_lock_fails_only_while_held() {
        let lock = Mutex::new(&classes::ARENA, 1);
        let guard = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(guard);
        *lock.try_lock().expect("free") += 1;
        assert_eq!(*lock.lock(), 2);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "lock order: waiting for 'stream' while holding 'arena'")]
    fn waiting_against_the_lock_order_panics_in_debug_builds() {
        let (late, early) = (Mutex::new(&classes::ARENA, ()), Mutex::new(&classes::STREAM, ()));
        let _held = late.lock();
        let _ = early.lock();
    }
}
