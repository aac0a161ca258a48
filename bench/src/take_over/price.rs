//! What a daemon that outlives its process costs: NBD and swap beside a daemon with `--no-survive`.

use std::path::Path;

use uzram::Result;
use uzram::units::pages_to_bytes;

use crate::block::check_disk;
use crate::block::swap::{self, in_turn_with};
use crate::block::swap_area::Side;
use crate::harness::corpus::Corpus;
use crate::harness::process::require;
use crate::harness::report::{each, jobs_text};
use crate::harness::{Options, Report};
use crate::nbd::{self, Server};

const NO_SURVIVE: &str = "--no-survive";
const TABLE: &str = "beside --no-survive";
const NAMES: [&str; 2] = ["default", NO_SURVIVE];

pub(super) fn measure_nbd(options: &Options, corpus: &Corpus, path: &Path) -> Result<Report> {
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
        for jobs in [1, 2] {
            let [survive, no_survive] = nbd::compare(options, rw, jobs, corpus, &servers)?;
            let row = format!("NBD {rw}, {}, MB/s", jobs_text(jobs));
            report.compared(TABLE, &row, NAMES, [&survive, &no_survive]);
        }
    }
    Ok(report)
}

pub(super) fn measure_swap(options: &Options, path: &Path) -> Result<Report> {
    check_disk(options.uzram()?)?;
    swap::check()?;
    let mut report = Report::default();
    let algorithm = options.algorithm.to_string();
    let survive = ["--algorithm", algorithm.as_str()];
    let no_survive = ["--algorithm", algorithm.as_str(), NO_SURVIVE];
    let sides = [Side::Uzram(&survive), Side::Uzram(&no_survive)];
    let turns = in_turn_with(options, path, sides)?;
    for (name, figure) in &swap::FIGURES[..2] {
        let [survive, no_survive] = turns.each_ref().map(|turns| each(turns, *figure));
        report.compared(TABLE, name, NAMES, [&survive, &no_survive]);
        report.ratio(TABLE, name, "speed", [&no_survive, &survive]);
    }
    Ok(report)
}
