//! What the tests of all tables do.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::expect::verdict;
use super::{Experiment, Plan, RoundOptions, Row, Series, Side};
use uzram_bench::harness::Source;

/// So many rounds, of measurements that take so long.
pub(crate) fn rounds(rounds: usize, duration: Duration) -> RoundOptions {
    RoundOptions { rounds, duration, ..RoundOptions::default() }
}

/// A measurement of so much work.
pub(crate) fn plan(design: usize, jobs: usize, work: u64, stop: &AtomicBool) -> Plan<'_> {
    Plan { design, jobs, work, seed: 7, stop }
}

/// All designs of a table, with a case begun.
pub(crate) fn begun(table: &Series, corpus: &Source, case: &str) -> Box<dyn Experiment> {
    let mut experiment = (table.open)(corpus, &(table.designs)().all()).unwrap();
    experiment.begin(case).unwrap();
    experiment
}

/// What was measured of a row was measured in each of so many rounds, whatever it came to.
pub(crate) fn assert_measured(row: &Row, rounds: usize) {
    let name = format!("{}, {} jobs, {}", row.case, row.jobs, row.before.design);
    for (quantity, values) in row.before.values.iter().chain(&row.after.values) {
        assert_eq!(values.len(), rounds, "{name}: {quantity}");
        assert!(values.iter().all(|value| value.is_finite() && *value >= 0.0), "{name}: {quantity}");
    }
}

/// All that the table prints was measured of both sides of a row.
pub(crate) fn assert_complete(table: &Series, row: &Row) {
    for side in [&row.before, &row.after] {
        let is_there = |value| side.median(value).is_some();
        assert!(table.columns.iter().all(|column| is_there(column.value)), "{}: {}", row.case, side.design);
    }
}

/// A design of which the same was measured in each of 9 rounds.
pub(crate) fn side(design: &str, values: &[(&'static str, f64)]) -> Side {
    let values = values.iter().map(|(quantity, value)| (*quantity, vec![*value; 9])).collect();
    Side { design: design.to_owned(), values }
}

/// A row of a table, beside what was published for it.
pub(crate) fn row(table: &Series, case: &str, jobs: usize, before: Side, after: Side) -> Row {
    let at = (table.designs)().before.iter().position(|design| *design == before.design);
    let published = at.and_then(|at| (table.published)(case, jobs, at));
    Row::new(case, jobs, before, after, published).unwrap()
}

/// The rows as if four rounds had been measured, which are too few to judge a speed.
pub(crate) fn of_four_rounds(mut rows: Vec<Row>) -> Vec<Row> {
    for side in rows.iter_mut().flat_map(|row| [&mut row.before, &mut row.after]) {
        side.values.values_mut().for_each(|rounds| rounds.truncate(4));
    }
    rows
}

/// The verdict on rows, on a machine with two CPUs.
pub(crate) fn said_of(table: &Series, rows: &[Row]) -> String {
    let said = verdict(table, rows, 2).join("\n");
    assert!(!said.contains("NaN"), "{said}");
    said
}
