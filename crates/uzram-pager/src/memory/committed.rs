//! Which parts of the allocator's memory are in use: the allocator says so for runs that overlap, and more
//! than once.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};
use uzram::{Error, ErrorKind, Result};

/// Use is counted in parts of so many bytes, which is what mimalloc hands out.
const PART_BYTES: usize = 64 << 10;
const WORD_BITS: usize = u64::BITS as usize;

/// See the [module's documentation](self).
pub(super) struct Committed {
    /// A bit for each part, set if it is in use. Never unmapped before this value is dropped.
    words: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the words are atomic, and belong to no thread.
unsafe impl Send for Committed {}
// SAFETY: as for `Send`.
unsafe impl Sync for Committed {}

impl Committed {
    /// Returns the parts of `bytes`, of which none is in use. Takes memory as they are used. Errors:
    /// `NoMemory`.
    pub(super) fn new(bytes: usize) -> Result<Committed> {
        let count = bytes.div_ceil(PART_BYTES).div_ceil(WORD_BITS).max(1);
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let words = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), count * 8, access, flags) };
        let words = words.ok().and_then(|words| NonNull::new(words.cast()));
        let refused = || Error::new(ErrorKind::NoMemory, "the system refused memory for a table");
        Ok(Committed { words: words.ok_or_else(refused)?, count })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped, zeros at first, which are valid for atomics.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.count) }
    }

    /// Calls `f` with each word that has parts of bytes at `offset`, and their bits in it; returns the sum of
    /// its results in bytes.
    fn sum(&self, offset: usize, len: usize, f: impl Fn(&AtomicU64, u64) -> u64) -> u64 {
        let (mut part, end) = (offset / PART_BYTES, (offset + len).div_ceil(PART_BYTES));
        let mut parts = 0u64;
        while part < end {
            let bit = part % WORD_BITS;
            let bits = (WORD_BITS - bit).min(end - part);
            let mask = (u64::MAX >> (WORD_BITS - bits)) << bit;
            parts += self.words().get(part / WORD_BITS).map_or(0, |word| f(word, mask));
            part += bits;
        }
        parts * PART_BYTES as u64
    }

    /// Notes that bytes are in use; returns how many were not.
    pub(super) fn add(&self, offset: usize, len: usize) -> u64 {
        self.sum(offset, len, |word, mask| {
            (!word.fetch_or(mask, Ordering::Relaxed) & mask).count_ones().into()
        })
    }

    /// Notes that bytes are not in use any more; returns how many were.
    pub(super) fn remove(&self, offset: usize, len: usize) -> u64 {
        self.sum(offset, len, |word, mask| {
            (word.fetch_and(!mask, Ordering::Relaxed) & mask).count_ones().into()
        })
    }
}

impl Drop for Committed {
    fn drop(&mut self) {
        // SAFETY: the value owns the mapping, and nobody has the words any more.
        let unmapped = unsafe { rustix::mm::munmap(self.words.as_ptr().cast(), self.count * 8) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::random::Random;

    use super::*;

    #[test]
    fn what_is_told_twice_counts_once() {
        const PARTS: usize = 300;
        let committed = Committed::new(PARTS * PART_BYTES).unwrap();
        let mut model = [false; PARTS];
        let mut random = Random::new(1);
        for step in 0..2000 {
            let first = random.next() as usize % PARTS;
            let parts = (random.next() as usize % 150 + 1).min(PARTS - first);
            let (offset, len) = (first * PART_BYTES, parts * PART_BYTES);
            let run = &mut model[first..first + parts];
            let used = run.iter().filter(|used| **used).count();
            let bytes = |parts: usize| (parts * PART_BYTES) as u64;
            if random.next().is_multiple_of(2) {
                assert_eq!(committed.add(offset, len), bytes(parts - used), "step {step}");
                run.fill(true);
            } else {
                assert_eq!(committed.remove(offset, len), bytes(used), "step {step}");
                run.fill(false);
            }
        }
        assert_eq!(committed.add(1, 1), if model[0] { 0 } else { PART_BYTES as u64 });
    }
}
