//! What it gives and costs that a daemon outlives the process that serves.
//!
//! * `outage`: the longest gap between two answers at a client of the block device (`client`) while the
//!   process that serves is killed, or exchanged by `uzram upgrade`; beside it the gap when nothing happens;
//!   and private memory and page tables of the daemon's processes.
//! * Here: NBD and swap of such a daemon beside one with `--no-survive`.
//!
//! Block devices and swap need root, FUSE and loop devices; NBD needs fio and nbdcopy. What cannot be
//! measured is left out, and a note says why.

mod client;
mod daemon;
mod outage;

use std::path::Path;

use uzram::Result;
use uzram::units::pages_to_bytes;

use crate::block::swap;
use crate::harness::corpus::{Corpus, Saved};
use crate::harness::process::require;
use crate::harness::{Options, Report, unsupported};
use crate::nbd::{self, Server};

const NO_SURVIVE: &str = "--no-survive";
const TABLE: &str = "beside --no-survive";
const NAMES: [&str; 2] = ["default", NO_SURVIVE];

/// The parts of the benchmark.
pub const PARTS: [&str; 3] = ["outages", "nbd", "swap"];

/// Measures all of it that is possible here. Pages of one word, repeated, are left out: they take no pool.
pub fn run(options: &Options) -> Result<Report> {
    options.uzram()?;
    let corpus = options.load_corpus()?.without_same_filled()?;
    let saved = Saved::temporary("pages", &corpus)?;
    let mut report = Report::default();
    if options.has("nbd") {
        report.part("NBD beside --no-survive", measure_nbd(options, &corpus, saved.path()))?;
    }
    if options.has("swap") {
        let algorithm = options.algorithm.to_string();
        let no_survive = ["--algorithm", &algorithm, NO_SURVIVE];
        let daemons = [&no_survive[..2], &no_survive];
        let measured = swap::compare(options, saved.path(), TABLE, NAMES, daemons);
        report.part("swap beside --no-survive", measured)?;
    }
    if options.has("outages") {
        report.part("outages", outage::measure(options, &corpus))?;
    }
    if report.figures.is_empty() { Err(unsupported(report.notes.join("; "))) } else { Ok(report) }
}

fn measure_nbd(options: &Options, corpus: &Corpus, path: &Path) -> Result<Report> {
    options.go_on()?;
    require(&nbd::CLIENTS)?;
    let mut report = Report::default();
    let (algorithm, size_bytes) = (options.algorithm.to_string(), pages_to_bytes(corpus.page_count() as u64));
    let start = |more: &[&str]| {
        let server = Server::uzram(options.uzram()?, &algorithm, size_bytes, more)?;
        nbd::fill(&server, path).map(|()| server)
    };
    let servers = [start(&[])?, start(&[NO_SURVIVE])?];
    // Reads come first: they need the disks as they were filled.
    for rw in ["randread", "randwrite"] {
        let row = |jobs: &str| format!("NBD {rw}, {jobs}, MB/s");
        nbd::compare(options, rw, corpus, &servers, (TABLE, NAMES), row, &mut report)?;
    }
    Ok(report)
}
