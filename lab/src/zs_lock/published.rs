//! The author's figures.
//!
//! Nhat Pham, "zsmalloc: Consolidate zs_pool's migrate_lock and size_class's locks", version 5, November
//! 2022, on a server with 36 cores: `fs_mark -d ../zram1mnt -s 100000 -n 2500 -t 32 -k`, files a second on
//! btrfs and on ext4; the file system on zram is 80 % full.

use std::collections::BTreeMap;

use crate::experiment::{Published, PublishedSide};

/// Threads of fs_mark.
pub(super) const THREADS: usize = 32;

/// Files a second.
struct Rate {
    average: f64,
    median: f64,
    stddev: f64,
}

struct FileSystem {
    name: &'static str,
    without: Rate,
    with: Rate,
}

/// The file system whose figures are in the table.
const BTRFS: FileSystem = FileSystem {
    name: "btrfs",
    without: Rate { average: 13487.2, median: 13575.0, stddev: 309.1 },
    with: Rate { average: 13520.2, median: 13531.0, stddev: 137.6 },
};

const EXT4: FileSystem = FileSystem {
    name: "ext4",
    without: Rate { average: 16958.0, median: 16986.0, stddev: 194.7 },
    with: Rate { average: 16824.4, median: 16839.0, stddev: 90.0 },
};

impl FileSystem {
    /// Returns the ratio of the files a second, by the medians.
    const fn gain(&self) -> f64 {
        self.with.median / self.without.median
    }

    fn change_percent(&self) -> f64 {
        100.0 * (self.gain() - 1.0)
    }
}

/// Returns the published figures.
pub(super) fn figures(jobs: usize) -> Option<Published> {
    if jobs != THREADS {
        return None;
    }
    let side = |design, of: fn(&FileSystem) -> &Rate| {
        let values = BTreeMap::from([
            ("btrfs_files_per_s", of(&BTRFS).median),
            ("ext4_files_per_s", of(&EXT4).median),
        ]);
        PublishedSide { design, figure: format!("{:.0} /s", of(&BTRFS).median), values }
    };
    Some(Published {
        before: side("without lock consolidation", |fs| &fs.without),
        after: side("with lock consolidation", |fs| &fs.with),
        ratio: BTRFS.gain(),
    })
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let of = |fs: &FileSystem| {
        let rate = |rate: &Rate| {
            format!("{:.1} (average {:.1}, standard deviation {:.1})", rate.median, rate.average, rate.stddev)
        };
        let change = fs.change_percent();
        format!("{}: {} -> {}, {change:+.1} %", fs.name, rate(&fs.without), rate(&fs.with))
    };
    format!(
        "published: files/s of fs_mark with {THREADS} threads on 36 cores, medians; {}; {}; in the table btrfs",
        of(&BTRFS),
        of(&EXT4)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_changes_are_those_of_the_message() {
        assert_eq!([BTRFS, EXT4].map(|fs| (10.0 * fs.change_percent()).round() / 10.0), [-0.3, -0.9]);
        let published = figures(THREADS).unwrap();
        assert_eq!(published.before.values["ext4_files_per_s"], 16986.0);
        assert_eq!((published.after.figure.as_str(), figures(8).is_none()), ("13531 /s", true));
        assert!(legend().contains("ext4: 16986.0 (average 16958.0"), "{}", legend());
    }
}
