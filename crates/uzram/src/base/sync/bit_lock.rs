//! A lock in two bits of a word that also holds other data: a lock per page costs no memory.
//!
//! ```text
//! 31       30        29                0
//! [ locked | waiters | value            ]
//! ```
//!
//! The value belongs to the holder and is read and replaced together with the lock: the exchange
//! that takes the lock returns it, the one that releases the lock publishes the new value. A thread
//! that does not get the lock spins for a moment, then sleeps in a [`WaitTable`], which many words
//! share (the parking-lot scheme: WebKit's ParkingLot, Pizlo 2015).

use super::class::{Hold, classes};
use super::stats::{LastCpus, LockMode};
use super::{AtomicU32, Condvar, Mutex, Ordering, spin_loop};

const LOCKED: u32 = 1 << 31;
const WAITERS: u32 = 1 << 30;

/// Tries before a waiter sleeps: some microseconds, several times as long as a holder takes that
/// does not compress under the lock.
const SPINS: u32 = if cfg!(loom) { 1 } else { 100 };

/// The word: two lock bits and 30 bits of value.
#[derive(Debug, Default)]
pub struct BitLock(AtomicU32);

/// The buckets in which threads sleep that wait for a [`BitLock`].
pub struct WaitTable {
    buckets: Box<[Bucket]>,
    last_cpus: LastCpus,
}

struct Bucket {
    /// The number of threads that sleep here.
    lock: Mutex<usize>,
    freed: Condvar,
}

/// Holds a [`BitLock`]. Dropping it publishes the value and releases the lock.
pub struct BitGuard<'a> {
    word: &'a AtomicU32,
    bucket: &'a Bucket,
    value: u32,
    /// [`BitGuard::release_by`] has released the lock.
    is_released: bool,
    _hold: Hold,
}

impl WaitTable {
    /// Makes a table of `buckets` buckets. Words of different buckets never wake each other's
    /// waiters.
    pub fn new(buckets: usize) -> Self {
        let bucket = |_| Bucket { lock: Mutex::new(&classes::WAIT_TABLE, 0), freed: Condvar::new() };
        WaitTable { buckets: (0..buckets.max(1)).map(bucket).collect(), last_cpus: LastCpus::new() }
    }

    /// Wakes all sleeping threads to check their locks again: some locks were released without a
    /// [`BitGuard`], as their memory became zeros.
    pub fn wake_all(&self) {
        self.buckets.iter().for_each(Bucket::wake);
    }

    #[inline]
    fn bucket(&self, key: usize) -> &Bucket {
        &self.buckets[key % self.buckets.len()]
    }
}

impl Bucket {
    /// Wakes the threads that sleep here. A thread about to sleep holds the bucket's lock until it sleeps.
    fn wake(&self) {
        let sleepers = *self.lock.lock();
        if sleepers > 0 {
            self.freed.notify_all();
        }
    }
}

impl BitLock {
    /// The bits of the value.
    pub const VALUE_MASK: u32 = WAITERS - 1;

    /// Waits for the lock. `key` selects the bucket of `table`; it must be the same at every call
    /// for this word.
    #[inline]
    pub fn lock<'a>(&'a self, table: &'a WaitTable, key: usize) -> BitGuard<'a> {
        let bucket = table.bucket(key);
        let wait = || self.try_take().unwrap_or_else(|| self.lock_slow(bucket));
        let last = table.last_cpus.of(key);
        let mode = LockMode::Exclusive;
        let (value, hold) = Hold::take(&classes::SLOT, last, mode, || self.try_take(), wait);
        BitGuard { word: &self.0, bucket, value, is_released: false, _hold: hold }
    }

    /// Takes the lock if it is free.
    pub fn try_lock<'a>(&'a self, table: &'a WaitTable, key: usize) -> Option<BitGuard<'a>> {
        let bucket = table.bucket(key);
        let value = self.try_take()?;
        let hold = Hold::new(&classes::SLOT, table.last_cpus.of(key), LockMode::Exclusive);
        Some(BitGuard { word: &self.0, bucket, value, is_released: false, _hold: hold })
    }

    #[inline]
    fn try_take(&self) -> Option<u32> {
        let old = self.0.load(Ordering::Relaxed);
        if old & LOCKED != 0 {
            return None;
        }
        let taken = self.0.compare_exchange(old, old | LOCKED, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().map(|old| old & Self::VALUE_MASK)
    }

    #[cold]
    fn lock_slow(&self, bucket: &Bucket) -> u32 {
        for _ in 0..SPINS {
            if let Some(value) = self.try_take() {
                return value;
            }
            spin_loop();
        }
        let mut sleeper = bucket.lock.lock();
        loop {
            let old = self.0.load(Ordering::Relaxed);
            let new = if old & LOCKED == 0 { old | LOCKED } else { old | WAITERS };
            if self.0.compare_exchange(old, new, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            if old & LOCKED == 0 {
                return old & Self::VALUE_MASK;
            }
            // The holder takes the bucket's lock before it wakes waiters, and this thread holds
            // that lock from before it set WAITERS until it sleeps: no wake-up is lost.
            *sleeper += 1;
            sleeper = sleeper.wait(&bucket.freed);
            *sleeper -= 1;
        }
    }
}

impl BitLock {
    /// Returns the value as it was last published, without waiting for a holder that may be about
    /// to replace it.
    #[inline]
    pub fn peek(&self) -> u32 {
        self.0.load(Ordering::Acquire) & Self::VALUE_MASK
    }

    /// Returns whether the lock is free and the value is 0. If so, the last holder's writes are
    /// visible to the caller.
    #[inline]
    pub fn is_free_and_zero(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Takes the lock if it is free and the value is 0; returns whether it did. The lock stays taken until
    /// [`BitLock::reopen`], or until the word's memory becomes zeros. There is no guard, so that a thread can
    /// hold many locks; it must not wait for other threads meanwhile.
    pub fn close(&self) -> bool {
        self.0.compare_exchange(0, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Releases a lock that [`BitLock::close`] took.
    pub fn reopen(&self, table: &WaitTable, key: usize) {
        if self.0.swap(0, Ordering::Release) & WAITERS != 0 {
            table.bucket(key).wake();
        }
    }

    /// Sets the value and frees the lock, even if it is taken: its holder was a thread of a process that has
    /// ended.
    #[cfg(not(loom))]
    pub fn reset(&self, value: u32) {
        debug_assert_eq!(value & !Self::VALUE_MASK, 0, "the top two bits are the lock's");
        // Do not write to the page unless the word changes.
        if self.0.load(Ordering::Relaxed) != value {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    /// Makes the word 0, for models: memory that goes back to the system becomes zeros.
    #[cfg(loom)]
    pub fn clear(&self) {
        // By an exchange, as loom does not order a store after earlier exchanges.
        self.0.swap(0, Ordering::Release);
    }
}

impl BitGuard<'_> {
    /// Returns the value.
    #[inline]
    pub fn value(&self) -> u32 {
        self.value
    }

    /// Sets the value that the release publishes.
    #[inline]
    pub fn set(&mut self, value: u32) {
        debug_assert_eq!(value & !BitLock::VALUE_MASK, 0, "the top two bits are the lock's");
        self.value = value;
    }

    /// Releases the lock by calling `replace` with the locked word and the unlocked one: if the word equals
    /// the first, `replace` stores the second, together with other data, and returns true. Afterwards the
    /// caller only drops the guard.
    #[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
    #[inline]
    pub(super) fn release_by(&mut self, replace: impl Fn(u32, u32) -> bool) {
        self.is_released = true;
        // Other threads only set WAITERS, so the loop runs at most twice.
        let waiters = loop {
            let locked = self.word.load(Ordering::Relaxed);
            if replace(locked, self.value) {
                break locked & WAITERS;
            }
        };
        if waiters != 0 {
            self.bucket.wake();
        }
    }
}

impl Drop for BitGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_released {
            return;
        }
        if self.word.swap(self.value, Ordering::Release) & WAITERS != 0 {
            self.bucket.wake();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct Shared(Cell<u64>);
    // SAFETY: the test only touches the cell while it holds the bit lock.
    unsafe impl Sync for Shared {}

    #[test]
    fn many_threads_lose_no_increment() {
        let (word, table, sum) = (BitLock::default(), WaitTable::new(1), Shared(Cell::new(0)));
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    let sum = &sum;
                    for i in 0..20_000 {
                        let mut guard = word.lock(&table, 0);
                        sum.0.set(sum.0.get() + 1);
                        guard.set((guard.value() + 1) & BitLock::VALUE_MASK);
                        if i % 1000 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!((sum.0.get(), word.lock(&table, 0).value()), (120_000, 120_000));
    }

    #[test]
    fn a_dropped_guard_leaves_the_value() {
        let (word, table) = (BitLock::default(), WaitTable::new(4));
        word.lock(&table, 0).set(7);
        let mut guard = word.lock(&table, 0);
        guard.set(9);
        assert_eq!(word.peek(), 7, "not yet published");
        guard.set(7);
        assert!(word.try_lock(&table, 0).is_none());
        assert_eq!(guard.value(), 7);
        drop(guard);
        assert_eq!(word.try_lock(&table, 0).expect("free").value(), 7);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::base::sync::{Arc, Guarded};

    /// Checks that `threads` threads that each take the lock once exclude each other, that each gets
    /// the lock, and that each sees what the one before published.
    fn exclusion(threads: u32) {
        loom::model(move || {
            let shared = Arc::new((BitLock::default(), WaitTable::new(1), Guarded::new(0u32)));
            let add = |shared: &(BitLock, WaitTable, Guarded<u32>)| {
                let mut guard = shared.0.lock(&shared.1, 0);
                // SAFETY: the bit lock is held.
                unsafe { shared.2.with_mut(|sum| *sum += 1) };
                guard.set(guard.value() + 1);
            };
            let others: Vec<_> = (1..threads)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || add(&shared))
                })
                .collect();
            add(&shared);
            for other in others {
                other.join().expect("no panic");
            }
            let guard = shared.0.lock(&shared.1, 0);
            // SAFETY: the bit lock is held.
            assert_eq!((guard.value(), unsafe { shared.2.with_mut(|sum| *sum) }), (threads, threads));
        });
    }

    #[test]
    fn loom_bit_lock_excludes_and_wakes() {
        exclusion(2);
    }

    #[test]
    #[ignore = "minutes: make loom"]
    fn loom_bit_lock_excludes_and_wakes_three() {
        exclusion(3);
    }
}
