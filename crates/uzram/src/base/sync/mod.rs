//! The only door to atomics and locks: the standard library's, or loom's models of them when built
//! with `--cfg loom`, so that loom checks the code that ships.
//!
//! Every lock of the engine belongs to a [`LockClass`] declared here, in lock order. Debug builds check that
//! order at each acquisition; the feature `lock-stats` records acquisitions, waits and holds per class.
//! Without both a class costs nothing.

mod class;
mod hold;
mod guarded;
#[cfg(all(test, loom))]
pub(crate) mod models;
mod mutex;
mod rw_lock;
mod stats;
mod timed;
mod wide_lock;

pub use class::{LockClass, classes};
pub use guarded::{Access, Guarded};
pub use mutex::{Mutex, MutexGuard};
pub use rw_lock::{ReadGuard, RwLock, WriteGuard};
#[cfg(feature = "lock-stats")]
pub use stats::{
    LockMode, LockRecording, LockStat, LockTimes, lock_stats, record_locks_on_demand, reset_lock_stats,
};
pub use timed::Timed;
pub use wide_lock::{WaitTable, WideGuard, WideLock, stores_16_bytes};

#[cfg(loom)]
use loom as imp;
#[cfg(not(loom))]
use std as imp;

use imp::hint::spin_loop;
pub use imp::sync::Condvar;
pub use imp::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
pub use std::sync::{Arc, Weak};

/// How long a thread sleeps before it checks its wait condition again.
#[cfg(tsan)]
const TSAN_NAP: std::time::Duration = std::time::Duration::from_micros(200);

/// Takes a lock by polling. The standard library is not instrumented: ThreadSanitizer sees only its
/// inlined parts, and would miss the happens-before of a blocking wait.
#[cfg(tsan)]
fn wait_visibly<G>(try_take: impl Fn() -> Option<G>) -> G {
    loop {
        match try_take() {
            Some(guard) => break guard,
            None => std::thread::yield_now(),
        }
    }
}

/// Writes a byte's own value back to it, so that its page is resident. loom does not model this memory.
///
/// # Safety
/// The byte is writable, and other threads change it only atomically.
pub(crate) unsafe fn rewrite(byte: *mut u8) {
    // SAFETY: the caller's promise.
    let byte = unsafe { std::sync::atomic::AtomicU8::from_ptr(byte) };
    let value = byte.load(Ordering::Relaxed);
    // If the exchange fails, another thread has written to the page.
    let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
}

/// A [`Counter`] of 32 bits.
#[derive(Debug, Default)]
pub struct Stamp(std::sync::atomic::AtomicU32);

impl Stamp {
    /// Returns the value.
    #[inline]
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces the value unless it is the same already: other CPUs then keep the cache line.
    #[inline]
    pub fn set(&self, value: u32) {
        if self.get() != value {
            self.0.store(value, Ordering::Relaxed);
        }
    }
}

/// A number that only informs: statistics and settings, on which no other memory depends.
/// loom does not model it, as it would explore every order of counting.
#[derive(Debug, Default)]
pub struct Counter(std::sync::atomic::AtomicU64);

impl Counter {
    /// Makes a counter that starts at `value`.
    pub const fn new(value: u64) -> Self {
        Counter(std::sync::atomic::AtomicU64::new(value))
    }

    /// Adds `n` and returns the sum.
    #[inline]
    pub fn add(&self, n: u64) -> u64 {
        self.0.fetch_add(n, Ordering::Relaxed).wrapping_add(n)
    }

    /// Adds `n` unless the sum exceeds `limit` (0: none); returns whether it added.
    pub fn add_within(&self, n: u64, limit: u64) -> bool {
        let add = |now: u64| (limit == 0 || now + n <= limit).then_some(now + n);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    /// Subtracts `n`. A CPU's share may wrap below zero; the sum of the shares is right.
    #[inline]
    pub fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    /// Takes a lock by `try_take`, or else by `wait`, and counts the caller as a waiter meanwhile.
    /// Models only call `wait`, as the count is not modelled.
    #[inline]
    fn while_waiting<G>(&self, try_take: impl FnOnce() -> Option<G>, wait: impl FnOnce() -> G) -> G {
        if cfg!(loom) {
            return wait();
        }
        try_take().unwrap_or_else(|| {
            self.add(1);
            let guard = wait();
            self.sub(1);
            guard
        })
    }

    /// Returns the value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces the value.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Raises the value to at least `value`.
    #[inline]
    pub fn raise(&self, value: u64) {
        if self.get() < value {
            self.0.fetch_max(value, Ordering::Relaxed);
        }
    }
}
