//! A data set of four times its memory, before compression, under Zipf access, beside the speed computed from
//! its hits and misses alone. Compressed, much more than a fourth of it fits.
//!
//! Three stores take turns: one has all of its pages in memory, one has them all on its file, and one has the
//! limit and a policy. The first and the last serve the same accesses; of the second, random pages are read.
//! A miss is an access that had to read the file.

use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::Result;
use uzram::store::{ReclaimPolicy, WritebackLayout};
use uzram::units::{page_of, pages_to_bytes};

use super::BackingOptions;
use super::scratch::{Pages, Scratch};
use crate::engine::hit_ratio::Zipf;
use crate::harness::go_on;
use crate::harness::rounds::in_turn;
use crate::harness::stats::median;

/// Pages of the data set, uncompressed, for each of memory.
pub(super) const PAGES_PER_LIMIT: u64 = 4;
/// The exponent of the Zipf distribution.
pub(super) const EXPONENT: f64 = 0.99;
/// The percentage of accesses that are reads.
const READ_PERCENT: u8 = 90;
/// Accesses generated in advance, for each page; then they repeat.
const ACCESSES_PER_PAGE: usize = 16;
/// Accesses for each page before it is measured.
const WARM_UP_PER_PAGE: usize = 2;
/// Accesses between two checks of the clock.
const LOOK_EVERY: usize = 32;

/// The results; medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct ZipfAccess {
    /// The data set before compression.
    pub size_bytes: u64,
    /// The data set compressed, just after it was stored.
    pub compressed_bytes: u64,
    /// Its memory limit.
    pub limit_bytes: u64,
    /// Accesses that read the file, in percent.
    pub miss_percent: f64,
    /// Accesses a second when all pages are in memory.
    pub memory_per_s: f64,
    /// Reads a second of pages that are on the file.
    pub backing_per_s: f64,
    /// Accesses a second with the limit.
    pub limited_per_s: f64,
    /// The last, divided by 1 / (hits / memory + misses / backing): the median of the rounds' ratios.
    pub speed_ratio: f64,
}

/// An access to a page; if it is a write, the page of the corpus to write.
#[derive(Clone, Copy)]
pub(super) struct Access {
    pub(super) page: u32,
    pub(super) written: Option<u32>,
}

/// Generates accesses to so many pages from a seed.
pub(super) fn accesses(page_count: usize, seed: u64) -> Vec<Access> {
    let mut random = fastrand::Rng::with_seed(!seed);
    let mut access =
        |page| Access { page, written: (random.u8(..100) >= READ_PERCENT).then(|| random.u32(..)) };
    let zipf = Zipf::new(page_count as u32, EXPONENT, seed);
    zipf.take(ACCESSES_PER_PAGE * page_count).map(&mut access).collect()
}

impl Access {
    pub(super) fn carry_out(self, pages: &mut Pages<'_>) -> Result<()> {
        match self.written {
            None => pages.read(self.page),
            Some(corpus_page) => pages.write(self.page, corpus_page),
        }
    }
}

/// Accesses that continue from slice to slice, and repeat from their end.
struct Accessed<'a> {
    pages: Pages<'a>,
    accesses: &'a [Access],
    done: usize,
}

/// The result of a slice.
struct Slice {
    accesses: usize,
    device_reads: u64,
    elapsed: Duration,
}

impl Slice {
    fn per_s(&self) -> f64 {
        self.accesses as f64 / self.elapsed.as_secs_f64()
    }

    fn device_reads_per_s(&self) -> f64 {
        self.device_reads as f64 / self.elapsed.as_secs_f64()
    }

    fn miss_share(&self) -> f64 {
        self.device_reads as f64 / self.accesses as f64
    }
}

impl<'a> Accessed<'a> {
    fn new(pages: Pages<'a>, accesses: &'a [Access]) -> Self {
        Accessed { pages, accesses, done: 0 }
    }

    fn next(&mut self) -> Result<()> {
        let access = self.accesses[self.done % self.accesses.len()];
        self.done += 1;
        access.carry_out(&mut self.pages)
    }

    /// Serves accesses for so long, but at most `most`.
    fn slice(&mut self, duration: Duration, most: usize) -> Result<Slice> {
        let device_reads = self.pages.backing_stats().reads;
        let start = Instant::now();
        let mut done = 0;
        while done < most && (done % LOOK_EVERY != 0 || start.elapsed() < duration) {
            self.next()?;
            done += 1;
        }
        let elapsed = start.elapsed();
        Ok(Slice { accesses: done, device_reads: self.pages.backing_stats().reads - device_reads, elapsed })
    }
}

/// The result of one round.
struct Round {
    memory: Slice,
    backing: Slice,
    limited: Slice,
}

impl Round {
    fn speed_ratio(&self) -> f64 {
        let misses = self.limited.miss_share();
        let parts = (1.0 - misses) / self.memory.per_s() + misses / self.backing.device_reads_per_s();
        self.limited.per_s() * parts
    }
}

/// Runs the measurement.
pub(super) fn measure(options: &BackingOptions, scratch: &Scratch<'_>) -> Result<ZipfAccess> {
    let limit_pages = page_of(options.limit_bytes);
    let page_count = (PAGES_PER_LIMIT * limit_pages) as usize;
    let file_bytes = options.zipf_file_bytes();
    let store = |name: &str| {
        let file = scratch.file(name, file_bytes)?;
        scratch.store(page_count, Some((file, WritebackLayout::Packed)), ReclaimPolicy::default())
    };
    let accesses = accesses(page_count, options.common.seed);
    let mut memory = Accessed::new(scratch.store(page_count, None, ReclaimPolicy::default())?, &accesses);
    memory.pages.fill()?;
    let compressed_bytes = memory.pages.compressed_bytes();
    go_on(&options.common.stop)?;
    let backing = store("backing")?;
    let each_once: Vec<_> = backing
        .shuffled(options.common.seed)
        .into_iter()
        .map(|page| Access { page, written: None })
        .collect();
    let mut backing = Accessed::new(backing, &each_once);
    backing.pages.fill()?;
    go_on(&options.common.stop)?;
    let mut limited = Accessed::new(store("limited")?, &accesses);
    limited.pages.limit(limit_pages)?;
    limited.pages.fill()?;
    for _ in 0..WARM_UP_PER_PAGE {
        go_on(&options.common.stop)?;
        limited.slice(Duration::MAX, page_count)?;
    }

    let duration = options.common.duration;
    let slices: [_; 3] = in_turn(options.common.repeat, &options.common.stop, |_, which| match which {
        0 => memory.slice(duration, usize::MAX),
        1 => {
            backing.pages.write_back()?;
            backing.slice(duration, page_count)
        }
        _ => limited.slice(duration, usize::MAX),
    })?;
    let [of_memory, of_backing, of_limited] = slices.map(Vec::into_iter);
    let rounds: Vec<Round> = of_memory
        .zip(of_backing.zip(of_limited))
        .map(|(memory, (backing, limited))| Round { memory, backing, limited })
        .collect();
    [&mut memory, &mut backing, &mut limited].into_iter().try_for_each(|accessed| accessed.pages.check())?;
    let middle = |figure: &dyn Fn(&Round) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
    Ok(ZipfAccess {
        size_bytes: pages_to_bytes(page_count as u64),
        compressed_bytes,
        limit_bytes: pages_to_bytes(limit_pages),
        miss_percent: middle(&|round| round.limited.miss_share() * 100.0),
        memory_per_s: middle(&|round| round.memory.per_s()),
        backing_per_s: middle(&|round| round.backing.device_reads_per_s()),
        limited_per_s: middle(&|round| round.limited.per_s()),
        speed_ratio: middle(&Round::speed_ratio),
    })
}
