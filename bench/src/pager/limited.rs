//! Memory limits of cgroups, for programs that swap.
//!
//! On a busy machine the kernel now and then finds nothing to reclaim in it although nearly all of it could be swapped out, and
//! would kill the program. Instead the program waits, and the limit is raised for a moment.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};

use crate::block::cgroup::Cgroup;
use crate::block::io_error;

/// How often it is looked whether the program waits, and by how much the limit is raised then.
const LOOK_EVERY: Duration = Duration::from_millis(2);
const RAISED_BYTES: u64 = 4 << 20;

/// A cgroup with a limit, removed when it is dropped.
pub(super) struct LimitedCgroup {
    watch: LimitWatch,
    cgroup: Cgroup,
}

/// Raises the limit of a cgroup while its programs wait for memory, until it is dropped.
pub struct LimitWatch {
    watcher: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

struct Shared {
    limit_path: PathBuf,
    control_path: PathBuf,
    limit_bytes: u64,
    ends: AtomicBool,
    raised: AtomicUsize,
}

impl LimitedCgroup {
    pub(super) fn new(limit_bytes: u64) -> Result<LimitedCgroup> {
        let cgroup = Cgroup::new()?;
        Ok(LimitedCgroup { watch: LimitWatch::start(&cgroup, limit_bytes)?, cgroup })
    }

    pub(super) fn dir(&self) -> &Path {
        self.cgroup.dir()
    }

    /// Returns how often the limit was raised.
    pub(super) fn raised(&self) -> usize {
        self.watch.shared.raised.load(Ordering::Relaxed)
    }
}

impl LimitWatch {
    /// Sets the limit, and has programs wait instead of being killed.
    ///
    /// # Errors
    /// `Io`: the kernel cannot reach the limit, among others.
    pub fn start(cgroup: &Cgroup, limit_bytes: u64) -> Result<LimitWatch> {
        let path = |name: &str| cgroup.dir().join(name);
        let shared = Arc::new(Shared {
            limit_path: path("memory.limit_in_bytes"),
            control_path: path("memory.oom_control"),
            limit_bytes,
            ends: AtomicBool::new(false),
            raised: AtomicUsize::new(0),
        });
        shared.limit(limit_bytes)?;
        fs::write(&shared.control_path, "1").map_err(|error| io_error(&shared.control_path, error))?;
        let theirs = Arc::clone(&shared);
        let watcher = std::thread::Builder::new().name("bench-limit".into()).spawn(move || theirs.watch());
        let watcher = watcher.map_err(|error| Error::new(ErrorKind::NoMemory, error.to_string()))?;
        Ok(LimitWatch { watcher: Some(watcher), shared })
    }
}

impl Shared {
    fn limit(&self, bytes: u64) -> Result<()> {
        fs::write(&self.limit_path, bytes.to_string()).map_err(|error| io_error(&self.limit_path, error))
    }

    /// Raises the limit while the program waits for memory.
    fn watch(&self) {
        let mut raised_bytes = 0;
        while !self.ends.load(Ordering::Relaxed) {
            let control = fs::read_to_string(&self.control_path).unwrap_or_default();
            if control.contains("under_oom 1") {
                self.raised.fetch_add(1, Ordering::Relaxed);
                // More each time: the program may have used up at once what the last time gave.
                raised_bytes += RAISED_BYTES;
                let _ = self.limit(self.limit_bytes + raised_bytes);
            } else if raised_bytes > 0 && self.limit(self.limit_bytes).is_ok() {
                // The kernel refuses a limit that it cannot reach at once.
                raised_bytes = 0;
            }
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
