//! Object words: what a handle leads to.
//!
//! ```text
//! u64   63          32 31    24 23       12 11          0
//!       [ page        | class  | index     | the design's ]
//! ```
//!
//! `page` is the first page of the zspage, `class` its size class, `index` the object's place in it.
//! Because the class stands in the word, a free can find it without any lock ("mm/zsmalloc: encode
//! class_idx in obj", W. Hao, 2026); the design of the kernel before that does not look there.

use crate::base::cpu::read_for_hint;
use crate::base::sync::{AtomicU64, Ordering};

use super::class::MAX_OBJECTS;

/// Bits of a word that are the design's.
pub const DESIGN_BITS: u32 = 12;
const INDEX_BITS: u32 = 12;
const CLASS_SHIFT: u32 = DESIGN_BITS + INDEX_BITS;
const PAGE_SHIFT: u32 = CLASS_SHIFT + u8::BITS;

const _: () = assert!(PAGE_SHIFT + 32 == u64::BITS && MAX_OBJECTS < 1 << INDEX_BITS);

/// Where an object is.
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
    /// As a word, the design's bits 0.
    #[inline]
    pub fn encode(self) -> u64 {
        u64::from(self.page) << PAGE_SHIFT
            | u64::from(self.class) << CLASS_SHIFT
            | u64::from(self.index) << DESIGN_BITS
    }

    /// From a word, whatever the design's bits are.
    #[inline]
    pub fn decode(word: u64) -> Self {
        Location {
            page: (word >> PAGE_SHIFT) as u32,
            class: (word >> CLASS_SHIFT) as u8,
            index: (word >> DESIGN_BITS) as u16 & ((1 << INDEX_BITS) - 1),
        }
    }
}

/// A handle's word, by the rules of a design. Any bytes are a cell.
pub trait Cell: Default + Send + Sync + 'static {
    /// Leads the handle to its object, which is written.
    fn publish(&self, object: Location);

    /// Whether the handle leads to `object`, and it could be moved now. The caller holds the
    /// [`MigrationGuard`](super::design::MigrationGuard) of its class.
    fn is_movable(&self, object: Location) -> bool;

    /// Leads the handle from one place to another, which has the same contents; returns false if the
    /// object cannot be moved now. The caller holds the [`MigrationGuard`](super::design::MigrationGuard)
    /// of its class.
    fn relocate(&self, from: Location, to: Location) -> bool;

    /// Where the object of the cell at `cell` might be, if its word says enough: a hint, as others may be changing what is
    /// there, which need not be a cell ([`read_for_hint`]).
    ///
    /// # Safety
    /// It is aligned as one, and mapped.
    unsafe fn hint(cell: *const Self) -> Option<Location>;
}

/// A cell of nothing but a word, which locks protect.
#[derive(Default)]
#[repr(transparent)]
pub struct WordCell(AtomicU64);

impl WordCell {
    /// Where the handle leads.
    #[inline]
    pub fn object(&self) -> Location {
        Location::decode(self.0.load(Ordering::Acquire))
    }
}

impl Cell for WordCell {
    #[inline]
    fn publish(&self, object: Location) {
        self.0.store(object.encode(), Ordering::Release);
    }

    fn is_movable(&self, object: Location) -> bool {
        self.object() == object
    }

    fn relocate(&self, _: Location, to: Location) -> bool {
        self.publish(to);
        true
    }

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
            let cell = WordCell::default();
            cell.publish(object);
            assert_eq!(cell.object(), object);
        }
    }
}
