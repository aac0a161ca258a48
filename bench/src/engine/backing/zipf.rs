//! A data set of four times its memory, before compression, under Zipf access, beside the speed computed from
//! its hits and misses alone. Compressed, much more than a fourth of it fits.
//!
//! Three stores take turns: one has all of its pages in memory, one has them all on its file, and one has the
//! limit and a policy. The first and the last serve the same accesses; of the second, random pages are read.
//! A miss is an access that had to read the file.

use std::time::{Duration, Instant};

use uzram::Result;
use uzram::units::{page_of, pages_to_bytes};

use super::scratch::{Pages, Scratch};
use crate::engine::compare::ROUNDS;
use crate::engine::zipf::{Access, PAGES_PER_LIMIT, WARM_UP_PER_PAGE, accesses};
use crate::harness::report::{each, mib};
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, SEED};

/// Accesses between two checks of the clock.
const LOOK_EVERY: usize = 32;

/// Accesses that continue from slice to slice, and repeat from their end.
struct Accessed<'a> {
    pages: Pages<'a>,
    accesses: &'a [Access],
    done: usize,
}

struct Slice {
    accesses: usize,
    device_reads: u64,
    elapsed: Duration,
}

impl Accessed<'_> {
    fn next(&mut self) -> Result<()> {
        let Access { page, written } = self.accesses[self.done % self.accesses.len()];
        self.done += 1;
        match written {
            None => self.pages.read(page),
            Some(corpus_page) => self.pages.write(page, corpus_page),
        }
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

pub(super) fn measure(
    options: &Options,
    [limit_bytes, file_bytes]: [u64; 2],
    scratch: &Scratch<'_>,
    report: &mut Report,
) -> Result<()> {
    const TABLE: &str = "Zipf access to 4 x the limit";
    let limit_pages = page_of(limit_bytes);
    let page_count = (PAGES_PER_LIMIT * limit_pages) as usize;
    let store = |name: &str| scratch.store(page_count, Some(scratch.file(name, file_bytes)?));
    let accesses = accesses(page_count, SEED);
    let start = |pages, accesses| Accessed { pages, accesses, done: 0 };
    let mut memory = start(scratch.store(page_count, None)?, &accesses);
    memory.pages.fill()?;
    let compressed_bytes = memory.pages.compressed_bytes();
    options.go_on()?;
    let backing = store("backing")?;
    let each_once = backing.shuffled(SEED).into_iter().map(|page| Access { page, written: None });
    let each_once: Vec<_> = each_once.collect();
    let mut backing = start(backing, &each_once);
    backing.pages.fill()?;
    options.go_on()?;
    let mut limited = start(store("limited")?, &accesses);
    limited.pages.limit(limit_pages)?;
    limited.pages.fill()?;
    for _ in 0..WARM_UP_PER_PAGE {
        options.go_on()?;
        limited.slice(Duration::MAX, page_count)?;
    }

    let duration = options.duration;
    let slices: [_; 3] = in_turn(options.rounds(ROUNDS), &options.stop, |_, which| match which {
        0 => memory.slice(duration, usize::MAX),
        1 => {
            backing.pages.write_back()?;
            backing.slice(duration, page_count)
        }
        _ => limited.slice(duration, usize::MAX),
    })?;
    [&mut memory, &mut backing, &mut limited].into_iter().try_for_each(|accessed| accessed.pages.check())?;
    let of = |which: usize, figure: fn(&Slice) -> f64| each(&slices[which], figure);
    let per_s = |slice: &Slice| slice.accesses as f64 / slice.elapsed.as_secs_f64();
    let (in_memory, with_limit) = (of(0, per_s), of(2, per_s));
    let from_file = of(1, |slice| slice.device_reads as f64 / slice.elapsed.as_secs_f64());
    let misses = of(2, |slice| slice.device_reads as f64 / slice.accesses as f64);
    let computed: Vec<f64> = (0..misses.len())
        .map(|round| 1.0 / ((1.0 - misses[round]) / in_memory[round] + misses[round] / from_file[round]))
        .collect();
    report.rounds(TABLE, "in memory", "accesses/s", &in_memory);
    report.rounds(TABLE, "from the file", "accesses/s", &from_file);
    report.rounds(TABLE, "limited", "accesses/s", &with_limit);
    report.rounds(TABLE, "limited", "misses %", &each(&misses, |share| share * 100.0));
    report.ratio(TABLE, "limited", "/ computed", [&with_limit, &computed]);
    report.note(format!(
        "Zipf access to {:.0} MiB, {:.0} compressed, in memory for {:.0}; computed: 1 / (hits / in memory + misses / from \
         the file)",
        mib(pages_to_bytes(page_count as u64)),
        mib(compressed_bytes),
        mib(limit_bytes)
    ));
    Ok(())
}
