//! The gains and costs of compaction: how tightly a scattered pool is packed (`density`), and how reads slow
//! down meanwhile (`reads`). Both scatter the pool in the same way (`churn`).

mod churn;
mod density;
mod reads;

use std::fmt;

use crate::harness::report::Table;
use serde::Serialize;
use uzram::Result;
use uzram::units::{format_size, page_of};

use super::Common;
use churn::Halves;
pub use density::{Density, Held};
pub use reads::{Compactor, ReadRow};

/// How to measure.
#[derive(Clone, Debug)]
pub struct CompactionOptions {
    /// The common options.
    pub common: Common,
    /// The size of the device; a shorter corpus is repeated.
    pub size_bytes: u64,
}

impl Default for CompactionOptions {
    fn default() -> Self {
        CompactionOptions { common: Common::default(), size_bytes: 256 << 20 }
    }
}

/// The results.
#[derive(Clone, Debug, Serialize)]
pub struct CompactionReport {
    /// The size of the device.
    pub size_bytes: u64,
    /// Memory before and after.
    pub density: Density,
    /// Reads meanwhile: for each number of jobs a row for each compactor, none first.
    pub reads: Vec<ReadRow>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// Measures both.
///
/// # Errors
/// A device that cannot be made, a page that does not read back, a stop.
pub fn run(options: &CompactionOptions) -> Result<CompactionReport> {
    let corpus = options.common.corpus.load_until(&options.common.stop)?;
    let halves = Halves::new(&corpus, &options.common.algorithm)?;
    let page_count = page_of(options.size_bytes) as usize;
    let mut notes = Vec::new();
    let density = density::measure(options, &corpus, &halves, page_count, &mut notes)?;
    let reads = reads::measure(options, &corpus, &halves, page_count)?;
    Ok(CompactionReport { size_bytes: options.size_bytes, density, reads, notes })
}

impl CompactionReport {
    /// Returns the reads by so many jobs beside that compactor.
    pub fn reads(&self, jobs: usize, compactor: Compactor) -> Option<&ReadRow> {
        self.reads.iter().find(|row| row.jobs == jobs && row.compactor == compactor)
    }
}

impl fmt::Display for CompactionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.density.fmt_table(f, self.size_bytes)?;
        writeln!(f)?;
        let mut table = Table::new([
            "<randread beside",
            "jobs",
            "MB/s",
            "p50 µs",
            "p99 µs",
            "p99.9 µs",
            "MB/s ratio",
            "p99.9 ratio",
            "pages freed/s",
        ]);
        for row in &self.reads {
            table.row([
                row.compactor.name().to_owned(),
                row.jobs.to_string(),
                format!("{:.0}", row.mb_per_s),
                format!("{:.2}", row.p50_us),
                format!("{:.2}", row.p99_us),
                format!("{:.2}", row.p999_us),
                format!("{:.2}", row.speed_ratio),
                format!("{:.2}", row.p999_ratio),
                format!("{:.0}", row.compacted_per_s),
            ]);
        }
        write!(f, "{table}")?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

impl Density {
    fn fmt_table(&self, f: &mut fmt::Formatter<'_>, size_bytes: u64) -> fmt::Result {
        writeln!(
            f,
            "compaction of {} after {} overwrites, in {:.0} ms; objects {}, packed by class {}",
            format_size(size_bytes),
            self.overwrites,
            self.compact_ms,
            format_size(self.object_bytes),
            format_size(self.ideal_bytes)
        )?;
        let mut table =
            Table::new(["<", "used", "charged", "chunks", "used/objects", "used/packed", "chunks/charged"]);
        for (name, held) in [("scattered", &self.scattered), ("compacted", &self.compacted)] {
            let ratio = |bytes: u64, of: u64| format!("{:.3}", bytes as f64 / of as f64);
            table.row([
                name.to_owned(),
                format_size(held.used_bytes),
                format_size(held.charged_bytes),
                format_size(held.chunk_bytes),
                ratio(held.used_bytes, self.object_bytes),
                ratio(held.used_bytes, self.ideal_bytes),
                ratio(held.chunk_bytes, held.charged_bytes),
            ]);
        }
        write!(f, "{table}")?;
        if let Some([scattered, compacted]) = self.kernel_used_bytes {
            writeln!(
                f,
                "kernel zram: used {}, compacted {}",
                format_size(scattered),
                format_size(compacted)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_scattered_pool_is_packed_and_reads_go_on() {
        let options = CompactionOptions { common: Common::tiny(96, 2), size_bytes: 4 << 20 };
        let report = run(&options).unwrap();
        let Density { scattered, compacted, ideal_bytes, object_bytes, .. } = report.density;
        assert!(compacted.used_bytes < scattered.used_bytes, "{:?}", report.density);
        assert!(object_bytes <= ideal_bytes && ideal_bytes <= compacted.used_bytes, "{:?}", report.density);
        assert!(
            compacted.used_bytes < compacted.charged_bytes && compacted.charged_bytes < compacted.chunk_bytes
        );
        assert_eq!(report.reads.len(), 6);
        for row in &report.reads {
            assert!(row.mb_per_s > 0.0 && row.p50_us <= row.p999_us && row.speed_ratio > 0.0, "{row:?}");
            assert_eq!(row.compactor == Compactor::Nobody, row.speed_ratio == 1.0, "{row:?}");
        }
        let text = report.to_string();
        assert!(text.contains("compacted") && text.contains("compact, looped"), "{text}");
        if report.density.kernel_used_bytes.is_none() {
            println!("skipped: {}", report.notes[0]);
        }
    }

    #[test]
    fn a_stop_ends_it() {
        let stop = Arc::new(AtomicBool::new(true));
        let common = Common { duration: Duration::from_secs(600), stop, ..Common::tiny(96, 1) };
        let options = CompactionOptions { common, size_bytes: 1 << 20 };
        assert_eq!(run(&options).unwrap_err().to_string(), "interrupted");
    }
}
