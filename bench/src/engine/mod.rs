//! `uzram bench`: fio's six patterns on 4 KiB pages, in process, on a device filled with a
//! corpus, beside the bare codec, the kernel's zram, and a device without an LRU or with another algorithm.
//!
//! How it measures:
//! * Page p of the device is filled with corpus page p (modulo the corpus's size). Before a pattern that
//!   reads, a device that was written is filled again.
//! * All targets run the same operations in the same order: a round's seed gives each job its own sequence.
//!   The targets are measured in interleaved rounds ([`crate::harness::rounds`]). Figures are medians over
//!   the rounds; ratios are medians of each round's ratio.
//! * A random write stores a corpus page drawn at random, and a sequential pass the corpus shifted by one
//!   page more than the last: contents and sizes change as they do in use, while the mix on the device stays
//!   the corpus's.
//! * Every seventh operation is timed, for every target, so that reading the clock costs only a few ns an
//!   operation. (Seven, because a mixed corpus repeats its kinds every third page.)
//! * With the codec, same-filled pages are left out of the corpus, for every target: the engine stores them
//!   without its codec, so there would be nothing to compare.
//!
//! Layout: [`pattern`](Pattern) selects the pages, `measure` runs and times jobs, each target has its own
//! file, and [`BenchReport`] prints.

pub mod backing;
mod codec_loop;
pub mod compaction;
pub mod hit_ratio;
mod kernel;
mod kernel_zram;
mod measure;
mod packed;
mod pattern;
pub mod recompression;
mod report;
pub mod survive;
mod uzram_device;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::codec::Algorithm;
use uzram::stream::StreamDesign;
use uzram::units::{Page, bytes_to_pages, pages_to_bytes};
use uzram::{Error, Result};

use crate::harness::corpus::{self, Corpus, Kind};
use crate::harness::rounds::in_turn_by_jobs;
use crate::harness::{DEFAULT_CORPUS_PAGES, Source, go_on, read_back};
pub use kernel_zram::KernelZram;
pub use measure::{Measurement, Plan, Until, mb_per_s, measure};
pub use packed::Packed;
pub use pattern::Pattern;
pub use report::{BenchReport, KernelMemory, Memory, Row};
pub use uzram_device::UzramDevice;

/// A target that uzram is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Against {
    /// The bare loop of the engine's codec on the same pages: the physical limit.
    Codec,
    /// A kernel zram device, hot-added for the run.
    Kernel,
    /// A uzram device without an LRU.
    NoLru,
    /// A uzram device with lz4, whatever the algorithm of the first one is.
    Lz4,
}

impl std::str::FromStr for Against {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "codec" => Ok(Against::Codec),
            "kernel" => Ok(Against::Kernel),
            "no-lru" => Ok(Against::NoLru),
            "lz4" => Ok(Against::Lz4),
            _ => Err(Error::invalid(format!("unknown target '{text}': write codec, kernel, no-lru or lz4"))
                .with_setting("--against")),
        }
    }
}

/// The options that all benchmarks of the engine share.
#[derive(Clone, Debug)]
pub struct Common {
    /// The pages to store.
    pub corpus: Source,
    /// The length of a measurement in one round.
    pub duration: Duration,
    /// How many rounds.
    pub repeat: usize,
    /// The algorithm, in uzram and, unless they say otherwise, in the targets it is compared with.
    pub algorithm: Algorithm,
    /// The seed for choosing pages.
    pub seed: u64,
    /// Setting it, for example from a signal handler, ends the run with an error after removing what it added
    /// to the system.
    pub stop: Arc<AtomicBool>,
}

/// How long a round lasts where two things differ by a few percent. Many short rounds tell them apart better
/// than a few long ones, between which a busy machine changes its speed more. On one, the cost of the LRU came
/// to ratios from 0.95 to 1.13 by 3 rounds of 0.5 s, from 0.93 to 1.06 by 50 of 50 ms in four runs, from 0.94 to
/// 1.02 by 150 of 20 ms, and from 0.97 to 1.01 by 250 of 20 ms in five runs.
const SLICE: Duration = Duration::from_millis(20);

impl Common {
    /// The same time, in rounds of at most [`SLICE`].
    pub(crate) fn in_slices(self) -> Common {
        let slices = self.repeat as u128 * self.duration.as_nanos() / SLICE.as_nanos();
        let repeat = usize::try_from(slices).unwrap_or(MAX_REPEAT).max(self.repeat);
        Common { duration: self.duration.min(SLICE), repeat: repeat.min(MAX_REPEAT), ..self }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let bad = |what: String, setting| Err(Error::invalid(what).with_setting(setting));
        if !(1..=MAX_REPEAT).contains(&self.repeat) {
            return bad(format!("{} rounds: it must be 1 to {MAX_REPEAT}", self.repeat), "--repeat");
        }
        if self.duration.is_zero() || self.duration > MAX_DURATION {
            return bad("a measurement must last more than nothing and at most an hour".into(), "--seconds");
        }
        Ok(())
    }
}

impl Default for Common {
    fn default() -> Self {
        Common {
            corpus: Source::Built(Kind::Mixed, DEFAULT_CORPUS_PAGES),
            duration: Duration::from_secs(1),
            repeat: 5,
            algorithm: Algorithm::default(),
            seed: 1,
            stop: Arc::default(),
        }
    }
}

#[cfg(test)]
impl Common {
    /// A small amount of work.
    fn tiny(corpus_pages: usize, repeat: usize) -> Self {
        let corpus = Source::Built(Kind::Mixed, corpus_pages);
        Common { corpus, duration: Duration::from_millis(20), repeat, ..Common::default() }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The common options.
    pub common: Common,
    /// The device's size; `None` for the corpus's. A shorter corpus is repeated.
    pub size_bytes: Option<u64>,
    /// The patterns, in the order of the report; if empty, only memory is measured.
    pub patterns: Vec<Pattern>,
    /// Numbers of threads.
    pub jobs: Vec<usize>,
    /// How threads share uzram's compression streams.
    pub streams: StreamDesign,
    /// The targets to compare with.
    pub against: Vec<Against>,
}

const MAX_JOBS: usize = 256;
pub(crate) const MAX_REPEAT: usize = 1000;
const MAX_DURATION: Duration = Duration::from_hours(1);

impl Default for BenchOptions {
    fn default() -> Self {
        BenchOptions {
            common: Common::default(),
            size_bytes: None,
            patterns: Pattern::ALL.to_vec(),
            jobs: vec![1, 2],
            streams: StreamDesign::PerCpu,
            against: Vec::new(),
        }
    }
}

impl BenchOptions {
    fn check(&self) -> Result<()> {
        let bad = |what: String, setting| Err(Error::invalid(what).with_setting(setting));
        if let Some(jobs) = self.jobs.iter().find(|jobs| !(1..=MAX_JOBS).contains(*jobs)) {
            return bad(format!("{jobs} jobs: it must be 1 to {MAX_JOBS}"), "--jobs");
        }
        if self.jobs.is_empty() && !self.patterns.is_empty() {
            return bad("no number of jobs".to_owned(), "--jobs");
        }
        self.common.check()
    }

    fn load_corpus(&self) -> Result<Corpus> {
        let corpus = self.common.corpus.load_until(&self.common.stop)?;
        match self.against.contains(&Against::Codec) {
            true => corpus.without_same_filled(),
            false => Ok(corpus),
        }
    }

    fn page_count(&self, corpus: &Corpus) -> Result<usize> {
        self.size_bytes.map_or(Ok(corpus.page_count()), checked_page_count)
    }
}

/// Pages of what is measured, at least one and no more than a corpus may have.
fn checked_page_count(size_bytes: u64) -> Result<usize> {
    let pages = bytes_to_pages(size_bytes);
    if pages == 0 || pages > corpus::MAX_PAGES as u64 {
        let most = uzram::units::format_size(pages_to_bytes(corpus::MAX_PAGES as u64));
        return Err(Error::invalid(format!("the device must have one page at least and {most} at most"))
            .with_setting("--size"));
    }
    Ok(pages as usize)
}

/// One thing that is measured. Its threads each take a worker.
pub trait Target: Sync {
    /// Returns the name in the report.
    fn name(&self) -> &'static str;

    /// Stores corpus page p in page p.
    fn fill(&self, corpus: &Corpus) -> Result<()>;

    /// Returns a worker, by which one thread runs its operations.
    fn worker(&self) -> Result<Box<dyn Worker + '_>>;
}

/// One thread's access to a target. Every target is called through this, at the same cost.
pub trait Worker {
    /// Reads a page into a buffer of the worker.
    fn read(&mut self, page: usize) -> Result<&Page>;

    /// Stores `contents`, a page of a corpus and thus aligned, in a page.
    fn write(&mut self, page: usize, contents: &Page) -> Result<()>;
}

/// Fills a target one page after another, by one thread.
fn fill_in_order(target: &dyn Target, corpus: &Corpus, page_count: usize) -> Result<()> {
    let mut worker = target.worker()?;
    (0..page_count).try_for_each(|page| worker.write(page, corpus.page(page)))
}

/// Runs the benchmark.
///
/// # Errors
/// `Invalid` names the invalid option. If the kernel has no zram, or does not let us use it, this is not an
/// error: the report says why it is missing.
pub fn run(options: BenchOptions) -> Result<BenchReport> {
    options.check()?;
    let corpus = options.load_corpus()?;
    let page_count = options.page_count(&corpus)?;
    let size_bytes = pages_to_bytes(page_count as u64);
    let mut notes = Vec::new();

    let device = UzramDevice::new(&options.common.algorithm, options.streams, size_bytes)?;
    let without_lru = match options.against.contains(&Against::NoLru) {
        true => Some(UzramDevice::without_lru(&options.common.algorithm, options.streams, size_bytes)?),
        false => None,
    };
    let with_lz4 = match options.against.contains(&Against::Lz4) {
        true => Some(UzramDevice::with_lz4(options.streams, size_bytes)?),
        false => None,
    };
    let codec = match options.against.contains(&Against::Codec) {
        true => Some(codec_loop::CodecLoop::new(
            options.common.algorithm.clone(),
            uzram::zsmalloc::huge_threshold(uzram::device::DEFAULT_CHAIN_SIZE),
            &corpus,
            page_count,
        )?),
        false => None,
    };
    let kernel = match options.against.contains(&Against::Kernel) {
        true => kernel::KernelDevice::add(&options.common.algorithm, size_bytes)
            .inspect_err(|error| notes.push(format!("kernel zram left out: {error}")))
            .ok(),
        false => None,
    };

    let mut targets: Vec<&dyn Target> = vec![&device];
    // Next to the device that they differ least from.
    targets.extend([&without_lru, &with_lz4].into_iter().flatten().map(|device| device as &dyn Target));
    targets.extend(codec.as_ref().map(|codec| codec as &dyn Target));
    targets.extend(kernel.as_ref().map(|kernel| kernel as &dyn Target));
    for target in &targets {
        target.fill(&corpus)?;
        verify(*target, &corpus, page_count)?;
        go_on(&options.common.stop)?;
    }
    let memory =
        Memory::new(&device.stats(), kernel.as_ref().map(|kernel| kernel.zram.memory()).transpose()?);
    let rows = measure_all(&options, &targets, &corpus, page_count)?;
    report::describe(&options, &targets, &mut notes);
    let (name, corpus_pages) = (options.common.corpus.name(), corpus.page_count());
    Ok(BenchReport { corpus: name, corpus_pages, size_bytes, rows, memory, notes })
}

/// Reads some pages of a target that was filled with a corpus.
///
/// # Errors
/// `Corrupt`: a page does not hold its page of the corpus.
pub fn verify(target: &dyn Target, corpus: &Corpus, page_count: usize) -> Result<()> {
    const CHECKED_PAGES: usize = 4096;
    let pages = (0..page_count).step_by(page_count.div_ceil(CHECKED_PAGES));
    verify_pages(target, corpus, pages.map(|page| (page, page)))
}

/// Reads pages of a target, each given with the page of the corpus that it should hold.
fn verify_pages(
    target: &dyn Target,
    corpus: &Corpus,
    mut pages: impl Iterator<Item = (usize, usize)>,
) -> Result<()> {
    let mut worker = target.worker()?;
    pages.try_for_each(|(page, corpus_page)| {
        let found = worker.read(page)?;
        read_back(found, corpus.page(corpus_page), || format!("{}: page {page}", target.name()))
    })
}

/// Measures every pattern, round by round, with all numbers of jobs and all targets in a round.
fn measure_all(
    options: &BenchOptions,
    targets: &[&dyn Target],
    corpus: &Corpus,
    page_count: usize,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut written = false;
    for &pattern in &options.patterns {
        if written && pattern.reads() {
            targets.iter().try_for_each(|target| target.fill(corpus))?;
        }
        written |= pattern.writes();
        let cells = in_turn_by_jobs(
            options.common.repeat,
            &options.jobs,
            targets.len(),
            &options.common.stop,
            |turn| {
                let plan = Plan {
                    pattern,
                    jobs: turn.jobs,
                    until: Until::Elapsed(options.common.duration),
                    seed: options.common.seed.wrapping_add(turn.round as u64),
                    corpus,
                    page_count,
                    stop: &options.common.stop,
                };
                measure(targets[turn.variant], &plan)
            },
        )?;
        for (cell, &jobs) in cells.iter().zip(&options.jobs) {
            rows.extend((0..targets.len()).map(|which| {
                let against = (which > 0).then_some(&cell[0]);
                Row::new(pattern, jobs, targets[which].name(), &cell[which], against)
            }));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests;
