//! Stores whose memory outlives the process: the layout of their file, and how a store is restored from it.

mod attach;
mod layout;
mod settings;

#[cfg(test)]
mod tests;

pub(super) use attach::attach;
pub use attach::{AttachProgress, Attached};
pub use layout::LAYOUT_VERSION;
pub(super) use layout::Memory;
pub(super) use settings::LiveSettings;

use std::os::fd::OwnedFd;

use crate::backing::Tiers;
use crate::base::cpu::Restartable;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{MappedAhead, MemoryFile};
use crate::base::sync::{Arc, stores_16_bytes};

use super::{Store, StoreBuilder, StoreStats};

impl Store {
    /// Makes a store in memory that outlives the process: its contents exist as long as a process holds the
    /// descriptor of [`Store::memory`], and [`Store::attach`] finds them. The first touch of such memory
    /// takes longer than that of private memory.
    /// Fails as [`StoreBuilder::build`]; `Unsupported` on a machine that can't publish 16 bytes at once.
    pub fn create_in(builder: &StoreBuilder) -> Result<Store> {
        check_machine()?;
        builder.check()?;
        let memory = Memory::create(builder)?;
        Store::assemble(builder, Some(memory))
    }

    /// Restores the store that [`Store::create_in`] made in this memory, in this process or one that has
    /// ended. Every page has the contents of its last write; if that write was not finished, those before it
    /// or its own. Reads of pages that are found damaged fail until the pages are written.
    ///
    /// `backing` is the backing device of the store, if it had one. Many threads call `progress` as they go
    /// through the pages.
    ///
    /// # Errors
    /// `Invalid` for any other descriptor, memory of another version, or another backing device; `Corrupt`
    /// for a damaged superblock; otherwise as [`StoreBuilder::build`].
    ///
    /// # Safety
    /// As long as the returned store lives, nothing else changes the memory: no other store uses it, in this
    /// process or another, and every thread of a process that did has ended.
    pub unsafe fn attach(
        memory: impl Into<KeptMemory>,
        backing: Option<Arc<Tiers>>,
        progress: impl Fn(AttachProgress) + Send + Sync + 'static,
    ) -> Result<(Store, Attached)> {
        // SAFETY: the caller's promise.
        let restored = unsafe { Store::restore(memory.into(), backing, progress) };
        restored.map(|(store, attached, _)| (store, attached))
    }

    /// As [`Store::attach`]; also returns what the store was built with, and what was set since.
    ///
    /// # Safety
    /// As [`Store::attach`].
    pub(crate) unsafe fn restore(
        memory: KeptMemory,
        backing: Option<Arc<Tiers>>,
        progress: impl Fn(AttachProgress) + Send + Sync + 'static,
    ) -> Result<(Store, Attached, StoreBuilder)> {
        check_machine()?;
        let file = match memory {
            KeptMemory::File(memory) => MemoryFile::from_fd(memory)?,
            KeptMemory::MappedAhead(stand_by) => stand_by.0.into_file(),
        };
        let (mut memory, builder) = Memory::open(file, backing)?;
        memory.progress = Box::new(progress);
        let store = Store::assemble(&builder, Some(memory))?;
        let StoreStats { pages_stored, pages_lost, .. } = store.stats();
        Ok((store, Attached { pages: pages_stored, pages_lost }, builder))
    }

    /// Returns the memory of a store that outlives the process, for [`Store::attach`]; `None` for other
    /// stores.
    pub fn memory(&self) -> Option<&Arc<MemoryFile>> {
        self.live_settings.as_ref().map(LiveSettings::file)
    }
}

/// The memory of a store that its process left.
pub enum KeptMemory {
    /// The descriptor of [`Store::memory`].
    File(OwnedFd),
    /// The memory that this process has mapped ahead.
    MappedAhead(StandBy),
}

impl From<OwnedFd> for KeptMemory {
    fn from(memory: OwnedFd) -> Self {
        KeptMemory::File(memory)
    }
}

impl From<StandBy> for KeptMemory {
    fn from(memory: StandBy) -> Self {
        KeptMemory::MappedAhead(memory)
    }
}

/// The memory of a store that another process uses, mapped ahead of an attach, which is faster then: it takes
/// no page faults.
pub struct StandBy(MappedAhead);

impl StandBy {
    /// Maps a store's memory. Its pages follow with [`StandBy::catch_up`].
    ///
    /// # Errors
    /// `Invalid` for a descriptor that is not of such memory; `Unsupported` where userfaultfd(2) or `/proc`
    /// is not available, or on a machine that can't publish 16 bytes at once; `NoMemory` when there is no
    /// address space.
    pub fn new(memory: OwnedFd) -> Result<StandBy> {
        check_machine()?;
        let mapped = MappedAhead::new(MemoryFile::from_fd(memory)?)?;
        // To register the process for these takes some ten ms, once: the attach finds that done.
        Restartable::get();
        Ok(StandBy(mapped))
    }

    /// Maps the pages that the memory has got since the last call, but for those in swap. It changes neither
    /// contents nor which pages are in memory, so the other process goes on meanwhile. Returns the number of
    /// bytes mapped.
    /// Fails with `Io` if the system does not report which pages are in memory, or which are mapped.
    pub fn catch_up(&self) -> Result<u64> {
        self.catch_up_while(&|| true)
    }

    /// As [`StandBy::catch_up`], but ends early when `goes_on`, called repeatedly, returns false.
    pub fn catch_up_while(&self, goes_on: &dyn Fn() -> bool) -> Result<u64> {
        self.0.catch_up(goes_on)
    }
}

/// Fails with `Unsupported` on a machine where no store outlives the process. All settings and designs can.
pub(crate) fn check_machine() -> Result<()> {
    if stores_16_bytes() {
        return Ok(());
    }
    let what = "this machine has no cmpxchg16b, without which contents cannot outlive the process";
    Err(Error::new(ErrorKind::Unsupported, what))
}
