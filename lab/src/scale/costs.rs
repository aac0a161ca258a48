//! What this machine's caches, clock and sleeping threads cost, measured with two threads pinned on two CPUs.
//!
//! * A line: two threads pass a word to and fro; half of a round trip.
//! * Many lines: they pass `BULK_LINES` lines to and fro, which each writes; per line, less what they take a thread
//!   alone, and less the word that passes the turn.
//! * Sleeping: two threads that park and unpark each other.
//! * The clock, and the hundred pauses for which the standard library's mutex spins before it sleeps.
//! * The list of idle streams: taking a stream and returning it are two holds of its lock. Compressing a page: the
//!   table's corpus, compressed once.
//!
//! Each figure is the lower quartile of many short batches: a thread that loses its CPU spoils a batch, not the figure.

use std::convert::Infallible;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use uzram::codec::{Algorithm, Encoder};
use uzram::cpu::Padded;
use uzram::stream::{IdleList, StreamCount, Streams};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use uzram_bench::harness::corpus::Corpus;
use uzram_bench::harness::stats::quantile;
use uzram_bench::harness::{Gate, go_on, joined, run_together};

/// The lines that are moved at once: a stream's are about as many.
const BULK_LINES: usize = 256;
/// The pauses of the standard library's mutex before a waiter sleeps (`std::sys::sync::mutex::futex`).
const PAUSES: usize = 100;

/// The batches of a figure, at least, unless they take [`PATIENCE`] times as long as they may.
const LEAST_BATCHES: usize = 64;
const PATIENCE: u32 = 100;

/// The costs, each with an entry a round, in nanoseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Costs {
    /// A line that another core has written.
    pub line_ns: Vec<f64>,
    /// One of many lines that are fetched side by side.
    pub bulk_line_ns: Vec<f64>,
    /// Reading the clock.
    pub clock_ns: Vec<f64>,
    /// Spinning before a waiter sleeps.
    pub spin_ns: Vec<f64>,
    /// From waking a thread until it runs.
    pub wake_ns: Vec<f64>,
    /// Waking a thread, for the one that wakes.
    pub wake_call_ns: Vec<f64>,
    /// A hold of the lock of the list of idle streams.
    pub stream_list_ns: Vec<f64>,
    /// Compressing a page.
    pub compress_ns: Vec<f64>,
}

impl Costs {
    /// Measures all of it in rounds of about `duration`.
    ///
    /// # Errors
    /// `Unsupported`: this process may not run on two CPUs. `Busy` once `stop` is set.
    pub fn measure(corpus: &Corpus, rounds: usize, duration: Duration, stop: &AtomicBool) -> Result<Costs> {
        let cpus = two_cpus()?;
        let mut costs = Costs::default();
        for round in 0..=rounds {
            go_on(stop)?;
            let line_ns = pass_lines(cpus, 0, duration)?;
            let bulk_ns = pass_lines(cpus, BULK_LINES, duration)?;
            let alone_ns = write_alone(BULK_LINES, duration);
            let (wake_ns, wake_call_ns) = wake(cpus, duration)?;
            let (stream_list_ns, compress_ns) = (stream_list(duration)?, compress(corpus)?);
            // Round 0 warms up.
            if round > 0 {
                costs.line_ns.push(line_ns);
                costs.bulk_line_ns.push((bulk_ns - line_ns - alone_ns).max(0.0) / BULK_LINES as f64);
                costs.clock_ns.push(per_call(duration, Instant::now));
                costs.spin_ns.push(per_call(duration, || (0..PAUSES).for_each(|_| spin_loop())));
                costs.wake_ns.push(wake_ns);
                costs.wake_call_ns.push(wake_call_ns);
                costs.stream_list_ns.push(stream_list_ns);
                costs.compress_ns.push(compress_ns);
            }
        }
        Ok(costs)
    }
}

/// Returns two CPUs on which this process may run.
fn two_cpus() -> Result<[usize; 2]> {
    let unsupported = |what: String| Error::new(ErrorKind::Unsupported, what);
    let allowed =
        sched_getaffinity(None).map_err(|error| unsupported(format!("the CPUs of this process: {error}")))?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    match (cpus.next(), cpus.next()) {
        (Some(first), Some(second)) => Ok([first, second]),
        _ => Err(unsupported("the cost of moving a cache line takes two CPUs to measure".to_owned())),
    }
}

/// Keeps the calling thread on a CPU.
fn pin(cpu: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(None, &only)
        .map_err(|error| Error::new(ErrorKind::Unsupported, format!("cannot stay on CPU {cpu}: {error}")))
}

/// Returns the nanoseconds of one call, from batches that take about `duration` together.
fn per_call<T>(duration: Duration, mut call: impl FnMut() -> T) -> f64 {
    const CALLS: u32 = 64;
    let mut batches = Batches::start(CALLS);
    while !batches.are_done(duration) {
        for _ in 0..CALLS {
            black_box(call());
        }
        batches.end_one();
    }
    batches.call_ns()
}

/// Returns the lower quartile: other threads only ever make a batch longer.
fn undisturbed(ns: &[f64]) -> f64 {
    quantile(ns, 0.25)
}

/// The times of batches, one after the other.
struct Batches {
    start: Instant,
    last: Instant,
    calls: u32,
    ns: Vec<f64>,
}

impl Batches {
    /// Starts the first batch, of so many calls as all have.
    fn start(calls: u32) -> Batches {
        let now = Instant::now();
        Batches { start: now, last: now, calls, ns: Vec::new() }
    }

    fn end_one(&mut self) {
        let now = Instant::now();
        self.ns.push((now - self.last).as_nanos() as f64 / f64::from(self.calls));
        self.last = now;
    }

    /// Returns whether there are enough of them and they took so long, or they took many times as long.
    fn are_done(&self, duration: Duration) -> bool {
        let elapsed = self.last - self.start;
        (self.ns.len() >= LEAST_BATCHES && elapsed >= duration) || elapsed >= PATIENCE * duration
    }

    /// Returns the nanoseconds of a call.
    fn call_ns(&self) -> f64 {
        undisturbed(&self.ns)
    }
}

/// A cache line; no two of them share one.
#[derive(Default)]
struct Line([AtomicU64; 8]);

fn lines(count: usize) -> Vec<Line> {
    (0..count).map(|_| Line::default()).collect()
}

/// Adds one to a word of each line. Not atomically: one thread at a time does.
fn write_lines(lines: &[Line]) {
    for Line([word, ..]) in lines {
        word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// Returns the nanoseconds in which a thread alone writes so many lines that are in its cache.
fn write_alone(count: usize, duration: Duration) -> f64 {
    let lines = lines(count);
    per_call(duration, || write_lines(&lines))
}

/// Returns the nanoseconds of one way: a thread on one CPU passes its turn to one on another CPU, which then writes
/// `count` lines that the first has written.
fn pass_lines(cpus: [usize; 2], count: usize, duration: Duration) -> Result<f64> {
    /// The turn after which both end.
    const END: u64 = u64::MAX;
    /// Turns of a thread in a batch.
    const PASSES: u32 = 8;
    let (lines, turn) = (&lines(count), &Padded::<AtomicU64>::default());
    let spans = run_together((0..2).map(move |thread: usize| {
        move |gate: &Gate| {
            // A thread that cannot stay on its CPU still plays its part: the other would wait for ever.
            let pinned = pin(cpus[thread]);
            gate.pass();
            let (mut passed, mut batches) = (0_u64, Batches::start(2 * PASSES));
            loop {
                let now = turn.load(Ordering::Acquire);
                if now == END {
                    break;
                }
                if now % 2 != thread as u64 {
                    spin_loop();
                    continue;
                }
                write_lines(lines);
                passed += 1;
                if passed.is_multiple_of(u64::from(PASSES)) {
                    batches.end_one();
                }
                let is_over = thread == 0 && batches.are_done(duration);
                turn.store(if is_over { END } else { now + 1 }, Ordering::Release);
            }
            pinned.map(|()| batches.call_ns())
        }
    }))?;
    Ok(spans[0])
}

/// Returns the nanoseconds from waking a thread on another CPU until it runs, and those that the call takes.
fn wake(cpus: [usize; 2], duration: Duration) -> Result<(f64, f64)> {
    thread::scope(|scope| {
        joined(scope.spawn(|| pin(cpus[0]).and_then(|()| wake_from_here(cpus[1], duration))))
    })
}

fn wake_from_here(other: usize, duration: Duration) -> Result<(f64, f64)> {
    let turn = AtomicU64::new(0);
    let ended = AtomicBool::new(false);
    let this = thread::current();
    let is_theirs = || turn.load(Ordering::Acquire) % 2 == 1;
    thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let pinned = pin(other);
            while !ended.load(Ordering::Acquire) {
                if is_theirs() {
                    turn.fetch_add(1, Ordering::AcqRel);
                    this.unpark();
                }
                thread::park();
            }
            pinned
        });
        let (mut trips, mut calls) = (Batches::start(2), Vec::new());
        while !trips.are_done(duration) {
            turn.fetch_add(1, Ordering::AcqRel);
            let before = Instant::now();
            echo.thread().unpark();
            calls.push(before.elapsed().as_nanos() as f64);
            while is_theirs() {
                thread::park();
            }
            trips.end_one();
        }
        ended.store(true, Ordering::Release);
        echo.thread().unpark();
        joined(echo)?;
        Ok((trips.call_ns(), undisturbed(&calls)))
    })
}

/// Returns the nanoseconds of a hold of the list's lock: half of taking a stream and returning it, at most.
fn stream_list(duration: Duration) -> Result<f64> {
    let Ok(list) = IdleList::new(StreamCount::try_from(2)?, || Ok::<u64, Infallible>(0));
    Ok(per_call(duration, || *list.lend()) / 2.0)
}

/// Returns the nanoseconds in which a page of the corpus is compressed.
fn compress(corpus: &Corpus) -> Result<f64> {
    let mut encoder = Encoder::new(&Algorithm::default())?;
    let mut out = vec![0; 2 * PAGE_SIZE];
    let mut batches = Batches::start(1);
    for page in corpus.pages() {
        black_box(encoder.encode(page, &mut out));
        batches.end_one();
    }
    // Pages differ: the mean, not the median.
    Ok(batches.ns.iter().sum::<f64>() / batches.ns.len().max(1) as f64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use uzram_bench::harness::corpus::{self, Kind};

    #[test]
    fn every_cost_is_measured_in_every_round() {
        let corpus = corpus::build(Kind::Mixed, 16).unwrap();
        let costs = Costs::measure(&corpus, 2, Duration::from_micros(500), &AtomicBool::new(false));
        let costs = match costs {
            Err(error) if error.kind() == ErrorKind::Unsupported => return println!("skipped: {error}"),
            costs => serde_json::to_value(costs.unwrap()).unwrap(),
        };
        for (name, rounds) in costs.as_object().unwrap() {
            let rounds: Vec<f64> = rounds.as_array().unwrap().iter().map(|ns| ns.as_f64().unwrap()).collect();
            assert_eq!(rounds.len(), 2, "{name}");
            // Of the lines that are fetched side by side nothing may be left on a noisy machine.
            let least = if name == "bulk_line_ns" { 0.0 } else { 0.01 };
            assert!(rounds.iter().all(|ns| *ns >= least && *ns < 1e9), "{name}: {rounds:?}");
        }
    }

    #[test]
    fn a_stop_ends_it() {
        let corpus = corpus::build(Kind::Mixed, 16).unwrap();
        let outcome = Costs::measure(&corpus, 2, Duration::from_micros(500), &AtomicBool::new(true));
        assert!(outcome.is_err());
    }
}
