//! What it gives and costs that a daemon outlives the process that serves.
//!
//! * `outage`: the longest gap between two answers at a client of the block device (`client`) while the
//!   process that serves is killed, or exchanged by `uzram upgrade`; beside it the gap when nothing happens;
//!   and private memory and page tables of the daemon's processes.
//! * `price`: NBD and swap of such a daemon beside one with `--no-survive`.
//!
//! Block devices and swap need root, FUSE and loop devices; NBD needs fio and nbdcopy. What cannot be
//! measured is left out, and a note says why.

mod client;
mod daemon;
mod outage;
mod price;

use uzram::Result;

use crate::harness::corpus::Saved;
use crate::harness::{Options, Report, unsupported};

/// The parts of the benchmark.
pub const PARTS: [&str; 3] = ["outages", "nbd", "swap"];

/// Measures all of it that is possible here. Pages of one word, repeated, are left out: they take no pool.
pub fn run(options: &Options) -> Result<Report> {
    options.uzram()?;
    let corpus = options.load_corpus()?.without_same_filled()?;
    let saved = Saved::temporary("pages", &corpus)?;
    let mut report = Report::default();
    if options.has("nbd") {
        report.part("NBD beside --no-survive", price::measure_nbd(options, &corpus, saved.path()))?;
    }
    if options.has("swap") {
        report.part("swap beside --no-survive", price::measure_swap(options, saved.path()))?;
    }
    if options.has("outages") {
        report.part("outages", outage::measure(options, &corpus))?;
    }
    if report.figures.is_empty() { Err(unsupported(report.notes.join("; "))) } else { Ok(report) }
}
