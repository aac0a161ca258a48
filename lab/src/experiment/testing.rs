//! What the tests of all tables do.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::{Experiment, Plan, RoundOptions, Row, Series};
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
