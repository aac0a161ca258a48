//! The hit ratio of the engine's LRU, beside that of an exact LRU with as much memory.
//!
//! One thread uses the pages of a [`Trace`] one by one, beginning with empty memory, and every use counts. A
//! page that is not in memory is added to the LRU, one that is there is marked as used, and when memory is
//! full, 32 pages at once are isolated at the cold end and evicted. The seed decides all except when the
//! thread changes its CPU, which delays the pages in the last CPU's pagevec a little.
//!
//! Layout: `traces` generates, `caches` keeps pages in memory, this file replays the one on the other.

mod caches;
mod traces;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::harness::report::Table;
use serde::Serialize;
use uzram::lru::{Batched, LruLocks, SingleLock};
use uzram::{Error, Result};

use crate::harness::go_on;
use caches::{Cache, EngineLru, ExactLru};
pub use traces::Trace;
pub(crate) use traces::Zipf;

/// The sizes of memory, in percent of the pages.
pub const MEMORY_PERCENT: [u32; 2] = [5, 20];

const MIN_PAGES: u32 = 100;
const MAX_PAGES: u32 = 1 << 24;
const MAX_USES: usize = 1 << 28;

/// What to replay.
#[derive(Clone, Debug)]
pub struct HitRatioOptions {
    /// The number of pages.
    pub pages: u32,
    /// Uses of each trace.
    pub uses: usize,
    /// Seeds the traces.
    pub seed: u64,
    /// Setting it ends the run with an error before the next replay.
    pub stop: Arc<AtomicBool>,
}

impl Default for HitRatioOptions {
    fn default() -> Self {
        HitRatioOptions { pages: 100_000, uses: 1_000_000, seed: 1, stop: Arc::default() }
    }
}

/// A trace replayed with one design of the LRU.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// [`Trace::name`].
    pub trace: &'static str,
    /// The size of memory, in percent of the pages.
    pub memory_percent: u32,
    /// [`LruLocks::NAME`].
    pub design: &'static str,
    /// Uses that found their page in memory.
    pub hit_percent: f64,
    /// The same with an exact LRU.
    pub exact_hit_percent: f64,
}

impl Row {
    /// Returns percentage points above an exact LRU, below 0 for fewer hits.
    pub fn points(&self) -> f64 {
        self.hit_percent - self.exact_hit_percent
    }
}

/// The hit ratios. `Display` prints a table.
#[derive(Clone, Debug, Serialize)]
pub struct HitRatioReport {
    /// The number of pages.
    pub pages: u32,
    /// Uses of each trace.
    pub uses: usize,
    /// A row for each trace, memory and design, in this order.
    pub rows: Vec<Row>,
}

impl HitRatioReport {
    /// Returns the row of one replay, if there is one.
    pub fn row(&self, trace: Trace, memory_percent: u32, design: &str) -> Option<&Row> {
        self.rows.iter().find(|row| {
            row.trace == trace.name() && row.memory_percent == memory_percent && row.design == design
        })
    }
}

/// Replays every trace with each size of memory.
///
/// # Errors
/// `Invalid` for too few or too many pages or uses, `Busy` when it is stopped, `NoMemory`; `Corrupt` if the
/// LRU misbehaves.
pub fn run(options: &HitRatioOptions) -> Result<HitRatioReport> {
    let HitRatioOptions { pages, uses, seed, ref stop } = *options;
    if !(MIN_PAGES..=MAX_PAGES).contains(&pages) || !(1..=MAX_USES).contains(&uses) {
        return Err(Error::invalid(format!(
            "{uses} uses of {pages} pages: it must be 1 to {MAX_USES} of {MIN_PAGES} to {MAX_PAGES}"
        )));
    }
    let mut rows = Vec::new();
    for trace in Trace::ALL {
        let used = trace.generate(pages, uses, seed);
        for memory_percent in MEMORY_PERCENT {
            let capacity_pages = (u64::from(pages) * u64::from(memory_percent) / 100) as usize;
            let exact_hit_percent = replay(&mut ExactLru::new(pages, capacity_pages), &used)?;
            let engine = [
                (Batched::NAME, replay(&mut EngineLru::<Batched>::new(pages, capacity_pages)?, &used)?),
                (SingleLock::NAME, replay(&mut EngineLru::<SingleLock>::new(pages, capacity_pages)?, &used)?),
            ];
            rows.extend(engine.map(|(design, hit_percent)| Row {
                trace: trace.name(),
                memory_percent,
                design,
                hit_percent,
                exact_hit_percent,
            }));
            go_on(stop)?;
        }
    }
    Ok(HitRatioReport { pages, uses, rows })
}

/// Returns the percentage of uses that found their page in memory.
fn replay(cache: &mut impl Cache, used: &[u32]) -> Result<f64> {
    let mut hits = 0usize;
    for page in used {
        hits += usize::from(cache.touch(*page)?);
    }
    Ok(hits as f64 / used.len() as f64 * 100.0)
}

impl fmt::Display for HitRatioReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["<trace", "memory", "<design", "hits", "exact LRU", "points"]);
        for row in &self.rows {
            table.row([
                row.trace.to_owned(),
                format!("{} %", row.memory_percent),
                row.design.to_owned(),
                format!("{:.2}", row.hit_percent),
                format!("{:.2}", row.exact_hit_percent),
                format!("{:+.2}", row.points()),
            ]);
        }
        write!(f, "hit ratios of {} uses of {} pages, percent\n\n{table}", self.uses, self.pages)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::sync::atomic::Ordering;

    fn small() -> HitRatioOptions {
        HitRatioOptions { pages: 2000, uses: 20_000, ..HitRatioOptions::default() }
    }

    #[test]
    fn every_trace_is_replayed() {
        let report = run(&small()).unwrap();
        assert_eq!(report.rows.len(), 3 * 2 * 2);
        for row in &report.rows {
            assert!((0.0..100.0).contains(&row.hit_percent), "{row:?}");
            assert_eq!(row.exact_hit_percent > 0.0, row.trace != "loop", "{row:?}");
        }
        for trace in [Trace::Zipf, Trace::ScanThroughZipf] {
            let [little, much] = MEMORY_PERCENT.map(|percent| report.row(trace, percent, "batched").unwrap());
            assert!(little.hit_percent < much.hit_percent, "{little:?} {much:?}");
            assert!(little.exact_hit_percent < much.exact_hit_percent, "{little:?} {much:?}");
        }
        // Half of the uses of this trace hit only in long rounds; so less than half of all uses can hit.
        assert!(report.row(Trace::ScanThroughZipf, 20, "batched").unwrap().hit_percent < 50.0);
        let text = report.to_string();
        assert!(text.contains("scan through Zipf") && text.contains("single-lock"), "{text}");
    }

    #[test]
    fn points_are_those_above_exact() {
        let row = Row {
            trace: "loop",
            memory_percent: 5,
            design: "batched",
            hit_percent: 40.0,
            exact_hit_percent: 42.5,
        };
        assert_eq!(row.points(), -2.5);
    }

    #[test]
    fn what_cannot_be_is_an_error() {
        for options in [
            HitRatioOptions { pages: 3, ..small() },
            HitRatioOptions { pages: u32::MAX, ..small() },
            HitRatioOptions { uses: 0, ..small() },
            HitRatioOptions { uses: usize::MAX, ..small() },
        ] {
            assert!(run(&options).unwrap_err().to_string().contains("must be 1 to"));
        }
        let stopped = small();
        stopped.stop.store(true, Ordering::Relaxed);
        assert_eq!(run(&stopped).unwrap_err().to_string(), "interrupted");
    }
}
