//! What is measured of `uzram run`, as a table and as JSON.

use std::fmt;

use serde::Serialize;

use crate::harness::report::{Table, figure_cell};

/// The results; medians over the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RunReport {
    /// Programs in half of their memory.
    pub programs: Vec<ProgramRow>,
    /// The time of a program whose memory fits, divided by that with plain mimalloc.
    pub fitting_ratio: Option<f64>,
    /// By how much longer a program takes that does nothing.
    pub start_ms: Option<f64>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// A program in half of its memory.
#[derive(Clone, Debug, Serialize)]
pub struct ProgramRow {
    /// Its name.
    pub name: &'static str,
    /// Its time without a limit, once.
    pub plain_s: f64,
    /// The most memory that it takes then.
    pub peak_bytes: u64,
    /// Half of that.
    pub limit_bytes: u64,
    /// How many rounds.
    pub rounds: usize,
    /// Its time in a cgroup of that size with swap on kernel zram.
    pub kernel_s: Option<f64>,
    /// Its time with `uzram run`.
    pub uzram_s: f64,
    /// The one divided by the other.
    pub ratio: Option<f64>,
    /// The most anonymous memory with `uzram run`, compressed memory included.
    pub anonymous_bytes: u64,
    /// The most memory of files, which is not managed.
    pub file_bytes: u64,
    /// How often the cgroup's limit was raised for a moment, as the kernel found nothing to reclaim.
    pub kernel_raised: usize,
    /// What `uzram run` said at the end.
    pub last_line: String,
}

impl RunReport {
    /// Returns the row of a program.
    pub fn program(&self, name: &str) -> Option<&ProgramRow> {
        self.programs.iter().find(|row| row.name == name)
    }

    /// Returns how many programs are not slower than on kernel zram, if any was compared.
    pub fn as_fast(&self) -> Option<usize> {
        let mut ratios = self.programs.iter().filter_map(|row| row.ratio).peekable();
        ratios.peek()?;
        Some(ratios.filter(|ratio| *ratio <= 1.0).count())
    }

    /// Returns the most anonymous memory beyond a limit; below 0, it stayed below.
    pub fn beyond_limit_bytes(&self) -> Option<f64> {
        let beyond = self.programs.iter().map(|row| row.anonymous_bytes as f64 - row.limit_bytes as f64);
        beyond.reduce(f64::max)
    }
}

impl fmt::Display for RunReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.programs.is_empty() {
            let mut table = Table::new([
                "<program in half of its memory",
                "plain s",
                "peak MiB",
                "limit MiB",
                "kernel zram s",
                "uzram s",
                "ratio",
                "anonymous MiB",
                "files MiB",
                "rounds",
            ]);
            let mib = |bytes: u64| figure_cell(Some(bytes as f64 / f64::from(1 << 20)), 1);
            for row in &self.programs {
                table.row([
                    row.name.to_owned(),
                    figure_cell(Some(row.plain_s), 2),
                    mib(row.peak_bytes),
                    mib(row.limit_bytes),
                    figure_cell(row.kernel_s, 2),
                    figure_cell(Some(row.uzram_s), 2),
                    figure_cell(row.ratio, 2),
                    mib(row.anonymous_bytes),
                    mib(row.file_bytes),
                    row.rounds.to_string(),
                ]);
            }
            writeln!(f, "{table}")?;
            for row in &self.programs {
                if !row.last_line.is_empty() {
                    writeln!(f, "{}: {}", row.name, row.last_line)?;
                }
                if row.kernel_raised > 0 {
                    let times = row.kernel_raised;
                    writeln!(f, "{}: the cgroup's limit was raised for a moment {times} times", row.name)?;
                }
            }
        }
        if let Some(ratio) = self.fitting_ratio {
            writeln!(f, "a program whose memory fits: {ratio:.3} of the time with plain mimalloc")?;
        }
        if let Some(ms) = self.start_ms {
            writeln!(f, "starting takes {ms:.1} ms more")?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
