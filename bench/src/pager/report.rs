//! What is measured of the pager, as a table and as JSON.

use std::fmt;

use serde::Serialize;
use uzram::units::format_size;

use super::unmap::Phase;
use super::zipf::{PagerAccess, ZipfAccess};
use crate::harness::report::{Table, figure_cell};

/// The results; medians over the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PagerReport {
    /// Paging out, faulting in, unmapping: a row for each side and phase.
    pub unmap: Vec<UnmapRow>,
    /// One fault.
    pub faults: Vec<FaultRow>,
    /// A loop over memory that fits.
    pub fitting: Vec<FittingRow>,
    /// Zipf access.
    pub zipf: Option<ZipfAccess>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// A phase of one side.
#[derive(Clone, Debug, Serialize)]
pub struct UnmapRow {
    /// `kernel`, or how the pager traps touches.
    pub side: &'static str,
    /// The phase.
    pub phase: Phase,
    /// Its time.
    pub ms: f64,
    /// The time divided by the kernel's.
    pub ratio: Option<f64>,
}

/// Touches of pages that were paged out.
#[derive(Clone, Debug, Serialize)]
pub struct FaultRow {
    /// How the pager traps touches.
    pub trap: &'static str,
    /// Threads that touch pages at the same time.
    pub threads: usize,
    /// The median time of a touch.
    pub p50_us: f64,
    /// Its 99th percentile.
    pub p99_us: f64,
    /// The median time to decode one of these pages.
    pub decode_us: f64,
    /// The median less that of decoding.
    pub p50_beyond_us: f64,
    /// The 99th percentile less the median of decoding.
    pub p99_beyond_us: f64,
}

/// A loop over memory that fits.
#[derive(Clone, Debug, Serialize)]
pub struct FittingRow {
    /// How the pager traps touches.
    pub trap: &'static str,
    /// Its time divided by that over plain memory.
    pub time_ratio: f64,
}

impl PagerReport {
    /// Returns the time of a phase divided by the kernel's.
    pub fn unmap_ratio(&self, trap: &str, phase: Phase) -> Option<f64> {
        self.unmap.iter().find(|row| row.side == trap && row.phase == phase)?.ratio
    }

    /// Returns what touches of so many threads took.
    pub fn fault(&self, trap: &str, threads: usize) -> Option<&FaultRow> {
        self.faults.iter().find(|row| row.trap == trap && row.threads == threads)
    }

    /// Returns the time of a loop over memory that fits, divided by that over plain memory.
    pub fn fitting_ratio(&self, trap: &str) -> Option<f64> {
        self.fitting.iter().find(|row| row.trap == trap).map(|row| row.time_ratio)
    }

    /// Returns the accesses of a pager, with a spill file or without one.
    pub fn access(&self, trap: &str, spills: bool) -> Option<&PagerAccess> {
        self.zipf.as_ref()?.pagers.iter().find(|row| row.trap == trap && row.spills == spills)
    }

    /// Returns the most memory beyond the limit that a pager took during Zipf access; below 0, it stayed below.
    pub fn beyond_limit_bytes(&self, trap: &str) -> Option<f64> {
        let rows = self.zipf.as_ref()?.pagers.iter().filter(|row| row.trap == trap);
        rows.map(|row| row.peak_bytes as f64 - row.limit_bytes as f64).reduce(f64::max)
    }
}

impl fmt::Display for PagerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.unmap.is_empty() {
            let mut table = Table::new(["<memory that is paged out", "<phase", "ms", "/ kernel zram"]);
            for row in &self.unmap {
                let cells = [figure_cell(Some(row.ms), 1), figure_cell(row.ratio, 3)];
                table.row([row.side.to_owned(), row.phase.name().to_owned()].into_iter().chain(cells));
            }
            writeln!(f, "{table}")?;
        }
        if !self.faults.is_empty() {
            let mut table = Table::new(["<one fault, µs", "threads", "p50", "p99", "decode"]);
            for row in &self.faults {
                let cells = [row.p50_us, row.p99_us, row.decode_us].map(|us| figure_cell(Some(us), 2));
                table.row([row.trap.to_owned(), row.threads.to_string()].into_iter().chain(cells));
            }
            writeln!(f, "{table}")?;
        }
        if !self.fitting.is_empty() {
            let mut table = Table::new(["<memory that fits", "time / plain memory"]);
            for row in &self.fitting {
                table.row([row.trap.to_owned(), figure_cell(Some(row.time_ratio), 4)]);
            }
            writeln!(f, "{table}")?;
        }
        if let Some(zipf) = &self.zipf {
            let what = format!("<Zipf access to {}", format_size(zipf.size_bytes));
            let mut table =
                Table::new([what.as_str(), "limit MiB", "accesses/s", "/ kernel zram", "misses", "peak MiB"]);
            let mib = |bytes: u64| figure_cell(Some(bytes as f64 / f64::from(1 << 20)), 1);
            if let Some(per_s) = zipf.kernel_per_s {
                let pool =
                    zipf.pool_bytes.map_or_else(String::new, |bytes| format!(", pool {} MiB", mib(bytes)));
                let misses = figure_cell(zipf.kernel_misses_per_access, 3);
                let cells = [mib(zipf.limit_bytes), figure_cell(Some(per_s), 0), "-".to_owned(), misses];
                table.row([format!("kernel{pool}")].into_iter().chain(cells));
            }
            for row in &zipf.pagers {
                let name =
                    if row.spills { format!("{}, with a spill file", row.trap) } else { row.trap.into() };
                let (per_s, ratio) = (figure_cell(Some(row.per_s), 0), figure_cell(row.speed_ratio, 3));
                let misses = figure_cell(Some(row.misses_per_access), 3);
                table.row([name, mib(row.limit_bytes), per_s, ratio, misses, mib(row.peak_bytes)]);
            }
            writeln!(f, "{table}")?;
            if let Some(raised) = zipf.raised.filter(|raised| *raised > 0) {
                writeln!(
                    f,
                    "the cgroup's limit was raised for a moment, as the kernel found nothing to reclaim: {raised} times"
                )?;
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
