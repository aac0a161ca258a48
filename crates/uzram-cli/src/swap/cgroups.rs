//! The memory that cgroups have swapped out, and whether their limits have room for it.

use std::fs;
use std::path::PathBuf;

use uzram_serve::mounts::{self, MountInfo};

/// The most cgroups examined; any further ones are ignored.
const MAX_CGROUPS: usize = 10_000;

/// A limit of at least this means no limit: cgroup v1 reports just below 2^63.
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// A cgroup with too little room for its swapped-out memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tight {
    pub dir: PathBuf,
    /// Bytes that it and its descendants have swapped out.
    pub swapped_bytes: u64,
    /// Bytes left below its limit.
    pub room_bytes: u64,
}

/// The file of a cgroup's counts.
pub const STATISTICS: &str = "memory.stat";

/// The file names of a cgroup version.
#[derive(Debug)]
struct Version {
    limit: &'static str,
    usage: &'static str,
    /// Prefix of the counts in `memory.stat` that include descendants.
    stat_prefix: &'static str,
    /// The file with the bytes swapped out; if `None`, a line of `memory.stat`.
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

/// Returns the first cgroup without room for its swapped-out memory, of which at most `most_bytes` come back.
/// Files that cannot be read are ignored.
pub fn find_tight(most_bytes: u64) -> Option<Tight> {
    let tight = |cgroup: Cgroup| {
        let counts = cgroup.counts()?;
        // The kernel does not report this per swap area.
        let swapped_bytes = cgroup.swapped_bytes(&counts)?.min(most_bytes);
        let room_bytes = cgroup.room_bytes(&counts)?;
        (swapped_bytes > room_bytes).then_some(Tight { dir: cgroup.dir, swapped_bytes, room_bytes })
    };
    let mut roots = roots().into_iter();
    roots.find_map(|root| root.with_those_below().find_map(tight))
}

/// Returns the directories of the cgroups that have a limit and swapped-out memory.
pub fn limited_and_swapped() -> impl Iterator<Item = PathBuf> {
    let cgroups = roots().into_iter().flat_map(Cgroup::with_those_below);
    cgroups.filter(Cgroup::is_limited_and_swapped).map(|cgroup| cgroup.dir)
}

#[derive(Debug)]
struct Cgroup {
    dir: PathBuf,
    version: &'static Version,
}

/// Returns the root cgroups: one for each mounted version.
fn roots() -> Vec<Cgroup> {
    let version = |mount: &MountInfo| match mount.file_system.as_str() {
        "cgroup" if mount.dir.join(V1.limit).exists() => Some(&V1),
        "cgroup2" => Some(&V2),
        _ => None,
    };
    let mut roots: Vec<Cgroup> = Vec::new();
    for mount in mounts::all().unwrap_or_default() {
        let Some(version) = version(&mount) else { continue };
        // A version may be mounted twice.
        if roots.iter().all(|root| root.version.limit != version.limit) {
            roots.push(Cgroup { version, dir: mount.dir });
        }
    }
    roots
}

impl Cgroup {
    /// Returns this cgroup and its descendants, each before its children.
    fn with_those_below(self) -> impl Iterator<Item = Cgroup> {
        let version = self.version;
        let mut dirs = vec![self.dir];
        let next = move || {
            let dir = dirs.pop()?;
            let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
            let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            dirs.extend(below.map(|entry| entry.path()));
            Some(Cgroup { dir, version })
        };
        std::iter::from_fn(next).take(MAX_CGROUPS)
    }

    fn number(&self, name: &str) -> Option<u64> {
        fs::read_to_string(self.dir.join(name)).ok()?.trim().parse().ok()
    }

    fn counts(&self) -> Option<Counts> {
        let text = fs::read_to_string(self.dir.join(STATISTICS)).ok()?;
        Some(Counts { text, prefix: self.version.stat_prefix })
    }

    /// Returns the bytes swapped out, without those that are also in the swap cache.
    fn swapped_bytes(&self, counts: &Counts) -> Option<u64> {
        match self.version.swap {
            Some(file) => Some(self.number(file)?.saturating_sub(counts.get("swapcached"))),
            None => Some(counts.get("swap")),
        }
    }

    /// Returns the bytes left below the limit, if there is one: no limit reads as "max", or as a huge number.
    fn room_bytes(&self, counts: &Counts) -> Option<u64> {
        let (limit, usage) = (self.number(self.version.limit)?, self.number(self.version.usage)?);
        // Page cache is reclaimed when memory is needed.
        let cache_bytes = counts.get("inactive_file") + counts.get("active_file");
        Some(limit.saturating_sub(usage.saturating_sub(cache_bytes)))
    }

    fn is_limited_and_swapped(&self) -> bool {
        let is_limited = self.number(self.version.limit).is_some_and(|limit| limit < NO_LIMIT_BYTES);
        let swapped_bytes = || self.swapped_bytes(&self.counts()?);
        is_limited && swapped_bytes().is_some_and(|bytes| bytes > 0)
    }
}

struct Counts {
    text: String,
    prefix: &'static str,
}

impl Counts {
    /// Returns the count of that name, or 0.
    fn get(&self, name: &str) -> u64 {
        let count =
            |line: &str| line.strip_prefix(self.prefix)?.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
        self.text.lines().find_map(count).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

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
        let all = || Cgroup { dir: root.path().to_owned(), version: &V1 }.with_those_below();
        assert_eq!(all().map(|cgroup| cgroup.dir).collect::<Vec<_>>(), [root.path(), &a, &b]);
        let facts = |cgroup: Cgroup| {
            let counts = cgroup.counts();
            let swapped_bytes = counts.as_ref().and_then(|counts| cgroup.swapped_bytes(counts));
            let room_bytes = counts.as_ref().and_then(|counts| cgroup.room_bytes(counts));
            (swapped_bytes, room_bytes, cgroup.is_limited_and_swapped())
        };
        assert_eq!(all().next().map(facts), Some((None, None, false)), "no controller");
        assert_eq!(all().nth(1).map(facts), Some((Some(5000), Some(9_223_372_036_854_769_012), false)));
        assert_eq!(all().nth(2).map(facts), Some((Some(5000), Some(5000), true)));

        let c = root.path().join("c");
        let stat = "inactive_file 100\nactive_file 0\nswapcached 50\n";
        let swapped = ("memory.swap.current", "650\n");
        write(&c, &[(V2.limit, "max\n"), (V2.usage, "3000\n"), ("memory.stat", stat), swapped]);
        let cgroup = || Cgroup { dir: c.clone(), version: &V2 };
        assert_eq!(facts(cgroup()), (Some(600), None, false));
        fs::write(c.join(V2.limit), "3000\n").unwrap();
        assert_eq!(facts(cgroup()), (Some(600), Some(100), true));
    }
}
