//! How each table is measured so that all of them fit into the time.
//!
//! A table alone is measured as it is among all.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::Result;
use uzram_bench::harness::corpus::Kind;
use uzram_bench::harness::rounds::RoundOptions;
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source, command};

use super::progress;
use crate::experiment::{LabOptions, Length, Series, pages_of};
use crate::tables::{self, TABLES};

/// What is measured, and where the report goes: the command line of `uzram lab report`.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram lab report out --quick")]
pub struct ReportOptions {
    /// The folder that the report is written into
    pub dir: PathBuf,
    /// Take less than five minutes, instead of less than an hour
    #[arg(long)]
    pub quick: bool,
    /// Tables, as `uzram lab list` shows them [default: all]
    #[arg(long, value_delimiter = ',', value_name = "TABLE,…", value_parser = tables::table)]
    pub tables: Vec<&'static Series>,
    /// Rounds [default: 15; with --quick, or for tables with slow cases, 5]
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,
    /// About how many seconds one measurement takes [default: 0.15; with --quick, 0.03]
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Numbers of jobs [default: each table's]
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    pub jobs: Vec<usize>,
    /// The pages that are stored, of tables that store some [default: mixed]
    #[arg(long, value_name = "FILE|NAME")]
    pub corpus: Option<Source>,
}

/// The time that measuring takes, divided by its estimate: calibrating, filling devices and starting threads;
/// of a table whose work is fixed, preparing.
const OVERHEAD: f64 = 1.25;
const FIXED_OVERHEAD: f64 = 1.1;
const LEAST_PAGES: usize = 512;

struct Work {
    rounds: usize,
    duration: Duration,
    /// The corpus of tables with fixed work, in times of the default one.
    corpus_share: f64,
}

/// With every table it takes less than five minutes, and less than an hour, on 2 CPUs.
const QUICK: Work = Work { rounds: LEAST_ROUNDS, duration: Duration::from_millis(30), corpus_share: 0.07 };
const FULL: Work = Work { rounds: 15, duration: Duration::from_millis(150), corpus_share: 0.5 };
/// The fewest rounds that distinguish a difference from the noise. Tables with slow cases have no more.
const LEAST_ROUNDS: usize = 5;

pub(super) struct Planned {
    pub(super) table: &'static Series,
    pub(super) options: LabOptions,
    pub(super) estimate_s: f64,
}

pub(super) fn plan(options: &ReportOptions, stop: &Arc<AtomicBool>) -> Result<Vec<Planned>> {
    let is_wanted = |table: &&Series| {
        options.tables.is_empty() || options.tables.iter().any(|named| named.name == table.name)
    };
    let tables = TABLES.into_iter().filter(is_wanted);
    tables.map(|table| planned(table, options, stop)).collect()
}

fn planned(table: &'static Series, options: &ReportOptions, stop: &Arc<AtomicBool>) -> Result<Planned> {
    let work = if options.quick { QUICK } else { FULL };
    let is_of_corpus = matches!(table.length, Length::Fixed { is_of_corpus: true, .. });
    let share = if is_of_corpus { work.corpus_share } else { 1.0 };
    let pages = ((share * DEFAULT_CORPUS_PAGES as f64) as usize).max(LEAST_PAGES);
    let rounds = if table.slow_cases.is_empty() { work.rounds } else { LEAST_ROUNDS };
    let lab_options = LabOptions {
        cases: cases(table, options.quick),
        jobs: options.jobs.clone(),
        rounds: RoundOptions {
            rounds: options.rounds.unwrap_or(rounds),
            duration: options.seconds.map_or(Ok(work.duration), command::seconds)?,
            stop: Arc::clone(stop),
            progress: progress::show,
        },
        corpus: options.corpus.clone().unwrap_or(Source::Built(Kind::Mixed, pages)),
    };
    let estimate_s = lab_options.estimate(table)?.as_secs_f64();
    let corpora = pages_of(&lab_options.corpus) as f64 / DEFAULT_CORPUS_PAGES as f64;
    let share = if is_of_corpus { corpora } else { 1.0 };
    let overhead = if table.length.is_fixed() { FIXED_OVERHEAD } else { OVERHEAD };
    Ok(Planned { table, options: lab_options, estimate_s: estimate_s * overhead * share })
}

/// Returns the cases to measure: all of them, which is said by none, or those that are not slow.
fn cases(table: &Series, quick: bool) -> Vec<String> {
    if !quick || table.slow_cases.is_empty() {
        return Vec::new();
    }
    let quick = table.case_names().into_iter().filter(|case| !table.slow_cases.contains(case));
    quick.map(str::to_owned).collect()
}

/// Returns which of a table's cases a quick report leaves out, in words.
pub(super) fn skipped(table: &Series, quick: bool) -> Option<String> {
    let skipped = table.slow_cases.join(", ");
    (quick && !skipped.is_empty())
        .then(|| format!("A quick report leaves out cases that take long: {skipped}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(quick: bool) -> ReportOptions {
        ReportOptions { quick, ..super::super::tests::options() }
    }

    fn total_s(options: &ReportOptions) -> f64 {
        plan(options, &Arc::default()).unwrap().iter().map(|planned| planned.estimate_s).sum()
    }

    #[test]
    fn all_tables_fit_into_the_time() {
        let (quick, full) = (total_s(&options(true)), total_s(&options(false)));
        assert!((60.0..=250.0).contains(&quick), "{quick} s");
        assert!((10.0 * 60.0..=50.0 * 60.0).contains(&full), "{full} s");
        for planned in plan(&options(true), &Arc::default()).unwrap() {
            assert_eq!(planned.options.rounds.rounds, 5);
            assert!(planned.options.rounds.duration >= Duration::from_millis(10));
        }
    }

    #[test]
    fn what_is_asked_for_is_planned() {
        let asked = ReportOptions {
            rounds: Some(3),
            seconds: Some(0.007),
            jobs: vec![2],
            corpus: Some(Source::Built(Kind::Text, 600)),
            ..options(true)
        };
        for planned in plan(&asked, &Arc::default()).unwrap() {
            let LabOptions { jobs, rounds, corpus, .. } = planned.options;
            assert_eq!((jobs, rounds.rounds, rounds.duration.as_millis()), (vec![2], 3, 7));
            assert!(matches!(corpus, Source::Built(Kind::Text, 600)));
        }
    }
}
