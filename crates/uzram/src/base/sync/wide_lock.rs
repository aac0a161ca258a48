//! A lock of two bits, 30 bits of its holder's, a stamp and a word of data in 16 bytes, which are published
//! together: a lock per page costs no memory.
//!
//! ```text
//!  0   bits    [ locked | waiters | the holder's 30 bits ]
//!  4   stamp   a number that the holder changes at once
//!  8   data    a number that the release of the lock publishes
//! ```
//!
//! The exchange that takes the lock returns the holder's bits, the one that releases it publishes the new
//! ones. A thread that does not get the lock spins for a moment, then sleeps in a [`WaitTable`], which many
//! words share (the parking-lot scheme: WebKit's ParkingLot, Pizlo 2015).
//!
//! A holder that replaces the data publishes it, the holder's bits and the unlocked state in one store, a
//! 16-byte compare-and-exchange. In memory that outlives the process, the word therefore holds its old
//! contents or its new ones, never a mix, wherever the process died. On a CPU without such a store
//! ([`stores_16_bytes`]), and in models, the data is stored first, then the lock is released.

use super::class::classes;
use super::hold::Hold;
use super::stats::{LastCpus, LockMode};
use super::{Access, AtomicU32, AtomicU64, Condvar, Mutex, Ordering, Stamp, spin_loop};

const LOCKED: u32 = 1 << 31;
const WAITERS: u32 = 1 << 30;

/// Tries before a waiter sleeps: some microseconds, several times as long as a holder takes that
/// does not compress under the lock.
const SPINS: u32 = if cfg!(loom) { 1 } else { 100 };

/// Two lock bits, 30 bits of the holder, a stamp and a word of data.
#[derive(Default)]
#[cfg_attr(not(loom), repr(C, align(16)))]
pub struct WideLock {
    bits: AtomicU32,
    stamp: Stamp,
    data: AtomicU64,
    /// Tracks the accesses to `data` for loom.
    access: Access,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<WideLock>() == 16);

/// Holds a [`WideLock`]. Dropping it publishes what was set and releases the lock.
pub struct WideGuard<'a> {
    word: &'a WideLock,
    bucket: &'a Bucket,
    bits: u32,
    /// The data to publish; `None` if it was not set.
    new: Option<u64>,
    _hold: Hold,
}

/// The buckets in which threads sleep that wait for a [`WideLock`].
pub struct WaitTable {
    buckets: Box<[Bucket]>,
    last_cpus: LastCpus,
}

struct Bucket {
    /// The number of threads that sleep here.
    lock: Mutex<usize>,
    freed: Condvar,
}

impl WaitTable {
    /// Makes a table of `buckets` buckets. Words of different buckets never wake each other's waiters.
    pub fn new(buckets: usize) -> Self {
        let bucket = |_| Bucket { lock: Mutex::new(&classes::WAIT_TABLE, 0), freed: Condvar::new() };
        WaitTable { buckets: (0..buckets.max(1)).map(bucket).collect(), last_cpus: LastCpus::new() }
    }

    /// Wakes all sleeping threads to check their locks again: some locks were released without a
    /// [`WideGuard`], as their memory became zeros.
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

/// Returns whether a [`WideLock`] is published in one store.
pub fn stores_16_bytes() -> bool {
    #[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
    return std::arch::is_x86_feature_detected!("cmpxchg16b");
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, tsan)))))]
    return false;
}

impl WideLock {
    /// The bits of the holder's.
    pub const BITS_MASK: u32 = WAITERS - 1;

    /// Waits for the lock. `key` selects the bucket of `table`; it must be the same at every call
    /// for this word.
    #[inline]
    pub fn lock<'a>(&'a self, table: &'a WaitTable, key: usize) -> WideGuard<'a> {
        let bucket = table.bucket(key);
        let wait = || self.try_take().unwrap_or_else(|| self.lock_slow(bucket));
        let last = table.last_cpus.of(key);
        let mode = LockMode::Exclusive;
        let (bits, hold) = Hold::take(&classes::SLOT, last, mode, || self.try_take(), wait);
        WideGuard { word: self, bucket, bits, new: None, _hold: hold }
    }

    /// Takes the lock if it is free.
    pub fn try_lock<'a>(&'a self, table: &'a WaitTable, key: usize) -> Option<WideGuard<'a>> {
        let bits = self.try_take()?;
        let hold = Hold::new(&classes::SLOT, table.last_cpus.of(key), LockMode::Exclusive);
        Some(WideGuard { word: self, bucket: table.bucket(key), bits, new: None, _hold: hold })
    }

    #[inline]
    fn try_take(&self) -> Option<u32> {
        let old = self.bits.load(Ordering::Relaxed);
        if old & LOCKED != 0 {
            return None;
        }
        let taken = self.bits.compare_exchange(old, old | LOCKED, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().map(|old| old & Self::BITS_MASK)
    }

    #[cold]
    fn lock_slow(&self, bucket: &Bucket) -> u32 {
        for _ in 0..SPINS {
            if let Some(bits) = self.try_take() {
                return bits;
            }
            spin_loop();
        }
        let mut sleeper = bucket.lock.lock();
        loop {
            let old = self.bits.load(Ordering::Relaxed);
            let new = if old & LOCKED == 0 { old | LOCKED } else { old | WAITERS };
            if self.bits.compare_exchange(old, new, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            if old & LOCKED == 0 {
                return old & Self::BITS_MASK;
            }
            // The holder takes the bucket's lock before it wakes waiters, and this thread holds
            // that lock from before it set WAITERS until it sleeps: no wake-up is lost.
            *sleeper += 1;
            sleeper = sleeper.wait(&bucket.freed);
            *sleeper -= 1;
        }
    }

    /// Returns the holder's bits as they were last published, without waiting for a holder that may be about
    /// to replace them.
    #[inline]
    pub fn peek_bits(&self) -> u32 {
        self.bits.load(Ordering::Acquire) & Self::BITS_MASK
    }

    /// Returns whether the lock is free and the holder's bits are 0. If so, the last holder's writes are
    /// visible to the caller.
    #[inline]
    pub fn is_free_and_zero(&self) -> bool {
        self.bits.load(Ordering::Acquire) == 0
    }

    /// Takes the lock if it is free and the holder's bits are 0; returns whether it did. The lock stays taken
    /// until [`WideLock::reopen`], or until the word's memory becomes zeros. There is no guard, so that a
    /// thread can hold many locks; it must not wait for other threads meanwhile.
    pub fn close(&self) -> bool {
        self.bits.compare_exchange(0, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Releases a lock that [`WideLock::close`] took.
    pub fn reopen(&self, table: &WaitTable, key: usize) {
        if self.bits.swap(0, Ordering::Release) & WAITERS != 0 {
            table.bucket(key).wake();
        }
    }

    /// Sets the holder's bits and frees the lock, even if it is taken: its holder was a thread of a process
    /// that has ended.
    pub fn reset(&self, bits: u32) {
        debug_assert_eq!(bits & !Self::BITS_MASK, 0, "the top two bits are the lock's");
        // Do not write to the page unless the word changes.
        if self.bits.load(Ordering::Relaxed) != bits {
            self.bits.store(bits, Ordering::Relaxed);
        }
    }

    /// Returns the stamp. Takes no lock.
    #[inline]
    pub fn stamp(&self) -> u32 {
        self.stamp.get()
    }

    /// Returns the data as last published, for hints: the holder's bits may belong to other data.
    #[inline]
    pub fn peek_data(&self) -> u64 {
        self.data.load(Ordering::Relaxed)
    }

    /// Makes everything 0, for models: memory that goes back to the system becomes zeros.
    #[cfg(loom)]
    pub fn clear(&self) {
        self.access.write();
        self.stamp.set(0);
        self.data.store(0, Ordering::Relaxed);
        // By an exchange, as loom does not order a store after earlier exchanges.
        self.bits.swap(0, Ordering::Release);
    }

    /// Releases the lock with these bits and data; returns the bits that it had.
    #[inline]
    fn publish(&self, bits: u32, new: u64) -> u32 {
        #[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
        if stores_16_bytes() {
            // Only the holder changes the stamp and the data.
            let (stamp, old) = (self.stamp(), self.data.load(Ordering::Relaxed));
            // Other threads only set WAITERS, so the loop runs at most twice.
            loop {
                let locked = self.bits.load(Ordering::Relaxed);
                // SAFETY: a `WideLock` has 16 bytes, aligned to 16, laid out as drawn above, that only atomic
                // instructions change while it is shared.
                if unsafe { replace_16_bytes(self, [join(locked, stamp), old], [join(bits, stamp), new]) } {
                    return locked;
                }
            }
        }
        self.access.write();
        self.data.store(new, Ordering::Relaxed);
        self.bits.swap(bits, Ordering::Release)
    }
}

impl WideGuard<'_> {
    /// Returns the holder's bits.
    #[inline]
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Sets the bits that the release publishes.
    #[inline]
    pub fn set_bits(&mut self, bits: u32) {
        debug_assert_eq!(bits & !WideLock::BITS_MASK, 0, "the top two bits are the lock's");
        self.bits = bits;
    }

    /// Sets and publishes the stamp.
    #[inline]
    pub fn set_stamp(&self, stamp: u32) {
        self.word.stamp.set(stamp);
    }

    /// Returns the data, as last set.
    #[inline]
    pub fn data(&self) -> u64 {
        self.new.unwrap_or_else(|| {
            self.word.access.read();
            self.word.data.load(Ordering::Relaxed)
        })
    }

    /// Sets the data that the release publishes.
    #[inline]
    pub fn set_data(&mut self, data: u64) {
        self.new = Some(data);
    }
}

impl Drop for WideGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let before = match self.new {
            Some(new) => self.word.publish(self.bits, new),
            None => self.word.bits.swap(self.bits, Ordering::Release),
        };
        if before & WAITERS != 0 {
            self.bucket.wake();
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
fn join(bits: u32, stamp: u32) -> u64 {
    u64::from(stamp) << u32::BITS | u64::from(bits)
}

/// Replaces the 16 bytes of a word by `new` if they are `old`; returns whether it did. A full barrier.
///
/// # Safety
/// `word` is valid for atomic reads and writes, and the CPU has `cmpxchg16b`.
#[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
#[inline]
unsafe fn replace_16_bytes(word: *const WideLock, old: [u64; 2], new: [u64; 2]) -> bool {
    let replaced: u8;
    // SAFETY: the caller vouches for the word and the CPU; rbx, which LLVM reserves, is restored.
    unsafe {
        std::arch::asm!(
            "xchg rbx, rsi",
            "lock cmpxchg16b xmmword ptr [rdi]",
            "sete r8b",
            "mov rbx, rsi",
            // Named, so that none of them is rbx, which may be chosen for a `reg`.
            inout("rsi") new[0] => _,
            in("rdi") word,
            out("r8b") replaced,
            in("rcx") new[1],
            inout("rax") old[0] => _,
            inout("rdx") old[1] => _,
            options(nostack),
        );
    }
    replaced != 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn data_and_bits_are_published_together() {
        let (word, table) = (WideLock::default(), WaitTable::new(4));
        let mut guard = word.lock(&table, 0);
        guard.set_data(7);
        guard.set_bits(3);
        guard.set_stamp(5);
        assert_eq!((guard.data(), guard.bits()), (7, 3));
        assert_eq!((word.peek_data(), word.peek_bits(), word.stamp()), (0, 0, 5), "not yet published");
        assert!(word.try_lock(&table, 0).is_none());
        drop(guard);
        assert_eq!((word.peek_data(), word.peek_bits(), word.stamp()), (7, 3, 5));
        let mut guard = word.try_lock(&table, 0).expect("free");
        guard.set_bits(4);
        drop(guard);
        assert_eq!((word.peek_data(), word.peek_bits()), (7, 4));
    }

    /// Also while threads sleep until the lock is free, and whether it is released with data or without.
    #[test]
    fn many_threads_see_data_and_bits_that_agree() {
        let (word, table) = (WideLock::default(), WaitTable::new(1));
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let (word, table) = (&word, &table);
                scope.spawn(move || {
                    for i in 0..20_000u32 {
                        let mut guard = word.lock(table, 0);
                        assert_eq!(u64::from(guard.bits() >> 1), guard.data());
                        let next = guard.bits() + 2;
                        if thread % 2 == 0 {
                            guard.set_bits(next);
                            guard.set_data((next >> 1).into());
                            guard.set_stamp(i);
                        } else {
                            // Released without data.
                            let flipped = guard.bits() ^ 1;
                            guard.set_bits(flipped);
                        }
                        if i % 1000 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!((word.lock(&table, 0).data(), word.peek_bits()), (60_000, 120_000));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::base::sync::models::together;
    use crate::base::sync::{Arc, Guarded};

    /// Each of `threads` threads takes the lock once, alone, and sees what the one before published.
    fn exclusion(threads: u32) {
        loom::model(move || {
            let shared = Arc::new((WideLock::default(), WaitTable::new(1), Guarded::new(0u32)));
            together(threads, &shared, |(word, table, sum)| {
                let mut guard = word.lock(table, 0);
                // SAFETY: the lock is held.
                unsafe { sum.with_mut(|sum| *sum += 1) };
                let next = guard.bits() + 1;
                guard.set_bits(next);
            });
            let guard = shared.0.lock(&shared.1, 0);
            // SAFETY: the lock is held.
            assert_eq!((guard.bits(), unsafe { shared.2.with_mut(|sum| *sum) }), (threads, threads));
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
