//! Hot pages: what it brings to recompress those that are used again and again with an algorithm that decodes fast.
//!
//! Two devices are filled with the same pages, and all pages are read twice, which makes them active in the LRU. One device
//! recompresses them; then random pages of both are read in turn.

use std::fmt;

use serde::Serialize;
use uzram::Result;
use uzram::units::{format_size, pages_to_bytes};

use super::super::report::{Row, quotient, speed_table};
use super::super::{BenchOptions, Common, Pattern, Target, UzramDevice, measure_all, verify};
use crate::harness::corpus::Corpus;
use crate::harness::go_on;

/// The algorithm that recompresses.
const AGAIN: &str = "lz4hc";
/// The names of the device that recompressed its pages, and of the other one.
const HOT: &str = "hot";
const AS_WRITTEN: &str = "as-written";

/// The results.
#[derive(Clone, Debug, Serialize)]
pub struct HotReport {
    /// The size of each device.
    pub size_bytes: u64,
    /// The algorithm that compressed pages when they were written.
    pub algorithm: String,
    /// The algorithm that recompressed them.
    pub again: &'static str,
    /// Pages that became smaller.
    pub pages_recompressed: u64,
    /// Pool pages before and after, the kernel's `mem_used_total`.
    pub used_bytes: [u64; 2],
    /// Random reads by one thread, of either device.
    pub reads: Vec<Row>,
}

/// Runs the measurement; each page of the corpus is once on each device.
///
/// # Errors
/// A corpus that cannot be loaded, a device that cannot be made, a page that does not read back, a stop.
pub fn run(common: &Common) -> Result<HotReport> {
    let corpus = common.corpus.load_until(&common.stop)?;
    let hot = device(common, &corpus)?.named(HOT);
    let as_written = device(common, &corpus)?.named(AS_WRITTEN);
    let before = hot.stats();
    hot.set("recompress", "type=hot")?;
    hot.set("compact", "1")?;
    let after = hot.stats();
    verify(&hot, &corpus, corpus.page_count())?;
    let options = BenchOptions {
        common: common.clone().in_slices(),
        patterns: vec![Pattern::RandRead],
        jobs: vec![1],
        ..BenchOptions::default()
    };
    Ok(HotReport {
        size_bytes: pages_to_bytes(corpus.page_count() as u64),
        algorithm: common.algorithm.to_string(),
        again: AGAIN,
        pages_recompressed: after.pages_recompressed - before.pages_recompressed,
        used_bytes: [before.mem_used_bytes, after.mem_used_bytes],
        reads: measure_all(&options, &[&hot, &as_written], &corpus, corpus.page_count())?,
    })
}

/// Makes a device full of pages that are active.
fn device(common: &Common, corpus: &Corpus) -> Result<UzramDevice> {
    let attributes = [
        ("comp_algorithm", common.algorithm.to_string()),
        ("recomp_algorithm", format!("algo={AGAIN}")),
        ("compact_threshold", "0".to_owned()),
    ];
    let device = UzramDevice::with_attributes(&attributes, pages_to_bytes(corpus.page_count() as u64))?;
    device.fill(corpus)?;
    let mut worker = device.worker()?;
    for _ in 0..2 {
        go_on(&common.stop)?;
        (0..corpus.page_count()).try_for_each(|page| worker.read(page).map(drop))?;
    }
    drop(worker);
    Ok(device)
}

impl HotReport {
    /// Returns the speed of reads of recompressed pages divided by that of pages as they were written.
    pub fn speed_ratio(&self) -> Option<f64> {
        self.reads.iter().find(|row| row.target == AS_WRITTEN)?.ratio
    }

    /// Returns the pool's memory afterwards, divided by that before.
    pub fn used_ratio(&self) -> Option<f64> {
        let [before, after] = self.used_bytes;
        quotient(after, before)
    }
}

impl fmt::Display for HotReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, after] = self.used_bytes.map(format_size);
        writeln!(
            f,
            "hot pages, {} from {} to {}: {} pages; pool {before} before, {after} after\n\n{}",
            format_size(self.size_bytes),
            self.algorithm,
            self.again,
            self.pages_recompressed,
            speed_table(&self.reads)
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn active_pages_become_smaller_and_are_read() {
        let report = run(&Common::tiny(600, 2)).unwrap();
        assert!(report.used_ratio().unwrap() < 1.0, "{report:?}");
        assert!((100..=600).contains(&report.pages_recompressed), "{report:?}");
        assert!(report.speed_ratio().unwrap() > 0.0 && report.reads.len() == 2, "{report:?}");
        let text = report.to_string();
        assert!(text.contains("from lz4 to lz4hc") && text.contains(AS_WRITTEN), "{text}");
    }

    #[test]
    fn a_stop_ends_it() {
        let common = Common { stop: Arc::new(AtomicBool::new(true)), ..Common::tiny(96, 1) };
        assert_eq!(run(&common).unwrap_err().to_string(), "interrupted");
    }
}
