//! The cost of compaction for concurrent reads.
//!
//! Threads read random pages while another thread overwrites a twentieth of the device in a second, so that
//! there is always something to compact; only the compactor differs. The rounds of all compactors are
//! interleaved, and each is compared with the one without compaction in its round.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::Result;
use uzram::units::pages_to_bytes;

use super::super::{Measurement, Pattern, Plan, Target, Until, UzramDevice};
use super::CompactionOptions;
use super::churn::{Churn, Halves};
use crate::harness::corpus::Corpus;
use crate::harness::joined;
use crate::harness::rounds::in_turn;
use crate::harness::stats::{median, median_ratio};

/// The part of the device that is overwritten in a second.
const OVERWRITTEN_PER_SECOND: f64 = 0.05;
/// The interval at which the writer writes what is due.
const WRITE_EVERY: Duration = Duration::from_millis(1);
/// The time for a running step of the background compactor to end.
const SETTLE: Duration = Duration::from_millis(50);
/// The rate limit of the background compactor.
const COMPACT_RATE: &str = "256M";

/// The thread that compacts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compactor {
    /// None.
    Nobody,
    /// The device's own thread: compact_threshold=1, compact_rate=256M.
    Background,
    /// A thread that sets `compact` repeatedly.
    Loop,
}

impl Compactor {
    /// All; the baseline comes first.
    const ALL: [Compactor; 3] = [Compactor::Nobody, Compactor::Background, Compactor::Loop];

    /// Returns the name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Compactor::Nobody => "nobody",
            Compactor::Background => "background",
            Compactor::Loop => "compact, looped",
        }
    }
}

/// Random reads by so many threads during compaction; medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct ReadRow {
    /// Threads.
    pub jobs: usize,
    /// The compactor.
    pub compactor: Compactor,
    /// 10^6 bytes a second.
    pub mb_per_s: f64,
    /// Half of the pages took at most this long.
    pub p50_us: f64,
    /// 99 of 100 pages took at most this long.
    pub p99_us: f64,
    /// 999 of 1000 pages took at most this long.
    pub p999_us: f64,
    /// The throughput divided by that without a compactor: the median of the rounds' ratios.
    pub speed_ratio: f64,
    /// The ratio of `p999_us`, in the same way.
    pub p999_ratio: f64,
    /// Pages that compaction freed in a second.
    pub compacted_per_s: f64,
}

/// One round.
struct Round {
    reads: Measurement,
    compacted_per_s: f64,
}

/// Measures a row for each compactor with 1 and with 2 jobs.
pub(super) fn measure(
    options: &CompactionOptions,
    corpus: &Corpus,
    halves: &Halves,
    page_count: usize,
) -> Result<Vec<ReadRow>> {
    let attributes = [("compact_threshold", "0"), ("compact_rate", COMPACT_RATE)]
        .map(|(name, value)| (name, value.to_owned()));
    let device = UzramDevice::with_attributes(&attributes, pages_to_bytes(page_count as u64))?;
    device.fill(corpus)?;
    let mut rows = Vec::new();
    for jobs in [1, 2] {
        let stop = &options.common.stop;
        let rounds: [_; Compactor::ALL.len()] = in_turn(options.common.repeat, stop, |number, which| {
            let plan = Plan {
                pattern: Pattern::RandRead,
                jobs,
                until: Until::Elapsed(options.common.duration),
                seed: options.common.seed.wrapping_add(number as u64),
                corpus,
                page_count,
                stop,
            };
            round(&device, Compactor::ALL[which], &plan, halves)
        })?;
        let row = |which: usize| ReadRow::new(jobs, Compactor::ALL[which], &rounds[which], &rounds[0]);
        rows.extend((0..rounds.len()).map(row));
    }
    Ok(rows)
}

impl ReadRow {
    fn new(jobs: usize, compactor: Compactor, rounds: &[Round], idle: &[Round]) -> ReadRow {
        let each =
            |rounds: &[Round], figure: &dyn Fn(&Round) -> f64| rounds.iter().map(figure).collect::<Vec<_>>();
        let speed = |round: &Round| round.reads.mb_per_s;
        let quantile = |fraction| move |round: &Round| round.reads.latencies.quantile_us(fraction);
        let middle = |figure: &dyn Fn(&Round) -> f64| median(&each(rounds, figure));
        let ratio = |figure: &dyn Fn(&Round) -> f64| median_ratio(&each(rounds, figure), &each(idle, figure));
        ReadRow {
            jobs,
            compactor,
            mb_per_s: middle(&speed),
            p50_us: middle(&quantile(0.5)),
            p99_us: middle(&quantile(0.99)),
            p999_us: middle(&quantile(0.999)),
            speed_ratio: ratio(&speed),
            p999_ratio: ratio(&quantile(0.999)),
            compacted_per_s: middle(&|round| round.compacted_per_s),
        }
    }
}

/// Reads while the device is overwritten and compacted.
fn round(device: &UzramDevice, compactor: Compactor, plan: &Plan<'_>, halves: &Halves) -> Result<Round> {
    let ends = &AtomicBool::new(false);
    let before = device.stats().pages_compacted;
    let start = Instant::now();
    let reads = thread::scope(|scope| {
        let writer = scope.spawn(move || overwrite(device, plan, halves, ends));
        let looped = (compactor == Compactor::Loop).then(|| scope.spawn(move || compact(device, ends)));
        let reads = set_threshold(device, compactor).and_then(|()| super::super::measure(device, plan));
        ends.store(true, Ordering::Relaxed);
        joined(writer)?;
        looped.map_or(Ok(()), joined)?;
        reads
    })?;
    let elapsed = start.elapsed();
    if compactor == Compactor::Background {
        device.set("compact_threshold", "0")?;
        thread::sleep(SETTLE);
    }
    let compacted = device.stats().pages_compacted - before;
    Ok(Round { reads, compacted_per_s: compacted as f64 / elapsed.as_secs_f64() })
}

fn set_threshold(device: &UzramDevice, compactor: Compactor) -> Result<()> {
    match compactor {
        Compactor::Background => device.set("compact_threshold", "1"),
        Compactor::Nobody | Compactor::Loop => Ok(()),
    }
}

/// Overwrites random pages at the rate, until `ends` is set.
fn overwrite(device: &UzramDevice, plan: &Plan<'_>, halves: &Halves, ends: &AtomicBool) -> Result<()> {
    let pages_per_s = plan.page_count as f64 * OVERWRITTEN_PER_SECOND;
    // Sizes change several times within a measurement.
    let pass = (pages_per_s / 4.0) as usize;
    let mut churn = Churn::new(halves, plan.page_count, pass, !plan.seed);
    let mut worker = device.worker()?;
    let (start, mut written) = (Instant::now(), 0);
    while !ends.load(Ordering::Relaxed) {
        thread::sleep(WRITE_EVERY);
        let due = (start.elapsed().as_secs_f64() * pages_per_s) as usize;
        for overwrite in churn.by_ref().take(due.saturating_sub(written)) {
            worker.write(overwrite.page, plan.corpus.page(overwrite.corpus_page))?;
        }
        written = due;
    }
    Ok(())
}

/// Compacts until `ends` is set.
fn compact(device: &UzramDevice, ends: &AtomicBool) -> Result<()> {
    while !ends.load(Ordering::Relaxed) {
        device.set("compact", "1")?;
    }
    Ok(())
}
