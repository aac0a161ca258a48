//! The gains and costs of recompression: how long it takes to recompress a device's pages, how much memory
//! that frees, and how reads slow down meanwhile ([`run`]); and what the policy makes of pages that nobody
//! uses ([`parked`]).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use uzram::units::{format_size, page_of, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::compare::ROUNDS;
use super::measure::{Measurement, Plan, Until, measure};
use super::pattern::Pattern;
use super::target::{Target, verify};
use super::uzram_device::UzramDevice;
use crate::harness::corpus::Corpus;
use crate::harness::memory::named_count;
use crate::harness::options::MAX_REPEAT;
use crate::harness::report::{each, jobs_text, mib, quotient};
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, go_on, joined, unsupported};

/// The algorithm that recompresses, at its default level.
const AGAIN: &str = "zstd";
/// Pages tried in a step, between checks whether to go on: some tens of ms of work.
const STEP_PAGES: usize = 1024;
/// The most time of a slice: in a longer one more pages change, and a device is large enough for fewer
/// slices.
const SLICE: Duration = Duration::from_millis(200);
/// The algorithm that `swap on` recompresses with.
const PARKED_AGAIN: &str = "zstd:3";
/// The shortest age at which pages are recompressed, and the time after which each page has it: ages are
/// counted in whole seconds.
const AGE_S: u64 = 1;
const ALL_OLD: Duration = Duration::from_secs(AGE_S + 1);
/// The policy's compressing thread has idle priority, and gets little time on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(20);
const TABLE: &str = "recompression";

/// Recompresses a device's pages, then again while they are read.
pub fn run(options: &Options) -> Result<Report> {
    let corpus = options.load_corpus()?;
    let size_bytes = options.amount(1 << 30, 8 << 20);
    let stepped = SteppedDevice::new(options, &corpus, size_bytes)?;
    let before = stepped.disk.device.stats();
    let start = Instant::now();
    while stepped.step()? {
        options.go_on()?;
    }
    let elapsed_s = start.elapsed().as_secs_f64();
    let after = stepped.disk.device.stats();
    verify(&stepped.disk, &corpus, stepped.page_count)?;
    let mut report = Report::default();
    let cells = [
        ("s", elapsed_s),
        ("pages", (after.pages_recompressed - before.pages_recompressed) as f64),
        ("pool before MiB", mib(before.mem_used_bytes)),
        ("after MiB", mib(after.mem_used_bytes)),
        ("after / before", quotient(after.mem_used_bytes, before.mem_used_bytes)),
    ];
    let size = format_size(size_bytes);
    report.row(TABLE, &format!("{size}, {} to {AGAIN}", options.algorithm), &cells);
    [1, 2].into_iter().try_for_each(|jobs| stepped.reads(jobs, &mut report))?;
    Ok(report)
}

/// Makes a device with an algorithm that recompresses, as large as the corpus if no size is given. Only the
/// effect of recompression is to be seen, not that of compaction.
fn device(options: &Options, again: &str, size_bytes: u64) -> Result<UzramDevice> {
    let attributes = [
        ("comp_algorithm", options.algorithm.to_string()),
        ("recomp_algorithm", format!("algo={again}")),
        ("compact_threshold", "0".to_owned()),
    ];
    UzramDevice::with_attributes(&attributes, size_bytes)
}

struct SteppedDevice<'a> {
    options: &'a Options,
    corpus: &'a Corpus,
    disk: UzramDevice,
    page_count: usize,
    /// Steps left until all pages have been tried.
    steps_left: AtomicUsize,
}

impl<'a> SteppedDevice<'a> {
    /// Makes a device full of pages that were compressed once.
    fn new(options: &'a Options, corpus: &'a Corpus, size_bytes: u64) -> Result<Self> {
        let (disk, page_count) = (device(options, AGAIN, size_bytes)?, page_of(size_bytes) as usize);
        let stepped = SteppedDevice { options, corpus, disk, page_count, steps_left: AtomicUsize::new(0) };
        stepped.fill().map(|()| stepped)
    }

    fn fill(&self) -> Result<()> {
        self.disk.fill(self.corpus)?;
        self.steps_left.store(self.steps(), Ordering::Relaxed);
        go_on(&self.options.stop)
    }

    fn steps(&self) -> usize {
        self.page_count.div_ceil(STEP_PAGES)
    }

    /// Refills the device if half of its pages or more may have been tried.
    fn refill(&self) -> Result<()> {
        if 2 * self.steps_left.load(Ordering::Relaxed) > self.steps() { Ok(()) } else { self.fill() }
    }

    /// Recompresses some pages, the largest, unless all were tried. One thread at a time takes steps.
    fn step(&self) -> Result<bool> {
        let Some(left) = self.steps_left.load(Ordering::Relaxed).checked_sub(1) else { return Ok(false) };
        self.steps_left.store(left, Ordering::Relaxed);
        self.disk.device.set("recompress", &format!("algo={AGAIN} max_pages={STEP_PAGES}"))?;
        Ok(true)
    }

    /// Measures random reads while another thread recompresses pages without a rate limit. A recompressed
    /// page takes longer to read, whether others are being recompressed or not. So that this does not count
    /// as a cost of concurrency, each slice of reads during recompression is between two of half its length
    /// without it: together these read as many recompressed pages.
    fn reads(&self, jobs: usize, report: &mut Report) -> Result<()> {
        const TABLE: &str = "randread during recompression";
        let (slice, rounds) = (self.options.duration.min(SLICE), self.options.rounds(ROUNDS));
        let slices = rounds as u128 * self.options.duration.as_nanos() / slice.as_nanos().max(1);
        let slices = usize::try_from(slices).unwrap_or(MAX_REPEAT).clamp(1, MAX_REPEAT);
        let [slices]: [Vec<[f64; 3]>; 1] = in_turn(slices, &self.options.stop, |number, _| {
            self.refill()?;
            let plan = |turn: usize, duration: Duration| {
                // Never the pages that were just read.
                let (turn, pattern) = (3 * number + turn, Pattern::RandRead);
                let plan = Plan::of_round(self.options, pattern, jobs, turn, self.corpus, self.page_count);
                Plan { until: Until::Elapsed(duration), ..plan }
            };
            let before = measure(&self.disk, &plan(0, slice / 2))?.mb_per_s;
            let pages_before = self.disk.device.stats().pages_recompressed;
            let during = self.read_and_recompress(&plan(1, slice))?.mb_per_s;
            let pages = self.disk.device.stats().pages_recompressed - pages_before;
            let after = measure(&self.disk, &plan(2, slice / 2))?.mb_per_s;
            Ok([during, f64::midpoint(before, after), pages as f64])
        })?;
        let (row, of) = (jobs_text(jobs), |at: usize| each(&slices, |slice| slice[at]));
        report.compared(TABLE, &row, ["MB/s", "idle MB/s"], [&of(0), &of(1)]);
        report.row(TABLE, &row, &[("pages", of(2).iter().sum())]);
        Ok(())
    }

    fn read_and_recompress(&self, plan: &Plan<'_>) -> Result<Measurement> {
        let ends = &AtomicBool::new(false);
        thread::scope(|scope| {
            let recompressor = scope.spawn(move || {
                while self.step()? && !ends.load(Ordering::Relaxed) {}
                Ok(())
            });
            let reads = measure(&self.disk, plan);
            ends.store(true, Ordering::Relaxed);
            joined(recompressor)?;
            reads
        })
    }
}

/// Fills a device with each page of the corpus once, and has its policy recompress them, as pages that were
/// not used for long. The bound of CPU time is off: only the sum is of interest here, and how fast it is
/// spent would be the bound's.
pub fn parked(options: &Options) -> Result<Report> {
    let corpus = options.load_corpus()?;
    let device = device(options, PARKED_AGAIN, pages_to_bytes(corpus.page_count() as u64))?;
    device.device.set("recompress_cpu", "0")?;
    device.fill(&corpus)?;
    let (before, start) = (device.device.stats(), Instant::now());
    device.device.set("recompress_after", &AGE_S.to_string())?;
    wait_for_a_look_at_all(&device, options, start)?;
    let elapsed_s = start.elapsed().as_secs_f64();
    device.device.set("compact", "1")?;
    let after = device.device.stats();
    verify(&device, &corpus, corpus.page_count())?;
    let stored_bytes = before.orig_data_bytes;
    let cpu_ms = policy_count(&device, "recompress_cpu_ms")? as f64;
    let cells = [
        ("ratio before", quotient(stored_bytes, before.mem_used_bytes)),
        ("ratio after", quotient(stored_bytes, after.mem_used_bytes)),
        ("gain", quotient(before.mem_used_bytes, after.mem_used_bytes)),
        ("pages", (after.pages_recompressed - before.pages_recompressed) as f64),
        ("s", elapsed_s),
        ("CPU ms / MiB", cpu_ms / mib(stored_bytes)),
    ];
    let mut report = Report::default();
    report.row("parked", "python", &cells);
    let size = format_size(stored_bytes);
    report.note(format!("parked: pages of {size}, {} to {PARKED_AGAIN}", options.algorithm));
    Ok(report)
}

/// Waits until the policy's thread has ended a look at the pages of a device, written before `start`, that
/// began when all of them were old.
fn wait_for_a_look_at_all(device: &UzramDevice, options: &Options, start: Instant) -> Result<()> {
    // A look is counted when it begins, and the next one begins after it.
    let mut ended_at = None;
    while start.elapsed() < PATIENCE {
        options.go_on()?;
        let looks = policy_count(device, "looks")?;
        if start.elapsed() >= ALL_OLD && looks >= *ended_at.get_or_insert(looks + 2) {
            return Ok(());
        }
        thread::sleep(POLL);
    }
    Err(unsupported("its thread of idle priority got too little CPU time"))
}

/// Returns one of the counts of the attribute `policy`.
fn policy_count(device: &UzramDevice, name: &str) -> Result<u64> {
    let count = named_count(&device.device.get("policy")?, name);
    count.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("the policy does not count {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_compressed_again_and_reads_go_on() {
        let report = run(&Options::tiny(96)).unwrap();
        let of = |column| report.get(TABLE, "8 MiB, lz4 to zstd", column).unwrap();
        assert!(of("after / before") < 1.0 && of("s") > 0.0, "{report}");
        assert!((1.0..=2048.0).contains(&of("pages")), "{report}");
        for jobs in ["1 job", "2 jobs"] {
            let of = |column| report.get("randread during recompression", jobs, column).unwrap();
            assert!(of("idle MB/s") > 0.0 && of("ratio") > 0.0 && of("pages") > 0.0, "{report}");
        }
    }

    #[test]
    fn all_pages_are_tried_and_a_refill_begins_again() {
        let options = Options::tiny(96);
        let corpus = options.load_corpus().unwrap();
        let stepped = SteppedDevice::new(&options, &corpus, 8 << 20).unwrap();
        let mut steps = 0;
        while stepped.step().unwrap() {
            steps += 1;
        }
        assert_eq!(steps, 2);
        let once = stepped.disk.device.stats();
        stepped.disk.device.set("recompress", "algo=zstd").unwrap();
        assert_eq!(stepped.disk.device.stats().pages_recompressed, once.pages_recompressed, "none was left");
        stepped.refill().unwrap();
        assert!(stepped.disk.device.stats().compr_data_bytes > once.compr_data_bytes);
        assert!(stepped.step().unwrap());
    }

    #[test]
    fn unused_pages_become_smaller() {
        let report = match parked(&Options::tiny(600)) {
            Ok(report) => report,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                return println!("skipped: {error}");
            }
        };
        let of = |column| report.get("parked", "python", column).unwrap();
        assert!(of("gain") > 1.0 && of("ratio before") > 1.0, "{report}");
        assert!((100.0..=600.0).contains(&of("pages")), "{report}");
    }
}
