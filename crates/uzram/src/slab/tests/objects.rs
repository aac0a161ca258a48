//! The contents of a test's objects, and the addresses in use.

use super::*;
use crate::base::sync::{AtomicU64, Ordering};

/// An object in use. Its contents are computed from both numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Live {
    pub(super) object: u32,
    /// Unique among the objects of a test.
    pub(super) stamp: u64,
}

impl Live {
    pub(super) fn new<P: Policy>(cache: &Cache<P>, size: usize, object: u32, stamp: u64) -> Self {
        let live = Live { object, stamp };
        let (words, rest) = bytes_of(cache, size, object).as_chunks_mut();
        let mut expected = live.words();
        words.iter_mut().zip(&mut expected).for_each(|(word, expected)| *word = expected);
        expected.take(1).for_each(|expected| rest.copy_from_slice(&expected[..rest.len()]));
        live
    }

    /// Fails if a byte of the object has changed since it was filled.
    pub(super) fn check<P: Policy>(self, cache: &Cache<P>, size: usize) {
        let (words, rest) = bytes_of(cache, size, self.object).as_chunks();
        let mut expected = self.words();
        let mut intact = words.iter().zip(&mut expected).all(|(word, expected)| *word == expected);
        intact &= expected.take(1).all(|expected| *rest == expected[..rest.len()]);
        assert!(
            intact,
            "{self:x?} of {size} bytes holds {:x?} instead of {:x?}…",
            bytes_of(cache, size, self.object),
            self.words().take(2).collect::<Vec<_>>()
        );
    }

    /// Returns the words that the object holds, without end.
    fn words(self) -> impl Iterator<Item = [u8; 8]> {
        let first = (u64::from(self.object) << 40 ^ self.stamp).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0u64..).map(move |at| first.wrapping_add(at.wrapping_mul(0x0101_0101_0101_0101)).to_le_bytes())
    }
}

#[allow(clippy::mut_from_ref, reason = "the object is the caller's, and the cache's no more")]
pub(super) fn bytes_of<P: Policy>(cache: &Cache<P>, size: usize, object: u32) -> &mut [u8] {
    // SAFETY: the callers own the object, which has `size` bytes, as long as they keep the slice; or they
    // misuse it on purpose while no other thread runs, and it lies in a slab that is mapped.
    unsafe { std::slice::from_raw_parts_mut(cache.address(object), size) }
}

/// The addresses of an arena at which objects in use start, shared by all threads.
pub(super) struct Claims {
    base: usize,
    /// A bit for each 8 bytes, in words of 64.
    bits: Vec<AtomicU64>,
}

impl Claims {
    pub(super) fn new(arena: &Arena) -> Self {
        let words = arena.reserved_pages() * PAGE_SIZE / 8 / 64;
        Claims { base: arena.address(0).addr(), bits: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Claims the address of a new object.
    pub(super) fn take(&self, address: *mut u8, size: usize, align: usize) {
        assert_eq!(address.addr() % align, 0, "{address:?} is not aligned to {align}");
        let offset = address.addr().checked_sub(self.base).expect("before the arena");
        assert!(offset + size <= self.bits.len() * 64 * 8, "beyond the arena");
        let (word, bit) = self.bit(address);
        assert_eq!(word.fetch_or(bit, Ordering::Relaxed) & bit, 0, "{address:?} was handed out twice");
    }

    /// Gives up the claim of an object that is about to be freed.
    pub(super) fn give_back(&self, address: *mut u8) {
        let (word, bit) = self.bit(address);
        assert_ne!(word.fetch_and(!bit, Ordering::Relaxed) & bit, 0, "{address:?} is not in use");
    }

    // The callers use Relaxed, so that race detectors see no ordering that the cache does not provide.
    fn bit(&self, address: *mut u8) -> (&AtomicU64, u64) {
        let at = (address.addr() - self.base) / 8;
        (&self.bits[at / 64], 1 << (at % 64))
    }
}
