//! The zram device over a store: byte offsets, attributes, life cycle, statistics.
//!
//! A device starts uninitialised. Setting `disksize` builds its store, with the parameters set so far;
//! `reset` frees everything and forgets the parameters. In between any number of users can open it
//! ([`Device::open`]); while it is open it can be neither reset nor removed. Tasks over all pages
//! (`recompress`, for instance) do not prevent that: they are interrupted.
//!
//! Lock order: the device's lock comes before all others. I/O does not take it.

pub mod attr;
mod backing;
mod builder;
mod io;
mod keeper;
mod task;

#[cfg(test)]
mod end_tests;
#[cfg(test)]
mod keeper_tests;
#[cfg(test)]
mod task_tests;
#[cfg(test)]
mod tests;

pub use crate::store::{
    AttachProgress, Attached, BackingState, DEFAULT_CHAIN_SIZE, DEFAULT_RUN_CACHE_BATCH_PAGES, KeptMemory,
    PageState, StandBy, Wait,
};
pub use attr::{Attribute, AttributeText, Reading, Value};
pub use backing::{Elsewhere, HowToOpen, KeptPart, NamedBacking, Opener, set_opener};
pub use builder::DeviceBuilder;
pub use io::{Extent, OpenDevice};
pub use keeper::Keeper;

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::units::{bytes_to_pages, pages_to_bytes};
use crate::lru;
use crate::store::{BackingOptions, BackingStats, PolicyThread, Store, StoreBuilder, WritebackLayout};
use crate::zsmalloc::ClassStat;

/// How long `reset` waits for interrupted tasks to end; one that waits for a backing device may take longer.
const TASKS_END_WITHIN: Duration = Duration::from_secs(5);
const TASKS_LOOK_EVERY: Duration = Duration::from_millis(2);

/// A zram device.
pub struct Device {
    name: String,
    state: Mutex<State>,
    /// The number of open handles and tasks. Increased and read under the lock; handles decrease it without
    /// the lock, tasks under it, so that there are never fewer users than tasks.
    users: Counter,
}

/// Protected by the device's lock.
#[derive(Default)]
struct State {
    params: Params,
    /// Keeps the memory of the device's stores, from one to the next.
    keeper: Option<Arc<dyn Keeper>>,
    /// Carries out the store's policy; it ends before the store does.
    policy: Option<PolicyThread>,
    store: Option<Arc<Store>>,
    disksize_bytes: u64,
    tasks: Vec<task::TaskProgress>,
    /// The device was removed: it cannot be initialised again.
    removed: bool,
}

/// The parameters that can be set before the device is initialised.
#[derive(Clone)]
struct Params {
    /// The store's parameters but for name, size and backing device.
    store: StoreBuilder,
    backing: Option<NamedBacking>,
    how_to_open: HowToOpen,
    writeback_layout: WritebackLayout,
    compressed_writeback: bool,
}

impl Default for Params {
    fn default() -> Self {
        Params {
            store: StoreBuilder::new("", 0),
            backing: None,
            how_to_open: HowToOpen::default(),
            writeback_layout: WritebackLayout::default(),
            compressed_writeback: true,
        }
    }
}

/// Declares [`DeviceStats`]: each figure, and how it is found.
macro_rules! device_stats {
    (
        |$disksize:ident, $store:ident, $stats:ident, $backing:ident|
        $($(#[$doc:meta])* $field:ident: $value:expr,)*
    ) => {
        /// A snapshot of a device's statistics. Sizes are in bytes, pages are of 4096 bytes.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[non_exhaustive]
        pub struct DeviceStats {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl std::iter::Sum for DeviceStats {
            /// Sums the statistics of several devices.
            fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
                all.fold(DeviceStats::default(), |sum, one| DeviceStats {
                    $($field: sum.$field.saturating_add(one.$field)),*
                })
            }
        }

        impl DeviceStats {
            fn of($disksize: u64, $store: &Store) -> Self {
                let ($stats, $backing) = ($store.stats(), $store.backing_stats());
                DeviceStats { $($field: $value,)* }
            }
        }
    };
}

device_stats! {
    |disksize_bytes, store, stats, backing|
    /// The size of the disk.
    disksize_bytes: disksize_bytes,
    /// The uncompressed size of the pages that hold something (mm_stat `orig_data_size`).
    orig_data_bytes: pages_to_bytes(stats.pages_stored),
    /// Their compressed size (mm_stat `compr_data_size`).
    compr_data_bytes: stats.compr_data_bytes,
    /// Memory of the pool (mm_stat `mem_used_total`).
    mem_used_bytes: pages_to_bytes(stats.pool_pages),
    /// The maximum of `mem_used_bytes` so far (mm_stat `mem_used_max`).
    mem_used_max_bytes: pages_to_bytes(stats.pool_pages_max),
    /// The limit of `mem_charged_bytes`; 0 for none.
    mem_limit_bytes: pages_to_bytes(stats.limit_pages),
    /// Memory of the pool and of its metadata slabs, and free memory kept for reuse.
    mem_charged_bytes: pages_to_bytes(stats.charged_pages),
    /// The size of all 2 MiB chunks that hold any of `mem_charged_bytes`: the address space in use.
    mem_chunk_bytes: pages_to_bytes(stats.chunk_pages),
    /// Free memory to keep ready, so that no request waits for it: the attribute `reserve`; 0 for none.
    reserve_bytes: pages_to_bytes(stats.reserve_pages),
    /// Free memory that is ready now, in whole chunks; may exceed `reserve_bytes`.
    reserve_free_bytes: pages_to_bytes(stats.reserve_free_pages),
    /// Writes that failed because the reserve was drained.
    reserve_drained: stats.reserve_drained,
    /// Writes that failed because the memory limit was reached.
    limit_refused: stats.limit_refused,
    /// The maximum memory of slot table, LRU, streams and dictionary, which depends on the disk's size and
    /// the number of streams. It grows when a spare stream is made.
    mem_fixed_bytes: store.fixed_bytes() as u64,
    /// The current memory of these, and of the tables that grow with the pool.
    mem_tables_bytes: 0,
    /// Same-filled pages.
    same_pages: stats.same_pages,
    /// Pages freed by compaction.
    pages_compacted: stats.pages_compacted,
    /// Pages made smaller by recompression.
    pages_recompressed: stats.pages_recompressed,
    /// Pages stored uncompressed.
    huge_pages: stats.huge_pages,
    /// Pages stored uncompressed so far.
    huge_pages_since: stats.huge_pages_since,
    /// Pages read.
    pages_read: stats.pages_read,
    /// Pages written.
    pages_written: stats.pages_written,
    /// Reads that failed.
    failed_reads: stats.failed_reads,
    /// Writes that failed.
    failed_writes: stats.failed_writes,
    /// Pages discarded.
    notify_free: stats.notify_free,
    /// Objects found damaged when they were freed; their memory is not used again.
    corrupted_objects: stats.corrupted,
    /// Times a thread waited because all compression streams were in use.
    stream_sleeps: stats.stream_sleeps,
    /// The size of the backing device; 0 without one.
    backing_bytes: backing.len_bytes,
    /// Bytes of the backing device that pages take, headers and padding included (bd_stat `bd_count`).
    backing_held_bytes: backing.held_bytes,
    /// Pages on the backing device and not in memory.
    pages_backed: backing.pages,
    /// Pages written back so far.
    pages_written_back: backing.pages_written_back,
    /// Pages returned from the backing device to memory so far.
    pages_returned: backing.pages_returned,
    /// Failed writes to the backing device.
    backing_failed_writes: backing.failed_writes,
    /// Failed reads from the backing device.
    backing_failed_reads: backing.failed_reads,
    /// Pages read back damaged: their reads fail.
    backing_corrupted: backing.corrupted,
}

impl DeviceStats {
    /// Returns all memory that the device takes now: what `mem_limit` bounds, and the tables.
    pub const fn memory_bytes(&self) -> u64 {
        self.mem_charged_bytes.saturating_add(self.mem_tables_bytes)
    }

    /// Returns the memory of the device's contents, which is freed as they are discarded.
    pub const fn kept_bytes(&self) -> u64 {
        self.mem_charged_bytes.saturating_sub(self.reserve_free_bytes)
    }
}

impl Params {
    fn check_layout(&self) -> Result<()> {
        if self.writeback_layout == WritebackLayout::Packed && !self.compressed_writeback {
            let what = "packed pages are written as they are compressed: set compressed_writeback to 1, or \
                        writeback_layout to blocks";
            return Err(Error::invalid(what).with_setting("compressed_writeback"));
        }
        if self.writeback_layout == WritebackLayout::Blocks && self.how_to_open.encrypted {
            let what = "single blocks are not encrypted: set writeback_layout to packed";
            return Err(Error::invalid(what).with_setting("writeback_layout"));
        }
        Ok(())
    }

    fn start_policy(&self, name: &str, store: &Arc<Store>) -> Result<Option<PolicyThread>> {
        let recompresses = self.store.recompression.iter().any(Option::is_some);
        let reclaims = recompresses || self.backing.is_some();
        reclaims.then(|| PolicyThread::start(name, store)).transpose()
    }

    fn backing_options(&self) -> Result<Option<BackingOptions>> {
        let Some(device) = &self.backing else { return Ok(None) };
        self.check_layout()?;
        let how = &self.how_to_open;
        if how.encrypted && !device.is_encrypted() || how.copies > device.copies() {
            let what = "backing_encrypted and backing_copies concern a backing_dev that is set after them: set it again";
            return Err(Error::invalid(what).with_setting("backing_dev"));
        }
        Ok(Some(BackingOptions {
            backing: Arc::clone(device.backing()),
            layout: self.writeback_layout,
            compressed: self.compressed_writeback,
        }))
    }
}

impl Device {
    /// Creates an uninitialised device. Fails with `Invalid` unless the name is 1 to 64 letters, digits, `-`,
    /// `_` and `.`, not starting with a dot: it becomes an export's name and part of paths.
    pub fn new(name: &str) -> Result<Arc<Device>> {
        Device::check_name(name)?;
        Ok(Arc::new(Device::with(name, State::default())))
    }

    fn with(name: &str, state: State) -> Device {
        let state = Mutex::new(&classes::DEVICE, state);
        Device { name: name.to_owned(), state, users: Counter::new(0) }
    }

    /// Checks a device's name. Fails as [`Device::new`].
    pub fn check_name(name: &str) -> Result<()> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(allowed) {
            let what = format!("'{name}' cannot name a device: use 1 to 64 letters, digits, '-', '_', '.'");
            return Err(Error::invalid(what));
        }
        Ok(())
    }

    /// Returns the name, as in `zram0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size of the disk; 0 while uninitialised.
    pub fn size_bytes(&self) -> u64 {
        self.state.lock().disksize_bytes
    }

    fn store(&self) -> Option<Arc<Store>> {
        self.state.lock().store.clone()
    }

    /// Returns the table of attributes.
    pub fn attributes() -> &'static [Attribute] {
        attr::TABLE
    }

    /// Reads an attribute. Returns its text as the kernel's file would show it, without the last newline.
    /// Fails with `NotFound`; `Permission` for a write-only attribute.
    pub fn get(&self, name: &str) -> Result<String> {
        self.reading(name).map(|reading| reading.text)
    }

    /// Reads an attribute, as text and as a value. Fails as [`Device::get`].
    pub fn reading(&self, name: &str) -> Result<Reading> {
        attr::find(name)?.get(self)
    }

    /// Writes an attribute.
    /// Fails with `NotFound`; `Permission` for a read-only attribute; the attribute's own error.
    pub fn set(&self, name: &str, value: &str) -> Result<()> {
        self.set_interruptible(name, value, &|| true)
    }

    /// As [`Device::set`], but a task over all pages ends when `is_wanted`, called repeatedly, returns false.
    ///
    /// # Errors
    /// Also `Interrupted`: what was done until then stays done.
    pub fn set_interruptible(&self, name: &str, value: &str, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        attr::find(name)?.set(self, value.trim(), is_wanted)
    }

    /// Checks values of `disksize` and `backing_dev` against the parameters set so far, as far as possible
    /// without building or opening anything. Fails with `Invalid` when they do not fit.
    pub fn check(&self, disksize: &str, backing_dev: Option<&str>) -> Result<()> {
        let pages = bytes_to_pages(attr::parse_disksize(disksize.trim())?);
        let backing_dev = backing_dev.map(str::trim).filter(|text| *text != "none");
        let state = self.state.lock();
        StoreBuilder { pages, ..state.params.store.clone() }.check()?;
        if state.keeper.is_some() {
            state.can_survive()?;
        }
        match backing_dev {
            Some(text) => state.params.check_layout().and_then(|()| NamedBacking::check(text)),
            None => Ok(()),
        }
    }

    /// Returns the current statistics. While uninitialised, all but the limit are 0.
    pub fn stats(&self) -> DeviceStats {
        let tables = self.store().map_or(0, |store| store.table_resident_bytes());
        DeviceStats { mem_tables_bytes: tables as u64, ..self.counts() }
    }

    /// Returns the statistics but for `mem_tables_bytes`, which is slow to count.
    pub fn counts(&self) -> DeviceStats {
        let (store, disksize_bytes, limit_pages) = {
            let state = self.state.lock();
            (state.store.clone(), state.disksize_bytes, state.params.store.limit_pages)
        };
        let Some(store) = store else {
            return DeviceStats { mem_limit_bytes: pages_to_bytes(limit_pages), ..DeviceStats::default() };
        };
        DeviceStats::of(disksize_bytes, &store)
    }

    /// Returns the statistics of the LRU; all 0 while uninitialised.
    pub fn lru_stats(&self) -> lru::LruStats {
        self.store().map(|store| store.lru_stats()).unwrap_or_default()
    }

    /// Returns the statistics of the backing device; all 0 without one or while uninitialised.
    pub fn backing_stats(&self) -> BackingStats {
        self.store().map(|store| store.backing_stats()).unwrap_or_default()
    }

    /// Returns how the backing device is; `None` without one.
    pub fn backing_state(&self) -> Option<BackingState> {
        let state = self.state.lock();
        let (backing, store) = (state.params.backing.clone()?, state.store.clone());
        // It may look at each extent.
        drop(state);
        let used = store.and_then(|store| store.backing_state());
        Some(used.unwrap_or_else(|| BackingState::of(backing.backing())))
    }

    /// Returns the backing device that is set, if any.
    pub fn backing(&self) -> Option<NamedBacking> {
        self.state.lock().params.backing.clone()
    }

    /// Sets the backing device, like the attribute `backing_dev`, but of any kind. Closes the one that was
    /// set before. Fails with `Busy` once the device is initialised.
    pub fn set_backing(&self, backing: Option<NamedBacking>) -> Result<()> {
        let mut state = self.state.lock();
        state.uninitialised("backing_dev")?;
        let old = std::mem::replace(&mut state.params.backing, backing);
        // Closing it may wait for the system.
        drop(state);
        drop(old);
        Ok(())
    }

    /// Removes what the device has in a store on other machines: for its end, and the end of the process. Its
    /// pages there are lost.
    pub fn erase_backing(&self) {
        self.store().iter().for_each(|store| store.erase_backing());
    }

    /// Returns whether writes find room below the memory limit, and in the reserve if there is one.
    pub fn has_room(&self) -> bool {
        self.store().is_none_or(|store| store.has_room())
    }

    /// Returns the statistics of each size class of the pool, smallest first; none while uninitialised.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        // Without the device's lock: it walks all classes.
        self.store().map(|store| store.class_stats()).unwrap_or_default()
    }

    /// Opens the disk for I/O. `reset` fails with `Busy` until all [`OpenDevice`]s are dropped.
    /// Fails with `Busy` while the device is uninitialised.
    pub fn open(self: &Arc<Self>) -> Result<OpenDevice> {
        let state = self.state.lock();
        let Some(store) = state.store.clone() else {
            let what = format!("'{}' has no size yet", self.name);
            return Err(Error::new(ErrorKind::Busy, what).with_setting("disksize"));
        };
        Ok(OpenDevice::new(store, Arc::clone(self), &state))
    }

    /// Builds the store of a disk of `bytes` bytes, rounded up to whole pages.
    fn initialise(&self, bytes: u64) -> Result<()> {
        let mut state = self.state.lock();
        state.uninitialised("disksize")?;
        if state.removed {
            return Err(Error::new(ErrorKind::NotFound, format!("'{}' was removed", self.name)));
        }
        let pages = bytes_to_pages(bytes);
        let params = &state.params;
        params.backing.iter().for_each(|backing| backing.backing().set_disk_bytes(pages_to_bytes(pages)));
        let backing = params.backing_options()?;
        let config = StoreBuilder { name: self.name.clone(), pages, backing, ..params.store.clone() };
        let store = match &state.keeper {
            None => config.build()?,
            Some(_) => {
                state.can_survive()?;
                Store::create_in(&config)?
            }
        };
        let store = Arc::new(store);
        let start = || {
            let policy = params.start_policy(&self.name, &store)?;
            if let Some((keeper, memory)) = state.keeper.as_ref().zip(store.memory()) {
                keeper.keep(&self.name, memory.as_fd(), params.backing.as_ref())?;
            }
            Ok::<_, Error>(policy)
        };
        let policy = start().inspect_err(|_| {
            // The next store may use it.
            params.backing.iter().for_each(|backing| backing.backing().give_back());
        })?;
        state.policy = policy;
        state.store = Some(store);
        state.disksize_bytes = pages_to_bytes(pages);
        Ok(())
    }

    fn reset(&self) -> Result<()> {
        self.empty(false)
    }

    /// Frees everything permanently: the device cannot be initialised or opened again.
    /// Fails with `Busy` while it is open, or if a task does not end in time.
    pub fn remove(&self) -> Result<()> {
        self.empty(true)
    }

    /// Empties a device that is not open; permanently with `removed`, or if it was removed before.
    fn empty(&self, removed: bool) -> Result<()> {
        let deadline = Instant::now() + TASKS_END_WITHIN;
        loop {
            let mut state = self.state.lock();
            let (users, tasks) = (self.users.get(), state.tasks.len() as u64);
            if users == 0 {
                let keeper = state.keeper.clone();
                if let (Some(_), Some(keeper)) = (&state.store, &keeper) {
                    // Under the lock, so that the device gets no new store before.
                    keeper.give_up(&self.name);
                }
                let new = State { keeper, removed: removed || state.removed, ..State::default() };
                let old = std::mem::replace(&mut *state, new);
                old.params.backing.iter().for_each(NamedBacking::unlock_when_dropped);
                // Unmapping takes a while: do it without the lock.
                drop(state);
                old.store.iter().for_each(|store| store.erase_backing());
                drop(old);
                return Ok(());
            }
            if users > tasks || Instant::now() > deadline {
                let what = format!(
                    "'{}' is in use (users: {users}): disconnect its clients, and wait for its tasks to end",
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
