#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use super::testing::{open_case, plan, rounds, verdict_text};
use super::*;
use uzram_bench::harness::to_json;

/// The measurements made: case, design, jobs, work, seed.
type Log = Vec<(String, usize, usize, u64, u64)>;

thread_local! {
    /// The log of this thread, which runs one test.
    static LOG: RefCell<Log> = const { RefCell::new(Vec::new()) };
}

/// A series whose measurements take 2 µs a unit of work before and 1 µs after.
const CLOCKWORK: Series = Series {
    name: "clockwork",
    about: "two speeds",
    title: "clockwork: faster",
    author: "Nobody",
    date: "2000",
    cases: &[("one", &[1, 3]), ("two", &[1, 3])],
    slow_cases: &[],
    unit: Unit::Page,
    designs: || Designs { before: vec!["old".to_owned()], after: "new".to_owned(), beyond: Vec::new() },
    columns: &[Column { value: "elapsed_s", heading: "elapsed", scale: 1000.0, decimals: 1 }],
    legend: || vec!["elapsed: milliseconds".to_owned()],
    total: Some("both"),
    counted_function: "",
    length: Length::Calibrated,
    open: |_, designs| {
        assert_eq!(designs, (CLOCKWORK.designs)().all());
        Ok(Box::new(Measuring { case: String::new() }))
    },
    published: |_, _, _| None,
    expectations: &[],
    findings: |rows, _| vec![format!("{} rows", rows.len())],
};

/// The same with a later design, of 0.5 µs, and another number of jobs in case two.
const BEYOND: Series = Series {
    cases: &[("one", &[1, 3]), ("two", &[2])],
    designs: || Designs {
        before: vec!["old".to_owned()],
        after: "new".to_owned(),
        beyond: vec!["even-newer".to_owned()],
    },
    total: None,
    open: |_, designs| {
        assert_eq!(designs, (BEYOND.designs)().all());
        Ok(Box::new(Measuring { case: String::new() }))
    },
    findings: |_, _| Vec::new(),
    ..CLOCKWORK
};

struct Measuring {
    case: String,
}

impl Experiment for Measuring {
    fn begin(&mut self, case: &str) -> Result<()> {
        self.case = case.to_owned();
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let Plan { design, jobs, work, seed, .. } = *plan;
        LOG.with_borrow_mut(|log| log.push((self.case.clone(), design, jobs, work, seed)));
        let elapsed = Duration::from_nanos(work * [2000, 1000, 500][design]);
        Ok(Sample { elapsed, values: vec![("user_s", 0.25)] })
    }
}

fn options() -> LabOptions {
    LabOptions { rounds: rounds(4, Duration::from_millis(10)), ..LabOptions::default() }
}

#[test]
fn rounds_alternate_on_the_same_fixed_work() {
    let report = run(&CLOCKWORK, &options()).unwrap();
    let log = LOG.take();
    for case in ["one", "two"] {
        for jobs in [1, 3] {
            // After calibrating (seed 0, as the warm-up), rounds 0 to 4 of both designs.
            let turns: Vec<_> =
                log.iter().filter(|turn| turn.0 == case && turn.2 == jobs && turn.4 > 0).collect();
            let designs: Vec<_> = turns.iter().map(|turn| turn.1).collect();
            assert_eq!(designs, [1, 0, 1, 0, 0, 1, 0, 1]);
            let work: BTreeSet<_> = turns.iter().map(|turn| turn.3).collect();
            assert_eq!(work, BTreeSet::from([10_000]), "10 ms at 1 µs");
            let seeds: Vec<_> = turns.iter().map(|turn| turn.4).collect();
            assert_eq!(seeds, [1, 1, 2, 2, 3, 3, 4, 4]);
        }
    }
    // Two cases and both together, with 1 and 3 jobs.
    assert_eq!(report.rows.len(), 6);
    for row in &report.rows {
        assert!((row.gain.ratio - 2.0).abs() < 1e-9, "{row:?}");
        assert_eq!((row.gain.low, row.gain.high), (row.gain.ratio, row.gain.ratio));
        assert_eq!(row.gain.p, 0.125, "the least that 4 rounds can give");
    }
    let total = report.rows.last().unwrap();
    assert_eq!((total.case.as_str(), total.after.median("user_s")), ("both", Some(0.5)));
    assert!(report.to_string().contains("\nVerdict\n6 rows\n"), "{report}");
}

#[test]
fn a_design_beyond_is_compared_with_the_one_after() {
    let report = run(&BEYOND, &options()).unwrap();
    let rows: Vec<_> = report.rows.iter().map(|row| (row.case.as_str(), row.jobs)).collect();
    // Each case with its own numbers of jobs, and no total.
    assert_eq!(rows, [("one", 1), ("one", 1), ("one", 3), ("one", 3), ("two", 2), ("two", 2)]);
    for pair in report.rows.chunks(2) {
        let designs = pair.iter().map(|row| (row.before.design.as_str(), row.after.design.as_str()));
        assert!(designs.eq([("old", "new"), ("new", "even-newer")]));
        assert!(pair.iter().all(|row| (row.gain.ratio - 2.0).abs() < 1e-9), "{pair:?}");
    }
    let text = report.to_string();
    let gains: Vec<_> = text
        .lines()
        .skip_while(|line| *line != "two")
        .skip(2)
        .take(3)
        .map(|line| (line[6..16].trim(), line.contains("2.00 [")))
        .collect();
    // The work is calibrated on the design after.
    assert_eq!(gains, [("old", true), ("new", false), ("even-newer", true)], "{text}");
    assert!(text.contains("      new           10.0\n"), "{text}");
    // 3 numbers of jobs in all, 3 designs, 4 rounds and the warm-up.
    assert_eq!(options().estimate(&BEYOND).unwrap(), Duration::from_millis(450));
}

#[test]
fn the_json_has_the_documented_form() {
    let options = LabOptions { cases: vec!["two".to_owned()], jobs: vec![3], ..options() };
    let report = run(&CLOCKWORK, &options).unwrap();
    let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
    let wanted = serde_json::json!({
        "table": "clockwork",
        "series": "\"clockwork: faster\", Nobody, 2000",
        "rows": [{
            "case": "two",
            "jobs": 3,
            "before": {"design": "old", "values": {"elapsed_s": [0.02, 0.02, 0.02, 0.02], "user_s": [0.25, 0.25, 0.25, 0.25]}},
            "after": {"design": "new", "values": {"elapsed_s": [0.01, 0.01, 0.01, 0.01], "user_s": [0.25, 0.25, 0.25, 0.25]}},
            "ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0, "p": 0.125,
            "published": null
        }]
    });
    assert_eq!(json, wanted);
}

#[test]
fn an_option_that_cannot_be_is_named() {
    let timed = |count, duration| LabOptions { rounds: rounds(count, duration), ..options() };
    let second = Duration::from_secs(1);
    let cases = [
        (LabOptions { cases: vec!["three".to_owned()], ..options() }, "--case"),
        (LabOptions { jobs: vec![1, 0], ..options() }, "--jobs"),
        (LabOptions { jobs: vec![257], ..options() }, "--jobs"),
        (timed(0, second), "--rounds"),
        (timed(101, second), "--rounds"),
        (timed(4, Duration::ZERO), "--seconds"),
        (timed(4, 3601 * second), "--seconds"),
    ];
    for (options, named) in cases {
        let error = run(&CLOCKWORK, &options).err().unwrap().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
    assert!(table("slabs").err().unwrap().to_string().contains("streams"));
}

#[test]
fn the_stop_flag_ends_a_run() {
    let options = options();
    options.rounds.stop.store(true, Ordering::Relaxed);
    assert_eq!(run(&CLOCKWORK, &options).err().unwrap().to_string(), "interrupted");
}

#[test]
fn the_estimate_counts_every_measurement() {
    // 2 cases, 2 numbers of jobs, 2 designs, 4 rounds and the warm-up.
    assert_eq!(options().estimate(&CLOCKWORK).unwrap(), Duration::from_millis(400));
}

/// A small corpus, for the tables that need one.
fn corpus() -> Source {
    Source::Built(Kind::Mixed, 64)
}

/// Returns whether a table needs `uzram` and other programs, which tests of the library do not have.
fn runs_programs(table: &Series) -> bool {
    ["streams-nbd", "zs-lock-disk"].contains(&table.name)
}

#[test]
fn a_stopped_measurement_ends_in_every_table() {
    let stop = AtomicBool::new(true);
    for table in TABLES.into_iter().filter(|table| !runs_programs(table)) {
        for case in table.case_names() {
            let mut experiment = open_case(table, &corpus(), case);
            for design in 0..(table.designs)().all().len() {
                experiment.measure(&plan(design, 3, 1 << 40, &stop)).unwrap();
            }
        }
    }
}

#[test]
fn no_table_opens_a_design_that_it_does_not_have() {
    for table in TABLES.into_iter().filter(|table| !runs_programs(table)) {
        let error = (table.open)(&corpus(), &["frozen".to_owned()]).err().unwrap();
        assert!(error.to_string().contains("frozen"), "{}: {error}", table.name);
    }
}

#[test]
fn nothing_is_said_of_what_was_not_measured() {
    for table in TABLES {
        let verdict = verdict_text(table, &[]);
        let not_measured = verdict.lines().filter(|line| line.contains(": not measured with ")).count();
        assert_eq!(not_measured, table.expectations.len(), "{verdict}");
    }
}
