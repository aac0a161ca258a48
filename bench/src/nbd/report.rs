//! The NBD benchmark's table.

use std::fmt;

use serde::Serialize;
use uzram::units::format_size;

use super::{Comparison, NbdOptions};
use crate::harness::report::Table;
use crate::harness::stats::{median, median_ratio};

/// One pattern with one number of jobs, uzram beside nbdkit. Figures are medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// fio's name of the pattern.
    pub rw: &'static str,
    /// fio jobs; each has its own connection.
    pub jobs: usize,
    /// uzram's algorithm.
    pub algorithm: &'static str,
    /// nbdkit's allocator.
    pub allocator: &'static str,
    /// uzram's 10^6 bytes a second, all jobs together.
    pub uzram_mb_per_s: f64,
    /// nbdkit's.
    pub nbdkit_mb_per_s: f64,
    /// The median of the rounds' ratios uzram / nbdkit.
    pub ratio: f64,
    /// The ratio to reach.
    pub wanted_ratio: f64,
}

impl Row {
    pub(super) fn new(comparison: &Comparison, jobs: usize, uzram: Vec<f64>, nbdkit: Vec<f64>) -> Row {
        Row {
            rw: comparison.rw,
            jobs,
            algorithm: comparison.algorithm,
            allocator: comparison.allocator,
            uzram_mb_per_s: median(&uzram),
            nbdkit_mb_per_s: median(&nbdkit),
            ratio: median_ratio(&uzram, &nbdkit),
            wanted_ratio: comparison.wanted_ratio,
        }
    }
}

/// All results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct NbdReport {
    /// The size of each disk.
    pub size_bytes: u64,
    /// A row for each comparison and number of jobs.
    pub rows: Vec<Row>,
    /// How it was measured.
    pub notes: Vec<String>,
}

impl NbdReport {
    /// Returns the row of a pattern, a number of jobs and an algorithm, if it was measured.
    pub fn row(&self, rw: &str, jobs: usize, algorithm: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.rw == rw && row.jobs == jobs && row.algorithm == algorithm)
    }
}

pub(super) fn notes(options: &NbdOptions) -> Vec<String> {
    vec![
        format!(
            "fio, nbd engine over a Unix socket, 4 KiB, iodepth 16; {} interleaved rounds of {:.1} s, medians",
            options.repeat,
            options.duration.as_secs_f64()
        ),
        "disks filled with the corpus; the contents of fio's write buffers are replaced by random corpus pages 1000 times a second".into(),
    ]
}

impl fmt::Display for NbdReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headings = ["<rw", "jobs", "<uzram", "uzram MB/s", "<nbdkit", "nbdkit MB/s", "ratio", "wanted"];
        let mut table = Table::new(headings);
        for row in &self.rows {
            table.row([
                row.rw.to_owned(),
                row.jobs.to_string(),
                row.algorithm.to_owned(),
                format!("{:.0}", row.uzram_mb_per_s),
                row.allocator.to_owned(),
                format!("{:.0}", row.nbdkit_mb_per_s),
                format!("{:.2}", row.ratio),
                format!("{:.2}", row.wanted_ratio),
            ]);
        }
        write!(f, "NBD disks of {}\n\n{table}", format_size(self.size_bytes))?;
        writeln!(f)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
