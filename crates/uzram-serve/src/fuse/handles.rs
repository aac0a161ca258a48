//! Open files by their handles.
//!
//! Locks: each handle's own, held for reading while a request is executed, and for writing while a file is opened or
//! closed. The kernel closes a file after the reply to its last request, so neither waits. Below it the lock of an
//! attribute's text, held while a piece of the text is generated.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use uzram::device::AttributeText;

use super::disk::Disk;
use crate::device_pool::DevicePool;

/// The most files open at a time; a loop device has one of them.
const MAX_OPEN: usize = 1024;

/// An open file.
pub(super) enum Open {
    /// A device's disk.
    Disk(Disk),
    /// An attribute: its text as of opening, or generated while it is read if it is long, `None` if the file is
    /// write-only; and the pool that sets it. Closing the file may wait for the pool's threads; no request depends on
    /// it.
    Attribute(Option<Mutex<AttributeText>>, Arc<DevicePool>),
    /// A file whose writes warm up a thread.
    WarmUp,
}

/// See the [module's documentation](self).
pub(super) struct Handles(Box<[RwLock<Option<Open>>]>);

impl Handles {
    pub fn new() -> Self {
        Handles((0..MAX_OPEN).map(|_| RwLock::new(None)).collect())
    }

    /// Returns a handle for a file; `None` when too many are open.
    pub fn open(&self, file: Open) -> Option<u64> {
        let free = |handle: &RwLock<Option<Open>>| Some(handle.try_write().ok()?.is_none());
        for (number, handle) in self.0.iter().enumerate() {
            if free(handle) != Some(true) {
                continue;
            }
            let mut place = handle.write().unwrap_or_else(PoisonError::into_inner);
            // Another thread may have taken it in between.
            if place.is_none() {
                *place = Some(file);
                return Some(number as u64);
            }
        }
        None
    }

    /// Returns the file of a handle, if it has one. It stays open while the guard lives.
    pub fn get(&self, handle: u64) -> Option<RwLockReadGuard<'_, Option<Open>>> {
        let place = self.0.get(usize::try_from(handle).ok()?)?;
        Some(place.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Closes a file.
    pub fn close(&self, handle: u64) {
        let place = usize::try_from(handle).ok().and_then(|handle| self.0.get(handle));
        if let Some(place) = place {
            let closed = place.write().unwrap_or_else(PoisonError::into_inner).take();
            // Dropped without the lock, as this may wait for the pool's tasks.
            drop(closed);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn handles_are_used_again_and_run_out() {
        let handles = Handles::new();
        let open = || handles.open(Open::WarmUp);
        for number in 0..MAX_OPEN as u64 {
            assert_eq!(open(), Some(number));
        }
        assert_eq!(open(), None);
        handles.close(7);
        assert!(handles.get(7).unwrap().is_none() && handles.get(8).unwrap().is_some());
        assert_eq!(open(), Some(7));
        // Invalid handles are ignored.
        handles.close(u64::MAX);
        assert!(handles.get(MAX_OPEN as u64).is_none());
    }
}
