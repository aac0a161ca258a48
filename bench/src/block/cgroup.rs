//! A cgroup of the memory controller, version 1, and one with a limit for a program that swaps.
//!
//! When a program that swaps fast has changed all of its memory since the kernel last counted, the kernel may
//! find nothing to reclaim, kills the program, or has its system calls fail, although nearly all of the
//! memory could be swapped out. So it is made to count anew all the time. Where that does not suffice the
//! program waits, and the limit is raised for a moment.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};

use crate::harness::memory::named_count;
use crate::harness::{io_error, unsupported};

/// A shell's script that enters a cgroup, whose folder is its name, and becomes the command that its
/// arguments are.
const ENTER: &str = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
const CONTROLLER: &str = "/sys/fs/cgroup/memory";
const LIMIT: &str = "memory.limit_in_bytes";
const OOM_CONTROL: &str = "memory.oom_control";
/// How often it is looked whether the program waits, and by how much the limit is raised then.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// The kernel counts anew at one of so many looks: that takes some 40 us.
const LOOKS_PER_COUNT: u32 = 5;
const RAISED_BYTES: u64 = 4 << 20;

/// A cgroup of this process's own, removed when dropped.
pub struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// `Unsupported` says why there can be none.
    pub fn check() -> Result<()> {
        let controller = Path::new(CONTROLLER);
        if !controller.join(LIMIT).exists() {
            return Err(unsupported("there is no memory controller of cgroups, version 1"));
        }
        let swapped = read_stat(controller, "swap").and_then(|swapped| {
            swapped.ok_or_else(|| unsupported("the kernel does not count what a cgroup has swapped out"))
        });
        let made = swapped.and_then(|_| Cgroup::new());
        made.map(drop).map_err(|error| unsupported(error.to_string()))
    }

    /// Makes one.
    pub fn new() -> Result<Cgroup> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let dir = Path::new(CONTROLLER).join(format!("uzram-bench-{}-{number}", std::process::id()));
        fs::create_dir(&dir).map_err(|error| io_error(&dir, error))?;
        Ok(Cgroup { dir })
    }

    /// Returns its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, value).map_err(|error| io_error(&path, error))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its last process may still be exiting.
        for _ in 0..100 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!("the cgroup is in use and stays: remove it with `rmdir {}`", self.dir.display());
    }
}

/// Returns a cgroup's statistics. That has the kernel (6.18, measured) bring them up to date, by which it
/// chooses what to swap out: else they are up to 2 s old.
fn statistics(dir: &Path) -> Result<String> {
    let path = dir.join("memory.stat");
    fs::read_to_string(&path).map_err(|error| io_error(&path, error))
}

/// Returns the value of a line of a cgroup's `memory.stat`, if it has that line.
pub(super) fn read_stat(dir: &Path, name: &str) -> Result<Option<u64>> {
    Ok(named_count(&statistics(dir)?, name))
}

/// A cgroup with a limit, which is raised while its programs wait for memory; removed when it is dropped.
pub(crate) struct LimitedCgroup {
    watcher: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

struct Shared {
    cgroup: Cgroup,
    limit_bytes: u64,
    ends: AtomicBool,
    raised: AtomicUsize,
}

impl LimitedCgroup {
    /// Makes one whose programs wait instead of being killed.
    pub(crate) fn new(limit_bytes: u64) -> Result<LimitedCgroup> {
        let (ends, raised) = (AtomicBool::new(false), AtomicUsize::new(0));
        let shared = Arc::new(Shared { cgroup: Cgroup::new()?, limit_bytes, ends, raised });
        shared.cgroup.set(OOM_CONTROL, "1")?;
        shared.cgroup.set(LIMIT, &limit_bytes.to_string())?;
        let theirs = Arc::clone(&shared);
        let watcher = thread::Builder::new().name("bench-limit".into()).spawn(move || theirs.watch());
        let watcher = watcher.map_err(|error| Error::new(ErrorKind::NoMemory, error.to_string()))?;
        Ok(LimitedCgroup { watcher: Some(watcher), shared })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.shared.cgroup.dir()
    }

    /// Returns the words that start a command in it.
    pub(crate) fn words(&self) -> [String; 4] {
        ["sh", "-c", ENTER, &self.dir().display().to_string()].map(str::to_owned)
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
        let set = |raised_bytes: u64| self.cgroup.set(LIMIT, &(self.limit_bytes + raised_bytes).to_string());
        let control = self.cgroup.dir().join(OOM_CONTROL);
        for look in (0..LOOKS_PER_COUNT).cycle() {
            if self.ends.load(Ordering::Relaxed) {
                return;
            }
            if look == 0 {
                let _ = statistics(self.cgroup.dir());
            }
            if fs::read_to_string(&control).is_ok_and(|control| control.contains("under_oom 1")) {
                self.raised.fetch_add(1, Ordering::Relaxed);
                // More each time: the program may have used up at once what the last time gave.
                raised_bytes += RAISED_BYTES;
                let _ = set(raised_bytes);
            } else if raised_bytes > 0 && set(0).is_ok() {
                // The kernel refuses a limit that it cannot reach at once.
                raised_bytes = 0;
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for LimitedCgroup {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        self.watcher.take().into_iter().for_each(|watcher| drop(watcher.join()));
    }
}
