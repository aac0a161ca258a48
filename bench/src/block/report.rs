//! The table of block devices and swap.

use std::fmt;

use serde::Serialize;
use uzram::units::format_size;

use super::{BlockOptions, FileSystem, Idle, Swap};
use crate::harness::report::{Table, figure_cell};
use crate::harness::stats::{median, median_ratio};

/// A figure for uzram and for the kernel's zram; medians over the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// uzram's.
    pub uzram: f64,
    /// The kernel's.
    pub kernel: f64,
    /// The median of the rounds' ratios uzram / kernel; `None` if the kernel's is 0.
    pub ratio: Option<f64>,
}

impl Compared {
    pub(super) fn new(uzram: &[f64], kernel: &[f64]) -> Compared {
        let ratio = Some(median_ratio(uzram, kernel)).filter(|ratio| ratio.is_finite());
        Compared { uzram: median(uzram), kernel: median(kernel), ratio }
    }
}

/// All results of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BlockReport {
    /// Each file system that could be measured.
    pub file_systems: Vec<FileSystem>,
    /// Swap, if it was measured.
    pub swap: Option<Swap>,
    /// Idle daemons.
    pub idle: Vec<Idle>,
    /// How it was measured, and what was left out and why.
    pub notes: Vec<String>,
}

impl BlockReport {
    /// Returns the results of a file system.
    pub fn file_system(&self, name: &str) -> Option<&FileSystem> {
        self.file_systems.iter().find(|file_system| file_system.name == name)
    }

    /// Returns the idle daemon of the largest swap area.
    pub fn largest_idle(&self) -> Option<&Idle> {
        self.idle.iter().max_by_key(|idle| idle.size_bytes)
    }
}

/// Adds the notes: how it was measured, and then what was left out.
pub(super) fn describe(options: &BlockOptions, report: &mut BlockReport, left_out: Vec<String>) {
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

impl fmt::Display for BlockReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["<block devices and swap", "uzram", "kernel", "ratio"]);
        let mut row = |what: String, compared: &Compared, unit: f64| {
            let figure = |value: f64| format!("{:.0}", value / unit);
            let ratio = figure_cell(compared.ratio, 2);
            table.row([what, figure(compared.uzram), figure(compared.kernel), ratio]);
        };
        for file_system in &self.file_systems {
            let name = file_system.name;
            row(format!("{name}, fs_mark, files/s"), &file_system.files_per_s, 1.0);
            row(format!("{name}, large file written, MB/s"), &file_system.write_mb_per_s, 1.0);
            row(format!("{name}, large file read, MB/s"), &file_system.read_mb_per_s, 1.0);
        }
        if let Some(swap) = &self.swap {
            let mib = f64::from(1 << 20);
            row(format!("swap-out of {}, ms", format_size(swap.size_bytes)), &swap.swap_out_ms, 1.0);
            row("its fault-in, page by page, ms".into(), &swap.fault_in_ms, 1.0);
            row("its fault-in in no order, ms".into(), &swap.random_in_ms, 1.0);
            for (what, compared) in
                ["swap-out", "fault-in", "fault-in in no order"].iter().zip(&swap.no_survive)
            {
                row(format!("--no-survive, {what}, ms"), compared, 1.0);
            }
            row("swapped, MiB".into(), &swap.swapped_bytes, mib);
            row("in the swap cache, MiB".into(), &swap.cached_bytes, mib);
            row("free, but still stored afterwards, KiB".into(), &swap.left_bytes, 1024.0);
        }
        write!(f, "{table}")?;
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
