//! Runs the jobs of one measurement and clocks them.

use std::hint::black_box;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use uzram::base::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use super::pattern::{Op, Ops, Pattern};
use super::{Target, Worker};
use crate::corpus::Corpus;
use crate::stats::Histogram;

/// One operation in this many is timed.
pub(super) const SAMPLE_EVERY: u64 = 7;

/// What to run.
pub(super) struct Plan<'a> {
    pub(super) pattern: Pattern,
    pub(super) jobs: usize,
    pub(super) duration: Duration,
    pub(super) seed: u64,
    pub(super) corpus: &'a Corpus,
    pub(super) page_count: usize,
    pub(super) stop: &'a AtomicBool,
}

/// What it gave.
pub(super) struct Measurement {
    /// 10^6 bytes a second, all jobs together.
    pub(super) mb_per_s: f64,
    pub(super) latencies: Histogram,
}

/// Runs the plan's jobs on a target, all at the same time.
pub(super) fn measure(target: &dyn Target, plan: &Plan<'_>) -> Result<Measurement> {
    // Held for writing until every thread is there, so that they start together; and if one cannot
    // be started, those that are there run to their end and nothing waits for ever.
    let gate = RwLock::new(());
    let results = thread::scope(|scope| -> Result<Vec<Result<Job>>> {
        let closed = gate.write();
        let threads: Vec<_> = (0..plan.jobs)
            .map(|job| {
                let gate = &gate;
                thread::Builder::new().name(format!("bench-{job}")).spawn_scoped(scope, move || {
                    let mut worker = target.worker()?;
                    drop(gate.read());
                    run_job(worker.as_mut(), plan, job)
                })
            })
            .collect();
        drop(closed);
        threads
            .into_iter()
            .map(|thread| match thread {
                Ok(thread) => {
                    thread.join().map_err(|_| Error::new(ErrorKind::Io, "a job of the benchmark panicked"))
                }
                Err(error) => Err(Error::new(ErrorKind::NoMemory, format!("cannot start a job: {error}"))
                    .with_setting("--jobs")),
            })
            .collect()
    })?;
    let mut total = Measurement { mb_per_s: 0.0, latencies: Histogram::default() };
    for job in results {
        let job = job?;
        total.mb_per_s += (job.ops * PAGE_SIZE as u64) as f64 / job.elapsed.as_secs_f64() / 1e6;
        total.latencies.merge(&job.latencies);
    }
    Ok(total)
}

struct Job {
    ops: u64,
    elapsed: Duration,
    latencies: Histogram,
}

fn run_job(worker: &mut dyn Worker, plan: &Plan<'_>, job: usize) -> Result<Job> {
    let corpus = plan.corpus;
    let mut source = Ops::new(plan.pattern, plan.seed, job, plan.jobs, plan.page_count, corpus.page_count());
    let mut one = || match source.next() {
        Op::Read { page } => worker.read(page).map(|page| {
            black_box(page);
        }),
        Op::Write { page, corpus_page } => worker.write(page, corpus.page(corpus_page)),
    };
    let mut latencies = Histogram::default();
    let mut ops = 0;
    let start = Instant::now();
    loop {
        for _ in 1..SAMPLE_EVERY {
            one()?;
        }
        let before = Instant::now();
        one()?;
        let after = Instant::now();
        latencies.record(after - before);
        ops += SAMPLE_EVERY;
        if after - start >= plan.duration || plan.stop.load(Ordering::Relaxed) {
            return Ok(Job { ops, elapsed: after - start, latencies });
        }
    }
}
