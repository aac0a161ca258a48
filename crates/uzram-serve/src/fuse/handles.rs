//! Open files by their handles.
//!
//! A handle is the index of its entry, in the low bits, and the entry's generation, so that it is never used
//! again. Each open file is in the ledger from before the reply to its opening until before the reply to its
//! closing.
//!
//! Locks: each entry's own, held for reading while a request is executed, and for writing while a file is
//! opened or closed. The kernel closes a file after the reply to its last request, so neither waits. Below it
//! the lock of an attribute's text, held while the text or a piece of it is generated.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use super::disk::{Disk, OpenText};
use super::ledger::{Ledger, MAX_OPEN, OpenFileRecord};
use crate::device_pool::DevicePool;

/// The low bits of a handle, which are its entry's index.
const INDEX_BITS: u32 = 16;
const _: () = assert!(MAX_OPEN <= 1 << INDEX_BITS);

pub(super) enum Open {
    Disk(Disk),
    /// An attribute: its text, and the pool that sets it. Closing the file may wait for the pool's threads;
    /// no request depends on it.
    Attribute(OpenText, Arc<DevicePool>),
    WarmUp,
    /// A file that was opened in an earlier life, and cannot be in this one.
    Lost,
}

pub(super) struct Handles {
    entries: Box<[RwLock<Entry>]>,
    ledger: Arc<Ledger>,
}

pub(super) struct Entry {
    generation: u32,
    pub open: Option<Open>,
}

fn handle(index: usize, generation: u32) -> u64 {
    u64::from(generation) << INDEX_BITS | index as u64
}

impl Handles {
    /// Opens the files of the ledger again by `open`; those that it does not open are lost.
    pub fn restore(ledger: Arc<Ledger>, open: impl Fn(&OpenFileRecord) -> Option<Open>) -> Self {
        let entry = |index| {
            let (generation, file) = ledger.open_file(index);
            let open = file.map(|file| {
                open(&file).unwrap_or_else(|| {
                    tracing::warn!(ino = file.ino, "a file that was open cannot be opened again");
                    Open::Lost
                })
            });
            RwLock::new(Entry { generation, open })
        };
        Handles { entries: (0..MAX_OPEN).map(entry).collect(), ledger }
    }

    /// Returns a handle for a file, which `record` describes; `None` when too many are open.
    pub fn open(&self, file: Open, record: OpenFileRecord) -> Option<u64> {
        for (index, entry) in self.entries.iter().enumerate() {
            // One that is in use is not free.
            let Ok(mut entry) = entry.try_write() else { continue };
            if entry.open.is_none() {
                self.ledger.enter_file(index, entry.generation, record);
                entry.open = Some(file);
                return Some(handle(index, entry.generation));
            }
        }
        None
    }

    /// Returns the handle that a request opened in an earlier life.
    pub fn opened_by(&self, unique: u64) -> Option<u64> {
        self.ledger.opened_by(unique).map(|(index, generation)| handle(index, generation))
    }

    /// Returns the file of a handle, if it has one. It stays open while the guard lives.
    pub fn get(&self, handle: u64) -> Option<RwLockReadGuard<'_, Entry>> {
        let (index, generation) = split(handle)?;
        let entry = self.entries.get(index)?.read().unwrap_or_else(PoisonError::into_inner);
        (entry.generation == generation && entry.open.is_some()).then_some(entry)
    }

    /// Closes a file, unless it was closed already.
    pub fn close(&self, handle: u64) {
        let Some((index, generation)) = split(handle) else { return };
        let Some(entry) = self.entries.get(index) else { return };
        let mut entry = entry.write().unwrap_or_else(PoisonError::into_inner);
        if entry.generation != generation || entry.open.is_none() {
            return;
        }
        entry.generation = generation.wrapping_add(1);
        self.ledger.clear_file(index, entry.generation);
        let closed = entry.open.take();
        drop(entry);
        // Dropped without the lock, as this may wait for the pool's tasks.
        drop(closed);
    }
}

fn split(handle: u64) -> Option<(usize, u32)> {
    let generation = u32::try_from(handle >> INDEX_BITS).ok()?;
    Some(((handle & ((1 << INDEX_BITS) - 1)) as usize, generation))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn record(unique: u64) -> OpenFileRecord {
        OpenFileRecord { ino: 2, mode: libc::O_WRONLY, unique }
    }

    #[test]
    fn entries_are_used_again_handles_are_not() {
        let handles = Handles::restore(Arc::new(Ledger::new().unwrap()), |_| None);
        let open = || handles.open(Open::WarmUp, record(1));
        for index in 0..MAX_OPEN as u64 {
            assert_eq!(open(), Some(index));
        }
        assert_eq!(open(), None);
        handles.close(7);
        assert!(handles.get(7).is_none() && handles.get(8).is_some());
        assert_eq!(open(), Some(1 << INDEX_BITS | 7));
        // Closed a second time.
        handles.close(7);
        assert!(handles.get(7).is_none() && handles.get(1 << INDEX_BITS | 7).is_some());
        // Invalid handles are ignored.
        handles.close(u64::MAX);
        assert!(handles.get(MAX_OPEN as u64).is_none());
    }

    #[test]
    fn files_stay_open_in_the_next_life() {
        let ledger = Arc::new(Ledger::new().unwrap());
        let handles = Handles::restore(Arc::clone(&ledger), |_| None);
        let [kept, closed, lost] =
            [2, 4, 6].map(|unique| handles.open(Open::WarmUp, record(unique)).unwrap());
        handles.close(closed);
        drop(handles);
        let handles = Handles::restore(ledger, |file| (file.unique != 6).then_some(Open::WarmUp));
        let is_open =
            |handle| handles.get(handle).is_some_and(|entry| matches!(entry.open, Some(Open::WarmUp)));
        assert!(is_open(kept) && !is_open(closed) && !is_open(lost));
        assert!(matches!(handles.get(lost).unwrap().open, Some(Open::Lost)));
        assert_eq!([2, 4, 6].map(|unique| handles.opened_by(unique)), [Some(kept), None, Some(lost)]);
        let again = handles.open(Open::WarmUp, record(8)).unwrap();
        assert!(again != closed && handles.get(closed).is_none());
        handles.close(lost);
        assert!(handles.get(lost).is_none() && handles.opened_by(6).is_none());
    }
}
