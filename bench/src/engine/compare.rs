//! Targets measured with fio's patterns in interleaved rounds, compared with the first of them.

use uzram::Result;

use super::measure::{Measurement, Plan, measure};
use super::pattern::Pattern;
use super::target::Target;
use crate::harness::corpus::Corpus;
use crate::harness::report::{each, jobs_text};
use crate::harness::rounds::in_turn_by_jobs;
use crate::harness::{Options, Report};

pub(crate) const ROUNDS: usize = 5;

/// What to measure of targets.
#[derive(Clone, Copy)]
pub struct Comparison<'a> {
    /// How to measure.
    pub options: &'a Options,
    /// The name of the table of speeds.
    pub table: &'static str,
    /// The patterns, in the order of the report; if empty, only memory is measured.
    pub patterns: &'a [Pattern],
    /// Numbers of threads.
    pub jobs: &'a [usize],
}

/// Measures every pattern, round by round, with all numbers of jobs and all targets in a round. Ratios are
/// those of the first target.
pub(super) fn compare(
    comparison: &Comparison<'_>,
    targets: &[&dyn Target],
    corpus: &Corpus,
    page_count: usize,
    report: &mut Report,
) -> Result<()> {
    let Comparison { options, table, .. } = *comparison;
    let mut written = false;
    for &pattern in comparison.patterns {
        if written && pattern.reads() {
            targets.iter().try_for_each(|target| target.fill(corpus))?;
        }
        written |= pattern.writes();
        let rounds = options.rounds(ROUNDS);
        let cells = in_turn_by_jobs(rounds, comparison.jobs, targets.len(), &options.stop, |turn| {
            let plan = Plan::of_round(options, pattern, turn.jobs, turn.round, corpus, page_count);
            measure(targets[turn.variant], &plan)
        })?;
        for (cell, &jobs) in cells.iter().zip(comparison.jobs) {
            let first = speeds(&cell[0]);
            for (target, rounds) in targets.iter().zip(cell) {
                let row = format!("{pattern}, {}, {}", jobs_text(jobs), target.name());
                add_rounds(report, table, &row, rounds);
                if target.name() != targets[0].name() {
                    report.ratio(table, &row, "ratio", [&first, &speeds(rounds)]);
                }
            }
        }
    }
    Ok(())
}

pub(super) fn speeds(rounds: &[Measurement]) -> Vec<f64> {
    each(rounds, |round| round.mb_per_s)
}

pub(super) fn add_rounds(report: &mut Report, table: &str, row: &str, rounds: &[Measurement]) {
    report.rounds(table, row, "MB/s", &speeds(rounds));
    for (column, fraction) in [("p50 µs", 0.5), ("p99 µs", 0.99), ("p99.9 µs", 0.999)] {
        report.rounds(table, row, column, &each(rounds, |round| round.latencies.quantile_us(fraction)));
    }
}
