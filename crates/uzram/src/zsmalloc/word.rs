//! Object words: what a handle resolves to.
//!
//! ```text
//! u64   63          32 31    24 23       12 11          0
//!       [ page        | class  | index     | design bits  ]
//! ```
//!
//! With the class in the word, a free finds it without any lock ("mm/zsmalloc: encode class_idx in obj", W.
//! Hao, 2026); the kernel's earlier design, `Split`, does not read it.

use crate::base::cpu::read_for_hint;
use crate::base::sync::{AtomicU64, Ordering};

use super::class::MAX_OBJECTS;

/// Bits of a word that belong to the lock design.
pub const DESIGN_BITS: u32 = 12;
pub(super) const INDEX_BITS: u32 = 12;
const CLASS_SHIFT: u32 = DESIGN_BITS + INDEX_BITS;
const PAGE_SHIFT: u32 = CLASS_SHIFT + u8::BITS;

const _: () = assert!(PAGE_SHIFT + 32 == u64::BITS && MAX_OBJECTS < 1 << INDEX_BITS);

/// The location of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The first page of its zspage.
    pub page: u32,
    /// Its size class.
    pub class: u8,
    /// Its number within the zspage.
    pub index: u16,
}

impl Location {
    /// Returns the word, with the design bits 0.
    #[inline]
    pub fn encode(self) -> u64 {
        u64::from(self.page) << PAGE_SHIFT
            | u64::from(self.class) << CLASS_SHIFT
            | u64::from(self.index) << DESIGN_BITS
    }

    /// Decodes a word; ignores the design bits.
    #[inline]
    pub fn decode(word: u64) -> Self {
        Location {
            page: (word >> PAGE_SHIFT) as u32,
            class: (word >> CLASS_SHIFT) as u8,
            index: (word >> DESIGN_BITS) as u16 & ((1 << INDEX_BITS) - 1),
        }
    }
}

/// A handle's word, as a lock design defines it: `repr(transparent)` over an atomic integer.
pub trait Cell: Default + Send + Sync + 'static {
    fn word(&self) -> &AtomicU64;

    /// Points the handle at its object, which has been written.
    #[inline]
    fn publish(&self, object: Location) {
        self.word().store(object.encode(), Ordering::Release);
    }

    /// Returns the location of the handle's object, whatever the design's bits are.
    #[inline]
    fn object(&self) -> Location {
        Location::decode(self.word().load(Ordering::Acquire))
    }

    /// Clears the design's bits. No other thread uses the handle.
    fn renew(&self) {
        let old = self.word().load(Ordering::Relaxed);
        let clean = Location::decode(old).encode();
        // Do not write to the page unless the word changes.
        if clean != old {
            self.word().store(clean, Ordering::Relaxed);
        }
    }

    /// Returns whether the handle points at `object` and the object can be moved now. The caller has locked
    /// its class for migration.
    fn is_movable(&self, object: Location) -> bool;

    /// Points the handle from one location at another with the same contents; returns false if the object
    /// cannot be moved now. The caller has locked its class for migration.
    fn relocate(&self, from: Location, to: Location) -> bool;

    /// Returns the likely location of the object of `cell`: a hint, as other threads may be changing the
    /// memory, which need not be a cell ([`read_for_hint`]).
    ///
    /// # Safety
    /// `cell` is aligned and mapped.
    #[inline]
    unsafe fn hint(cell: *const Self) -> Option<Location> {
        // SAFETY: the caller's promise; a cell is its word.
        unsafe { read_for_hint(cell.cast()) }.map(Location::decode)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::random::Random;

    #[test]
    fn words_keep_what_they_encode() {
        let mut random = Random::new(1);
        for _ in 0..1000 {
            let index = random.below(MAX_OBJECTS + 1) as u16;
            let object = Location { page: random.next() as u32, class: random.next() as u8, index };
            assert_eq!(Location::decode(object.encode() | random.next() & 0xfff), object);
        }
    }
}
