//! Who may move pages while the process forks: the threads that serve touches, and those that change the memory map.
//!
//! The gate closes in two steps:
//!
//! 1. [`Gate::stop_changes`] waits for the program's threads that are in the pager. Their stacks may lie in memory that it manages, so that
//!    all touches are served until they are done.
//! 2. [`Gate::close`] waits for the threads that serve touches, which touch no such memory. From now on only touches of the thread that
//!    forks are served, whose stack may be such memory, too. All others are left alone, and must be repeated when the gate is open again.
//!
//! From the second step on the thread that forks is not woken when its page is placed, but when the one that serves it has nothing left to
//! do: else something might move while the process is copied.
//!
//! Lock order: changing, moving.

use std::sync::PoisonError;

use crate::sync::{AtomicU32, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// See the [module's documentation](self).
pub(crate) struct Gate {
    /// Held shared by the program's threads that change memory, and exclusively while the process forks.
    changing: RwLock<()>,
    /// Held shared by the threads that serve touches, and exclusively while the process forks.
    moving: RwLock<()>,
    /// The thread that forks; 0 for none.
    forker: AtomicU32,
}

/// A thread that serves a touch. While it lives, the gate does not close.
pub(crate) struct Admitted<'a> {
    /// Not if the gate is closed: the thread that forks waits for this one.
    _moving: Option<RwLockReadGuard<'a, ()>>,
}

/// A closed gate. It opens when this is dropped.
pub(crate) struct Closed<'a> {
    gate: &'a Gate,
    _moving: RwLockWriteGuard<'a, ()>,
}

impl Gate {
    pub(crate) fn new() -> Gate {
        Gate { changing: RwLock::new(()), moving: RwLock::new(()), forker: AtomicU32::new(0) }
    }

    /// Has the process not fork while the result lives.
    pub(crate) fn change(&self) -> RwLockReadGuard<'_, ()> {
        self.changing.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no thread changes memory, and none does while the result lives.
    pub(crate) fn stop_changes(&self) -> RwLockWriteGuard<'_, ()> {
        self.changing.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no touch is being served, and none is while the result lives, except those of this thread.
    pub(crate) fn close(&self, thread: u32) -> Closed<'_> {
        self.forker.store(thread, Ordering::SeqCst);
        let moving = self.moving.write().unwrap_or_else(PoisonError::into_inner);
        Closed { gate: self, _moving: moving }
    }

    /// Returns whether a touch of this thread is served now.
    pub(crate) fn admit(&self, thread: u32) -> Option<Admitted<'_>> {
        let moving = self.moving.try_read().ok();
        (moving.is_some() || self.is_forker(thread)).then_some(Admitted { _moving: moving })
    }

    /// Returns whether this is the thread that forks: then it is woken at the end of serving its touch, wherever its page is.
    pub(crate) fn is_forker(&self, thread: u32) -> bool {
        self.forker.load(Ordering::SeqCst) == thread
    }

    /// Returns whether threads are woken as soon as their pages are there.
    pub(crate) fn is_open(&self) -> bool {
        self.is_forker(0)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        // Before touches are served again: those that are must wake their threads.
        self.gate.forker.store(0, Ordering::SeqCst);
    }
}
