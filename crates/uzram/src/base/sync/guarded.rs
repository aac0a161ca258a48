//! Data whose lock lies elsewhere.

use super::imp::cell::UnsafeCell;

/// A `T` whose lock does not contain it: a size class's lock protects the zspages of the class, a
/// slot's bit lock the slot. loom checks every access.
#[derive(Debug, Default)]
pub struct Guarded<T>(UnsafeCell<T>);

// SAFETY: `with_mut` is the only access, and its callers promise to hold the lock that protects
// this value, so only one thread at a time uses the `T`.
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> Guarded<T> {
    /// Wraps `value`.
    pub fn new(value: T) -> Self {
        Guarded(UnsafeCell::new(value))
    }

    /// Runs `f` on the value.
    ///
    /// # Safety
    /// The caller holds the lock that protects this value, and `f` does not access the value again.
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

/// Reports accesses to memory that loom does not model, such as an object's bytes in the arena: loom
/// then checks that a write excludes other accesses. Otherwise empty.
#[derive(Debug, Default)]
pub struct Access {
    #[cfg(loom)]
    seen: UnsafeCell<()>,
}

// SAFETY: the cell holds no data; loom checks the order of the calls.
#[cfg(loom)]
unsafe impl Sync for Access {}

impl Access {
    /// Reports a read.
    #[inline]
    pub fn read(&self) {
        #[cfg(loom)]
        self.seen.with(|_| ());
    }

    /// Reports a write, or a handover to a thread that may write.
    #[inline]
    pub fn write(&self) {
        #[cfg(loom)]
        self.seen.with_mut(|_| ());
    }
}
