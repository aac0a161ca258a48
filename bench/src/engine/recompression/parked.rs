//! Pages of a parked program: the memory that they take before and after the policy's thread recompressed them, as pages that
//! were not used for long, and the CPU time that it took.
//!
//! The bound of CPU time is off: only the sum is of interest here, and how fast it is spent would be the bound's.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::units::{format_size, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::super::report::quotient;
use super::super::{Common, Target, UzramDevice, verify};
use crate::harness::go_on;

/// The algorithm that `swap on` recompresses with.
const AGAIN: &str = "zstd:3";
/// The shortest age at which pages are recompressed, and the time after which each page has it: ages are counted in whole
/// seconds.
const AGE_S: u64 = 1;
const ALL_OLD: Duration = Duration::from_secs(AGE_S + 1);
/// The compressing thread has idle priority, and gets little time on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(20);

/// The results.
#[derive(Clone, Debug, Serialize)]
pub struct ParkedReport {
    /// The algorithm that compressed pages when they were written.
    pub algorithm: String,
    /// The algorithm that recompressed them.
    pub again: &'static str,
    /// Contents of the pages.
    pub stored_bytes: u64,
    /// Pages that became smaller.
    pub pages_recompressed: u64,
    /// Pool pages before and after, the kernel's `mem_used_total`.
    pub used_bytes: [u64; 2],
    /// CPU time of both threads.
    pub cpu_ms: u64,
    /// The time that it took.
    pub elapsed_s: f64,
}

/// Fills a device with each page of the corpus once, and has its policy recompress the pages. `None` if that did not end in
/// time.
///
/// # Errors
/// A corpus that cannot be loaded, a device that cannot be made, a page that does not read back, a stop.
pub fn run(common: &Common) -> Result<Option<ParkedReport>> {
    let corpus = common.corpus.load_until(&common.stop)?;
    let attributes = [
        ("comp_algorithm", common.algorithm.to_string()),
        ("recomp_algorithm", format!("algo={AGAIN}")),
        ("recompress_cpu", "0".to_owned()),
        ("compact_threshold", "0".to_owned()),
    ];
    let device = UzramDevice::with_attributes(&attributes, pages_to_bytes(corpus.page_count() as u64))?;
    device.fill(&corpus)?;
    let (before, start) = (device.stats(), Instant::now());
    device.set("recompress_after", &AGE_S.to_string())?;
    if !wait_for_a_look_at_all(&device, common, start)? {
        return Ok(None);
    }
    let elapsed_s = start.elapsed().as_secs_f64();
    device.set("compact", "1")?;
    let after = device.stats();
    verify(&device, &corpus, corpus.page_count())?;
    Ok(Some(ParkedReport {
        algorithm: common.algorithm.to_string(),
        again: AGAIN,
        stored_bytes: before.orig_data_bytes,
        pages_recompressed: after.pages_recompressed - before.pages_recompressed,
        used_bytes: [before.mem_used_bytes, after.mem_used_bytes],
        cpu_ms: policy_count(&device, "recompress_cpu_ms")?,
        elapsed_s,
    }))
}

/// Waits until the policy's thread has ended a look at the pages of a device, written before `start`, that began when all of
/// them were old. Returns whether it did in time.
fn wait_for_a_look_at_all(device: &UzramDevice, common: &Common, start: Instant) -> Result<bool> {
    // A look is counted when it begins, and the next one begins after it.
    let mut ended_at = None;
    while start.elapsed() < PATIENCE {
        go_on(&common.stop)?;
        let looks = policy_count(device, "looks")?;
        if start.elapsed() >= ALL_OLD && looks >= *ended_at.get_or_insert(looks + 2) {
            return Ok(true);
        }
        thread::sleep(POLL);
    }
    Ok(false)
}

/// Returns one of the counts of the attribute `policy`.
fn policy_count(device: &UzramDevice, name: &str) -> Result<u64> {
    let text = device.get("policy")?;
    let count = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    count.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("the policy does not count {name}")))
}

impl ParkedReport {
    /// Returns the contents divided by the pool's memory, before and after.
    pub fn ratios(&self) -> [Option<f64>; 2] {
        self.used_bytes.map(|used_bytes| quotient(self.stored_bytes, used_bytes))
    }

    /// Returns the ratio after divided by that before.
    pub fn gain(&self) -> Option<f64> {
        let [before, after] = self.used_bytes;
        quotient(before, after)
    }

    /// Returns the CPU time for each MiB of contents, in milliseconds.
    pub fn cpu_ms_per_mib(&self) -> f64 {
        self.cpu_ms as f64 * f64::from(1 << 20) / self.stored_bytes as f64
    }
}

impl fmt::Display for ParkedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, after] = self.ratios().map(|ratio| ratio.unwrap_or(f64::NAN));
        writeln!(
            f,
            "parked pages, {} from {} to {}: ratio {before:.2} before, {after:.2} after; {} pages in {:.2} s, {:.1} ms of CPU time per MiB",
            format_size(self.stored_bytes),
            self.algorithm,
            self.again,
            self.pages_recompressed,
            self.elapsed_s,
            self.cpu_ms_per_mib()
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::engine::Common;

    #[test]
    fn unused_pages_become_smaller() {
        let Some(report) = run(&Common::tiny(600, 1)).unwrap() else {
            return println!("skipped: a thread of idle priority gets too little time");
        };
        assert!(report.gain().unwrap() > 1.0 && report.stored_bytes > 1 << 20, "{report:?}");
        assert!((100..=600).contains(&report.pages_recompressed), "{report:?}");
        let [before, after] = report.ratios().map(Option::unwrap);
        assert!(before > 1.0 && after > before, "{report:?}");
        let text = report.to_string();
        assert!(text.contains("from lz4 to zstd:3") && text.contains("per MiB"), "{text}");
    }

    #[test]
    fn a_stop_ends_it() {
        let common = Common { stop: Arc::new(AtomicBool::new(true)), ..Common::tiny(96, 1) };
        assert_eq!(run(&common).unwrap_err().to_string(), "interrupted");
    }
}
