//! Data that a lock elsewhere protects.

#[cfg(loom)]
use loom::cell::UnsafeCell;
#[cfg(not(loom))]
use std::cell::UnsafeCell;

/// A `T` whose lock is not around it but beside it: a size class's lock guards the zspages of the
/// class, a slot's bit lock the slot. loom checks every access.
#[derive(Debug, Default)]
pub struct Guarded<T>(UnsafeCell<T>);

// SAFETY: `with_mut` is the only access, and its callers promise that they hold the lock that
// guards this value, so threads only ever hand the `T` from one to the next.
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> Guarded<T> {
    /// Wraps `value`.
    pub fn new(value: T) -> Self {
        Guarded(UnsafeCell::new(value))
    }

    /// Runs `f` on the value.
    ///
    /// # Safety
    /// The caller holds the lock that guards this value, and `f` does not come back to it.
    #[inline]
    pub unsafe fn with_mut<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the caller holds the lock, so no other reference to the value exists.
        let run = |value: *mut T| f(unsafe { &mut *value });
        #[cfg(not(loom))]
        return run(self.0.get());
        #[cfg(loom)]
        return self.0.with_mut(run);
    }
}

/// Tells loom when memory is used that it cannot see, such as an object's bytes in the arena: it
/// then checks that writes exclude each other and reads. Otherwise empty.
#[derive(Debug, Default)]
pub struct Access {
    #[cfg(loom)]
    seen: UnsafeCell<()>,
}

// SAFETY: there is nothing to share; loom checks the order of the calls.
#[cfg(loom)]
unsafe impl Sync for Access {}

impl Access {
    /// The memory is read.
    #[inline]
    pub fn read(&self) {
        #[cfg(loom)]
        self.seen.with(|_| ());
    }

    /// The memory is written, or handed on to someone who may.
    #[inline]
    pub fn write(&self) {
        #[cfg(loom)]
        self.seen.with_mut(|_| ());
    }
}
