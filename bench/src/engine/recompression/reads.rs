//! The cost of recompression for concurrent reads.
//!
//! Threads read random pages while another thread recompresses pages without a rate limit. A recompressed
//! page takes longer to read, whether others are being recompressed or not. So that this does not count as a
//! cost of concurrency, each slice of reads during recompression is between two of half its length without
//! it: together these read as many recompressed pages.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::Result;

use super::super::{MAX_REPEAT, Measurement, Pattern, Plan, Until, measure};
use super::{RecompressionOptions, SteppedDevice};
use crate::harness::joined;
use crate::harness::rounds::in_turn;
use crate::harness::stats::{Histogram, median, median_ratio};

/// The most time of a slice: in a longer one more pages change, and a device is large enough for fewer
/// slices.
const SLICE: Duration = Duration::from_millis(200);

/// Random reads by so many threads; medians over the slices.
#[derive(Clone, Debug, Serialize)]
pub struct ReadRow {
    /// Threads.
    pub jobs: usize,
    /// Slices with recompression.
    pub slices: usize,
    /// 10^6 bytes a second without recompression.
    pub idle_mb_per_s: f64,
    /// The same during recompression.
    pub mb_per_s: f64,
    /// 999 of 1000 pages took at most this long without recompression, in all slices together.
    pub idle_p999_us: f64,
    /// The same during recompression.
    pub p999_us: f64,
    /// The throughput divided by that of the slices before and after it: the median of these ratios.
    pub speed_ratio: f64,
    /// Pages that became smaller in a second.
    pub recompressed_per_s: f64,
}

/// One slice, and the halves before and after.
struct Round {
    idle: [Measurement; 2],
    during: Measurement,
    recompressed_per_s: f64,
}

/// Measures the row of so many jobs.
pub(super) fn measure_row(
    options: &RecompressionOptions,
    device: &SteppedDevice<'_>,
    jobs: usize,
) -> Result<ReadRow> {
    let slice = options.common.duration.min(SLICE);
    let slices = options.common.repeat as u128 * options.common.duration.as_nanos() / slice.as_nanos().max(1);
    let slices = usize::try_from(slices).unwrap_or(MAX_REPEAT).clamp(1, MAX_REPEAT);
    let [rounds] = in_turn(slices, &options.common.stop, |number, _| {
        device.refill()?;
        round(options, device, jobs, slice, number)
    })?;
    Ok(ReadRow::new(jobs, &rounds))
}

fn round(
    options: &RecompressionOptions,
    device: &SteppedDevice<'_>,
    jobs: usize,
    slice: Duration,
    number: usize,
) -> Result<Round> {
    let plan = |turn: usize, duration: Duration| Plan {
        pattern: Pattern::RandRead,
        jobs,
        until: Until::Elapsed(duration),
        // Never the pages that were just read.
        seed: options.common.seed.wrapping_add((3 * number + turn) as u64),
        corpus: device.corpus,
        page_count: device.page_count(),
        stop: &options.common.stop,
    };
    let before = measure(&device.device, &plan(0, slice / 2))?;
    let (during, recompressed_per_s) = read_and_recompress(device, &plan(1, slice))?;
    let after = measure(&device.device, &plan(2, slice / 2))?;
    Ok(Round { idle: [before, after], during, recompressed_per_s })
}

fn read_and_recompress(device: &SteppedDevice<'_>, plan: &Plan<'_>) -> Result<(Measurement, f64)> {
    let ends = &AtomicBool::new(false);
    let before = device.stats().pages_recompressed;
    let start = Instant::now();
    let reads = thread::scope(|scope| {
        let recompressor = scope.spawn(move || {
            while device.step()? && !ends.load(Ordering::Relaxed) {}
            Ok(())
        });
        let reads = measure(&device.device, plan);
        ends.store(true, Ordering::Relaxed);
        joined(recompressor)?;
        reads
    })?;
    let recompressed = device.stats().pages_recompressed - before;
    Ok((reads, recompressed as f64 / start.elapsed().as_secs_f64()))
}

impl ReadRow {
    fn new(jobs: usize, rounds: &[Round]) -> ReadRow {
        let each = |figure: &dyn Fn(&Round) -> f64| rounds.iter().map(figure).collect::<Vec<_>>();
        let idle = each(&|round| f64::midpoint(round.idle[0].mb_per_s, round.idle[1].mb_per_s));
        let during = each(&|round| round.during.mb_per_s);
        let (mut idle_latencies, mut latencies) = (Histogram::default(), Histogram::default());
        for round in rounds {
            round.idle.iter().for_each(|idle| idle_latencies.merge(&idle.latencies));
            latencies.merge(&round.during.latencies);
        }
        ReadRow {
            jobs,
            slices: rounds.len(),
            idle_mb_per_s: median(&idle),
            mb_per_s: median(&during),
            idle_p999_us: idle_latencies.quantile_us(0.999),
            p999_us: latencies.quantile_us(0.999),
            speed_ratio: median_ratio(&during, &idle),
            recompressed_per_s: median(&each(&|round| round.recompressed_per_s)),
        }
    }
}
