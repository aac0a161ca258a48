//! Memory limits of cgroups, for programs that swap.
//!
//! When a program that swaps fast has changed all of its memory since the kernel last counted, the kernel may find nothing to
//! reclaim, kills the program, or has its system calls fail, although nearly all of the memory could be swapped out. So it is
//! made to count anew all the time. Where that does not suffice the program waits, and the limit is raised for a moment.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};

use super::cgroup::{Cgroup, count_anew};
use crate::harness::io_error;

/// How often it is looked whether the program waits, and by how much the limit is raised then.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// The kernel counts anew at one of so many looks: that takes some 40 us.
const LOOKS_PER_COUNT: u32 = 5;
const RAISED_BYTES: u64 = 4 << 20;

/// A cgroup with a limit, removed when it is dropped.
pub(crate) struct LimitedCgroup {
    watch: LimitWatch,
    cgroup: Cgroup,
}

/// Raises the limit of a cgroup while its programs wait for memory, until it is dropped.
pub struct LimitWatch {
    watcher: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

struct Shared {
    dir: PathBuf,
    limit_path: PathBuf,
    control_path: PathBuf,
    /// The limit, and what it is raised by now. Held while the kernel's is set.
    limit: Mutex<Limit>,
    ends: AtomicBool,
    raised: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Limit {
    bytes: u64,
    raised_bytes: u64,
}

impl LimitedCgroup {
    pub(crate) fn new(limit_bytes: u64) -> Result<LimitedCgroup> {
        let cgroup = Cgroup::new()?;
        Ok(LimitedCgroup { watch: LimitWatch::start(&cgroup, limit_bytes)?, cgroup })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.cgroup.dir()
    }

    /// Returns the words that start a command in it.
    pub(crate) fn words(&self) -> [String; 4] {
        self.cgroup.words()
    }

    /// Returns how often the limit was raised.
    pub(crate) fn raised(&self) -> usize {
        self.watch.raised()
    }
}

impl LimitWatch {
    /// Sets the limit as [`Cgroup::limit`] does, and has programs wait instead of being killed.
    ///
    /// # Errors
    /// `Io`.
    pub fn start(cgroup: &Cgroup, limit_bytes: u64) -> Result<LimitWatch> {
        let path = |name: &str| cgroup.dir().join(name);
        let control_path = path("memory.oom_control");
        fs::write(&control_path, "1").map_err(|error| io_error(&control_path, error))?;
        let shared = Arc::new(Shared {
            dir: cgroup.dir().to_owned(),
            limit_path: path("memory.limit_in_bytes"),
            control_path,
            limit: Mutex::new(Limit { bytes: cgroup.limit(limit_bytes)?, raised_bytes: 0 }),
            ends: AtomicBool::new(false),
            raised: AtomicUsize::new(0),
        });
        let theirs = Arc::clone(&shared);
        let watcher = std::thread::Builder::new().name("bench-limit".into()).spawn(move || theirs.watch());
        let watcher = watcher.map_err(|error| Error::new(ErrorKind::NoMemory, error.to_string()))?;
        Ok(LimitWatch { watcher: Some(watcher), shared })
    }

    /// Returns the limit.
    pub fn limit_bytes(&self) -> u64 {
        self.shared.lock().bytes
    }

    /// Returns how often it was raised because a program waited.
    pub fn raised(&self) -> usize {
        self.shared.raised.load(Ordering::Relaxed)
    }

    /// Sets a higher limit.
    ///
    /// # Errors
    /// `Io`.
    pub fn raise(&self, limit_bytes: u64) -> Result<()> {
        let mut limit = self.shared.lock();
        limit.bytes = limit_bytes;
        self.shared.set(*limit).map_err(|error| io_error(&self.shared.limit_path, error))
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Limit> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, limit: Limit) -> std::io::Result<()> {
        fs::write(&self.limit_path, (limit.bytes + limit.raised_bytes).to_string())
    }

    /// Keeps the statistics up to date, and raises the limit while the program waits for memory.
    fn watch(&self) {
        for look in (0..LOOKS_PER_COUNT).cycle() {
            if self.ends.load(Ordering::Relaxed) {
                return;
            }
            if look == 0 {
                let _ = count_anew(&self.dir);
            }
            let control = fs::read_to_string(&self.control_path).unwrap_or_default();
            let mut limit = self.lock();
            if control.contains("under_oom 1") {
                self.raised.fetch_add(1, Ordering::Relaxed);
                // More each time: the program may have used up at once what the last time gave.
                limit.raised_bytes += RAISED_BYTES;
                let _ = self.set(*limit);
            } else if limit.raised_bytes > 0 && self.set(Limit { raised_bytes: 0, ..*limit }).is_ok() {
                // The kernel refuses a limit that it cannot reach at once.
                limit.raised_bytes = 0;
            }
            drop(limit);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for LimitWatch {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        self.watcher.take().into_iter().for_each(|watcher| drop(watcher.join()));
    }
}
