//! The benches of a pager: what threads move pages with. There is a fixed number, made with the pager, as a thread in a signal
//! handler cannot make one.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

use uzram::Result;
use uzram::units::{PAGE_SIZE, Page};

use crate::trap::MOST_PAGES;

/// What a thread moves pages with.
pub(crate) struct Bench<S> {
    /// Where pages lie that it takes.
    pub(crate) shelf: S,
    /// Contents on their way.
    pub(crate) buffer: Box<[Page; MOST_PAGES]>,
}

impl<S> Bench<S> {
    pub(crate) fn new(shelf: S) -> Bench<S> {
        let Ok(buffer) = vec![[0; PAGE_SIZE]; MOST_PAGES].try_into() else {
            unreachable!("it has this length")
        };
        Bench { shelf, buffer }
    }
}

struct Place<B> {
    taken: AtomicBool,
    bench: UnsafeCell<B>,
}

/// See the [module's documentation](self).
pub(crate) struct Benches<B>(Box<[Place<B>]>);

// SAFETY: a bench is used by the thread that took it alone.
unsafe impl<B: Send> Sync for Benches<B> {}

impl<B> Benches<B> {
    /// Makes `count` benches.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn new(count: usize, make: impl Fn() -> Result<B>) -> Result<Self> {
        let place =
            |_| make().map(|bench| Place { taken: AtomicBool::new(false), bench: UnsafeCell::new(bench) });
        Ok(Benches((0..count).map(place).collect::<Result<_>>()?))
    }

    /// Takes a free bench; waits until there is one. A thread takes no second one, and waits for no unit while it has one.
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

/// A bench that belongs to this thread until it is dropped.
pub(crate) struct Taken<'a, B>(&'a Place<B>);

impl<B> Deref for Taken<'_, B> {
    type Target = B;

    fn deref(&self) -> &B {
        // SAFETY: this thread has taken the bench.
        unsafe { &*self.0.bench.get() }
    }
}

impl<B> DerefMut for Taken<'_, B> {
    fn deref_mut(&mut self) -> &mut B {
        // SAFETY: as above, and this is the only reference to the guard.
        unsafe { &mut *self.0.bench.get() }
    }
}

impl<B> Drop for Taken<'_, B> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}
