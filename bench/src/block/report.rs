//! The table of block devices and swap.

use std::fmt;

use serde::Serialize;
use uzram::units::format_size;

use super::{FileSystem, Idle, Options, Swap};
use crate::harness::stats::{median, median_ratio};

/// A figure of uzram's and of the kernel's zram; medians over the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// uzram's.
    pub uzram: f64,
    /// The kernel's.
    pub kernel: f64,
    /// The median of the rounds' ratios uzram / kernel; none when the kernel's is 0.
    pub ratio: Option<f64>,
}

impl Compared {
    pub(super) fn new(uzram: &[f64], kernel: &[f64]) -> Compared {
        let ratio = Some(median_ratio(uzram, kernel)).filter(|ratio| ratio.is_finite());
        Compared { uzram: median(uzram), kernel: median(kernel), ratio }
    }
}

/// Everything a run found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Each file system that could be measured.
    pub file_systems: Vec<FileSystem>,
    /// Swap, if it could be.
    pub swap: Option<Swap>,
    /// Idle daemons.
    pub idle: Vec<Idle>,
    /// How it was measured, and what was left out and why.
    pub notes: Vec<String>,
}

impl Report {
    /// What was found of a file system.
    pub fn file_system(&self, name: &str) -> Option<&FileSystem> {
        self.file_systems.iter().find(|file_system| file_system.name == name)
    }

    /// The idle daemon of the largest swap area.
    pub fn largest_idle(&self) -> Option<&Idle> {
        self.idle.iter().max_by_key(|idle| idle.size_bytes)
    }
}

/// The notes: how it was measured, and then what was left out.
pub(super) fn describe(options: &Options, report: &mut Report, left_out: Vec<String>) {
    let rounds =
        if options.repeat == 1 { "1 round".into() } else { format!("{} interleaved rounds", options.repeat) };
    report
        .notes
        .push(format!("{rounds}, medians; ratio = uzram / kernel zram, median of the rounds' ratios"));
    if !report.file_systems.is_empty() {
        report.notes.push(
            "fs_mark writes zeroes and syncs each file; the large file is the corpus, written in pieces of 1 MiB and synced, read after mounting anew".into(),
        );
    }
    if report.swap.is_some() {
        report.notes.push(
            "swapped: on the swap area alone when all had moved out; in the swap cache: there and in memory; free: when the program had ended, and some time later".into(),
        );
    }
    report.notes.extend(left_out);
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<44} {:>10} {:>10}  {:>6}", "block devices and swap", "uzram", "kernel", "ratio")?;
        for file_system in &self.file_systems {
            let name = file_system.name;
            file_system.files_per_s.fmt_row(f, &format!("{name}, fs_mark, files/s"), 1.0)?;
            file_system.write_mb_per_s.fmt_row(f, &format!("{name}, large file written, MB/s"), 1.0)?;
            file_system.read_mb_per_s.fmt_row(f, &format!("{name}, large file read, MB/s"), 1.0)?;
        }
        if let Some(swap) = &self.swap {
            let mib = f64::from(1 << 20);
            swap.swap_out_ms.fmt_row(f, &format!("swap-out of {}, ms", format_size(swap.size_bytes)), 1.0)?;
            swap.fault_in_ms.fmt_row(f, "its fault-in, page by page, ms", 1.0)?;
            swap.swapped_bytes.fmt_row(f, "swapped, MiB", mib)?;
            swap.cached_bytes.fmt_row(f, "in the swap cache, MiB", mib)?;
            swap.left_bytes.fmt_row(f, "free, but still stored afterwards, KiB", 1024.0)?;
        }
        for idle in &self.idle {
            writeln!(
                f,
                "idle daemon of {}: {:.3} % CPU, {} resident, and {} of the slot table",
                format_size(idle.size_bytes),
                idle.cpu_percent,
                format_size(idle.resident_bytes),
                format_size(idle.slot_table_bytes)
            )?;
        }
        writeln!(f)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

impl Compared {
    fn fmt_row(&self, f: &mut fmt::Formatter<'_>, what: &str, unit: f64) -> fmt::Result {
        let ratio = self.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        writeln!(f, "{what:<44} {:>10.0} {:>10.0}  {ratio:>6}", self.uzram / unit, self.kernel / unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_compared_each_with_its_own() {
        let compared = Compared::new(&[10.0, 30.0, 40.0], &[10.0, 10.0, 20.0]);
        assert_eq!(compared, Compared { uzram: 30.0, kernel: 10.0, ratio: Some(2.0) });
        assert_eq!(Compared::new(&[1.0], &[0.0]).ratio, None);
    }
}
