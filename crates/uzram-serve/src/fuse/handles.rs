//! Open files by their handles.
//!
//! Lock: each handle's own, held for reading while a request is carried out, for writing while a file is opened
//! or closed. The kernel closes a file when its last request has been answered, so that neither waits. Below it that of an
//! attribute's text, held while a piece of it is made.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use uzram::device::AttributeText;

use super::disk::Disk;
use crate::device_pool::DevicePool;

/// Files open at once: a loop device has one, and a client of its own another.
const MAX_OPEN: usize = 1024;

/// An open file.
pub(super) enum Open {
    /// A device's disk.
    Disk(Disk),
    /// An attribute: its text as it was then, or made as it is read if it is long, none if it is only written; and who
    /// sets it. They are waited for when the file is closed: nobody's request is.
    Attribute(Option<Mutex<AttributeText>>, Arc<DevicePool>),
    /// The file by which threads are prepared.
    WarmUp,
}

/// See the [module's documentation](self).
pub(super) struct Handles(Box<[RwLock<Option<Open>>]>);

impl Handles {
    pub fn new() -> Self {
        Handles((0..MAX_OPEN).map(|_| RwLock::new(None)).collect())
    }

    /// Gives a file a handle; `None` when too many are open.
    pub fn open(&self, file: Open) -> Option<u64> {
        let free = |handle: &RwLock<Option<Open>>| Some(handle.try_write().ok()?.is_none());
        for (number, handle) in self.0.iter().enumerate() {
            if free(handle) != Some(true) {
                continue;
            }
            let mut place = handle.write().unwrap_or_else(PoisonError::into_inner);
            // Another may have taken it in between.
            if place.is_none() {
                *place = Some(file);
                return Some(number as u64);
            }
        }
        None
    }

    /// The file of a handle, if it has one, for as long as the answer is kept.
    pub fn get(&self, handle: u64) -> Option<RwLockReadGuard<'_, Option<Open>>> {
        let place = self.0.get(usize::try_from(handle).ok()?)?;
        Some(place.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Closes a file.
    pub fn close(&self, handle: u64) {
        let place = usize::try_from(handle).ok().and_then(|handle| self.0.get(handle));
        if let Some(place) = place {
            let closed = place.write().unwrap_or_else(PoisonError::into_inner).take();
            // Without the lock: it waits for those who wait for the device.
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
        // Handles that are none do no harm.
        handles.close(u64::MAX);
        assert!(handles.get(MAX_OPEN as u64).is_none());
    }
}
