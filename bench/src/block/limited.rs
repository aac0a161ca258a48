//! Memory limits of cgroups, for programs that swap.
//!
//! When a program that swaps fast has changed all of its memory since the kernel last counted, the kernel may
//! find nothing to reclaim, kills the program, or has its system calls fail, although nearly all of the
//! memory could be swapped out. So it is made to count anew all the time. Where that does not suffice the
//! program waits, and the limit is raised for a moment.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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

/// A cgroup with a limit, which is raised while its programs wait for memory; removed when it is dropped.
pub(crate) struct LimitedCgroup {
    watcher: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
    cgroup: Cgroup,
}

struct Shared {
    dir: PathBuf,
    limit_path: PathBuf,
    control_path: PathBuf,
    limit_bytes: u64,
    ends: AtomicBool,
    raised: AtomicUsize,
}

impl LimitedCgroup {
    /// Makes one with a limit as [`Cgroup::limit`] sets it, whose programs wait instead of being killed.
    pub(crate) fn new(limit_bytes: u64) -> Result<LimitedCgroup> {
        let cgroup = Cgroup::new()?;
        let path = |name: &str| cgroup.dir().join(name);
        let control_path = path("memory.oom_control");
        fs::write(&control_path, "1").map_err(|error| io_error(&control_path, error))?;
        let shared = Arc::new(Shared {
            dir: cgroup.dir().to_owned(),
            limit_path: path("memory.limit_in_bytes"),
            control_path,
            limit_bytes: cgroup.limit(limit_bytes)?,
            ends: AtomicBool::new(false),
            raised: AtomicUsize::new(0),
        });
        let theirs = Arc::clone(&shared);
        let watcher = std::thread::Builder::new().name("bench-limit".into()).spawn(move || theirs.watch());
        let watcher = watcher.map_err(|error| Error::new(ErrorKind::NoMemory, error.to_string()))?;
        Ok(LimitedCgroup { watcher: Some(watcher), shared, cgroup })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.cgroup.dir()
    }

    /// Returns the words that start a command in it.
    pub(crate) fn words(&self) -> [String; 4] {
        self.cgroup.words()
    }

    /// Returns how often the limit was raised because a program waited.
    pub(crate) fn raised(&self) -> usize {
        self.shared.raised.load(Ordering::Relaxed)
    }
}

impl Shared {
    /// Keeps the statistics up to date, and raises the limit while the program waits for memory.
    fn watch(&self) {
        let mut raised_bytes = 0;
        let set =
            |raised_bytes: u64| fs::write(&self.limit_path, (self.limit_bytes + raised_bytes).to_string());
        for look in (0..LOOKS_PER_COUNT).cycle() {
            if self.ends.load(Ordering::Relaxed) {
                return;
            }
            if look == 0 {
                let _ = count_anew(&self.dir);
            }
            let control = fs::read_to_string(&self.control_path).unwrap_or_default();
            if control.contains("under_oom 1") {
                self.raised.fetch_add(1, Ordering::Relaxed);
                // More each time: the program may have used up at once what the last time gave.
                raised_bytes += RAISED_BYTES;
                let _ = set(raised_bytes);
            } else if raised_bytes > 0 && set(0).is_ok() {
                // The kernel refuses a limit that it cannot reach at once.
                raised_bytes = 0;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for LimitedCgroup {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        self.watcher.take().into_iter().for_each(|watcher| drop(watcher.join()));
    }
}
