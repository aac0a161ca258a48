//! One lock for the pool, except that a zspage is held while an object in it is read: "zsmalloc:
//! Consolidate zs_pool's migrate_lock and size_class's locks" (N. Pham, 2022).

use std::ops::{Deref, DerefMut};

use crate::base::cpu::Padded;
use crate::base::sync::{Mutex, MutexGuard, classes};
use crate::zsmalloc::RawPool;
use crate::zsmalloc::counts::Counts;
use crate::zsmalloc::word::{Cell, Location};
use crate::zsmalloc::zspage::Lists;

use super::held::{self, WordCell};
use super::{PoolLocks, Released};

/// One lock for the whole pool.
pub struct Consolidated {
    /// On cache lines of its own: read-only data would otherwise share them.
    classes: Padded<Mutex<Box<[Lists]>>>,
}

/// The pool's lock, for the lists of a class.
pub struct ClassLists<'a> {
    classes: MutexGuard<'a, Box<[Lists]>>,
    class: u8,
}

impl Deref for ClassLists<'_> {
    type Target = Lists;

    #[inline]
    fn deref(&self) -> &Lists {
        &self.classes[usize::from(self.class)]
    }
}

impl DerefMut for ClassLists<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Lists {
        &mut self.classes[usize::from(self.class)]
    }
}

impl PoolLocks for Consolidated {
    const NAME: &'static str = "consolidated";
    const READS_OUTLIVE_FREES: bool = false;
    const FREES_PAGES_LOCKED: bool = true;
    type Cell = WordCell;
    type Lists<'a> = ClassLists<'a>;
    type MigrationGuard<'a> = ClassLists<'a>;

    fn new(classes: usize) -> Self {
        let lists = (0..classes).map(|_| Lists::new()).collect();
        Consolidated { classes: Padded(Mutex::new(&classes::ZS_POOL, lists)) }
    }

    #[inline]
    fn lists(&self, class: u8, counts: &Counts) -> ClassLists<'_> {
        counts.count(|share| &share.pool_locks);
        ClassLists { classes: self.classes.lock(), class }
    }

    fn lock_for_migration(&self, class: u8, counts: &Counts) -> ClassLists<'_> {
        self.lists(class, counts)
    }

    fn is_contended(guard: &ClassLists<'_>) -> bool {
        guard.classes.is_contended()
    }

    #[inline]
    unsafe fn pin(pool: &RawPool<Self>, handle: u32) -> Location {
        // Any class will do: the lock is the pool's.
        let _locked = pool.locks.lists(0, &pool.counts);
        // SAFETY: the handle is in use and not being freed (the caller's promise); moving takes the pool's
        // lock.
        unsafe { held::find_and_hold(pool, handle) }
    }

    #[inline]
    unsafe fn free(pool: &RawPool<Self>, handle: u32) -> Option<Released<'_, Self>> {
        let mut lists = pool.lists(0);
        // SAFETY: the handle is in use, and only this call frees it (the caller's promise).
        let object = unsafe { pool.handles.get(handle) }.object();
        lists.guard_mut().class = object.class;
        pool.is_sound(handle, object).then_some((object, lists))
    }
}
