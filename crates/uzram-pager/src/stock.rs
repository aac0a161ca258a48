//! A fixed number of things that threads take and give back: benches, and stacks of the signal handler. They
//! are made beforehand, as a thread in a signal handler cannot make one.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::Result;

struct Place<B> {
    taken: AtomicBool,
    thing: UnsafeCell<B>,
}

/// See the [module's documentation](self).
pub(crate) struct Stock<B>(Box<[Place<B>]>);

// SAFETY: a thing is used by the thread that took it alone.
unsafe impl<B: Send> Sync for Stock<B> {}

impl<B> Stock<B> {
    /// Makes `count` of them, each by `make` with its number. Errors: those of `make`.
    pub(crate) fn new(count: usize, make: impl Fn(usize) -> Result<B>) -> Result<Self> {
        let place = |nth| {
            make(nth).map(|thing| Place { taken: AtomicBool::new(false), thing: UnsafeCell::new(thing) })
        };
        Ok(Stock((0..count).map(place).collect::<Result<_>>()?))
    }

    /// Calls `f` with each of them, none of which is taken. Errors: those of `f`.
    pub(crate) fn for_each_free(&self, f: impl Fn(&B) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(|place| {
            assert!(!place.taken.swap(true, Ordering::Acquire), "it is free");
            f(&Taken(place))
        })
    }

    /// Takes a free one; waits until there is one. A thread takes no second one, and waits for no page while
    /// it has one of the benches.
    pub(crate) fn take(&self) -> Taken<'_, B> {
        loop {
            for place in &self.0 {
                if !place.taken.load(Ordering::Relaxed) && !place.taken.swap(true, Ordering::Acquire) {
                    return Taken(place);
                }
            }
            std::thread::yield_now();
        }
    }
}

/// A thing that belongs to this thread until it is dropped.
pub(crate) struct Taken<'a, B>(&'a Place<B>);

impl<B> Deref for Taken<'_, B> {
    type Target = B;

    fn deref(&self) -> &B {
        // SAFETY: this thread has taken it.
        unsafe { &*self.0.thing.get() }
    }
}

impl<B> DerefMut for Taken<'_, B> {
    fn deref_mut(&mut self) -> &mut B {
        // SAFETY: as above, and this is the only reference to the guard.
        unsafe { &mut *self.0.thing.get() }
    }
}

impl<B> Drop for Taken<'_, B> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}
