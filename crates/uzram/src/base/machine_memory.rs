//! The machine's memory, and the limit of this process's control group.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::error::{Error, ErrorKind, Result};
use super::mountinfo::{self, MountInfo};

/// The memory of the machine and the limit of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The machine's memory.
    pub ram_bytes: u64,
    /// The most memory that the process may use: all of the machine's if there is no limit.
    pub limit_bytes: u64,
}

/// Returns the memory of this machine and the limit of this process's control group. Fails with `Io` if
/// `/proc` does not tell.
pub fn read() -> Result<Memory> {
    let ram_bytes = meminfo("MemTotal:")?;
    // If these cannot be read, there are no control groups.
    let groups = fs::read("/proc/self/cgroup").unwrap_or_default();
    let mounts = mountinfo::all().unwrap_or_default();
    let limit = limit_bytes(&groups, &mounts, |path| fs::read_to_string(path).ok());
    Ok(Memory { ram_bytes, limit_bytes: limit.unwrap_or(ram_bytes).min(ram_bytes) })
}

/// A memory cgroup of version 1, and the least limit of it and its ancestors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version1Limit {
    /// Its path in the hierarchy, as `/proc/self/cgroup` has it.
    pub cgroup: String,
    /// The limit, which is less than the machine's memory.
    pub limit_bytes: u64,
}

/// Returns this process's memory cgroup if it is of version 1 and has a limit, or an ancestor has. `None` if
/// it cannot be read.
pub fn version_1_limit() -> Option<Version1Limit> {
    let groups = fs::read("/proc/self/cgroup").ok()?;
    let limit = limit_of_version_1(&groups, &mountinfo::all().ok()?, |path| fs::read_to_string(path).ok())?;
    (limit.limit_bytes < meminfo("MemTotal:").ok()?).then_some(limit)
}

/// Returns the kernel's estimate of the memory that programs can still allocate. Fails with `Io` if `/proc`
/// does not tell.
pub fn available_bytes() -> Result<u64> {
    meminfo("MemAvailable:")
}

fn meminfo(name: &str) -> Result<u64> {
    let unknown = |why: String| {
        Error::new(ErrorKind::Io, format!("cannot find out how much memory there is: /proc/meminfo {why}"))
    };
    let text =
        fs::read_to_string("/proc/meminfo").map_err(|error| unknown(format!("cannot be read: {error}")))?;
    figure(&text, name).ok_or_else(|| unknown(format!("has no {}", name.trim_end_matches(':'))))
}

fn figure(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// Returns the lowest limit of the process's control group and its ancestors, of cgroup v1 or v2.
fn limit_bytes(groups: &[u8], mounts: &[MountInfo], read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let limits = groups.split(|byte| *byte == b'\n').filter_map(|line| {
        let (is_version_2, group) = memory_group(line)?;
        let file = if is_version_2 { "memory.max" } else { "memory.limit_in_bytes" };
        let (mount, below) = mount_of(group, mounts, is_version_2)?;
        let dirs = below.ancestors().map(|dir| mount.dir.join(dir));
        dirs.filter_map(|dir| read(&dir.join(file))?.trim().parse().ok()).min()
    });
    limits.min()
}

/// Returns the limit of the memory cgroup of version 1, and of ancestors that no mount shows.
fn limit_of_version_1(
    groups: &[u8],
    mounts: &[MountInfo],
    read: impl Fn(&Path) -> Option<String>,
) -> Option<Version1Limit> {
    let of_version_1 =
        |line| memory_group(line).and_then(|(is_version_2, group)| (!is_version_2).then_some(group));
    let group = groups.split(|byte| *byte == b'\n').find_map(of_version_1)?;
    let (mount, below) = mount_of(group, mounts, false)?;
    let counts = read(&mount.dir.join(below).join("memory.stat"))?;
    let limit = counts.lines().find_map(|line| line.strip_prefix("hierarchical_memory_limit "));
    Some(Version1Limit { cgroup: group.display().to_string(), limit_bytes: limit?.trim().parse().ok()? })
}

/// Parses a line of `/proc/PID/cgroup`: whether the cgroup is of version 2, and its path.
fn memory_group(line: &[u8]) -> Option<(bool, &Path)> {
    // hierarchy-ID:controller-list:cgroup-path, cgroups(7)
    let mut fields = line.splitn(3, |byte| *byte == b':').skip(1);
    let (controllers, group) = (fields.next()?, Path::new(OsStr::from_bytes(fields.next()?)));
    let has_memory = || controllers.split(|byte| *byte == b',').any(|name| name == b"memory");
    (controllers.is_empty() || has_memory()).then_some((controllers.is_empty(), group))
}

/// Returns the memory hierarchy's mount that shows most ancestors of `group`, and its path below that.
fn mount_of<'a>(
    group: &'a Path,
    mounts: &'a [MountInfo],
    is_version_2: bool,
) -> Option<(&'a MountInfo, &'a Path)> {
    let mounts = mounts.iter().filter(|mount| match mount.file_system.as_str() {
        "cgroup2" => is_version_2,
        "cgroup" => !is_version_2 && mount.options.iter().any(|option| option == "memory"),
        _ => false,
    });
    let seen = mounts.clone().filter_map(|mount| Some((mount, group.strip_prefix(&mount.root).ok()?)));
    // The root of a cgroup namespace may differ from the mount's; then only the mount's root is visible.
    let or_root = || mounts.clone().next().map(|mount| (mount, Path::new("")));
    seen.max_by_key(|(_, below)| below.components().count()).or_else(or_root)
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

    fn limit(groups: impl AsRef<[u8]>, mounts: impl AsRef<[u8]>, files: &[(&str, &str)]) -> Option<u64> {
        let read = |path: &Path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == path);
            file.map(|(_, text)| (*text).to_owned())
        };
        limit_bytes(groups.as_ref(), &mountinfo::parse(mounts.as_ref()), read)
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
        // In a container, whose groups' paths differ from those of the mount.
        assert_eq!(limit("4:memory:/\n", V1, &files), Some(9_223_372_036_854_771_712));
        assert_eq!(limit("4:cpu:/docker/ab/c\n", V1, &files), None);
    }

    #[test]
    fn a_limit_of_version_1_includes_ancestors_that_are_not_shown() {
        let limit = |groups: &str, stat: &str| {
            let read = |path: &Path| {
                (path == Path::new("/sys/fs/cgroup/memory/c/memory.stat")).then(|| stat.to_owned())
            };
            limit_of_version_1(groups.as_bytes(), &mountinfo::parse(V1.as_bytes()), read)
        };
        let (groups, stat) =
            ("4:memory:/docker/ab/c\n0::/\n", "cache 7\nhierarchical_memory_limit 136314880\n");
        let found = Version1Limit { cgroup: "/docker/ab/c".to_owned(), limit_bytes: 130 << 20 };
        assert_eq!(limit(groups, stat), Some(found));
        assert_eq!(limit(groups, "cache 7\n"), None);
        assert_eq!(limit("4:cpu:/docker/ab/c\n0::/\n", stat), None);
        assert_eq!(limit("0::/docker/ab/c\n", stat), None);
    }

    #[test]
    fn the_mount_is_found_among_others() {
        let files = [
            ("/sys/fs/cgroup/a b/memory.max", "1073741824"),
            ("/a b/c/memory.max", "536870912"),
            ("/other/memory.max", "4096"),
        ];
        let foreign = b"77 22 0:9 / /mnt/\xff\xfe rw - ext4 /dev/sda1 rw\n".as_slice();
        assert_eq!(limit("0::/a b\n", [foreign, V2.as_bytes()].concat(), &files), Some(1 << 30));
        assert_eq!(limit(b"1:name=\xff:/\n0::/a b\n", V2, &files), Some(1 << 30));
        let bound = "40 22 0:26 /other /other rw - cgroup2 cgroup2 rw\n";
        assert_eq!(limit("0::/a b\n", [bound, V2].concat(), &files), Some(1 << 30));
        assert_eq!(limit("0::/a b\n", bound, &files), Some(4096), "it is the only one");
        // Of two mounts that show the group, the one that shows more of its ancestors.
        let part = "41 22 0:26 /a\\040b /a\\040b rw - cgroup2 cgroup2 rw\n";
        assert_eq!(limit("0::/a b/c\n", part, &files), Some(1 << 29));
        assert_eq!(limit("0::/a b/c\n", [part, V2].concat(), &files), Some(1 << 30));
    }

    #[test]
    fn this_machine_has_memory() {
        assert_eq!(figure("MemFree:  3 kB\nMemTotal:       16384 kB\n", "MemTotal:"), Some(16 << 20));
        assert_eq!(figure("MemTotal: 16384\n", "MemTotal:"), None);
        assert!(available_bytes().unwrap() > 0);
        let memory = read().unwrap();
        assert!(1 << 20 < memory.limit_bytes && memory.limit_bytes <= memory.ram_bytes, "{memory:?}");
    }
}
