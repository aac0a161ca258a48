//! Models of what loom has no models of: futexes, and locks whose `try_read` returns at once and fails while
//! a thread waits for `write`, as the standard library's does. (loom's own one may have the caller of
//! `try_read` wait.)

use std::ops::Deref;
use std::sync::{LockResult, TryLockError, TryLockResult};
use std::time::Duration;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Condvar, Mutex, MutexGuard};

/// A number that threads wait for. No time passes: who is not woken sleeps for ever.
pub(crate) struct Futex {
    number: AtomicU32,
    /// Held while the number is compared, as in the kernel.
    lock: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    pub(crate) fn new(number: u32) -> Futex {
        Futex { number: AtomicU32::new(number), lock: Mutex::new(()), woken: Condvar::new() }
    }

    pub(crate) fn wait(&self, number: u32, _: Option<Duration>) {
        let guard = self.lock.lock().expect("no panic");
        if self.number.load(Ordering::SeqCst) == number {
            drop(self.woken.wait(guard));
        }
    }

    pub(crate) fn wake_one(&self) {
        let _guard = self.lock.lock().expect("no panic");
        self.woken.notify_one();
    }

    pub(crate) fn wake_all(&self) {
        let _guard = self.lock.lock().expect("no panic");
        self.woken.notify_all();
    }
}

impl Deref for Futex {
    type Target = AtomicU32;

    fn deref(&self) -> &AtomicU32 {
        &self.number
    }
}

#[derive(Default)]
struct Held {
    readers: u32,
    is_written: bool,
    writers_waiting: u32,
}

impl Held {
    fn may_read(&self) -> bool {
        !self.is_written && self.writers_waiting == 0
    }
}

pub(crate) struct RwLock<T> {
    held: Mutex<Held>,
    released: Condvar,
    _data: T,
}

pub(crate) struct RwLockReadGuard<'a, T>(&'a RwLock<T>);

pub(crate) struct RwLockWriteGuard<'a, T>(&'a RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(data: T) -> RwLock<T> {
        RwLock { held: Mutex::default(), released: Condvar::new(), _data: data }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("no panic")
    }

    pub(crate) fn try_read(&self) -> TryLockResult<RwLockReadGuard<'_, T>> {
        let mut held = self.held();
        if !held.may_read() {
            return Err(TryLockError::WouldBlock);
        }
        held.readers += 1;
        Ok(RwLockReadGuard(self))
    }

    pub(crate) fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        let mut held = self.held();
        while !held.may_read() {
            held = self.released.wait(held).expect("no panic");
        }
        held.readers += 1;
        Ok(RwLockReadGuard(self))
    }

    pub(crate) fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        let mut held = self.held();
        while held.is_written || held.readers > 0 {
            held.writers_waiting += 1;
            held = self.released.wait(held).expect("no panic");
            held.writers_waiting -= 1;
        }
        held.is_written = true;
        Ok(RwLockWriteGuard(self))
    }
}

impl<T> Drop for RwLockReadGuard<'_, T> {
    fn drop(&mut self) {
        self.0.held().readers -= 1;
        self.0.released.notify_all();
    }
}

impl<T> Drop for RwLockWriteGuard<'_, T> {
    fn drop(&mut self) {
        self.0.held().is_written = false;
        self.0.released.notify_all();
    }
}
