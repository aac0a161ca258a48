//! Which cgroups have more swapped out than their limit lets back into memory.

use std::fs;
use std::path::{Path, PathBuf};

use uzram_serve::mounts::{self, MountInfo};

/// Cgroups that are looked at, at most: a machine with more is not looked through.
const MAX_CGROUPS: usize = 10_000;

/// A cgroup with too little room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tight {
    /// Its directory.
    pub dir: PathBuf,
    /// What it has swapped out, with those below it.
    pub swapped_bytes: u64,
    /// What its limit leaves it.
    pub room_bytes: u64,
}

/// The names of one version's files.
struct Version {
    limit: &'static str,
    usage: &'static str,
    /// Prefix of the counts in `memory.stat` that include the cgroups below.
    stat_prefix: &'static str,
    /// What is swapped out: a file of its own, or a line of `memory.stat`.
    swap: Option<&'static str>,
}

const V1: Version = Version {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    stat_prefix: "total_",
    swap: None,
};
const V2: Version = Version {
    limit: "memory.max",
    usage: "memory.current",
    stat_prefix: "",
    swap: Some("memory.swap.current"),
};

/// The first cgroup found that could not take back what it has swapped out. What cannot be read is passed over: the
/// kernel is asked in the end.
pub fn find_tight() -> Option<Tight> {
    let mounts = mounts::all().unwrap_or_default();
    let version = |mount: &MountInfo| match mount.file_system.as_str() {
        "cgroup" if mount.dir.join(V1.limit).exists() => Some(&V1),
        "cgroup2" => Some(&V2),
        _ => None,
    };
    mounts.iter().find_map(|mount| version(mount).and_then(|version| search(&mount.dir, version)))
}

fn search(root: &Path, version: &Version) -> Option<Tight> {
    let (mut dirs, mut next) = (vec![root.to_owned()], 0);
    while let Some(dir) = dirs.get(next).cloned() {
        next += 1;
        if let Some(tight) = look_at(&dir, version) {
            return Some(tight);
        }
        let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        dirs.extend(below.map(|entry| entry.path()));
        dirs.truncate(MAX_CGROUPS);
    }
    None
}

fn look_at(dir: &Path, version: &Version) -> Option<Tight> {
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    // One without a limit says "max", or a number beyond all memory.
    let (limit, usage) = (number(version.limit)?, number(version.usage)?);
    let stat = fs::read_to_string(dir.join("memory.stat")).ok()?;
    let count = |name: &str| {
        let name = format!("{}{name} ", version.stat_prefix);
        stat.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok()).unwrap_or(0)
    };
    let swapped_bytes = match version.swap {
        Some(file) => number(file)?,
        None => count("swap"),
    };
    // What the page cache has of it goes when it is needed.
    let cache_bytes = count("inactive_file") + count("active_file");
    let room_bytes = limit.saturating_sub(usage.saturating_sub(cache_bytes));
    (swapped_bytes > room_bytes).then(|| Tight { dir: dir.to_owned(), swapped_bytes, room_bytes })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn write(dir: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(dir).unwrap();
        files.iter().for_each(|(name, text)| fs::write(dir.join(name), text).unwrap());
    }

    #[test]
    fn both_versions_are_read() {
        let root = tempfile::tempdir().unwrap();
        let (a, b) = (root.path().join("a"), root.path().join("a/b"));
        let stat = "swap 1\ntotal_swap 5000\ntotal_inactive_file 100\ntotal_active_file 200\n";
        write(&a, &[(V1.limit, "9223372036854771712\n"), (V1.usage, "3000\n"), ("memory.stat", stat)]);
        write(&b, &[(V1.limit, "7700\n"), (V1.usage, "3000\n"), ("memory.stat", stat)]);
        assert_eq!(search(root.path(), &V1), None);
        fs::write(b.join(V1.limit), "7699").unwrap();
        let tight = Tight { dir: b, swapped_bytes: 5000, room_bytes: 4999 };
        assert_eq!(search(root.path(), &V1), Some(tight));

        let c = root.path().join("c");
        let stat = "inactive_file 100\nactive_file 0\n";
        write(
            &c,
            &[
                (V2.limit, "max\n"),
                (V2.usage, "3000\n"),
                ("memory.stat", stat),
                ("memory.swap.current", "600\n"),
            ],
        );
        assert_eq!(search(root.path(), &V2), None);
        fs::write(c.join(V2.limit), "3000\n").unwrap();
        assert_eq!(search(root.path(), &V2), Some(Tight { dir: c, swapped_bytes: 600, room_bytes: 100 }));
    }
}
