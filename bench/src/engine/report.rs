//! The results of a benchmark, as a table for people and as JSON.

use std::fmt;

use serde::Serialize;
use uzram::device::DeviceStats;
use uzram::units::format_size;

use super::measure::{Measurement, SAMPLE_EVERY};
use super::{BenchOptions, Pattern, Target};
use crate::harness::report::{Table, figure_cell};
use crate::harness::stats::{median, median_ratio};

/// One target under one pattern with one number of jobs. Figures are medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// fio's name of the pattern.
    pub rw: &'static str,
    /// Threads.
    pub jobs: usize,
    /// `uzram`, `no-lru`, `lz4`, `codec` or `kernel`; of stores, `memfd` or `private`; of hot pages, `hot` or `as-written`.
    pub target: &'static str,
    /// 10^6 bytes a second, all jobs together.
    pub mb_per_s: f64,
    /// Half of the pages took at most this long.
    pub p50_us: f64,
    /// 99 of 100 pages took at most this long.
    pub p99_us: f64,
    /// 999 of 1000 pages took at most this long.
    pub p999_us: f64,
    /// The first target's throughput divided by this one's, the median of the rounds' ratios; none for
    /// the first itself: uzram, or of stores the one in a memfd, or of hot pages the device that recompressed them.
    pub ratio: Option<f64>,
    /// `mb_per_s` of each round.
    pub rounds_mb_per_s: Vec<f64>,
}

impl Row {
    pub(super) fn new(
        pattern: Pattern,
        jobs: usize,
        target: &'static str,
        rounds: &[Measurement],
        first: Option<&Vec<Measurement>>,
    ) -> Row {
        let speeds = |rounds: &[Measurement]| rounds.iter().map(|round| round.mb_per_s).collect::<Vec<_>>();
        let quantile = |fraction| {
            let values: Vec<_> = rounds.iter().map(|round| round.latencies.quantile_us(fraction)).collect();
            median(&values)
        };
        let rounds_mb_per_s = speeds(rounds);
        Row {
            rw: pattern.name(),
            jobs,
            target,
            mb_per_s: median(&rounds_mb_per_s),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            ratio: first.map(|first| median_ratio(&speeds(first), &rounds_mb_per_s)),
            rounds_mb_per_s,
        }
    }
}

/// The memory of the filled uzram device, before any pattern ran.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Contents of the pages that hold data.
    pub stored_bytes: u64,
    /// Those contents, compressed.
    pub compressed_bytes: u64,
    /// Pool pages.
    pub used_bytes: u64,
    /// The memory that the limit bounds: pool pages, metadata, free runs kept.
    pub charged_bytes: u64,
    /// Allocated at the start, independent of what is stored.
    pub fixed_bytes: u64,
    /// Pages whose words are all equal.
    pub same_pages: u64,
    /// Pages stored raw.
    pub huge_pages: u64,
    /// `used_bytes / compressed_bytes`; `None` if nothing was compressed.
    pub used_per_compressed: Option<f64>,
    /// The kernel device's memory, when it was measured.
    pub kernel: Option<KernelMemory>,
}

/// The kernel's `mm_stat` after the same fill.
#[derive(Clone, Debug, Serialize)]
pub struct KernelMemory {
    /// orig_data_size.
    pub stored_bytes: u64,
    /// compr_data_size.
    pub compressed_bytes: u64,
    /// mem_used_total.
    pub used_bytes: u64,
    /// same_pages.
    pub same_pages: u64,
    /// huge_pages.
    pub huge_pages: u64,
    /// `used_bytes / compressed_bytes`; `None` if nothing was compressed.
    pub used_per_compressed: Option<f64>,
}

pub(super) fn quotient(a: u64, b: u64) -> Option<f64> {
    (b > 0).then(|| a as f64 / b as f64)
}

impl Memory {
    pub(super) fn new(stats: &DeviceStats, kernel: Option<KernelMemory>) -> Memory {
        Memory {
            stored_bytes: stats.orig_data_bytes,
            compressed_bytes: stats.compr_data_bytes,
            used_bytes: stats.mem_used_bytes,
            charged_bytes: stats.mem_charged_bytes,
            fixed_bytes: stats.mem_fixed_bytes,
            same_pages: stats.same_pages,
            huge_pages: stats.huge_pages,
            used_per_compressed: quotient(stats.mem_used_bytes, stats.compr_data_bytes),
            kernel,
        }
    }
}

/// All results of a run. `Display` prints the tables; the JSON has the fields as keys.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// The corpus's name.
    pub corpus: String,
    /// Pages of the corpus used.
    pub corpus_pages: usize,
    /// The device's size.
    pub size_bytes: u64,
    /// A row for each pattern, number of jobs and target, in this order.
    pub rows: Vec<Row>,
    /// The memory of the filled device.
    pub memory: Memory,
    /// Notes on how to judge the figures, and on what was left out and why.
    pub notes: Vec<String>,
}

impl BenchReport {
    /// Returns the row of a target, if it was measured.
    pub fn row(&self, rw: Pattern, jobs: usize, target: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.rw == rw.name() && row.jobs == jobs && row.target == target)
    }
}

/// Adds the notes that every report has: how it was measured.
pub(super) fn describe(options: &BenchOptions, targets: &[&dyn Target], notes: &mut Vec<String>) {
    notes.push(format!(
        "{} {} of {:.2} s, medians; every {SAMPLE_EVERY}th page timed; ratio = uzram / target, median of the rounds' ratios",
        options.common.repeat,
        if options.common.repeat == 1 { "round" } else { "interleaved rounds" },
        options.common.duration.as_secs_f64()
    ));
    notes
        .push("random writes store a corpus page drawn at random, sequential ones the corpus shifted".into());
    for target in targets {
        match target.name() {
            "codec" => notes.push(
                "codec: the bare loop on the same pages in the same order; same-filled pages left out of every target; pages that reach the huge threshold are copied".into(),
            ),
            "no-lru" => notes.push("no-lru: a uzram device with lru_enable=0".into()),
            "lz4" => notes.push("lz4: a uzram device with lz4".into()),
            "kernel" => notes.push("kernel: in process against a block device (O_DIRECT, a system call a page), with lz4 beside memory".into()),
            _ => {}
        }
    }
}

/// The rows as a table.
pub(super) fn speed_table(rows: &[Row]) -> Table {
    let mut table = Table::new(["<rw", "jobs", "<target", "MB/s", "p50 µs", "p99 µs", "p99.9 µs", "ratio"]);
    for row in rows {
        table.row([
            row.rw.to_owned(),
            row.jobs.to_string(),
            row.target.to_owned(),
            format!("{:.0}", row.mb_per_s),
            format!("{:.2}", row.p50_us),
            format!("{:.2}", row.p99_us),
            format!("{:.2}", row.p999_us),
            row.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
        ]);
    }
    table
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let corpus_bytes = uzram::units::pages_to_bytes(self.corpus_pages as u64);
        let [device, size] = [self.size_bytes, corpus_bytes].map(format_size);
        writeln!(f, "device {device}, corpus {}, {size}", self.corpus)?;
        let table = speed_table(&self.rows);
        if !table.is_empty() {
            write!(f, "\n{table}")?;
        }
        self.memory.fmt_table(f)?;
        writeln!(f)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

impl Memory {
    fn fmt_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table =
            Table::new(["<memory", "stored", "compressed", "used", "used/compressed", "charged", "fixed"]);
        table.row([
            "uzram".to_owned(),
            format_size(self.stored_bytes),
            format_size(self.compressed_bytes),
            format_size(self.used_bytes),
            figure_cell(self.used_per_compressed, 3),
            format_size(self.charged_bytes),
            format_size(self.fixed_bytes),
        ]);
        if let Some(kernel) = &self.kernel {
            table.row([
                "kernel".to_owned(),
                format_size(kernel.stored_bytes),
                format_size(kernel.compressed_bytes),
                format_size(kernel.used_bytes),
                figure_cell(kernel.used_per_compressed, 3),
            ]);
        }
        write!(f, "\n{table}")
    }
}
