//! A lock per class, and readers that pin their object in its handle's word.
//!
//! ```text
//! 63            12  11    10     0
//! [ location      | freed | pins  ]
//! ```
//!
//! A reader increments `pins` while it uses the object; a free sets `freed`. The free releases the object if
//! it has no readers, else the last reader does.
//!
//! An object that is neither read nor freed is moved by copying it and then compare-exchanging the whole
//! word for one that points at the copy. A reader or a free that came first makes the exchange fail; one
//! that comes later finds the copy. No thread writes to a published object, so the copy is identical.

use crate::base::cpu::Padded;
use crate::base::sync::{AtomicU64, Mutex, MutexGuard, Ordering, classes, fence};
use crate::zsmalloc::RawPool;
use crate::zsmalloc::counts::Counts;
use crate::zsmalloc::word::{Cell, DESIGN_BITS, Location};
use crate::zsmalloc::zspage::Lists;

use super::{PoolLocks, Released};

const FREED: u64 = 1 << (DESIGN_BITS - 1);
const PINS_MASK: u64 = FREED - 1;
/// A thread that finds this many pins on an object drops its own and tries again, which leaves room for
/// as many other threads to do the same.
const MANY_PINS: u64 = PINS_MASK / 2;

/// A lock per class, and readers that pin their object.
pub struct Pinned {
    classes: Box<[Padded<Mutex<Lists>>]>,
}

/// A word with pins.
#[derive(Default)]
#[repr(transparent)]
pub struct PinCell(AtomicU64);

impl Cell for PinCell {
    #[inline]
    fn word(&self) -> &AtomicU64 {
        &self.0
    }

    fn is_movable(&self, object: Location) -> bool {
        self.0.load(Ordering::Relaxed) == object.encode()
    }

    fn relocate(&self, from: Location, to: Location) -> bool {
        let (from, to) = (from.encode(), to.encode());
        // Acquire: past readers' accesses come before the old location is reused.
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// The ordering of an unpin. ThreadSanitizer does not see fences, such as that of [`at_rest`].
const UNPIN: Ordering = if cfg!(tsan) { Ordering::AcqRel } else { Ordering::Release };

/// Returns the object to release, if the free bit and pins of the word's old value are exactly `last`:
/// then the caller's change was the last one.
#[inline]
fn at_rest(old: u64, last: u64) -> Option<Location> {
    if old & (FREED | PINS_MASK) != last {
        return None;
    }
    // The readers' accesses come before the release of the object.
    fence(Ordering::Acquire);
    Some(Location::decode(old))
}

impl Pinned {
    fn released(pool: &RawPool<Self>, handle: u32, object: Location) -> Option<Released<'_, Self>> {
        pool.is_sound(handle, object).then(|| (object, pool.lists(object.class)))
    }
}

impl PoolLocks for Pinned {
    const NAME: &'static str = "pinned";
    const READS_OUTLIVE_FREES: bool = true;
    const FREES_PAGES_LOCKED: bool = false;
    type Cell = PinCell;
    type Lists<'a> = MutexGuard<'a, Lists>;
    type MigrationGuard<'a> = MutexGuard<'a, Lists>;

    fn new(classes: usize) -> Self {
        let lists = |_| Padded(Mutex::new(&classes::SIZE_CLASS, Lists::new()));
        Pinned { classes: (0..classes).map(lists).collect() }
    }

    #[inline]
    fn lists(&self, class: u8, counts: &Counts) -> MutexGuard<'_, Lists> {
        counts.count(|share| &share.class_locks);
        self.classes[usize::from(class)].lock()
    }

    fn lock_for_migration(&self, class: u8, counts: &Counts) -> MutexGuard<'_, Lists> {
        self.lists(class, counts)
    }

    fn is_contended(guard: &MutexGuard<'_, Lists>) -> bool {
        guard.is_contended()
    }

    #[inline]
    unsafe fn pin(pool: &RawPool<Self>, handle: u32) -> Location {
        // SAFETY: the handle is in use (the caller's promise).
        let PinCell(word) = unsafe { pool.handles.get(handle) };
        loop {
            let old = word.fetch_add(1, Ordering::Acquire);
            debug_assert_eq!(old & FREED, 0, "pinned after it was freed");
            if old & PINS_MASK < MANY_PINS {
                return Location::decode(old);
            }
            word.fetch_sub(1, Ordering::Relaxed);
            std::thread::yield_now();
        }
    }

    #[inline]
    unsafe fn unpin(pool: &RawPool<Self>, handle: u32, _: Location) -> Option<Released<'_, Self>> {
        // SAFETY: the pin keeps the handle in use.
        let old = unsafe { pool.handles.get(handle) }.0.fetch_sub(1, UNPIN);
        at_rest(old, FREED | 1).and_then(|object| Self::released(pool, handle, object))
    }

    #[inline]
    unsafe fn free(pool: &RawPool<Self>, handle: u32) -> Option<Released<'_, Self>> {
        // SAFETY: the handle is in use (the caller's promise).
        let old = unsafe { pool.handles.get(handle) }.0.fetch_or(FREED, Ordering::AcqRel);
        debug_assert_eq!(old & FREED, 0, "freed twice");
        at_rest(old, 0).and_then(|object| Self::released(pool, handle, object))
    }
}
