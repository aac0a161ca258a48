//! Shared by the tests of all tables.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::expect::verdict;
use super::{Experiment, Plan, RoundOptions, Row, Sample, Series, Side};
use uzram_bench::harness::Source;
use uzram_bench::harness::corpus::Kind;

pub(crate) fn rounds(rounds: usize, duration: Duration) -> RoundOptions {
    RoundOptions { rounds, duration, ..RoundOptions::default() }
}

pub(crate) fn plan(design: usize, jobs: usize, work: u64) -> Plan<'static> {
    static STOP: AtomicBool = AtomicBool::new(false);
    Plan { design, jobs, work, seed: 7, stop: &STOP }
}

pub(crate) fn corpus() -> Source {
    Source::Built(Kind::Mixed, 192)
}

pub(crate) fn open_case(table: &Series, case: &str) -> Box<dyn Experiment> {
    let mut experiment = (table.open)(&corpus(), &(table.designs)().all()).unwrap();
    experiment.begin(case).unwrap();
    experiment
}

pub(crate) fn value(sample: &Sample, name: &str) -> f64 {
    sample.values.iter().find(|value| value.0 == name).unwrap().1
}

/// Returns a design with the same measurements in each of 9 rounds.
pub(crate) fn side(design: &str, values: &[(&'static str, f64)]) -> Side {
    let values = values.iter().map(|(quantity, value)| (*quantity, vec![*value; 9])).collect();
    Side { design: design.to_owned(), values }
}

pub(crate) fn row(table: &Series, case: &str, jobs: usize, before: Side, after: Side) -> Row {
    let at = (table.designs)().before.iter().position(|design| *design == before.design);
    let published = at.and_then(|at| table.published_at(case, jobs, at));
    Row::new(case, jobs, before, after, published).unwrap()
}

/// Returns the verdict on rows, on a machine with two CPUs.
pub(crate) fn verdict_text(table: &Series, rows: &[Row]) -> String {
    let said = verdict(table, rows, 2).1.join("\n");
    assert!(!said.contains("NaN"), "{said}");
    said
}
