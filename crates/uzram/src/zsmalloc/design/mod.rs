//! Lock designs, as types: the locks that each operation of a pool takes.
//!
//! | design | to allocate | to find an object | to free | to move |
//! |---|---|---|---|---|
//! | [`Split`] | class | pool (read), then the zspage is held | pool (read), class | pool (write), class |
//! | [`ClassIndexed`] | class | as `Split` | class | as `Split` |
//! | [`Consolidated`] | pool | pool, then the zspage is held | pool | pool |
//! | [`Pinned`] | class | none: the object's word is pinned | class | class |
//!
//! `Split` is the kernel's design before two patch series: "zsmalloc: Consolidate zs_pool's
//! migrate_lock and size_class's locks" (N. Pham, 2022), which is `Consolidated`, and "mm/zsmalloc:
//! reduce lock contention in zs_free()" (W. Hao, 2026), which is `ClassIndexed`. In these three a reader
//! keeps all objects of a zspage from being moved, and the caller keeps the object being read from being
//! freed. In [`Pinned`], which is ours, a reader pins only its object, may go on reading when it is
//! freed, and never waits.

#[cfg(feature = "designs")]
mod class_locks;
#[cfg(feature = "designs")]
mod consolidated;
#[cfg(feature = "designs")]
mod held;
mod pinned;

#[cfg(feature = "designs")]
pub use class_locks::{
    CLASS_IN_WORD, ClassIndexed, ClassLocks, FREE_WITHOUT_POOL_LOCK, PAGES_AFTER_LOCK, Split,
};
#[cfg(feature = "designs")]
pub use consolidated::Consolidated;
pub use pinned::Pinned;

use std::ops::DerefMut;

use crate::base::sync::Timed;

use super::RawPool;
use super::counts::Counts;
use super::word::{Cell, Location};
use super::zspage::Lists;

/// The locks of a design, and the operations under them.
pub trait PoolLocks: Sized + Send + Sync + 'static {
    /// The name in settings and tables.
    const NAME: &'static str;
    /// Whether a reader may go on reading when its object is freed; the last reader then releases it.
    /// If not, the caller keeps the object from being freed while it is read.
    const READS_OUTLIVE_FREES: bool;
    /// Whether the pages of an emptied zspage are freed while its class's lists are still locked.
    const FREES_PAGES_LOCKED: bool;
    /// The handle's word.
    type Cell: Cell;
    /// The locked lists of a class.
    type Lists<'a>: DerefMut<Target = Lists>;
    /// The locked lists of a class whose objects no thread can look up, and whose zspages no thread can hold,
    /// meanwhile.
    type MigrationGuard<'a>: MigrationGuard;

    /// Makes the locks for `classes` classes.
    fn new(classes: usize) -> Self;

    /// Locks the lists of a class.
    fn lists(&self, class: u8, counts: &Counts) -> Self::Lists<'_>;

    /// Locks the lists of a class to move its objects.
    fn lock_for_migration(&self, class: u8, counts: &Counts) -> Self::MigrationGuard<'_>;

    /// Finds a handle's object, and keeps it in place until [`PoolLocks::unpin`].
    ///
    /// # Safety
    /// The handle is in use and not being freed.
    unsafe fn pin(pool: &RawPool<Self>, handle: u32) -> Location;

    /// Ends a pin; by default, a hold of the zspage. If the object was freed meanwhile and the caller must
    /// release it, returns it with the lists of its class.
    ///
    /// # Safety
    /// The handle is pinned.
    #[inline]
    unsafe fn unpin(pool: &RawPool<Self>, handle: u32, object: Location) -> Option<Released<'_, Self>> {
        let _ = handle;
        // SAFETY: the object is in use (the caller's promise) and stays in place, as its zspage is held.
        unsafe { pool.zspage_at(object.page) }.let_go();
        None
    }

    /// Finds a handle's object to free it: returns the object to release with the lists of its class,
    /// unless a reader will release it.
    ///
    /// # Safety
    /// The handle is in use, and only this call frees it.
    unsafe fn free(pool: &RawPool<Self>, handle: u32) -> Option<Released<'_, Self>>;
}

/// An object that is no longer used, and the locked lists of its class.
pub type Released<'a, D> = (Location, Timed<'a, <D as PoolLocks>::Lists<'a>>);

/// Locked lists whose holder moves objects.
pub trait MigrationGuard: DerefMut<Target = Lists> {
    /// Returns whether other threads wait for one of the locks.
    fn is_contended(&self) -> bool;
}
