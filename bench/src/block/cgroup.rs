//! A cgroup of the memory controller, version 1.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use uzram::Result;

use crate::harness::{io_error, unsupported};

/// How often a limit is tried, and how long to wait in between; then by how much more than is used it is set.
const LIMIT_TRIES: usize = 100;
const LIMIT_PAUSE: Duration = Duration::from_millis(5);
const LIMIT_SLACK_BYTES: u64 = 1 << 20;
/// A shell's script that enters a cgroup, whose folder is its name, and becomes the command that its
/// arguments are.
const ENTER: &str = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
const CONTROLLER: &str = "/sys/fs/cgroup/memory";

/// A cgroup of this process's own, removed when dropped.
pub struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// `Unsupported` says why there can be none.
    pub fn check() -> Result<()> {
        let controller = Path::new(CONTROLLER);
        if !controller.join("memory.limit_in_bytes").exists() {
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

    /// Returns the words that start a command in this cgroup.
    pub(crate) fn words(&self) -> [String; 4] {
        ["sh", "-c", ENTER, &self.dir.display().to_string()].map(str::to_owned)
    }

    /// Returns the bytes of memory that are charged to it.
    pub fn used_bytes(&self) -> Result<u64> {
        let path = self.dir.join("memory.usage_in_bytes");
        let text = fs::read_to_string(&path).map_err(|error| io_error(&path, error))?;
        let number = text.trim().parse();
        number.map_err(|_| io_error(&path, std::io::Error::other(format!("'{}'", text.trim()))))
    }

    /// Limits its memory: what is beyond is swapped out, as far as the kernel finds it; what it does not find
    /// may stay. Returns the limit.
    pub(crate) fn limit(&self, mut bytes: u64) -> Result<u64> {
        let path = self.dir.join("memory.limit_in_bytes");
        let set = |bytes: u64| fs::write(&path, bytes.to_string());
        let is_busy = |outcome: &std::io::Result<()>| {
            outcome.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
        };
        let mut outcome = set(bytes);
        // The kernel gives up when it finds nothing to swap out.
        for _ in 0..LIMIT_TRIES {
            if !is_busy(&outcome) {
                break;
            }
            thread::sleep(LIMIT_PAUSE);
            count_anew(&self.dir)?;
            outcome = set(bytes);
        }
        while is_busy(&outcome) {
            bytes = self.used_bytes()? + LIMIT_SLACK_BYTES;
            outcome = set(bytes);
        }
        outcome.map(|()| bytes).map_err(|error| io_error(&path, error))
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

/// Has the kernel (6.18, measured) bring a cgroup's statistics up to date, by which it chooses what to swap
/// out: else they are up to 2 s old.
pub(crate) fn count_anew(dir: &Path) -> Result<()> {
    statistics(dir).map(drop)
}

fn statistics(dir: &Path) -> Result<String> {
    let path = dir.join("memory.stat");
    fs::read_to_string(&path).map_err(|error| io_error(&path, error))
}

/// Returns the value of a line of a cgroup's `memory.stat`, if it has that line.
pub(super) fn read_stat(dir: &Path, name: &str) -> Result<Option<u64>> {
    let text = statistics(dir)?;
    let find = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    Ok(text.lines().find_map(find))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_by_its_whole_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("memory.stat"), "cache 1\nswapcached 4096\nswap 8192\ntotal_swap 5\n")
            .unwrap();
        assert_eq!(read_stat(dir.path(), "swap").unwrap(), Some(8192));
        assert_eq!(read_stat(dir.path(), "swapcached").unwrap(), Some(4096));
        assert_eq!(read_stat(dir.path(), "rss").unwrap(), None);
    }
}
