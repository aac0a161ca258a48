//! Object words: what a handle leads to.
//!
//! ```text
//! u64   63          32 31    24 23       12 11          0
//!       [ page        | class  | index     | the design's ]
//!
//! u32   31                       11 10      0
//!       [ page                     | index   ]
//! ```
//!
//! `page` is the first page of the zspage, `class` its size class, `index` the object's place in it.
//! Where the class stands in the word, a free finds it without any lock ("mm/zsmalloc: encode
//! class_idx in obj", W. Hao, 2026); the smaller word has no room for it, and names 2^21 pages, 8 GiB.

use crate::base::cpu::read_for_hint;
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};

use super::class::MAX_OBJECTS;

/// Bits of a u64 word that are the design's.
pub const DESIGN_BITS: u32 = 12;
const INDEX_BITS: u32 = 12;
const CLASS_SHIFT: u32 = DESIGN_BITS + INDEX_BITS;
const PAGE_SHIFT: u32 = CLASS_SHIFT + u8::BITS;
const INDEX_BITS_32: u32 = 11;

const _: () = assert!(PAGE_SHIFT + 32 == u64::BITS && MAX_OBJECTS < 1 << INDEX_BITS);
const _: () = assert!(MAX_OBJECTS < 1 << INDEX_BITS_32);

/// Where an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The first page of its zspage.
    pub page: u32,
    /// Its size class.
    pub class: u8,
    /// Its number within the zspage.
    pub index: u16,
}

impl Object {
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
        Object {
            page: (word >> PAGE_SHIFT) as u32,
            class: (word >> CLASS_SHIFT) as u8,
            index: (word >> DESIGN_BITS) as u16 & ((1 << INDEX_BITS) - 1),
        }
    }
}

/// What a word says of where its object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The first page of its zspage.
    pub page: u32,
    /// Its number within the zspage.
    pub index: u16,
    /// Its size class, if the word has room for it.
    pub class: Option<u8>,
}

/// A layout of object words.
pub trait ObjectWord: Default + Send + Sync + 'static {
    /// How many pages it can tell apart.
    const MAX_PAGES: u64;
    /// A word in memory.
    type Atomic: Default + Send + Sync;

    /// Makes a word lead to an object.
    fn store(word: &Self::Atomic, object: Object);

    /// Where a word leads.
    fn load(word: &Self::Atomic) -> Place;

    /// As [`Cell::hint`].
    ///
    /// # Safety
    /// As there.
    unsafe fn hint(word: *const Self::Atomic) -> Option<Object>;
}

impl ObjectWord for u64 {
    const MAX_PAGES: u64 = 1 << 32;
    type Atomic = AtomicU64;

    #[inline]
    fn store(word: &AtomicU64, object: Object) {
        word.store(object.encode(), Ordering::Release);
    }

    #[inline]
    fn load(word: &AtomicU64) -> Place {
        let Object { page, class, index } = Object::decode(word.load(Ordering::Acquire));
        Place { page, index, class: Some(class) }
    }

    #[inline]
    unsafe fn hint(word: *const AtomicU64) -> Option<Object> {
        // SAFETY: the caller's promise.
        unsafe { read_for_hint(word.cast()) }.map(Object::decode)
    }
}

impl ObjectWord for u32 {
    const MAX_PAGES: u64 = 1 << (u32::BITS - INDEX_BITS_32);
    type Atomic = AtomicU32;

    #[inline]
    fn store(word: &AtomicU32, object: Object) {
        debug_assert!(u64::from(object.page) < Self::MAX_PAGES, "the pool is no larger");
        word.store(object.page << INDEX_BITS_32 | u32::from(object.index), Ordering::Release);
    }

    #[inline]
    fn load(word: &AtomicU32) -> Place {
        let word = word.load(Ordering::Acquire);
        let index = word as u16 & ((1 << INDEX_BITS_32) - 1);
        Place { page: word >> INDEX_BITS_32, index, class: None }
    }

    /// The class is missing.
    #[inline]
    unsafe fn hint(_: *const AtomicU32) -> Option<Object> {
        None
    }
}

/// A handle's word, by the rules of a design. Any bytes are a cell.
pub trait Cell: Default + Send + Sync + 'static {
    /// Leads the handle to its object, which is written.
    fn publish(&self, object: Object);

    /// Whether the handle leads to `object`, and it could be moved now. The lists of its class are
    /// [`Still`](super::design::Still).
    fn is_movable(&self, object: Object) -> bool;

    /// Leads the handle from one place to another, which has the same contents; answers false if the
    /// object cannot be moved now. The lists of its class are [`Still`](super::design::Still).
    fn relocate(&self, from: Object, to: Object) -> bool;

    /// Where the object of the cell at `cell` might be, if its word says enough: a hint, as others may be changing what is
    /// there, which need not be a cell ([`read_for_hint`]).
    ///
    /// # Safety
    /// It is aligned as one, and mapped.
    unsafe fn hint(cell: *const Self) -> Option<Object>;
}

/// A cell of nothing but a word, which locks protect.
#[derive(Default)]
#[repr(transparent)]
pub struct WordCell<W: ObjectWord>(W::Atomic);

impl<W: ObjectWord> WordCell<W> {
    /// Where the handle leads.
    #[inline]
    pub fn place(&self) -> Place {
        W::load(&self.0)
    }
}

impl<W: ObjectWord> Cell for WordCell<W> {
    #[inline]
    fn publish(&self, object: Object) {
        W::store(&self.0, object);
    }

    fn is_movable(&self, object: Object) -> bool {
        let Place { page, index, .. } = self.place();
        (page, index) == (object.page, object.index)
    }

    fn relocate(&self, _: Object, to: Object) -> bool {
        W::store(&self.0, to);
        true
    }

    #[inline]
    unsafe fn hint(cell: *const Self) -> Option<Object> {
        // SAFETY: the caller's promise; a cell is its word.
        unsafe { W::hint(cell.cast()) }
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
            let object = Object { page: random.next() as u32, class: random.next() as u8, index };
            assert_eq!(Object::decode(object.encode() | random.next() & 0xfff), object);
            let large = AtomicU64::default();
            <u64 as ObjectWord>::store(&large, object);
            let Object { page, class, .. } = object;
            assert_eq!(<u64 as ObjectWord>::load(&large), Place { page, index, class: Some(class) });
            let page = page % (1 << 21);
            let small = AtomicU32::default();
            <u32 as ObjectWord>::store(&small, Object { page, ..object });
            assert_eq!(<u32 as ObjectWord>::load(&small), Place { page, index, class: None });
        }
    }
}
