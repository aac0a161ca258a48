//! The zram device over a store: byte offsets, attributes, life cycle, statistics.
//!
//! A device starts uninitialised. Setting `disksize` makes its store, with the parameters set
//! until then; `reset` frees everything and forgets the parameters. In between it is open to any
//! number of users ([`Device::open`]), and while it has one it can be neither reset nor removed. What it does with all its
//! pages on request (`recompress`, say) is then ended first.
//!
//! Lock order: the device's lock comes before all others. I/O does not take it.

pub mod attr;
mod backing;
mod builder;
mod io;
mod task;

#[cfg(test)]
mod task_tests;
#[cfg(test)]
mod tests;

pub use crate::store::{
    DEFAULT_CHAIN_SIZE, DEFAULT_COMPACT_RATE_BYTES, DEFAULT_COMPACT_THRESHOLD_PERCENT,
    DEFAULT_RUN_CACHE_BATCH_PAGES, PageState, Wait,
};
pub use attr::{Attribute, AttributeText};
pub use backing::NamedBacking;
pub use builder::DeviceBuilder;
pub use io::{Extent, OpenDevice};

use std::thread;
use std::time::{Duration, Instant};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::units::{bytes_to_pages, pages_to_bytes};
use crate::lru;
use crate::store::{
    BackingOptions, BackingStats, PolicyThread, Store, StoreBuilder, WritebackLayout, WritebackLimit,
};
use crate::zsmalloc::ClassStat;

/// How long `reset` waits for the end of what it has told to end: what waits for a backing device may take longer.
const TASKS_END_WITHIN: Duration = Duration::from_secs(5);
/// How often it looks.
const TASKS_LOOK_EVERY: Duration = Duration::from_millis(2);

/// A zram device.
pub struct Device {
    name: String,
    state: Mutex<State>,
    /// Those that have it open, and the tasks. Raised and read under the lock; lowered without it by those that have it
    /// open, so that there are never fewer users than tasks.
    users: Counter,
}

/// Protected by the device's lock.
#[derive(Default)]
struct State {
    params: Params,
    /// Carries out the store's policy; it ends before the store does.
    policy: Option<PolicyThread>,
    store: Option<Arc<Store>>,
    disksize_bytes: u64,
    tasks: Vec<task::TaskProgress>,
    /// It is never initialised again.
    removed: bool,
}

/// What can be set before the device is initialised.
#[derive(Clone)]
struct Params {
    /// Of the store, but for its name, its size, and where its cold pages go.
    store: StoreBuilder,
    backing: Option<NamedBacking>,
    /// Of the next backing: whether it may hold something else.
    backing_force: bool,
    writeback_layout: WritebackLayout,
    compressed_writeback: bool,
    writeback_limit: WritebackLimit,
    /// None for what suits the layout.
    writeback_batch: Option<u64>,
}

impl Default for Params {
    fn default() -> Self {
        Params {
            store: StoreBuilder::new("", 0),
            backing: None,
            backing_force: false,
            writeback_layout: WritebackLayout::default(),
            compressed_writeback: true,
            writeback_limit: WritebackLimit::default(),
            writeback_batch: None,
        }
    }
}

/// A snapshot of a device's statistics. Sizes are in bytes, the rest counts pages of 4096 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceStats {
    /// The size of the disk.
    pub disksize_bytes: u64,
    /// The size, uncompressed, of the pages that hold something (mm_stat `orig_data_size`).
    pub orig_data_bytes: u64,
    /// Their compressed size (mm_stat `compr_data_size`).
    pub compr_data_bytes: u64,
    /// Memory of the pool (mm_stat `mem_used_total`).
    pub mem_used_bytes: u64,
    /// The most it ever was (mm_stat `mem_used_max`).
    pub mem_used_max_bytes: u64,
    /// The limit of `mem_charged_bytes`; 0 for none.
    pub mem_limit_bytes: u64,
    /// Memory of the pool and of its metadata slabs, and free memory kept for reuse.
    pub mem_charged_bytes: u64,
    /// Memory of all chunks of 2 MiB in which any of that lies: what is held of the address space.
    pub mem_chunk_bytes: u64,
    /// Memory that is to be kept ready, so that nobody waits for it: the attribute `reserve`; 0 for none.
    pub reserve_bytes: u64,
    /// What is ready of it, or of more, in whole free chunks.
    pub reserve_free_bytes: u64,
    /// Writes that failed because nothing was ready any more.
    pub reserve_drained: u64,
    /// Writes that failed because the memory limit was met.
    pub limit_refused: u64,
    /// What the disk's size and the number of streams cost at most: slot table, LRU, streams, dictionary.
    /// It grows by a stream when all were lent and a spare one was made.
    pub mem_fixed_bytes: u64,
    /// What these, and the tables that grow with the pool, cost now.
    pub mem_tables_bytes: u64,
    /// Pages that are one word, repeated.
    pub same_pages: u64,
    /// Pages freed by compaction.
    pub pages_compacted: u64,
    /// Pages that became smaller by being compressed again.
    pub pages_recompressed: u64,
    /// Pages stored as they are.
    pub huge_pages: u64,
    /// Pages ever stored as they are.
    pub huge_pages_since: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Writes that failed.
    pub failed_writes: u64,
    /// Pages discarded.
    pub notify_free: u64,
    /// Objects found damaged when they were freed; their memory is not used again.
    pub corrupted_objects: u64,
    /// Times a thread found all compression streams lent and waited for one.
    pub stream_sleeps: u64,
    /// The size of the backing device; 0 without one.
    pub backing_bytes: u64,
    /// What pages take of it, with what is lost around them (bd_stat `bd_count`).
    pub backing_held_bytes: u64,
    /// Pages that are on the backing device and not in memory.
    pub pages_backed: u64,
    /// Pages that left memory for the backing device, so far.
    pub pages_written_back: u64,
    /// Pages that came back from it to stay, so far.
    pub pages_returned: u64,
    /// Writes of the backing device that failed.
    pub backing_failed_writes: u64,
    /// Reads of the backing device that failed.
    pub backing_failed_reads: u64,
    /// Pages that came back from it damaged: their reads fail.
    pub backing_corrupted: u64,
}

impl Params {
    /// Whether pages can be written to a backing device so.
    fn check_layout(&self) -> Result<()> {
        if self.writeback_layout == WritebackLayout::Packed && !self.compressed_writeback {
            let what = "packed pages are written as they are compressed: set compressed_writeback to 1, or \
                        writeback_layout to blocks";
            return Err(Error::invalid(what).with_setting("compressed_writeback"));
        }
        Ok(())
    }

    /// Where cold pages go, for the store.
    fn backing_options(&self) -> Result<Option<BackingOptions>> {
        let Some(device) = &self.backing else { return Ok(None) };
        self.check_layout()?;
        Ok(Some(BackingOptions {
            backing: Arc::clone(device.backing()),
            layout: self.writeback_layout,
            compressed: self.compressed_writeback,
        }))
    }
}

impl Device {
    /// An uninitialised device.
    ///
    /// # Errors
    /// `Invalid` unless the name is 1 to 64 letters, digits, `-`, `_` and `.`, not starting with a
    /// dot: it becomes an export's name and part of paths.
    pub fn new(name: &str) -> Result<Arc<Device>> {
        Device::check_name(name)?;
        Ok(Arc::new(Device {
            name: name.to_owned(),
            state: Mutex::new(&classes::DEVICE, State::default()),
            users: Counter::new(0),
        }))
    }

    /// Whether a device can have that name.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn check_name(name: &str) -> Result<()> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(allowed) {
            let what = format!("'{name}' cannot name a device: use 1 to 64 letters, digits, '-', '_', '.'");
            return Err(Error::invalid(what));
        }
        Ok(())
    }

    /// Its name, as in `zram0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The size of the disk; 0 while uninitialised.
    pub fn size_bytes(&self) -> u64 {
        self.state.lock().disksize_bytes
    }

    /// The table of attributes.
    pub fn attributes() -> &'static [Attribute] {
        attr::TABLE
    }

    /// Reads an attribute: its text, as the kernel's file would show it, without the last newline.
    ///
    /// # Errors
    /// `NotFound`; `Permission` for one that can only be written.
    pub fn get(&self, name: &str) -> Result<String> {
        attr::find(name)?.get(self)
    }

    /// Writes an attribute.
    ///
    /// # Errors
    /// `NotFound`; `Permission` for one that can only be read; the attribute's own error.
    pub fn set(&self, name: &str, value: &str) -> Result<()> {
        self.set_interruptible(name, value, &|| true)
    }

    /// The same, but what takes its time goes on only as long as `is_wanted` returns true, which is asked again and again.
    ///
    /// # Errors
    /// Further `Interrupted`: what was done until then stays done.
    pub fn set_interruptible(&self, name: &str, value: &str, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        attr::find(name)?.set(self, value.trim(), is_wanted)
    }

    /// Whether values of `disksize` and `backing_dev` make sense together with what was set, as far as that can be told
    /// without setting them: nothing is made or opened.
    ///
    /// # Errors
    /// `Invalid` when they do not.
    pub fn check(&self, disksize: &str, backing_dev: Option<&str>) -> Result<()> {
        let pages = bytes_to_pages(attr::parse_disksize(disksize.trim())?);
        let backing_dev = backing_dev.map(str::trim).filter(|text| *text != "none");
        let state = self.state.lock();
        StoreBuilder { pages, ..state.params.store.clone() }.check()?;
        match backing_dev {
            Some(text) => state.params.check_layout().and_then(|()| NamedBacking::check(text)),
            None => Ok(()),
        }
    }

    /// The statistics now; all zero while uninitialised but for the limit.
    pub fn stats(&self) -> DeviceStats {
        let tables = self.state.lock().store.clone().map_or(0, |store| store.table_resident_bytes());
        DeviceStats { mem_tables_bytes: tables as u64, ..self.counts() }
    }

    /// The statistics but for `mem_tables_bytes`, which takes the system a while to count.
    pub fn counts(&self) -> DeviceStats {
        let (store, disksize_bytes, limit_pages) = {
            let state = self.state.lock();
            (state.store.clone(), state.disksize_bytes, state.params.store.limit_pages)
        };
        let Some(store) = store else {
            return DeviceStats { mem_limit_bytes: pages_to_bytes(limit_pages), ..DeviceStats::default() };
        };
        let (stats, backing) = (store.stats(), store.backing_stats());
        DeviceStats {
            disksize_bytes,
            orig_data_bytes: pages_to_bytes(stats.pages_stored),
            compr_data_bytes: stats.compr_data_bytes,
            mem_used_bytes: pages_to_bytes(stats.pool_pages),
            mem_used_max_bytes: pages_to_bytes(stats.pool_pages_max),
            mem_limit_bytes: pages_to_bytes(stats.limit_pages),
            mem_charged_bytes: pages_to_bytes(stats.charged_pages),
            mem_chunk_bytes: pages_to_bytes(stats.chunk_pages),
            reserve_bytes: pages_to_bytes(stats.reserve_pages),
            reserve_free_bytes: pages_to_bytes(stats.reserve_free_pages),
            reserve_drained: stats.reserve_drained,
            limit_refused: stats.limit_refused,
            mem_fixed_bytes: store.fixed_bytes() as u64,
            mem_tables_bytes: 0,
            same_pages: stats.same_pages,
            pages_compacted: stats.pages_compacted,
            pages_recompressed: stats.pages_recompressed,
            huge_pages: stats.huge_pages,
            huge_pages_since: stats.huge_pages_since,
            pages_read: stats.pages_read,
            pages_written: stats.pages_written,
            failed_reads: stats.failed_reads,
            failed_writes: stats.failed_writes,
            notify_free: stats.notify_free,
            corrupted_objects: stats.corrupted,
            stream_sleeps: stats.stream_sleeps,
            backing_bytes: backing.len_bytes,
            backing_held_bytes: backing.held_bytes,
            pages_backed: backing.pages,
            pages_written_back: backing.pages_written_back,
            pages_returned: backing.pages_returned,
            backing_failed_writes: backing.failed_writes,
            backing_failed_reads: backing.failed_reads,
            backing_corrupted: backing.corrupted,
        }
    }

    /// What the lists of pages by their use have and did; nothing while uninitialised.
    pub fn lru_stats(&self) -> lru::LruStats {
        self.state.lock().store.as_ref().map(|store| store.lru_stats()).unwrap_or_default()
    }

    /// What the backing device holds and was asked for; nothing without one or while uninitialised.
    pub fn backing_stats(&self) -> BackingStats {
        self.state.lock().store.as_ref().map(|store| store.backing_stats()).unwrap_or_default()
    }

    /// Where its cold pages go, if anywhere.
    pub fn backing(&self) -> Option<NamedBacking> {
        self.state.lock().params.backing.clone()
    }

    /// Sets where its cold pages go: the attribute `backing_dev`, for backings that are no files. What was set
    /// before is let go.
    ///
    /// # Errors
    /// `Busy` once the device is initialised.
    pub fn set_backing(&self, backing: Option<NamedBacking>) -> Result<()> {
        let mut state = self.state.lock();
        state.uninitialised("backing_dev")?;
        let old = std::mem::replace(&mut state.params.backing, backing);
        // Closing it may wait for the system.
        drop(state);
        drop(old);
        Ok(())
    }

    /// The state of each size class of the pool, smallest first; none while uninitialised.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        // Without the lock: it looks through all classes.
        let store = self.state.lock().store.clone();
        store.map(|store| store.class_stats()).unwrap_or_default()
    }

    /// Opens the disk for I/O; until all are dropped, `reset` fails with `Busy`.
    ///
    /// # Errors
    /// `Busy` while the device is uninitialised.
    pub fn open(self: &Arc<Self>) -> Result<OpenDevice> {
        let state = self.state.lock();
        let Some(store) = state.store.clone() else {
            let what = format!("'{}' has no size yet", self.name);
            return Err(Error::new(ErrorKind::Busy, what).with_setting("disksize"));
        };
        Ok(OpenDevice::new(store, Arc::clone(self), &state))
    }

    /// Makes the store: the disk has `bytes` bytes from now on, rounded up to whole pages.
    fn initialise(&self, bytes: u64) -> Result<()> {
        let mut state = self.state.lock();
        state.uninitialised("disksize")?;
        if state.removed {
            return Err(Error::new(ErrorKind::NotFound, format!("'{}' was removed", self.name)));
        }
        let pages = bytes_to_pages(bytes);
        let params = &state.params;
        let backing = params.backing_options()?;
        let recompresses = params.store.recompression.iter().any(Option::is_some);
        let is_backed = backing.is_some();
        let config = StoreBuilder { name: self.name.clone(), pages, backing, ..params.store.clone() };
        let store = Arc::new(config.build()?);
        if is_backed {
            store.change_writeback_limit(|limit| *limit = params.writeback_limit);
            params.writeback_batch.iter().for_each(|writes| store.set_writeback_batch(*writes));
        }
        if is_backed || recompresses {
            state.policy = Some(PolicyThread::start(&self.name, &store)?);
        }
        state.store = Some(store);
        state.disksize_bytes = pages_to_bytes(pages);
        Ok(())
    }

    /// Frees everything and forgets all parameters.
    fn reset(&self) -> Result<()> {
        self.empty(false)
    }

    /// Frees everything, for good: the device can't be initialised or opened again.
    ///
    /// # Errors
    /// `Busy` while it is open, or what it does with all its pages does not end.
    pub fn remove(&self) -> Result<()> {
        self.empty(true)
    }

    /// Empties a device that nobody has open; for good, if it is to be `removed` or was before.
    fn empty(&self, removed: bool) -> Result<()> {
        let deadline = Instant::now() + TASKS_END_WITHIN;
        loop {
            let mut state = self.state.lock();
            let (users, tasks) = (self.users.get(), state.tasks.len() as u64);
            if users == 0 {
                let new = State { removed: removed || state.removed, ..State::default() };
                let old = std::mem::replace(&mut *state, new);
                // Unmapping takes a while, for which nobody need wait.
                drop(state);
                drop(old);
                return Ok(());
            }
            if users > tasks || Instant::now() > deadline {
                let what = format!(
                    "'{}' is in use by {users}: disconnect its clients, and wait for what it was told to do",
                    self.name
                );
                return Err(Error::new(ErrorKind::Busy, what));
            }
            drop(state);
            self.interrupt();
            thread::sleep(TASKS_LOOK_EVERY);
        }
    }
}

impl State {
    /// Fails once the device is initialised: the attribute must be set before.
    fn uninitialised(&self, attribute: &str) -> Result<()> {
        match self.store {
            None => Ok(()),
            Some(_) => {
                let what =
                    format!("{attribute} can only be set before the device is initialised; reset it first");
                Err(Error::new(ErrorKind::Busy, what))
            }
        }
    }
}
