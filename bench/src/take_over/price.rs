//! What a daemon that outlives its process costs: NBD and swap beside a daemon with `--no-survive`.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use uzram::Result;
use uzram::units::{format_size, pages_to_bytes};

use super::{TakeOverOptions, TakeOverReport};
use crate::block::{BlockOptions, SwapTimes, swap};
use crate::harness::corpus::Corpus;
use crate::harness::go_on;
use crate::harness::rounds::in_turn;
use crate::harness::stats::{median, median_ratio};
use crate::nbd::{self, Fio, Server};

/// The option of the other daemon.
const NO_SURVIVE: &str = "--no-survive";
/// Reads come first: they need the disks as they were filled.
const PATTERNS: [&str; 2] = ["randread", "randwrite"];
/// Numbers of NBD clients.
const JOBS: [usize; 2] = [1, 2];

/// One figure of both daemons; medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct PriceRow {
    /// What was measured.
    pub what: String,
    /// The unit of the figures.
    pub unit: &'static str,
    /// Of the daemon that outlives its process.
    pub survive: f64,
    /// Of the one that does not.
    pub no_survive: f64,
    /// The speed of the first divided by that of the second, the median of the rounds' ratios.
    pub speed_ratio: f64,
}

impl PriceRow {
    fn of_speeds(what: String, [survive, no_survive]: &[Vec<f64>; 2]) -> PriceRow {
        let speed_ratio = median_ratio(survive, no_survive);
        PriceRow { what, unit: "MB/s", survive: median(survive), no_survive: median(no_survive), speed_ratio }
    }

    fn of_times(what: String, [survive, no_survive]: &[Vec<f64>; 2]) -> PriceRow {
        let speed_ratio = median_ratio(no_survive, survive);
        PriceRow { what, unit: "ms", survive: median(survive), no_survive: median(no_survive), speed_ratio }
    }
}

/// Adds the rows of NBD, or a note that says why not.
pub(super) fn measure_nbd(
    options: &TakeOverOptions,
    corpus: &Corpus,
    path: &Path,
    report: &mut TakeOverReport,
) -> Result<()> {
    let common = &options.common;
    go_on(&common.stop)?;
    if let Some(name) = nbd::missing_client() {
        report.notes.push(format!("NBD beside {NO_SURVIVE} not measured: the program {name} is missing"));
        return Ok(());
    }
    let (algorithm, size_bytes) = (common.algorithm.to_string(), pages_to_bytes(corpus.page_count() as u64));
    let start = |more: &[&str]| {
        let server = Server::uzram(&options.programs.uzram, &algorithm, size_bytes, more, None)?;
        nbd::fill(&server, path).map(|()| server)
    };
    let servers = [start(&[])?, start(&[NO_SURVIVE])?];
    let duration = common.duration.max(nbd::MIN_DURATION);
    for rw in PATTERNS {
        for jobs in JOBS {
            let speeds = in_turn(common.repeat, &common.stop, |round, which| {
                let fio = Fio { rw, jobs, duration, seed: round as u64 + 1 };
                fio.run(servers[which].uri(), corpus)
            })?;
            report.prices.push(PriceRow::of_speeds(nbd_name(rw, jobs), &speeds));
        }
    }
    let (size, seconds) = (format_size(size_bytes), duration.as_secs_f64());
    report
        .notes
        .push(format!("NBD: fio, disks of {size}, {} interleaved rounds of {seconds:.1} s", common.repeat));
    Ok(())
}

/// Adds the rows of swap, or a note that says why not.
pub(super) fn measure_swap(
    options: &TakeOverOptions,
    path: &Path,
    report: &mut TakeOverReport,
) -> Result<()> {
    if let Some(obstacle) = swap::obstacle() {
        report.notes.push(format!("swap beside {NO_SURVIVE} not measured: {obstacle}"));
        return Ok(());
    }
    let block = BlockOptions {
        programs: options.programs.clone(),
        corpus: path.to_owned(),
        repeat: options.common.repeat,
        amounts: options.swap.clone(),
        stop: Arc::clone(&options.common.stop),
    };
    let algorithm = options.common.algorithm.to_string();
    let survive = ["--algorithm", algorithm.as_str()];
    let no_survive = ["--algorithm", algorithm.as_str(), NO_SURVIVE];
    let rounds = swap::in_turn_with(&block, [&survive, &no_survive])?;
    let times =
        |time: fn(&SwapTimes) -> f64| rounds.each_ref().map(|rounds| rounds.iter().map(time).collect());
    report.prices.push(PriceRow::of_times(SWAP_OUT.to_owned(), &times(|times| times.swap_out_ms)));
    report.prices.push(PriceRow::of_times(FAULT_IN.to_owned(), &times(|times| times.fault_in_ms)));
    let size = format_size(options.swap.swapped_bytes);
    report.notes.push(format!("swap: {size} of a program, {} interleaved rounds", options.common.repeat));
    Ok(())
}

/// The name of swapping out.
const SWAP_OUT: &str = "swap-out";
/// The name of swapping in.
const FAULT_IN: &str = "swap-in page by page";

/// The names of all rows, in their order.
pub(crate) fn names() -> impl Iterator<Item = String> {
    let nbd = PATTERNS.into_iter().flat_map(|rw| JOBS.map(|jobs| nbd_name(rw, jobs)));
    nbd.chain([SWAP_OUT, FAULT_IN].map(str::to_owned))
}

fn nbd_name(rw: &str, jobs: usize) -> String {
    format!("NBD {rw}, {jobs} {}", if jobs == 1 { "job" } else { "jobs" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_above_one_is_faster() {
        let figures = [vec![20.0, 30.0, 40.0], vec![10.0, 10.0, 20.0]];
        let speeds = PriceRow::of_speeds("a".to_owned(), &figures);
        assert_eq!((speeds.survive, speeds.no_survive, speeds.speed_ratio), (30.0, 10.0, 2.0));
        assert_eq!(PriceRow::of_times("b".to_owned(), &figures).speed_ratio, 0.5);
        let names: Vec<_> = names().collect();
        assert_eq!(
            (names.len(), names[0].as_str(), names[3].as_str()),
            (6, "NBD randread, 1 job", "NBD randwrite, 2 jobs")
        );
    }
}
