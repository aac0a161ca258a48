//! How much memory the machine has, and how much of it this process may use.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::{Error, ErrorKind, Result};
use super::size_expr::Memory;

/// The memory of this machine and of this process's control group.
///
/// # Errors
/// `Io`: `/proc` does not say.
pub fn read() -> Result<Memory> {
    let unknown = |why: &str| {
        Error::new(ErrorKind::Io, format!("cannot find out how much memory there is: /proc/meminfo {why}"))
    };
    let read = |path: &str| fs::read_to_string(path);
    let meminfo = read("/proc/meminfo").map_err(|error| unknown(&format!("cannot be read: {error}")))?;
    let ram_bytes = ram_bytes(&meminfo).ok_or_else(|| unknown("has no MemTotal"))?;
    // Without them there are no control groups.
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let mounts = read("/proc/self/mountinfo").unwrap_or_default();
    let limit = limit_bytes(&groups, &mounts, |path| fs::read_to_string(path).ok());
    Ok(Memory { ram_bytes, limit_bytes: limit.unwrap_or(ram_bytes).min(ram_bytes) })
}

fn ram_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// The least limit of the process's control group and those it lies in, of either version of them; `read` reads a file.
fn limit_bytes(groups: &str, mounts: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        // hierarchy-ID:controller-list:cgroup-path, cgroups(7)
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let file = match controllers {
            "" => "memory.max",
            _ if controllers.split(',').any(|name| name == "memory") => "memory.limit_in_bytes",
            _ => return None,
        };
        let (root, mount_point) = mounts.lines().find_map(|line| mounted(line, controllers.is_empty()))?;
        // A namespace may have another root than the mount; then what can be seen is the mount's root.
        let below = Path::new(group).strip_prefix(root).unwrap_or(Path::new(""));
        let dirs = below.ancestors().map(|dir| mount_point.join(dir));
        dirs.filter_map(|dir| read(&dir.join(file))?.trim().parse().ok()).min()
    });
    limits.min()
}

/// Root and mount point of a line of mountinfo, if it is the hierarchy that bounds memory: proc_pid_mountinfo(5).
fn mounted(line: &str, version_2: bool) -> Option<(&str, PathBuf)> {
    let (before, after) = line.split_once(" - ")?;
    let mut after = after.split(' ');
    let (kind, options) = (after.next()?, after.nth(1)?);
    let wanted = match kind {
        "cgroup2" => version_2,
        "cgroup" => !version_2 && options.split(',').any(|option| option == "memory"),
        _ => false,
    };
    let mut before = before.split(' ').skip(3);
    let (root, mount_point) = (before.next()?, before.next()?);
    wanted.then(|| (root, PathBuf::from(mount_point)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const V1: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
35 31 0:32 /docker/ab /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const V2: &str = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn limit(groups: &str, mounts: &str, files: &[(&str, &str)]) -> Option<u64> {
        let read = |path: &Path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == path);
            file.map(|(_, text)| (*text).to_owned())
        };
        limit_bytes(groups, mounts, read)
    }

    #[test]
    fn the_least_limit_of_all_groups_around_counts() {
        let files = [
            ("/sys/fs/cgroup/system.slice/memory.max", "1073741824\n"),
            ("/sys/fs/cgroup/system.slice/uzram.service/memory.max", "max\n"),
            ("/sys/fs/cgroup/other/memory.max", "4096\n"),
        ];
        assert_eq!(limit("0::/system.slice/uzram.service\n", V2, &files), Some(1 << 30));
        assert_eq!(limit("0::/\n", V2, &files), None);
        assert_eq!(limit("0::/gone\n", V2, &files), None);
        assert_eq!(limit("", V2, &files), None);
        assert_eq!(limit("0::/other\n", "", &files), None);
    }

    #[test]
    fn the_old_version_of_groups_has_limits_too() {
        let groups = "4:memory:/docker/ab/c\n2:cpu,cpuacct:/docker/ab\n0::/\n";
        let files = [
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/c/memory.limit_in_bytes", "2147483648\n"),
        ];
        assert_eq!(limit(groups, V1, &files), Some(2 << 30));
        // From within a container, whose groups lie elsewhere than they are mounted.
        assert_eq!(limit("4:memory:/\n", V1, &files), Some(9_223_372_036_854_771_712));
        assert_eq!(limit("4:cpu:/docker/ab/c\n", V1, &files), None);
    }

    #[test]
    fn this_machine_has_memory() {
        assert_eq!(ram_bytes("MemFree:  3 kB\nMemTotal:       16384 kB\n"), Some(16 << 20));
        assert_eq!(ram_bytes("MemTotal: 16384\n"), None);
        let memory = read().unwrap();
        assert!(1 << 20 < memory.limit_bytes && memory.limit_bytes <= memory.ram_bytes, "{memory:?}");
    }
}
