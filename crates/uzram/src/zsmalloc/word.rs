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
pub trait ObjectWord: Send + Sync + 'static {
    /// How it is called.
    const NAME: &'static str;
    /// How many pages it can tell apart.
    const MAX_PAGES: u64;
    /// A handle's word in memory.
    type Cell: Default + Send + Sync;

    /// Leads the handle to an object.
    fn store(cell: &Self::Cell, object: Object);

    /// Where the handle leads.
    fn load(cell: &Self::Cell) -> Place;

    /// Where the object of a cell might be, if the word says enough: a hint.
    ///
    /// # Safety
    /// There is mapped memory, aligned for a cell; what is in it need be none.
    #[inline]
    unsafe fn peek(cell: *const Self::Cell) -> Option<Object> {
        let _ = cell;
        None
    }
}

impl ObjectWord for u64 {
    const NAME: &'static str = "u64";
    const MAX_PAGES: u64 = 1 << 32;
    type Cell = AtomicU64;

    #[inline]
    fn store(cell: &AtomicU64, object: Object) {
        cell.store(object.encode(), Ordering::Release);
    }

    #[inline]
    fn load(cell: &AtomicU64) -> Place {
        let Object { page, class, index } = Object::decode(cell.load(Ordering::Acquire));
        Place { page, index, class: Some(class) }
    }

    #[inline]
    unsafe fn peek(cell: *const AtomicU64) -> Option<Object> {
        // SAFETY: the caller's promise; whatever is there is taken as a number.
        Some(Object::decode(unsafe { cell.cast::<u64>().read_volatile() }))
    }
}

impl ObjectWord for u32 {
    const NAME: &'static str = "u32";
    const MAX_PAGES: u64 = 1 << (u32::BITS - INDEX_BITS_32);
    type Cell = AtomicU32;

    #[inline]
    fn store(cell: &AtomicU32, object: Object) {
        debug_assert!(u64::from(object.page) < Self::MAX_PAGES, "the pool is no larger");
        cell.store(object.page << INDEX_BITS_32 | u32::from(object.index), Ordering::Release);
    }

    #[inline]
    fn load(cell: &AtomicU32) -> Place {
        let word = cell.load(Ordering::Acquire);
        let index = word as u16 & ((1 << INDEX_BITS_32) - 1);
        Place { page: word >> INDEX_BITS_32, index, class: None }
    }
}

#[cfg(all(test, not(feature = "loom")))]
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
