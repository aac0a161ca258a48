//! Handles of the kernel's designs: their words hold only the location, and a zspage is held while an object
//! of it is read.

use crate::base::sync::AtomicU64;
use crate::zsmalloc::RawPool;
use crate::zsmalloc::word::{Cell, Location};

use super::PoolLocks;

/// A cell that holds only the location, which locks protect.
#[derive(Default)]
#[repr(transparent)]
pub struct WordCell(AtomicU64);

impl Cell for WordCell {
    #[inline]
    fn word(&self) -> &AtomicU64 {
        &self.0
    }

    fn is_movable(&self, object: Location) -> bool {
        self.object() == object
    }

    fn relocate(&self, _: Location, to: Location) -> bool {
        self.publish(to);
        true
    }
}

/// Finds an object by its word, and holds its zspage.
///
/// # Safety
/// The handle is in use, and its object is neither freed nor moved meanwhile.
#[inline]
pub(super) unsafe fn find_and_hold<D: PoolLocks<Cell = WordCell>>(
    pool: &RawPool<D>,
    handle: u32,
) -> Location {
    // SAFETY: the handle is in use (the caller's promise).
    let object = unsafe { pool.handles.get(handle) }.object();
    // SAFETY: the object is in use and cannot be moved (the caller's promise), so its zspage is in use.
    unsafe { pool.zspage_at(object.page) }.hold();
    object
}
