//! Runs the jobs of one measurement and times them.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzram::Result;
use uzram::units::PAGE_SIZE;

use super::pattern::{Op, Ops, Pattern};
use super::target::{Target, Worker};
use crate::harness::corpus::Corpus;
use crate::harness::stats::Histogram;
use crate::harness::{Gate, Options, SEED, Span, Usage, run_together};

/// One operation in this many is timed, as reading the clock takes some ns. A mixed corpus repeats its kinds
/// every third page.
pub(super) const SAMPLE_EVERY: u64 = 7;

/// What to run.
pub struct Plan<'a> {
    /// Which pages are read and written, in what order.
    pub pattern: Pattern,
    /// Threads.
    pub jobs: usize,
    /// When a job ends.
    pub until: Until,
    /// The same seed means the same operations.
    pub seed: u64,
    /// The pages to write.
    pub corpus: &'a Corpus,
    /// Pages of the target.
    pub page_count: usize,
    /// If it is set, the jobs end early.
    pub stop: &'a AtomicBool,
}

impl<'a> Plan<'a> {
    /// Returns that of a round.
    pub(super) fn of_round(
        options: &'a Options,
        pattern: Pattern,
        jobs: usize,
        round: usize,
        corpus: &'a Corpus,
        page_count: usize,
    ) -> Plan<'a> {
        let (until, seed) = (Until::Elapsed(options.duration), SEED.wrapping_add(round as u64));
        Plan { pattern, jobs, until, seed, corpus, page_count, stop: &options.stop }
    }
}

/// When a job ends.
#[derive(Clone, Copy)]
pub enum Until {
    /// After so long.
    Elapsed(Duration),
    /// After so many pages, or a few more: it checks after every seventh.
    Pages(u64),
}

/// The result of a measurement.
#[derive(Default)]
pub struct Measurement {
    /// 10^6 bytes a second: the jobs' own rates, added up.
    pub mb_per_s: f64,
    /// Latencies of the operations that were timed.
    pub latencies: Histogram,
    /// From the start of the first job to the end of the last.
    pub elapsed: Duration,
    /// By all jobs.
    pub pages_read: u64,
    /// By all jobs.
    pub pages_written: u64,
    /// Of the jobs' threads.
    pub usage: Usage,
}

/// Runs the plan's jobs on a target, all at the same time.
pub fn measure(target: &dyn Target, plan: &Plan<'_>) -> Result<Measurement> {
    let job = |job| {
        move |gate: &Gate| {
            let mut worker = target.worker()?;
            gate.pass();
            run_job(worker.as_mut(), plan, job)
        }
    };
    let jobs = run_together((0..plan.jobs).map(job))?;
    let mut total = Measurement::default();
    for job in &jobs {
        let pages = job.pages_read + job.pages_written;
        total.mb_per_s += mb_per_s(pages, job.span.end - job.span.start);
        total.latencies.merge(&job.latencies);
        total.pages_read += job.pages_read;
        total.pages_written += job.pages_written;
    }
    (total.elapsed, total.usage) = Span::together(jobs.iter().map(|job| job.span));
    Ok(total)
}

/// Returns a rate in 10^6 bytes a second.
pub fn mb_per_s(pages: u64, elapsed: Duration) -> f64 {
    (pages * PAGE_SIZE as u64) as f64 / elapsed.as_secs_f64() / 1e6
}

struct Job {
    pages_read: u64,
    pages_written: u64,
    span: Span,
    latencies: Histogram,
}

/// Runs one job. Profilers look for its name, so it must stay a function.
#[inline(never)]
fn run_job(worker: &mut dyn Worker, plan: &Plan<'_>, job: usize) -> Result<Job> {
    #[cfg(feature = "lock-stats")]
    let _recording = uzram::sync::LockRecording::start();
    let corpus = plan.corpus;
    let mut source = Ops::new(plan.pattern, plan.seed, job, plan.jobs, plan.page_count, corpus.page_count());
    let mut pages_written = 0;
    let mut one = || match source.next() {
        Op::Read { page } => worker.read(page).map(|page| {
            black_box(page);
        }),
        Op::Write { page, corpus_page } => {
            pages_written += 1;
            worker.write(page, corpus.page(corpus_page))
        }
    };
    let mut latencies = Histogram::default();
    let mut pages = 0;
    let usage = Usage::of_this_thread()?;
    let start = Instant::now();
    let end = loop {
        for _ in 1..SAMPLE_EVERY {
            one()?;
        }
        let before = Instant::now();
        one()?;
        let after = Instant::now();
        latencies.record(after - before);
        pages += SAMPLE_EVERY;
        let enough = match plan.until {
            Until::Elapsed(duration) => after - start >= duration,
            Until::Pages(wanted) => pages >= wanted,
        };
        if enough || plan.stop.load(Ordering::Relaxed) {
            break after;
        }
    };
    let span = Span { start, end, usage: Usage::of_this_thread()? - usage };
    Ok(Job { pages_read: pages - pages_written, pages_written, span, latencies })
}
