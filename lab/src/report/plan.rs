//! How each table is measured so that all of them fit into the time.
//!
//! The same options give the same plan on the same machine, whichever tables are chosen: a table alone
//! is measured as it is among all.

use std::time::Duration;

use uzram::Result;
use uzram_bench::harness::corpus::Kind;
use uzram_bench::harness::rounds::RoundOptions;
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source};

use super::progress;
use super::results::ReportOptions;
use crate::experiment::{LabOptions, Length, Series, pages_of};
use crate::tables::TABLES;

/// The time that measuring takes, divided by its estimate: calibrating, filling devices and starting threads;
/// of a table whose work is fixed, preparing.
const OVERHEAD: f64 = 1.25;
const FIXED_OVERHEAD: f64 = 1.1;
/// The share of the time that tables with fixed work may take, if it is short.
const FIXED_SHARE: f64 = 0.4;
/// The fewest pages of a corpus.
const LEAST_PAGES: usize = 512;
/// The fewest rounds that distinguish a difference from the noise.
const LEAST_ROUNDS: usize = 5;
/// The shortest measurement.
const LEAST_S: f64 = 0.005;

/// The time for all tables.
struct Budget {
    seconds: f64,
    /// Numbers of rounds, the preferred one first.
    rounds: &'static [usize],
    measurement_s: f64,
}

/// Under five minutes, under an hour: less is planned, because a machine may be slower than this one.
const QUICK: Budget = Budget { seconds: 235.0, rounds: &[LEAST_ROUNDS], measurement_s: 0.15 };
const FULL: Budget = Budget { seconds: 45.0 * 60.0, rounds: &[21, 17, 13, 11, 9], measurement_s: 0.15 };

/// A table, and how it is measured.
pub(super) struct Planned {
    pub(super) table: &'static Series,
    pub(super) options: LabOptions,
    pub(super) estimate: Duration,
}

/// What is the same for all tables.
struct Plan {
    rounds: usize,
    measurement_s: f64,
    /// The corpus of tables with fixed work, in times of the default one.
    fixed_share: f64,
}

/// Plans the chosen tables.
///
/// # Errors
/// `Invalid` names the option that does not fit a table.
pub(super) fn plan(options: &ReportOptions) -> Result<Vec<Planned>> {
    let plan = choose(options)?;
    options.tables.iter().map(|table| planned(table, options, &plan)).collect()
}

fn planned(table: &'static Series, options: &ReportOptions, plan: &Plan) -> Result<Planned> {
    let pages = match table.length {
        Length::Fixed { is_of_corpus: true, .. } => plan.fixed_share * DEFAULT_CORPUS_PAGES as f64,
        _ => DEFAULT_CORPUS_PAGES as f64,
    };
    let lab_options = LabOptions {
        cases: cases(table, options.quick),
        jobs: options.jobs.clone(),
        rounds: RoundOptions {
            rounds: rounds_of(table, options, plan.rounds),
            duration: duration(plan.measurement_s),
            stop: options.stop.clone(),
            progress: progress::show,
        },
        corpus: options
            .corpus
            .clone()
            .unwrap_or(Source::Built(Kind::Mixed, (pages as usize).max(LEAST_PAGES))),
        ..LabOptions::default()
    };
    let overhead = if table.length.is_fixed() { FIXED_OVERHEAD } else { OVERHEAD };
    let estimate = lab_options.estimate(table)?.as_secs_f64() * overhead;
    let share = match table.length {
        Length::Fixed { is_of_corpus: true, .. } => {
            pages_of(&lab_options.corpus) as f64 / DEFAULT_CORPUS_PAGES as f64
        }
        _ => 1.0,
    };
    Ok(Planned { table, options: lab_options, estimate: duration(estimate * share) })
}

/// Returns the rounds of a table: of one with slow cases as few as can be judged, unless others are asked
/// for.
fn rounds_of(table: &Series, options: &ReportOptions, rounds: usize) -> usize {
    let is_slow = options.rounds.is_none() && !table.slow_cases.is_empty();
    if is_slow { rounds.min(LEAST_ROUNDS) } else { rounds }
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

/// Chooses rounds and lengths: the most rounds with which everything fits into the time, else the least work.
fn choose(options: &ReportOptions) -> Result<Plan> {
    let budget = if options.quick { QUICK } else { FULL };
    let wanted_s = options.duration.map_or(budget.measurement_s, |duration| duration.as_secs_f64());
    let own = options.rounds.map(|rounds| [rounds]);
    let candidates = own.as_ref().map_or(budget.rounds, |own| own.as_slice());
    let mut plan = Plan { rounds: 1, measurement_s: wanted_s, fixed_share: 1.0 };
    for &rounds in candidates {
        plan.rounds = rounds;
        let cost = Cost::of(options, rounds)?;
        let seconds = OVERHEAD * cost.measurements * wanted_s + cost.of_corpus_s + cost.fixed_s;
        if seconds <= budget.seconds {
            return Ok(plan);
        }
    }
    let cost = Cost::of(options, plan.rounds)?;
    let available_s = (budget.seconds - cost.fixed_s).max(0.0);
    plan.fixed_share = (available_s * FIXED_SHARE / cost.of_corpus_s).min(1.0);
    if options.duration.is_none() {
        let rest_s = available_s - plan.fixed_share * cost.of_corpus_s;
        let measurement_s = (rest_s / cost.measurements / OVERHEAD).clamp(LEAST_S, wanted_s);
        plan.measurement_s = (1000.0 * measurement_s).floor() / 1000.0;
    }
    Ok(plan)
}

/// What all tables take.
#[derive(Default)]
struct Cost {
    /// The number of measurements that are as long as wanted.
    measurements: f64,
    /// Seconds of those that are shorter with a smaller corpus, and of those that are not.
    of_corpus_s: f64,
    fixed_s: f64,
}

impl Cost {
    fn of(options: &ReportOptions, rounds: usize) -> Result<Cost> {
        let mut cost = Cost::default();
        for table in TABLES {
            let rounds = rounds_of(table, options, rounds);
            let second = RoundOptions { rounds, duration: Duration::from_secs(1), ..RoundOptions::default() };
            let cases = cases(table, options.quick);
            let jobs = options.jobs.clone();
            let lab_options = LabOptions { cases, jobs, rounds: second, ..LabOptions::default() };
            let seconds = lab_options.estimate(table)?.as_secs_f64();
            let seconds = if table.length.is_fixed() { FIXED_OVERHEAD * seconds } else { seconds };
            *match table.length {
                Length::Calibrated => &mut cost.measurements,
                Length::Fixed { is_of_corpus: true, .. } => &mut cost.of_corpus_s,
                Length::Fixed { is_of_corpus: false, .. } => &mut cost.fixed_s,
            } += seconds;
        }
        Ok(cost)
    }
}

/// Returns a duration; a number that is none is an option that [`LabOptions::estimate`] refuses.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn options(quick: bool) -> ReportOptions {
        ReportOptions { quick, ..super::super::tests::options() }
    }

    fn total_s(options: &ReportOptions) -> f64 {
        plan(options).unwrap().iter().map(|planned| planned.estimate.as_secs_f64()).sum()
    }

    #[test]
    fn all_tables_fit_into_the_time() {
        let (quick, full) = (total_s(&options(true)), total_s(&options(false)));
        assert!((60.0..=250.0).contains(&quick), "{quick} s");
        assert!((10.0 * 60.0..=50.0 * 60.0).contains(&full), "{full} s");
        for planned in plan(&options(true)).unwrap() {
            assert_eq!(planned.options.rounds.rounds, 5);
            assert!(planned.options.rounds.duration >= Duration::from_millis(10));
        }
    }

    #[test]
    fn what_is_asked_for_is_planned() {
        let asked = ReportOptions {
            rounds: Some(3),
            duration: Some(Duration::from_millis(7)),
            jobs: vec![2],
            corpus: Some(Source::Built(Kind::Text, 600)),
            ..options(true)
        };
        for planned in plan(&asked).unwrap() {
            let LabOptions { jobs, rounds, corpus, .. } = planned.options;
            assert_eq!((jobs, rounds.rounds, rounds.duration.as_millis()), (vec![2], 3, 7));
            assert!(matches!(corpus, Source::Built(Kind::Text, 600)));
        }
        for (wrong, named) in [
            (ReportOptions { rounds: Some(0), ..options(true) }, "--rounds"),
            (ReportOptions { duration: Some(Duration::ZERO), ..options(true) }, "--seconds"),
            (ReportOptions { jobs: vec![0], ..options(true) }, "--jobs"),
        ] {
            let error = plan(&wrong).err().unwrap().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    /// A table has the same options whichever others are measured.
    #[test]
    fn the_plan_of_a_table_does_not_depend_on_the_others() {
        let all = plan(&options(true)).unwrap();
        for planned in &all {
            let alone = ReportOptions { tables: vec![planned.table], ..options(true) };
            assert_eq!(plan(&alone).unwrap()[0].options.rounds.duration, planned.options.rounds.duration);
        }
    }
}
