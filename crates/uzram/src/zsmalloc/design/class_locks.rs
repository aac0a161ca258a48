//! A lock per class, and one for the pool that keeps objects in place while a handle is looked up: the
//! kernel's design since 2023, and its three steps of 2026.

use std::ops::{Deref, DerefMut};

use crate::base::cpu::Padded;
use crate::base::sync::{Mutex, MutexGuard, ReadGuard, RwLock, WriteGuard, classes};
use crate::zsmalloc::RawPool;
use crate::zsmalloc::counts::Counts;
use crate::zsmalloc::word::{Cell, Location};
use crate::zsmalloc::zspage::Lists;

use super::held::{self, WordCell};
use super::{PoolLocks, Released};

/// A lock per class and one for the pool. `STEPS` is a mask of the series' steps, which follow.
pub struct ClassLocks<const STEPS: u8> {
    /// On cache lines of its own, like each class's lock: read-only data would otherwise share them.
    pool: Padded<RwLock>,
    classes: Box<[Padded<Mutex<Lists>>]>,
}

/// Step 1: a free takes the class's index from the object word, not from the zspage.
pub const CLASS_IN_WORD: u8 = 1;
/// Step 2: a free takes no pool lock. It has no effect without step 1.
pub const FREE_WITHOUT_POOL_LOCK: u8 = 2;
/// Step 3: an emptied zspage's pages are freed after the class's lock is released.
pub const PAGES_AFTER_LOCK: u8 = 4;

/// The design before both series, as in the table of [designs](super).
pub type Split = ClassLocks<0>;
/// "mm/zsmalloc: reduce lock contention in zs_free()" (W. Hao, 2026).
pub type ClassIndexed = ClassLocks<{ CLASS_IN_WORD | FREE_WITHOUT_POOL_LOCK | PAGES_AFTER_LOCK }>;

impl<const STEPS: u8> ClassLocks<STEPS> {
    const FREES_WITHOUT_POOL_LOCK: bool = STEPS & CLASS_IN_WORD != 0 && STEPS & FREE_WITHOUT_POOL_LOCK != 0;

    /// Returns the class of an object that was found in a word: it is in the word, or in the zspage.
    ///
    /// # Safety
    /// Unless it is in the word, the object is in use and cannot be moved.
    #[inline]
    unsafe fn class_of(pool: &RawPool<Self>, object: Location) -> u8 {
        // SAFETY: the object is in use and stays in place, so its zspage is in use (the caller's promise).
        let of_zspage = || unsafe { pool.zspage_at(object.page) }.class;
        if STEPS & CLASS_IN_WORD != 0 { object.class } else { of_zspage() }
    }

    fn look_up(&self, counts: &Counts) -> ReadGuard<'_> {
        counts.count(|share| &share.pool_locks);
        self.pool.read()
    }
}

/// The lists of a class, and the pool's lock.
pub struct BothLocks<'a> {
    // Declared before `pool`: released in reverse lock order.
    lists: MutexGuard<'a, Lists>,
    pool: WriteGuard<'a>,
}

impl Deref for BothLocks<'_> {
    type Target = Lists;

    fn deref(&self) -> &Lists {
        &self.lists
    }
}

impl DerefMut for BothLocks<'_> {
    fn deref_mut(&mut self) -> &mut Lists {
        &mut self.lists
    }
}

impl<const STEPS: u8> PoolLocks for ClassLocks<STEPS> {
    const NAME: &'static str = match STEPS {
        0 => "split",
        CLASS_IN_WORD => "class-in-word",
        3 => "no-pool-lock",
        PAGES_AFTER_LOCK => "pages-after-lock",
        7 => "class-indexed",
        _ => "class-locks",
    };
    const READS_OUTLIVE_FREES: bool = false;
    const FREES_PAGES_LOCKED: bool = STEPS & PAGES_AFTER_LOCK == 0;
    type Cell = WordCell;
    type Lists<'a> = MutexGuard<'a, Lists>;
    type MigrationGuard<'a> = BothLocks<'a>;

    fn new(classes: usize) -> Self {
        let lists = |_| Padded(Mutex::new(&classes::SIZE_CLASS, Lists::new()));
        ClassLocks {
            pool: Padded(RwLock::new(&classes::ZS_POOL)),
            classes: (0..classes).map(lists).collect(),
        }
    }

    #[inline]
    fn lists(&self, class: u8, counts: &Counts) -> MutexGuard<'_, Lists> {
        counts.count(|share| &share.class_locks);
        self.classes[usize::from(class)].lock()
    }

    fn lock_for_migration(&self, class: u8, counts: &Counts) -> BothLocks<'_> {
        counts.count(|share| &share.pool_locks);
        let pool = self.pool.write();
        BothLocks { lists: self.lists(class, counts), pool }
    }

    fn is_contended(guard: &BothLocks<'_>) -> bool {
        guard.lists.is_contended() || guard.pool.is_contended()
    }

    #[inline]
    unsafe fn pin(pool: &RawPool<Self>, handle: u32) -> Location {
        let _look_up = pool.locks.look_up(&pool.counts);
        // SAFETY: the handle is in use and not being freed (the caller's promise); moving takes the pool's
        // lock for writing.
        unsafe { held::find_and_hold(pool, handle) }
    }

    #[inline]
    unsafe fn free(pool: &RawPool<Self>, handle: u32) -> Option<Released<'_, Self>> {
        // SAFETY: the handle is in use (the caller's promise).
        let cell = unsafe { pool.handles.get(handle) };
        let lists = if Self::FREES_WITHOUT_POOL_LOCK {
            // A moved object stays in its class.
            pool.lists(cell.object().class)
        } else {
            let _look_up = pool.locks.look_up(&pool.counts);
            // SAFETY: the object is in use, and the pool's lock keeps it in place.
            pool.lists(unsafe { Self::class_of(pool, cell.object()) })
        };
        // Read the word again: the object may have moved before the class's lock was taken.
        let object = cell.object();
        pool.is_sound(handle, object).then_some((object, lists))
    }
}
