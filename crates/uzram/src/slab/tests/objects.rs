//! The contents of a test's objects, and the addresses in use.

use super::*;
use crate::base::error::Result;
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

/// A cache that has its arena for itself, and its objects in use.
pub(super) struct Objects<P: Policy> {
    pub(super) arena: Arc<Arena>,
    pub(super) cache: Cache<P>,
    pub(super) size: usize,
    align: usize,
    claims: Claims,
    pub(super) live: Vec<Live>,
    stamp: u64,
}

impl<P: Policy> Objects<P> {
    pub(super) fn new(shape: (usize, usize), restartable: bool) -> Self {
        let arena = arena();
        let cache = cache_of(&arena, shape, restartable);
        Self::of(arena, cache, shape)
    }

    pub(super) fn of(arena: Arc<Arena>, cache: Cache<P>, (size, align): (usize, usize)) -> Self {
        let claims = Claims::new(&arena);
        Objects { arena, cache, size, align, claims, live: Vec::new(), stamp: 0 }
    }

    pub(super) fn alloc(&mut self, gfp: Gfp) -> Result<()> {
        let object = self.cache.alloc(gfp)?;
        self.claims.take(self.cache.address(object), self.size, self.align);
        self.stamp += 1;
        self.live.push(Live::new(&self.cache, self.size, object, self.stamp));
        Ok(())
    }

    /// Takes an object out of those in use, to free it, after checking that it has not changed or moved.
    pub(super) fn take(&mut self, at: usize) -> u32 {
        let live = self.live.swap_remove(at);
        live.check(&self.cache, self.size);
        self.claims.give_back(self.cache.address(live.object), self.size);
        live.object
    }

    pub(super) fn free(&mut self, at: usize) {
        let object = self.take(at);
        self.cache.free(object).unwrap();
    }

    pub(super) fn check(&self) {
        self.live.iter().for_each(|live| live.check(&self.cache, self.size));
    }

    pub(super) fn check_info(&self) {
        check_info(&self.arena, &self.cache, self.live.len());
    }

    pub(super) fn finish(mut self) {
        (0..self.live.len()).rev().for_each(|at| self.free(at));
        self.check_info();
        check_all_is_back(&self.arena, vec![self.cache]);
    }
}

/// The addresses of an arena that objects in use have, shared by all threads.
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

    pub(super) fn take(&self, address: *mut u8, size: usize, align: usize) {
        assert_eq!(address.addr() % align, 0, "{address:?} is not aligned to {align}");
        let offset = address.addr().checked_sub(self.base).expect("before the arena");
        assert!(offset + size <= self.bits.len() * 64 * 8, "beyond the arena");
        for (word, bits) in self.bits(address, size) {
            assert_eq!(word.fetch_or(bits, Ordering::Relaxed) & bits, 0, "{address:?} was handed out twice");
        }
    }

    pub(super) fn give_back(&self, address: *mut u8, size: usize) {
        for (word, bits) in self.bits(address, size) {
            assert_eq!(word.fetch_and(!bits, Ordering::Relaxed) & bits, bits, "{address:?} is not in use");
        }
    }

    // The callers use Relaxed, so that race detectors see no ordering that the cache does not provide.
    fn bits(&self, address: *mut u8, size: usize) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let first = (address.addr() - self.base) / 8;
        let end = first + size.div_ceil(8);
        (first / 64..end.div_ceil(64)).map(move |word| {
            let (from, to) = (first.max(word * 64), end.min(word * 64 + 64));
            (&self.bits[word], !0 >> (64 - (to - from)) << (from % 64))
        })
    }
}
