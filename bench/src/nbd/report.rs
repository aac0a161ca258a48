//! The NBD benchmark's table.

use std::fmt;

use serde::Serialize;
use uzram::units::format_size;

use super::{Comparison, Options};
use crate::harness::stats::{median, median_ratio};

/// One pattern with one number of jobs, uzram beside nbdkit. Figures are medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// fio's name of the pattern.
    pub rw: &'static str,
    /// fio jobs, each a connection of its own.
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

/// Everything a run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The size of each disk.
    pub size_bytes: u64,
    /// A row for each comparison and number of jobs.
    pub rows: Vec<Row>,
    /// How it was measured.
    pub notes: Vec<String>,
}

impl Report {
    /// The row of a pattern, a number of jobs and an algorithm, if it was measured.
    pub fn row(&self, rw: &str, jobs: usize, algorithm: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.rw == rw && row.jobs == jobs && row.algorithm == algorithm)
    }

    /// One line of JSON.
    pub fn to_json(&self) -> String {
        // Only maps with keys that are no strings, and failing writers, make serde_json fail.
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }
}

pub(super) fn notes(options: &Options) -> Vec<String> {
    vec![
        format!(
            "fio, nbd engine over a Unix socket, 4 KiB, iodepth 16; {} interleaved rounds of {:.1} s, medians",
            options.repeat,
            options.duration.as_secs_f64()
        ),
        "disks filled with the corpus; the contents of fio's write buffers are replaced by random corpus pages 1000 times a second".into(),
    ]
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "NBD disks of {}", format_size(self.size_bytes))?;
        writeln!(
            f,
            "\n{:<10} {:>4}  {:<6} {:>10}  {:<7} {:>11}  {:>6} {:>7}",
            "rw", "jobs", "uzram", "uzram MB/s", "nbdkit", "nbdkit MB/s", "ratio", "wanted"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<10} {:>4}  {:<6} {:>10.0}  {:<7} {:>11.0}  {:>6.2} {:>7.2}",
                row.rw,
                row.jobs,
                row.algorithm,
                row.uzram_mb_per_s,
                row.allocator,
                row.nbdkit_mb_per_s,
                row.ratio,
                row.wanted_ratio
            )?;
        }
        writeln!(f)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
