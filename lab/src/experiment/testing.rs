//! Shared by the tests of all tables.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::expect::verdict;
use super::{Experiment, LabOptions, LabReport, Plan, RoundOptions, Row, Sample, Series, Side, run};
use uzram_bench::harness::{Source, to_json};

/// Returns options for so many rounds, of measurements of that length.
pub(crate) fn rounds(rounds: usize, duration: Duration) -> RoundOptions {
    RoundOptions { rounds, duration, ..RoundOptions::default() }
}

pub(crate) fn plan(design: usize, jobs: usize, work: u64, stop: &AtomicBool) -> Plan<'_> {
    Plan { design, jobs, work, seed: 7, stop }
}

/// Opens all designs of a table, and begins a case.
pub(crate) fn open_case(table: &Series, corpus: &Source, case: &str) -> Box<dyn Experiment> {
    let mut experiment = (table.open)(corpus, &(table.designs)().all()).unwrap();
    experiment.begin(case).unwrap();
    experiment
}

/// Runs a short form of a table and prints it: it must have `rows` rows, with every quantity measured in
/// every round, whatever its value, and the same work by each design; its text must contain all of `said`.
pub(crate) fn run_short(table: &Series, options: &LabOptions, rows: usize, said: &[&str]) -> LabReport {
    let report = run(table, options).unwrap();
    assert_eq!(report.rows.len(), rows);
    for row in &report.rows {
        let name = format!("{}, {} jobs, {}", row.case, row.jobs, row.before.design);
        for (quantity, values) in row.before.values.iter().chain(&row.after.values) {
            assert_eq!(values.len(), options.rounds.rounds, "{name}: {quantity}");
            assert!(values.iter().all(|value| value.is_finite() && *value >= 0.0), "{name}: {quantity}");
        }
        let units =
            |side: &Side| Some(side.values["elapsed_s"][0] / side.values.get(table.unit.costs()[0])?[0]);
        if let Some((before, after)) = units(&row.before).zip(units(&row.after)) {
            assert!((before / after - 1.0).abs() < 1e-6, "{name}: {before} and {after} units of work");
        }
    }
    let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
    assert!(json["rows"].as_array().unwrap().iter().all(|row| row["p"].is_number()));
    let text = report.to_string();
    for said in said.iter().chain(&["Verdict"]) {
        assert!(text.contains(said), "{said}: {text}");
    }
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    println!("{text}");
    report
}

/// Returns a quantity of a measurement.
pub(crate) fn value(sample: &Sample, name: &str) -> f64 {
    sample.values.iter().find(|value| value.0 == name).unwrap().1
}

/// Returns a design with the same measurements in each of 9 rounds.
pub(crate) fn side(design: &str, values: &[(&'static str, f64)]) -> Side {
    let values = values.iter().map(|(quantity, value)| (*quantity, vec![*value; 9])).collect();
    Side { design: design.to_owned(), values }
}

/// Returns a row of a table, with its published figures.
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
