//! Handle cells: where an object is, who reads it, and whether it is to go.
//!
//! ```text
//! 63          32 31    24 23       12  11    10     0
//! [ page        | class  | index     | freed | pins  ]
//! ```
//!
//! `page` is the first page of the zspage, `class` its size class, `index` the object's place in
//! it: a free finds its class without any lock. A reader raises `pins` while it looks at the
//! object; a free sets `freed`. The object is released by whoever sees both at rest: the free when
//! nobody reads, else the last reader. So readers and writers never wait for each other.
//!
//! A handle may only be pinned by someone who knows that it is not freed yet (the store holds the
//! slot's lock meanwhile).

use crate::base::sync::{Access, AtomicU64, Ordering, fence};

use super::class::MAX_OBJECTS;

const PIN_BITS: u32 = 11;
const INDEX_BITS: u32 = 12;
const PINS_MASK: u64 = (1 << PIN_BITS) - 1;
const FREED: u64 = 1 << PIN_BITS;
const INDEX_SHIFT: u32 = PIN_BITS + 1;
const CLASS_SHIFT: u32 = INDEX_SHIFT + INDEX_BITS;
const PAGE_SHIFT: u32 = CLASS_SHIFT + 8;
/// A thread that finds so many readers of one object takes its pin back and tries again, which
/// leaves room for as many more to do the same.
const MANY_PINS: u64 = PINS_MASK / 2;

const _: () = assert!(PAGE_SHIFT + 32 == u64::BITS && MAX_OBJECTS < 1 << INDEX_BITS);
#[cfg(not(feature = "loom"))]
const _: () = assert!(size_of::<HandleCell>() == 8);

/// Where an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Object {
    /// The first page of its zspage.
    pub(super) page: u32,
    /// Its size class.
    pub(super) class: u8,
    /// Its number within the zspage.
    pub(super) index: u16,
}

impl Object {
    fn encode(self) -> u64 {
        u64::from(self.page) << PAGE_SHIFT
            | u64::from(self.class) << CLASS_SHIFT
            | u64::from(self.index) << INDEX_SHIFT
    }

    fn decode(word: u64) -> Self {
        Object {
            page: (word >> PAGE_SHIFT) as u32,
            class: (word >> CLASS_SHIFT) as u8,
            index: (word >> INDEX_SHIFT) as u16 & ((1 << INDEX_BITS) - 1),
        }
    }
}

/// One handle's word.
#[derive(Debug, Default)]
pub(super) struct HandleCell {
    word: AtomicU64,
    /// The object's bytes.
    contents: Access,
}

impl HandleCell {
    /// Points the handle at an object that nobody else knows yet.
    #[inline]
    pub(super) fn publish(&self, object: Object) {
        self.contents.write();
        self.word.store(object.encode(), Ordering::Release);
    }

    /// Where the object of a cell is, if it is live; nothing may rest on it.
    ///
    /// # Safety
    /// There is mapped memory, aligned for a cell.
    #[inline]
    pub(super) unsafe fn peek(cell: *const HandleCell) -> Object {
        // SAFETY: the caller's promise; whatever is there is taken as a number.
        Object::decode(unsafe { cell.cast::<u64>().read_volatile() })
    }

    /// Keeps the object from being released until [`HandleCell::unpin`].
    #[inline]
    pub(super) fn pin(&self) -> Object {
        loop {
            let old = self.word.fetch_add(1, Ordering::Acquire);
            debug_assert_eq!(old & FREED, 0, "pinned after it was freed");
            if old & PINS_MASK < MANY_PINS {
                self.contents.read();
                return Object::decode(old);
            }
            self.word.fetch_sub(1, Ordering::Relaxed);
            std::thread::yield_now();
        }
    }

    /// Ends a pin. Answers the object if the caller must now release it.
    #[inline]
    pub(super) fn unpin(&self) -> Option<Object> {
        self.contents.read();
        let old = self.word.fetch_sub(1, Ordering::Release);
        self.at_rest(old, FREED | 1)
    }

    /// Marks the object as freed. Answers it if the caller must now release it.
    #[inline]
    pub(super) fn free(&self) -> Option<Object> {
        let old = self.word.fetch_or(FREED, Ordering::AcqRel);
        debug_assert_eq!(old & FREED, 0, "freed twice");
        self.at_rest(old, 0)
    }

    #[inline]
    fn at_rest(&self, old: u64, last: u64) -> Option<Object> {
        if old & (FREED | PINS_MASK) != last {
            return None;
        }
        // What the readers did comes before what happens to the object now.
        fence(Ordering::Acquire);
        self.contents.write();
        Some(Object::decode(old))
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
            let object = Object {
                page: random.next() as u32,
                class: random.next() as u8,
                index: random.below(MAX_OBJECTS + 1) as u16,
            };
            let cell = HandleCell::default();
            cell.publish(object);
            assert_eq!(cell.pin(), object);
            assert_eq!(cell.pin(), object);
            assert_eq!((cell.unpin(), cell.free(), cell.unpin()), (None, None, Some(object)));
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use crate::base::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    /// `readers` threads read the object while another frees it: exactly one of them releases it,
    /// after all have finished reading.
    fn release_once(readers: usize) {
        loom::model(move || {
            let object = Object { page: 3, class: 5, index: 7 };
            let shared = Arc::new((HandleCell::default(), AtomicUsize::new(0)));
            shared.0.publish(object);
            let threads: Vec<_> = (0..readers)
                .map(|_| {
                    // The pin is taken while the handle is known to be live.
                    assert_eq!(shared.0.pin(), object);
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || {
                        shared.0.contents.read();
                        if shared.0.unpin().is_some() {
                            shared.1.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            if shared.0.free().is_some() {
                shared.1.fetch_add(1, Ordering::Relaxed);
            }
            for thread in threads {
                thread.join().expect("no panic");
            }
            assert_eq!(shared.1.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn loom_handle_is_released_once_after_its_reader() {
        release_once(1);
    }

    #[test]
    fn loom_handle_is_released_once_after_two_readers() {
        release_once(2);
    }
}
