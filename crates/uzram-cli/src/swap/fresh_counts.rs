//! Makes the kernel flush cgroup statistics while programs swap.
//!
//! When a cgroup reaches its memory limit, Linux (6.18, measured) chooses pages to reclaim by statistics that
//! it flushes every 2 s. If a program changes all of its cgroup's memory faster than that, reclaim may choose
//! nothing, and the OOM killer kills the program although there is swap space: so it was with kernel zram in
//! 6 of 9 runs of 15 s of a program that used four times its limit in random order. Reading a cgroup's
//! `memory.stat` flushes them. So, while there are requests, a thread reads the files of the cgroups that
//! swap. No request waits for it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use uzram::device::Device;

use crate::swap::cgroups::{self, STATISTICS};

/// How often statistics are flushed while there are requests.
const PERIOD: Duration = Duration::from_millis(50);
/// How often cgroups that swap are searched for; also how often an idle thread checks for requests.
const SEARCH_PERIOD: Duration = Duration::from_millis(500);
/// The time without requests after which the thread is idle.
const REST: Duration = Duration::from_secs(2);
/// The most cgroups flushed; each takes about 40 us.
const MAX_CGROUPS: usize = 64;

/// The thread. Dropping this ends it.
pub struct FreshCounts {
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl FreshCounts {
    /// Starts the thread for programs that swap to one of these devices. Searches once before it returns,
    /// which allocates the memory that the thread needs.
    pub fn start(devices: Vec<Arc<Device>>) -> std::io::Result<Self> {
        let (ends, end) = mpsc::channel();
        let mut keeper = Keeper::new(devices);
        keeper.search();
        let run = move || {
            while end.recv_timeout(keeper.period()) == Err(RecvTimeoutError::Timeout) {
                keeper.look();
            }
        };
        let thread = thread::Builder::new().name("fresh-counts".to_owned()).spawn(run)?;
        Ok(FreshCounts { ends: Some(ends), thread: Some(thread) })
    }
}

impl Drop for FreshCounts {
    fn drop(&mut self) {
        self.ends = None;
        // A panic of the thread needs no handling.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Keeper {
    devices: Vec<Arc<Device>>,
    /// Pages read and written at the last look.
    pages: u64,
    /// When `pages` last changed; `None` when idle.
    changed: Option<Instant>,
    /// The statistics files of the cgroups that swapped at the last search.
    counts: Vec<File>,
    searched: Option<Instant>,
}

impl Keeper {
    fn new(devices: Vec<Arc<Device>>) -> Self {
        Keeper { devices, pages: 0, changed: None, counts: Vec::new(), searched: None }
    }

    fn period(&self) -> Duration {
        if self.changed.is_some() { PERIOD } else { SEARCH_PERIOD }
    }

    fn look(&mut self) {
        let counts = self.devices.iter().map(|device| device.counts());
        let pages = counts.map(|counts| counts.pages_read + counts.pages_written).sum();
        if pages != std::mem::replace(&mut self.pages, pages) {
            self.changed = Some(Instant::now());
        } else if self.changed.is_none_or(|changed| changed.elapsed() >= REST) {
            self.changed = None;
            return;
        }
        if self.searched.is_none_or(|searched| searched.elapsed() >= SEARCH_PERIOD) {
            self.search();
        }
        // Reading the file of a removed cgroup fails.
        self.counts.retain(|counts| counts.read_at(&mut [0], 0).is_ok());
    }

    fn search(&mut self) {
        let open = |dir: PathBuf| File::open(dir.join(STATISTICS)).ok();
        self.counts.clear();
        self.counts.extend(cgroups::limited_and_swapped().filter_map(open).take(MAX_CGROUPS));
        self.searched = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_often_while_there_are_requests() {
        let device = Device::new("a").unwrap();
        device.set("disksize", "1M").unwrap();
        let mut keeper = Keeper::new(vec![Arc::clone(&device)]);
        keeper.look();
        assert_eq!(keeper.period(), SEARCH_PERIOD);
        device.open().unwrap().write(0, &[1; 4096]).unwrap();
        keeper.look();
        assert_eq!(keeper.period(), PERIOD);
        // A readable and an unreadable file; search results are kept for `SEARCH_PERIOD`.
        let file = |path: &str| File::open(path).unwrap();
        keeper.counts = vec![file("/proc/self/stat"), file("/")];
        keeper.searched = Some(Instant::now());
        keeper.look();
        assert_eq!((keeper.period(), keeper.counts.len()), (PERIOD, 1));
        keeper.changed = keeper.changed.and_then(|changed| changed.checked_sub(REST));
        keeper.look();
        assert_eq!(keeper.period(), SEARCH_PERIOD);
        drop(FreshCounts::start(vec![device]).unwrap());
    }
}
