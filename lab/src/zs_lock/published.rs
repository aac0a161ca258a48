//! The author's figures, from the file of published figures: files a second of fs_mark.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::SERIES;
use crate::experiment::{Published, PublishedSide};
use crate::published::{Source, part};

/// The file system whose figures stand beside the table without file systems.
pub(super) const SHOWN: &str = "btrfs";
/// Threads of fs_mark.
pub(super) const THREADS: usize = 32;

/// The author's tables.
static MESSAGE: LazyLock<Message> = LazyLock::new(|| part(SERIES.name));

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    /// The names of the sides before and after.
    designs: [String; 2],
    threads: usize,
    /// The file system whose figures are in the table.
    btrfs: FileSystem,
    ext4: FileSystem,
    source: Source,
}

/// Files a second.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rate {
    average: f64,
    median: f64,
    stddev: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSystem {
    without: Rate,
    with: Rate,
}

impl FileSystem {
    /// Returns the ratio of the files a second, by the medians.
    const fn gain(&self) -> f64 {
        self.with.median / self.without.median
    }

    fn change_percent(&self) -> f64 {
        100.0 * (self.gain() - 1.0)
    }
}

/// Returns the published figures on a file system, with so many threads.
pub(super) fn on_file_system(name: &str, jobs: usize) -> Option<Published> {
    let Message { designs, threads, btrfs, ext4, .. } = &*MESSAGE;
    let shown = match name {
        "btrfs" => btrfs,
        "ext4" => ext4,
        _ => return None,
    };
    if jobs != *threads {
        return None;
    }
    let side = |design: usize, of: fn(&FileSystem) -> &Rate| {
        let values =
            BTreeMap::from([("btrfs_files_per_s", of(btrfs).median), ("ext4_files_per_s", of(ext4).median)]);
        PublishedSide { design: &designs[design], figure: format!("{:.0} /s", of(shown).median), values }
    };
    Some(Published { before: side(0, |fs| &fs.without), after: side(1, |fs| &fs.with), ratio: shown.gain() })
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let of = |name: &str, fs: &FileSystem| {
        let rate = |rate: &Rate| {
            format!("{:.1} (average {:.1}, standard deviation {:.1})", rate.median, rate.average, rate.stddev)
        };
        let change = fs.change_percent();
        format!("{name}: {} -> {}, {change:+.1} %", rate(&fs.without), rate(&fs.with))
    };
    format!(
        "published: files/s of fs_mark with {} threads on {}, medians; {}; {}",
        MESSAGE.threads,
        MESSAGE.source.machine,
        of("btrfs", &MESSAGE.btrfs),
        of("ext4", &MESSAGE.ext4)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_changes_are_those_of_the_message() {
        let file_systems = [&MESSAGE.btrfs, &MESSAGE.ext4];
        assert_eq!(file_systems.map(|fs| (10.0 * fs.change_percent()).round() / 10.0), [-0.3, -0.9]);
        let published = on_file_system(SHOWN, THREADS).unwrap();
        assert_eq!(published.before.values["ext4_files_per_s"], 16986.0);
        assert_eq!((published.after.figure.as_str(), on_file_system(SHOWN, 8).is_none()), ("13531 /s", true));
        assert_eq!(on_file_system("ext4", THREADS).unwrap().after.figure, "16839 /s");
        assert!(legend().contains("ext4: 16986.0 (average 16958.0"), "{}", legend());
    }
}
