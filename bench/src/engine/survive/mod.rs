//! What memory that outlives the process costs: how long it takes to attach a store that was left in it (`attach`), and
//! how its reads and writes compare with those of the same store in private memory (`speed`). The stores are `stores`'s.

mod attach;
mod speed;
mod stores;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;
use uzram::units::format_size;
use uzram::{Error, Result};

use super::report::{Row, speed_table};
use super::{Common, Pattern, checked_page_count};
use crate::harness::corpus::Corpus;
use crate::harness::report::Table;
use crate::harness::stats::median;
pub use attach::{AttachRow, MappedWhen, WriteOrder};
use stores::MeasuredStore;

/// How to measure.
#[derive(Clone, Debug)]
pub struct SurviveOptions {
    /// As of the others, but that pages of one word, repeated, are left out: they have no object to be found.
    pub common: Common,
    /// Pages of the store that is attached, all of them written; a shorter corpus is repeated.
    pub size_bytes: u64,
    /// Pages of another store that is attached, with `full`.
    pub large_size_bytes: u64,
    /// Whether to measure what takes GiB of memory, if the machine has it.
    pub full: bool,
}

impl Default for SurviveOptions {
    fn default() -> Self {
        SurviveOptions {
            common: Common::default(),
            size_bytes: 1 << 30,
            large_size_bytes: 16 << 30,
            full: false,
        }
    }
}

impl SurviveOptions {
    /// Why no store can outlive its process here, if so.
    pub fn obstacle(&self) -> Option<Error> {
        let page_count = checked_page_count(self.size_bytes);
        page_count.and_then(|page_count| MeasuredStore::surviving(&self.common.algorithm, page_count)).err()
    }

    fn load_corpus(&self) -> Result<Corpus> {
        self.common.corpus.load_until(&self.common.stop)?.without_same_filled()
    }
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct SurviveReport {
    /// Attaching, four rows for each size.
    pub attach: Vec<AttachRow>,
    /// Pages of each store whose reads and writes were measured.
    pub speed_pages: usize,
    /// A row for each pattern, number of jobs and store: `memfd`, then `private` with the ratio memfd / private.
    pub speed: Vec<Row>,
    /// How it was measured, and what was left out and why.
    pub notes: Vec<String>,
}

impl SurviveReport {
    /// Attaching a store of that size whose pages were written in that order, with its memory mapped then.
    pub fn attach(&self, size_bytes: u64, written: WriteOrder, mapped: MappedWhen) -> Option<&AttachRow> {
        let is_it =
            |row: &&AttachRow| (row.size_bytes, row.written, row.mapped) == (size_bytes, written, mapped);
        self.attach.iter().find(is_it)
    }

    /// Throughput in memory that outlives the process, divided by that in private memory.
    pub fn speed_ratio(&self, rw: Pattern, jobs: usize) -> Option<f64> {
        self.speed.iter().find(|row| row.rw == rw.name() && row.jobs == jobs && row.ratio.is_some())?.ratio
    }
}

/// Measures all of it.
///
/// # Errors
/// `Invalid` names the option that cannot be; a store that cannot be had, a page that does not read back, a stop.
pub fn run(options: &SurviveOptions) -> Result<SurviveReport> {
    options.common.check()?;
    checked_page_count(options.size_bytes)?;
    let corpus = options.load_corpus()?;
    let mut notes = Vec::new();
    let speed = speed::measure(&options.common, &corpus, &mut notes)?;
    let mut attach = attach::measure(&options.common, &corpus, options.size_bytes, &mut notes)?;
    match reason_to_leave_out(options, &corpus)? {
        None => {
            attach.extend(attach::measure(&options.common, &corpus, options.large_size_bytes, &mut notes)?);
        }
        Some(reason) => {
            let size = format_size(options.large_size_bytes);
            notes.push(format!("attach of {size} not measured: {reason}"));
        }
    }
    notes.dedup();
    notes.push(format!("pages are of the corpus {}", options.common.corpus.name()));
    Ok(SurviveReport { attach, speed_pages: corpus.page_count(), speed, notes })
}

/// Why the large store is not measured, if so.
fn reason_to_leave_out(options: &SurviveOptions, corpus: &Corpus) -> Result<Option<String>> {
    match options.full {
        true => attach::missing_memory(&options.common, corpus, options.large_size_bytes),
        false => Ok(Some("it takes --full".to_owned())),
    }
}

impl fmt::Display for SurviveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new([
            "<attach of pages written",
            "<mapped",
            "size",
            "pages",
            "compressed",
            "pool",
            "attaches",
            "median ms",
            "fastest ms",
            "slowest ms",
        ]);
        for row in &self.attach {
            let times = || row.rounds_ms.iter().copied();
            table.row([
                row.written.name().to_owned(),
                row.mapped.name().to_owned(),
                format_size(row.size_bytes),
                row.pages.to_string(),
                format_size(row.compressed_bytes),
                format_size(row.used_bytes),
                row.rounds_ms.len().to_string(),
                format!("{:.1}", median(&row.rounds_ms)),
                format!("{:.1}", times().fold(f64::INFINITY, f64::min)),
                format!("{:.1}", times().fold(0.0, f64::max)),
            ]);
        }
        write!(f, "{table}\nstores of {} pages\n{}\n", self.speed_pages, speed_table(&self.speed))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}
