//! Stores whose memory outlives the process: the layout of their file, and how a store is restored from it.
//!
//! - `layout.rs`: the regions of the file, and the superblock that describes them
//! - `settings.rs`: the fixed settings of a store as bytes, and the settings that change while it is used
//! - `attach.rs`: restores all other state from the slots

mod attach;
mod layout;
mod settings;

#[cfg(test)]
mod tests;

pub use attach::Attached;
pub(super) use attach::{Parts, attach};
pub(super) use layout::Memory;
pub(super) use settings::LiveSettings;

use std::os::fd::OwnedFd;

use crate::backing::Backing;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::MemoryFile;
use crate::base::sync::{Arc, stores_16_bytes};

use super::{Store, StoreBuilder, StoreStats};

impl Store {
    /// Makes a store in memory that outlives the process: its contents exist as long as a process holds the descriptor
    /// of [`Store::memory`], and [`Store::attach`] finds them. The first touch of such memory takes longer than that of
    /// private memory.
    ///
    /// # Errors
    /// As [`StoreBuilder::build`]; `Unsupported` on a machine that can't publish 16 bytes at once.
    pub fn create_in(builder: &StoreBuilder) -> Result<Store> {
        check_can_survive()?;
        builder.check()?;
        let memory = Memory::create(builder)?;
        Store::assemble(builder, Some(memory))
    }

    /// Restores the store that [`Store::create_in`] made in this memory, in this process or one that has ended. Every
    /// page has the contents of its last write; if that write was not finished, those before it or its own. Reads of
    /// pages that are found damaged fail until the pages are written.
    ///
    /// `backing` is the backing device of the store, if it had one.
    ///
    /// # Errors
    /// `Invalid` for any other descriptor, memory of another version, or another backing device; `Corrupt` for a
    /// damaged superblock; otherwise as [`StoreBuilder::build`].
    ///
    /// # Safety
    /// As long as the returned store lives, nothing else changes the memory: no other store uses it, in this process or
    /// another, and every thread of a process that did has ended.
    pub unsafe fn attach(memory: OwnedFd, backing: Option<Arc<dyn Backing>>) -> Result<(Store, Attached)> {
        check_can_survive()?;
        let (memory, builder) = Memory::open(MemoryFile::from_fd(memory)?, backing)?;
        let store = Store::assemble(&builder, Some(memory))?;
        let StoreStats { pages_stored, pages_lost, .. } = store.stats();
        Ok((store, Attached { pages: pages_stored, pages_lost }))
    }

    /// Returns the memory of a store that outlives the process, for [`Store::attach`]; `None` for other stores.
    pub fn memory(&self) -> Option<&Arc<MemoryFile>> {
        self.live_settings.as_ref().map(LiveSettings::file)
    }
}

/// # Errors
/// `Unsupported` on a machine that can't publish 16 bytes at once.
fn check_can_survive() -> Result<()> {
    if stores_16_bytes() {
        return Ok(());
    }
    let what = "this machine has no cmpxchg16b, without which contents cannot outlive the process";
    Err(Error::new(ErrorKind::Unsupported, what))
}
