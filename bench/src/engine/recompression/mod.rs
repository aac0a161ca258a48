//! The gains and costs of recompression: how long it takes to recompress a device's pages, how much memory
//! that frees, and how reads slow down meanwhile (`reads`); and what the policy makes of pages that nobody
//! uses ([`parked`]).

pub mod parked;
mod reads;

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::harness::report::Table;
use serde::Serialize;
use uzram::Result;
use uzram::codec;
use uzram::device::DeviceStats;
use uzram::units::{format_size, page_of};

use super::report::quotient;
use super::{Common, Target, UzramDevice, go_on, verify};
use crate::harness::corpus::Corpus;
pub use reads::ReadRow;

/// Pages tried in a step, between checks whether to go on: some tens of ms of work.
const STEP_PAGES: usize = 1024;
/// Numbers of threads that read.
const JOBS: [usize; 2] = [1, 2];

/// How to measure.
#[derive(Clone, Debug)]
pub struct RecompressionOptions {
    /// The common options; their algorithm compresses pages when they are written.
    pub common: Common,
    /// The size of the device; a shorter corpus is repeated.
    pub size_bytes: u64,
    /// The algorithm that recompresses, at its default level.
    pub again: codec::Kind,
}

impl Default for RecompressionOptions {
    fn default() -> Self {
        RecompressionOptions { common: Common::default(), size_bytes: 1 << 30, again: codec::Kind::Zstd }
    }
}

/// The results.
#[derive(Clone, Debug, Serialize)]
pub struct RecompressionReport {
    /// The size of the device.
    pub size_bytes: u64,
    /// The algorithm that compressed pages when they were written.
    pub algorithm: String,
    /// The algorithm that recompressed them.
    pub again: &'static str,
    /// The time of recompression without concurrent reads, in seconds.
    pub elapsed_s: f64,
    /// Pages that became smaller.
    pub pages_recompressed: u64,
    /// Pool pages before and after, the kernel's `mem_used_total`.
    pub used_bytes: [u64; 2],
    /// Size of the compressed pages before and after.
    pub compressed_bytes: [u64; 2],
    /// Reads meanwhile, a row for each number of jobs.
    pub reads: Vec<ReadRow>,
}

/// Runs all measurements.
///
/// # Errors
/// A device that cannot be made, a page that does not read back, a stop.
pub fn run(options: &RecompressionOptions) -> Result<RecompressionReport> {
    let corpus = options.common.corpus.load_until(&options.common.stop)?;
    let device = SteppedDevice::new(options, &corpus)?;
    let before = device.stats();
    let start = Instant::now();
    while device.step()? {
        go_on(&options.common.stop)?;
    }
    let elapsed_s = start.elapsed().as_secs_f64();
    let after = device.stats();
    verify(&device.device, &corpus, device.page_count())?;
    let reads =
        JOBS.into_iter().map(|jobs| reads::measure_row(options, &device, jobs)).collect::<Result<_>>()?;
    let both = |figure: fn(&DeviceStats) -> u64| [figure(&before), figure(&after)];
    Ok(RecompressionReport {
        size_bytes: options.size_bytes,
        algorithm: options.common.algorithm.to_string(),
        again: options.again.name(),
        elapsed_s,
        pages_recompressed: after.pages_recompressed - before.pages_recompressed,
        used_bytes: both(|stats| stats.mem_used_bytes),
        compressed_bytes: both(|stats| stats.compr_data_bytes),
        reads,
    })
}

/// A device whose pages are recompressed step by step.
struct SteppedDevice<'a> {
    options: &'a RecompressionOptions,
    corpus: &'a Corpus,
    device: UzramDevice,
    /// Steps left until all pages have been tried.
    steps_left: AtomicUsize,
}

impl<'a> SteppedDevice<'a> {
    /// Makes a device full of pages that were compressed once.
    fn new(options: &'a RecompressionOptions, corpus: &'a Corpus) -> Result<Self> {
        let attributes = [
            ("comp_algorithm", options.common.algorithm.to_string()),
            ("recomp_algorithm", format!("algo={}", options.again.name())),
            // Only the effect of recompression is to be seen, not that of compaction.
            ("compact_threshold", "0".to_owned()),
        ];
        let device = UzramDevice::with_attributes(&attributes, options.size_bytes)?;
        let device = SteppedDevice { options, corpus, device, steps_left: AtomicUsize::new(0) };
        device.fill()?;
        Ok(device)
    }

    fn page_count(&self) -> usize {
        page_of(self.options.size_bytes) as usize
    }

    fn stats(&self) -> DeviceStats {
        self.device.stats()
    }

    /// Rewrites all pages.
    fn fill(&self) -> Result<()> {
        self.device.fill(self.corpus)?;
        self.steps_left.store(self.steps(), Ordering::Relaxed);
        go_on(&self.options.common.stop)
    }

    /// Returns the number of steps for all pages.
    fn steps(&self) -> usize {
        self.page_count().div_ceil(STEP_PAGES)
    }

    /// Refills the device if half of its pages or more may have been tried.
    fn refill(&self) -> Result<()> {
        if 2 * self.steps_left.load(Ordering::Relaxed) > self.steps() { Ok(()) } else { self.fill() }
    }

    /// Recompresses some pages, the largest, unless all were tried. One thread at a time takes steps.
    fn step(&self) -> Result<bool> {
        let Some(left) = self.steps_left.load(Ordering::Relaxed).checked_sub(1) else { return Ok(false) };
        self.steps_left.store(left, Ordering::Relaxed);
        let step = format!("algo={} max_pages={STEP_PAGES}", self.options.again.name());
        self.device.set("recompress", &step)?;
        Ok(true)
    }
}

impl RecompressionReport {
    /// Returns the reads by so many jobs.
    pub fn reads(&self, jobs: usize) -> Option<&ReadRow> {
        self.reads.iter().find(|row| row.jobs == jobs)
    }

    /// Returns the pool's memory afterwards, divided by that before.
    pub fn used_ratio(&self) -> Option<f64> {
        let [before, after] = self.used_bytes;
        quotient(after, before)
    }
}

impl fmt::Display for RecompressionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [used_before, used_after] = self.used_bytes.map(format_size);
        let [compressed_before, compressed_after] = self.compressed_bytes.map(format_size);
        writeln!(
            f,
            "recompression of {} from {} to {}, in {:.2} s, {} pages",
            format_size(self.size_bytes),
            self.algorithm,
            self.again,
            self.elapsed_s,
            self.pages_recompressed
        )?;
        writeln!(
            f,
            "pool {used_before} before, {used_after} after; compressed {compressed_before}, {compressed_after}\n"
        )?;
        let mut table = Table::new([
            "<randread during it",
            "idle MB/s",
            "MB/s",
            "idle p99.9 µs",
            "p99.9 µs",
            "MB/s ratio",
            "pages/s",
        ]);
        for row in &self.reads {
            table.row([
                format!("jobs: {}", row.jobs),
                format!("{:.0}", row.idle_mb_per_s),
                format!("{:.0}", row.mb_per_s),
                format!("{:.2}", row.idle_p999_us),
                format!("{:.2}", row.p999_us),
                format!("{:.2}", row.speed_ratio),
                format!("{:.0}", row.recompressed_per_s),
            ]);
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;

    fn tiny() -> RecompressionOptions {
        RecompressionOptions {
            common: Common::tiny(96, 2),
            size_bytes: 8 << 20,
            ..RecompressionOptions::default()
        }
    }

    #[test]
    fn pages_are_compressed_again_and_reads_go_on() {
        let report = run(&tiny()).unwrap();
        let [before, after] = report.used_bytes;
        assert!(after < before && report.used_ratio().unwrap() < 1.0, "{report:?}");
        assert!(report.compressed_bytes[1] < report.compressed_bytes[0] && report.elapsed_s > 0.0);
        assert!((1..=2048).contains(&report.pages_recompressed), "{}", report.pages_recompressed);
        assert_eq!(report.reads.len(), 2);
        for row in &report.reads {
            assert!(row.mb_per_s > 0.0 && row.idle_mb_per_s > 0.0 && row.speed_ratio > 0.0, "{row:?}");
            assert!(row.slices == 2 && row.recompressed_per_s > 0.0, "{row:?}");
        }
        assert!(report.reads(2).is_some());
        let text = report.to_string();
        assert!(text.contains("from lz4 to zstd") && text.contains("MB/s ratio"), "{text}");
    }

    #[test]
    fn all_pages_are_tried_and_a_refill_begins_again() {
        let options = tiny();
        let corpus = options.common.corpus.load_until(&options.common.stop).unwrap();
        let device = SteppedDevice::new(&options, &corpus).unwrap();
        let mut steps = 0;
        while device.step().unwrap() {
            steps += 1;
        }
        assert_eq!(steps, 2);
        let once = device.stats();
        device.device.set("recompress", "algo=zstd").unwrap();
        assert_eq!(device.stats().pages_recompressed, once.pages_recompressed, "none was left");
        device.refill().unwrap();
        assert!(device.stats().compr_data_bytes > once.compr_data_bytes);
        assert!(device.step().unwrap());
    }

    #[test]
    fn a_stop_ends_it() {
        let stop = Arc::new(AtomicBool::new(true));
        let common = Common { stop, duration: Duration::from_secs(600), ..tiny().common };
        let options = RecompressionOptions { common, ..tiny() };
        assert_eq!(run(&options).unwrap_err().to_string(), "interrupted");
    }
}
