//! A [`BitLock`], a stamp and a word of data in 16 bytes, which are published together.
//!
//! ```text
//!  0   lock    [ locked | waiters | the holder's 30 bits ]
//!  4   stamp   a number that the holder changes at once
//!  8   data    a number that the release of the lock publishes
//! ```
//!
//! A holder that replaces the data publishes it, the holder's bits and the unlocked state in one store, a
//! 16-byte compare-and-exchange. In memory that outlives the process, the word therefore holds its old
//! contents or its new ones, never a mix, wherever the process died. On a CPU without such a store
//! ([`stores_16_bytes`]), and in models, the data is stored first, then the lock is released.

use super::bit_lock::{BitGuard, BitLock, WaitTable};
use super::{Access, AtomicU64, Ordering, Stamp};

/// A [`BitLock`], a stamp and a word of data, which are published together.
#[derive(Default)]
#[cfg_attr(not(loom), repr(C, align(16)))]
pub struct WideLock {
    lock: BitLock,
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
    lock: BitGuard<'a>,
    /// The data to publish; `None` if it was not set.
    new: Option<u64>,
}

/// Returns whether a [`WideLock`] is published in one store.
pub fn stores_16_bytes() -> bool {
    #[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
    return std::arch::is_x86_feature_detected!("cmpxchg16b");
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, tsan)))))]
    return false;
}

impl WideLock {
    /// Waits for the lock: [`BitLock::lock`].
    #[inline]
    pub fn lock<'a>(&'a self, table: &'a WaitTable, key: usize) -> WideGuard<'a> {
        WideGuard { word: self, lock: self.lock.lock(table, key), new: None }
    }

    /// Takes the lock if it is free.
    pub fn try_lock<'a>(&'a self, table: &'a WaitTable, key: usize) -> Option<WideGuard<'a>> {
        Some(WideGuard { word: self, lock: self.lock.try_lock(table, key)?, new: None })
    }

    /// Returns the lock, to read its value and to close it without a guard.
    #[inline]
    pub fn bits(&self) -> &BitLock {
        &self.lock
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
        self.lock.clear();
    }
}

impl WideGuard<'_> {
    /// Returns the holder's bits.
    #[inline]
    pub fn bits(&self) -> u32 {
        self.lock.value()
    }

    /// Sets the bits that the release publishes.
    #[inline]
    pub fn set_bits(&mut self, bits: u32) {
        self.lock.set(bits);
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
        let Some(new) = self.new else { return };
        #[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
        if stores_16_bytes() {
            // Only the holder changes the stamp and the data.
            let (stamp, old) = (self.word.stamp(), self.word.data.load(Ordering::Relaxed));
            let word = std::ptr::from_ref(self.word);
            self.lock.release_by(|locked, unlocked| {
                // SAFETY: a `WideLock` has 16 bytes, aligned to 16, laid out as drawn above, that only atomic
                // instructions change while it is shared.
                unsafe { replace_16_bytes(word, [join(locked, stamp), old], [join(unlocked, stamp), new]) }
            });
            return;
        }
        self.word.access.write();
        self.word.data.store(new, Ordering::Relaxed);
    }
}

/// Returns the first eight bytes of a word.
#[cfg(all(target_arch = "x86_64", not(any(loom, tsan))))]
fn join(lock: u32, stamp: u32) -> u64 {
    u64::from(stamp) << u32::BITS | u64::from(lock)
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
        let (word, table) = (WideLock::default(), WaitTable::new(1));
        let mut guard = word.lock(&table, 0);
        guard.set_data(7);
        guard.set_bits(3);
        guard.set_stamp(5);
        assert_eq!((guard.data(), guard.bits()), (7, 3));
        assert_eq!((word.peek_data(), word.bits().peek(), word.stamp()), (0, 0, 5), "not yet published");
        drop(guard);
        assert_eq!((word.peek_data(), word.bits().peek(), word.stamp()), (7, 3, 5));
        let mut guard = word.lock(&table, 0);
        guard.set_bits(4);
        drop(guard);
        assert_eq!((word.peek_data(), word.bits().peek()), (7, 4));
    }

    /// Checks that data and bits agree for every holder, also while other threads sleep until the lock is
    /// free.
    #[test]
    fn many_threads_see_data_and_bits_that_agree() {
        let (word, table) = (WideLock::default(), WaitTable::new(1));
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for i in 0..20_000u32 {
                        let mut guard = word.lock(&table, 0);
                        assert_eq!(u64::from(guard.bits()), guard.data());
                        let next = guard.bits() + 1;
                        guard.set_bits(next);
                        guard.set_data(next.into());
                        guard.set_stamp(i);
                        if i % 1000 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(word.lock(&table, 0).data(), 120_000);
    }
}
