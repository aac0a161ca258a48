//! What memory that outlives the process costs: how long it takes to attach a store that was left in it, and
//! how its reads and writes compare with those of the same store in private memory.
//!
//! A store is filled, and dropped while its memory is held. Then it is attached and dropped, again and again.
//! Every other time the memory is mapped anew, with empty page tables, as in a process that never had it; in
//! between a `StandBy` maps it ahead. Only the attach is clocked, from its call to its return. Before the
//! next time one page in 1024 is written again, so that what is attached is always the memory of a store that
//! was in use. First the pages are those that were written in order; then all are written again in random
//! order, after which slots that follow each other lead to memory far apart.
//!
//! For the speed, all pages of both stores are written before anything counts, so that their memory is there:
//! having the system give it is no part of this.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use uzram::codec::Algorithm;
use uzram::store::{StandBy, Store, StoreBuilder};
use uzram::units::{PAGE_SIZE, Page, PageNo, format_size, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::compare::{Comparison, ROUNDS, compare};
use super::packed::Packed;
use super::pattern::Pattern;
use super::target::{Disk, Target, checked_page_count, verify};
use crate::harness::corpus::Corpus;
use crate::harness::report::mib;
use crate::harness::{Options, Report, SEED, lack_of_memory, unsupported};

/// The most attaches of a row, unless there are more rounds.
const MAX_ATTACHES: usize = 32;
/// One page in so many is written between two attaches.
const REWRITTEN_SHARE: usize = 1024;
/// Pages written between two looks at the stop flag.
const LOOK_EVERY: usize = 4096;
/// Memory that a page takes beside its object: slot, handle, LRU node, and what finds its place in random
/// order.
const PAGE_OVERHEAD_BYTES: f64 = 64.0;
/// Memory of objects while they are scattered, by their bytes.
const SCATTERED: f64 = 1.25;
const SURVIVING: &str = "memfd";
const PRIVATE: &str = "private";
/// When the memory of a store that is attached is mapped: by `Store::attach`, or ahead, by a `StandBy`.
const MAPPED: [&str; 2] = ["mapped at attach", "mapped ahead"];

/// Measures all of it. Pages of one word, repeated, are left out: they have no object to be found.
pub fn run(options: &Options) -> Result<Report> {
    MeasuredStore::new(SURVIVING, &options.algorithm, 1).map_err(|error| unsupported(error.to_string()))?;
    let corpus = options.load_corpus()?.without_same_filled()?;
    let mut report = Report::default();
    speed(options, &corpus, &mut report)?;
    attach(options, &corpus, options.amount(1 << 30, 1 << 20), "small", &mut report)?;
    let large_bytes = options.amount(16 << 30, 4 << 20);
    match options.full.then(|| missing_memory(options, &corpus, large_bytes)).transpose()? {
        Some(None) => attach(options, &corpus, large_bytes, "large", &mut report)?,
        missing => {
            let (size, why) = (format_size(large_bytes), missing.flatten());
            let why = why.unwrap_or_else(|| "it takes --full".to_owned());
            report.note(format!("attach of {size} not measured: {why}"));
        }
    }
    report.note(format!("pages are of the corpus {}", options.corpus.name()));
    Ok(report)
}

/// Random reads and writes. The rounds are slices, as the difference is a few percent.
fn speed(options: &Options, corpus: &Corpus, report: &mut Report) -> Result<()> {
    let page_count = corpus.page_count();
    let surviving = MeasuredStore::new(SURVIVING, &options.algorithm, page_count)?;
    let private = MeasuredStore::new(PRIVATE, &options.algorithm, page_count)?;
    let stores: [&dyn Target; 2] = [&surviving, &private];
    for store in stores {
        store.fill(corpus)?;
        verify(store, corpus, page_count)?;
        options.go_on()?;
    }
    let options = &options.in_slices(ROUNDS);
    let (patterns, jobs) = (&[Pattern::RandRead, Pattern::RandWrite], &[1, 2]);
    let table = "memory that outlives the process";
    let comparison = Comparison { options, table, patterns, jobs };
    compare(&comparison, &stores, corpus, page_count, report)
}

/// Measures two rows for each order of writes.
fn attach(
    options: &Options,
    corpus: &Corpus,
    size_bytes: u64,
    which: &str,
    report: &mut Report,
) -> Result<()> {
    const TABLE: &str = "attach";
    let page_count = checked_page_count(size_bytes)?;
    let mut store = MeasuredStore::new(SURVIVING, &options.algorithm, page_count)?;
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut pages: Vec<u32> = (0..page_count as u32).collect();
    for written in ["in order", "in random order"] {
        if written == "in random order" {
            random.shuffle(&mut pages);
        }
        write(options, corpus, &store, &pages)?;
        let rounds_ms;
        (store, rounds_ms) = attach_repeatedly(options, corpus, store, &mut random)?;
        verify(&store, corpus, page_count)?;
        for (mapped, ms) in MAPPED.into_iter().zip(rounds_ms) {
            let (row, stats) = (format!("{which}, written {written}, {mapped}"), store.store.stats());
            let cells = [
                ("MiB", mib(size_bytes)),
                ("compressed MiB", mib(stats.compr_data_bytes)),
                ("pool MiB", mib(pages_to_bytes(stats.pool_pages))),
                ("attaches", ms.len() as f64),
                ("fastest ms", ms.iter().copied().fold(f64::INFINITY, f64::min)),
                ("slowest ms", ms.iter().copied().fold(0.0, f64::max)),
            ];
            report.row(TABLE, &row, &cells);
            report.rounds(TABLE, &row, "median ms", &ms);
        }
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    report
        .note(format!("attach: on {cpus} CPUs; one page in {REWRITTEN_SHARE} written between two attaches"));
    Ok(())
}

/// Stores in each of these pages the corpus's page of its number.
fn write(options: &Options, corpus: &Corpus, store: &MeasuredStore, pages: &[u32]) -> Result<()> {
    let mut worker = store.worker()?;
    for pages in pages.chunks(LOOK_EVERY) {
        options.go_on()?;
        pages.iter().try_for_each(|page| worker.write(*page as usize, corpus.page(*page as usize)))?;
    }
    Ok(())
}

/// Attaches a store each way at least once a round, and as often as the rounds' time allows, up to
/// [`MAX_ATTACHES`]; returns the store, and for each of [`MAPPED`] the times in ms.
fn attach_repeatedly(
    options: &Options,
    corpus: &Corpus,
    mut store: MeasuredStore,
    random: &mut fastrand::Rng,
) -> Result<(MeasuredStore, [Vec<f64>; 2])> {
    let (least, start) = (options.rounds(ROUNDS), Instant::now());
    let time = options.duration.mul_f64(least as f64);
    let mut rounds_ms = [Vec::new(), Vec::new()];
    loop {
        for (ahead, rounds_ms) in [false, true].into_iter().zip(&mut rounds_ms) {
            let page_count = store.page_count;
            let rewritten = std::iter::repeat_with(|| random.u32(..page_count as u32));
            let rewritten: Vec<u32> = rewritten.take(page_count.div_ceil(REWRITTEN_SHARE)).collect();
            write(options, corpus, &store, &rewritten)?;
            let elapsed: Duration;
            (store, elapsed) = store.attach_again(ahead)?;
            rounds_ms.push(elapsed.as_secs_f64() * 1e3);
        }
        let rounds = rounds_ms[0].len();
        if rounds >= least && (rounds >= MAX_ATTACHES || start.elapsed() >= time) {
            return Ok((store, rounds_ms));
        }
    }
}

/// What the machine lacks of the memory that a store of this size takes, if it does.
fn missing_memory(options: &Options, corpus: &Corpus, size_bytes: u64) -> Result<Option<String>> {
    let object_bytes = Packed::new(&options.algorithm, PAGE_SIZE, corpus)?.mean_bytes();
    let page_bytes = object_bytes * SCATTERED + PAGE_OVERHEAD_BYTES;
    lack_of_memory((checked_page_count(size_bytes)? as f64 * page_bytes) as u64)
}

/// A store that is used without a device.
struct MeasuredStore {
    name: &'static str,
    store: Store,
    page_count: usize,
}

impl MeasuredStore {
    /// An empty store: in memory that outlives the process, if that is its name, else in private memory.
    fn new(name: &'static str, algorithm: &Algorithm, page_count: usize) -> Result<MeasuredStore> {
        let builder = StoreBuilder::new("bench", page_count as u64).algorithm(algorithm.clone());
        let store = if name == SURVIVING { Store::create_in(&builder)? } else { builder.build()? };
        Ok(MeasuredStore { name, store, page_count })
    }

    /// Drops the store, all of whose pages hold something, and attaches its memory, perhaps mapped ahead;
    /// returns how long the attach took.
    fn attach_again(self, ahead: bool) -> Result<(MeasuredStore, Duration)> {
        let MeasuredStore { name, store, page_count } = self;
        let memory = store.memory().ok_or_else(|| Error::invalid("the store is in private memory"))?;
        let memory = memory.as_fd().try_clone_to_owned();
        let memory =
            memory.map_err(|error| Error::new(ErrorKind::Io, format!("no second descriptor: {error}")))?;
        drop(store);
        let start: Instant;
        let (store, attached) = if ahead {
            let stand_by = StandBy::new(memory)?;
            stand_by.catch_up()?;
            start = Instant::now();
            // SAFETY: the store that had the memory was dropped.
            unsafe { Store::attach(stand_by, None, |_| ())? }
        } else {
            start = Instant::now();
            // SAFETY: as above.
            unsafe { Store::attach(memory, None, |_| ())? }
        };
        let elapsed = start.elapsed();
        if (attached.pages, attached.pages_lost) != (page_count as u64, 0) {
            let what = format!("attached a store of {page_count} pages, and found {attached:?}");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok((MeasuredStore { name, store, page_count }, elapsed))
    }
}

impl Disk for MeasuredStore {
    fn name(&self) -> &'static str {
        self.name
    }

    fn page_count(&self) -> usize {
        self.page_count
    }

    fn read(&self, page: usize, buffer: &mut Page) -> Result<()> {
        self.store.read(PageNo(page as u32), buffer)
    }

    fn write(&self, page: usize, contents: &Page) -> Result<()> {
        self.store.write(PageNo(page as u32), contents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_attached_and_compared() {
        let report = run(&Options { full: true, ..Options::tiny(96) }).unwrap();
        for which in ["small", "large"] {
            for written in ["in order", "in random order"] {
                for mapped in MAPPED {
                    let row = format!("{which}, written {written}, {mapped}");
                    let of = |column| report.get("attach", &row, column).unwrap();
                    assert!(of("median ms") > 0.0 && (1.0..=32.0).contains(&of("attaches")), "{report}");
                    assert!(of("compressed MiB") < of("pool MiB"), "{report}");
                }
            }
        }
        assert_eq!(report.column("memory that outlives the process", "ratio").count(), 2 * 2);
        let report = run(&Options::tiny(96)).unwrap();
        assert!(
            report.notes.contains(&"attach of 4 MiB not measured: it takes --full".to_owned()),
            "{report}"
        );
    }

    #[test]
    fn only_full_memory_that_outlives_the_process_is_attached() {
        let algorithm = Algorithm::default();
        let private = MeasuredStore::new(PRIVATE, &algorithm, 9).unwrap();
        assert!(private.attach_again(false).err().unwrap().to_string().contains("private memory"));
        let empty = MeasuredStore::new(SURVIVING, &algorithm, 9).unwrap();
        assert!(empty.attach_again(true).err().unwrap().to_string().contains("9 pages"), "none was written");
    }
}
