//! How long it takes to attach a full store.
//!
//! A store is filled, and dropped while its memory is held. Then it is attached and dropped, again and again. Every other
//! time the memory is mapped anew, with empty page tables, as in a process that never had it; in between a `StandBy`
//! maps it ahead. Only the attach is clocked, from its call to its return. Before the next time one page in 1024 is written
//! again, so that what is attached is always the memory of a store that was in use.
//!
//! First the pages are those that were written in order; then all are written again in random order, after which
//! slots that follow each other lead to memory far apart.

use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::Result;
use uzram::units::{PAGE_SIZE, pages_to_bytes};

use super::super::{Common, Packed, Target, checked_page_count, verify};
use super::stores::MeasuredStore;
use crate::harness::corpus::Corpus;
use crate::harness::stats::median;
use crate::harness::{go_on, lack_of_memory};

/// The most attaches of a row, unless there are more rounds.
const MAX_ATTACHES: usize = 32;
/// One page in so many is written between two attaches.
const REWRITTEN_SHARE: usize = 1024;
/// Pages written between two looks at the stop flag.
const LOOK_EVERY: usize = 4096;
/// Memory that a page takes beside its object: slot, handle, LRU node, and what finds its place in random order.
const PAGE_OVERHEAD_BYTES: f64 = 64.0;
/// Memory of objects while they are scattered, by their bytes.
const SCATTERED: f64 = 1.25;

/// In which order a store's pages were written last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteOrder {
    /// By their numbers.
    InOrder,
    /// At random.
    Random,
}

impl WriteOrder {
    const ALL: [WriteOrder; 2] = [WriteOrder::InOrder, WriteOrder::Random];

    /// As it stands in the report.
    pub fn name(self) -> &'static str {
        match self {
            WriteOrder::InOrder => "in order",
            WriteOrder::Random => "in random order",
        }
    }
}

/// When the memory of a store that is attached was mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MappedWhen {
    /// By `Store::attach`.
    Attached,
    /// Ahead, by a `StandBy`.
    Ahead,
}

impl MappedWhen {
    const ALL: [MappedWhen; 2] = [MappedWhen::Attached, MappedWhen::Ahead];

    /// As it stands in the report.
    pub fn name(self) -> &'static str {
        match self {
            MappedWhen::Attached => "at attach",
            MappedWhen::Ahead => "ahead",
        }
    }
}

/// Attaching one store.
#[derive(Clone, Debug, Serialize)]
pub struct AttachRow {
    /// Bytes of its pages before compression.
    pub size_bytes: u64,
    /// Its pages, each with an object in memory.
    pub pages: u64,
    /// How they were written.
    pub written: WriteOrder,
    /// When its memory was mapped.
    pub mapped: MappedWhen,
    /// Its objects.
    pub compressed_bytes: u64,
    /// Pool pages.
    pub used_bytes: u64,
    /// How long the attach took, the median.
    pub attach_ms: f64,
    /// The same, each time.
    pub rounds_ms: Vec<f64>,
}

/// Measures two rows for each order of writes.
pub(super) fn measure(
    common: &Common,
    corpus: &Corpus,
    size_bytes: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<AttachRow>> {
    let page_count = checked_page_count(size_bytes)?;
    let mut store = MeasuredStore::surviving(&common.algorithm, page_count)?;
    let mut random = fastrand::Rng::with_seed(common.seed);
    let mut pages: Vec<u32> = (0..page_count as u32).collect();
    let mut rows = Vec::new();
    for written in WriteOrder::ALL {
        if written == WriteOrder::Random {
            random.shuffle(&mut pages);
        }
        write(common, corpus, &store, &pages)?;
        let (attached, rounds_ms) = attach_repeatedly(common, corpus, store, &mut random)?;
        store = attached;
        verify(&store, corpus, page_count)?;
        let of = |(mapped, rounds_ms)| AttachRow::new(&store, written, mapped, rounds_ms);
        rows.extend(MappedWhen::ALL.into_iter().zip(rounds_ms).map(of));
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    notes.push(format!(
        "attach: medians, on {cpus} CPUs; {} to {} attaches each way, one page in {REWRITTEN_SHARE} written between two",
        common.repeat,
        common.repeat.max(MAX_ATTACHES)
    ));
    Ok(rows)
}

impl AttachRow {
    fn new(store: &MeasuredStore, written: WriteOrder, mapped: MappedWhen, rounds_ms: Vec<f64>) -> AttachRow {
        let (pages, stats) = (store.page_count() as u64, store.stats());
        AttachRow {
            size_bytes: pages_to_bytes(pages),
            pages,
            written,
            mapped,
            compressed_bytes: stats.compr_data_bytes,
            used_bytes: pages_to_bytes(stats.pool_pages),
            attach_ms: median(&rounds_ms),
            rounds_ms,
        }
    }
}

/// Stores in each of these pages the corpus's page of its number.
fn write(common: &Common, corpus: &Corpus, store: &MeasuredStore, pages: &[u32]) -> Result<()> {
    let mut worker = store.worker()?;
    for pages in pages.chunks(LOOK_EVERY) {
        go_on(&common.stop)?;
        pages.iter().try_for_each(|page| worker.write(*page as usize, corpus.page(*page as usize)))?;
    }
    Ok(())
}

/// Attaches a store each way at least once a round, and as often as the rounds' time allows, up to [`MAX_ATTACHES`]; returns
/// the store, and for each way the times in ms.
fn attach_repeatedly(
    common: &Common,
    corpus: &Corpus,
    mut store: MeasuredStore,
    random: &mut fastrand::Rng,
) -> Result<(MeasuredStore, [Vec<f64>; 2])> {
    let time = common.duration.mul_f64(common.repeat as f64);
    let start = Instant::now();
    let mut rounds_ms = [Vec::new(), Vec::new()];
    loop {
        for (mapped, rounds_ms) in MappedWhen::ALL.into_iter().zip(&mut rounds_ms) {
            let page_count = store.page_count();
            let rewritten = std::iter::repeat_with(|| random.u32(..page_count as u32));
            let rewritten: Vec<u32> = rewritten.take(page_count.div_ceil(REWRITTEN_SHARE)).collect();
            write(common, corpus, &store, &rewritten)?;
            let elapsed: Duration;
            (store, elapsed) = store.attach_again(mapped)?;
            rounds_ms.push(elapsed.as_secs_f64() * 1e3);
        }
        let rounds = rounds_ms[0].len();
        if rounds >= common.repeat && (rounds >= MAX_ATTACHES || start.elapsed() >= time) {
            return Ok((store, rounds_ms));
        }
    }
}

/// What the machine lacks of the memory that a store of this size takes, if it does.
pub(super) fn missing_memory(common: &Common, corpus: &Corpus, size_bytes: u64) -> Result<Option<String>> {
    let object_bytes = Packed::new(&common.algorithm, PAGE_SIZE, corpus)?.mean_bytes();
    let page_bytes = object_bytes * SCATTERED + PAGE_OVERHEAD_BYTES;
    let needed_bytes = (checked_page_count(size_bytes)? as f64 * page_bytes) as u64;
    lack_of_memory(needed_bytes)
}
