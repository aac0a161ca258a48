//! Deferred frees: a free puts the handle on a list of its CPU, and a thread frees the objects later, in batches.
//!
//! A pool has this if it is built with [`PoolBuilder::defer_frees`](super::PoolBuilder::defer_frees), whatever its lock
//! design. The idea is Wenchao Hao's ("Re: [RFC PATCH v2 0/4] mm/zsmalloc: reduce zs_free() latency on swap release
//! path", 30 April 2026); sorting a batch by zspage, the limit, and the flushes are ours.
//!
//! An object whose free waits is in use for all that the pool does: its handle is not used for another object, its pages
//! and its place in the statistics stay, and compaction may move it. [`RawPool::flush_frees`] frees what waits. The pool
//! calls it itself
//!
//! * when a store that may wait finds no room;
//! * before compaction, and before and after owners are asked to free the coldest objects;
//! * when the pool is dropped.
//!
//! The thread that frees is the program's ([`RawPool::run_freer`]), as is the one that returns an arena's free memory to the
//! system. Without it, threads that find no room on the lists free batches themselves.
//!
//! `lists` has the lists, `batch` frees a batch. No lock is held while a batch is freed but those of its class's lists.

mod batch;
mod lists;

#[cfg(all(test, loom))]
mod loom_tests;

pub(super) use lists::DeferredLists;

use std::thread;
use std::time::{Duration, Instant};

use super::design::PoolLocks;
use super::raw::RawPool;

/// How long the freer waits for a batch to fill up before it frees what the lists hold, and after which it does that even
/// if other batches are full: the memory of the last frees is back that much later, and rare frees wake it at most that often.
const LINGER: Duration = Duration::from_millis(2);

impl<D: PoolLocks> RawPool<D> {
    /// Has a handle freed later.
    ///
    /// # Safety
    /// As [`RawPool::free`].
    #[inline]
    pub(super) unsafe fn defer(&self, deferred: &DeferredLists, handle: u32) {
        // SAFETY: these handles were deferred, and none is given to two calls.
        deferred.defer(handle, |handles| unsafe { self.free_batch(handles) });
    }

    /// Frees all objects whose frees wait, and waits for other threads that are freeing some; returns whether any waited.
    pub fn flush_frees(&self) -> bool {
        // SAFETY: as in `defer`.
        let free = |handles: &[u32]| unsafe { self.free_batch(handles) };
        self.deferred.as_ref().is_some_and(|deferred| deferred.flush(free))
    }

    /// Frees objects on this thread as their frees come, as long as `still_wanted`, then those that wait. To end it,
    /// unpark the thread when `still_wanted` has changed. One thread at a time is woken for this.
    pub fn run_freer(&self, still_wanted: impl Fn() -> bool) {
        let Some(deferred) = &self.deferred else { return };
        // SAFETY: as in `defer`.
        let free = |handles: &[u32]| unsafe { self.free_batch(handles) };
        deferred.set_freer(Some(thread::current()));
        let (mut nothing_waits, mut flushed) = (false, Instant::now());
        // Each turn parks once at most, so that an unpark for `still_wanted` is never taken for another.
        while still_wanted() {
            if deferred.free_queued(free) {
                if flushed.elapsed() >= LINGER {
                    deferred.flush(free);
                    flushed = Instant::now();
                }
            } else if nothing_waits {
                deferred.sleep();
                nothing_waits = false;
            } else {
                deferred.rest(LINGER);
                // After a quiet time, what the lists hold.
                nothing_waits = !deferred.free_queued(free) && !deferred.flush(free);
            }
        }
        deferred.set_freer(None);
        deferred.flush(free);
    }

    /// Returns the number of objects whose frees wait or are going on, each of at most a page. One may count twice while its
    /// batch is queued.
    pub fn waiting_frees(&self) -> u64 {
        self.deferred.as_ref().map_or(0, DeferredLists::waiting)
    }
}

impl<D: PoolLocks> Drop for RawPool<D> {
    fn drop(&mut self) {
        self.flush_frees();
    }
}
