//! The stores of this benchmark: one in memory that outlives the process, and the same in private memory.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use uzram::codec::Algorithm;
use uzram::store::{StandBy, Store, StoreBuilder, StoreStats};
use uzram::units::{Page, PageNo};
use uzram::{Error, ErrorKind, Result};

use super::super::{Target, Worker, fill_in_order};
use super::attach::MappedWhen;
use crate::harness::corpus::{AlignedPage, Corpus};

/// A store that is used without a device.
pub(super) struct MeasuredStore {
    name: &'static str,
    store: Store,
    page_count: usize,
}

impl MeasuredStore {
    /// An empty store in memory that outlives the process.
    pub(super) fn surviving(algorithm: &Algorithm, page_count: usize) -> Result<MeasuredStore> {
        let store = Store::create_in(&builder(algorithm, page_count))?;
        Ok(MeasuredStore { name: "memfd", store, page_count })
    }

    /// The same in private memory.
    pub(super) fn private(algorithm: &Algorithm, page_count: usize) -> Result<MeasuredStore> {
        let store = builder(algorithm, page_count).build()?;
        Ok(MeasuredStore { name: "private", store, page_count })
    }

    pub(super) fn page_count(&self) -> usize {
        self.page_count
    }

    pub(super) fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    /// Drops the store, all of whose pages hold something, and attaches its memory; returns how long the attach took.
    ///
    /// # Errors
    /// It is in private memory; it cannot be attached, or not all of its pages are found.
    pub(super) fn attach_again(self, mapped: MappedWhen) -> Result<(MeasuredStore, Duration)> {
        let MeasuredStore { name, store, page_count } = self;
        let memory = memory_of(&store)?;
        drop(store);
        let start: Instant;
        let (store, attached) = match mapped {
            MappedWhen::Attached => {
                start = Instant::now();
                // SAFETY: the store that had the memory was dropped.
                unsafe { Store::attach(memory, None)? }
            }
            MappedWhen::Ahead => {
                let stand_by = StandBy::new(memory)?;
                stand_by.catch_up()?;
                start = Instant::now();
                // SAFETY: as above.
                unsafe { stand_by.attach(None)? }
            }
        };
        let elapsed = start.elapsed();
        if (attached.pages, attached.pages_lost) != (page_count as u64, 0) {
            let what = format!("attached a store of {page_count} pages, and found {attached:?}");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok((MeasuredStore { name, store, page_count }, elapsed))
    }
}

fn builder(algorithm: &Algorithm, page_count: usize) -> StoreBuilder {
    StoreBuilder::new("bench", page_count as u64).algorithm(algorithm.clone())
}

/// Another descriptor of a store's memory.
fn memory_of(store: &Store) -> Result<OwnedFd> {
    let memory = store.memory().ok_or_else(|| Error::invalid("the store is in private memory"))?;
    memory.as_fd().try_clone_to_owned().map_err(|error| {
        Error::new(ErrorKind::Io, format!("cannot have another descriptor of the store's memory: {error}"))
    })
}

impl Target for MeasuredStore {
    fn name(&self) -> &'static str {
        self.name
    }

    fn fill(&self, corpus: &Corpus) -> Result<()> {
        fill_in_order(self, corpus, self.page_count)
    }

    fn worker(&self) -> Result<Box<dyn Worker + '_>> {
        Ok(Box::new(StoreWorker { store: &self.store, buffer: Box::new(AlignedPage([0; _])) }))
    }
}

struct StoreWorker<'a> {
    store: &'a Store,
    buffer: Box<AlignedPage>,
}

impl Worker for StoreWorker<'_> {
    fn read(&mut self, page: usize) -> Result<&Page> {
        self.store.read(PageNo(page as u32), &mut self.buffer.0)?;
        Ok(&self.buffer.0)
    }

    fn write(&mut self, page: usize, contents: &Page) -> Result<()> {
        self.store.write(PageNo(page as u32), contents)
    }
}
