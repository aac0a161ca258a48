//! Who may move pages while the process forks: the threads that serve touches, and those that change the
//! memory map.
//!
//! The gate closes in two steps:
//!
//! 1. [`Gate::stop_changes`] waits for the program's threads that are in the pager. Their stacks may lie in
//!    memory that it manages, so that all touches are served until they are done.
//! 2. [`Gate::close`] waits for the threads that serve touches, which touch no such memory. From now on only
//!    touches of the thread that forks are served, whose stack may be such memory, too. All others are left
//!    alone, and must be repeated when the gate is open again.
//!
//! From the second step on the thread that forks is not woken when its page is placed, but when the one that
//! serves it has nothing left to do: else something might move while the process is copied. It may find its
//! page there before it sleeps, and go on all the same: so it waits once more, by [`Closed::settle`], before
//! it forks.
//!
//! Lock order: changing, moving.

use std::sync::PoisonError;

use crate::sync::{AtomicU32, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard, yield_now};

/// See the [module's documentation](self).
pub(crate) struct Gate {
    /// Held shared by the program's threads that change memory, and exclusively while the process forks.
    changing: RwLock<()>,
    /// Held shared by the threads that serve touches, and exclusively while the process forks.
    moving: RwLock<()>,
    /// The thread that forks; 0 for none.
    forker: AtomicU32,
    /// How many touches of that thread are being served while the gate closes, or is closed.
    serving: AtomicU32,
}

/// A thread that serves a touch. While it lives, the gate does not close, or a process does not fork that has
/// closed it.
pub(crate) enum Admitted<'a> {
    Open {
        _moving: RwLockReadGuard<'a, ()>,
    },
    /// It is the thread that forks which touched.
    Closed(&'a Gate),
}

/// A closed gate. It opens when this is dropped.
pub(crate) struct Closed<'a> {
    gate: &'a Gate,
    _moving: RwLockWriteGuard<'a, ()>,
}

impl Gate {
    pub(crate) fn new() -> Gate {
        Gate {
            changing: RwLock::new(()),
            moving: RwLock::new(()),
            forker: AtomicU32::new(0),
            serving: AtomicU32::new(0),
        }
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
        if let Ok(_moving) = self.moving.try_read() {
            return Some(Admitted::Open { _moving });
        }
        self.is_forker(thread).then(|| {
            self.serving.fetch_add(1, Ordering::SeqCst);
            Admitted::Closed(self)
        })
    }

    /// Begins in a child, which has none of the threads that serve touches.
    pub(crate) fn begin_in_child(&self) {
        self.serving.store(0, Ordering::SeqCst);
    }

    /// Returns whether this is the thread that forks: then it is woken at the end of serving its touch,
    /// wherever its page is.
    pub(crate) fn is_forker(&self, thread: u32) -> bool {
        self.forker.load(Ordering::SeqCst) == thread
    }

    /// Returns whether threads are woken as soon as their pages are there.
    pub(crate) fn is_open(&self) -> bool {
        self.is_forker(0)
    }
}

impl Closed<'_> {
    /// Waits until no touch is being served. Nothing moves from now on but pages that this thread has not
    /// touched before.
    pub(crate) fn settle(&self) {
        while self.gate.serving.load(Ordering::SeqCst) > 0 {
            yield_now();
        }
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        if let Admitted::Closed(gate) = self {
            gate.serving.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        // Before touches are served again: those that are must wake their threads.
        self.gate.forker.store(0, Ordering::SeqCst);
    }
}
