use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;

use super::testing::{corpus, open_case, plan, rounds, row, side, verdict_text};
use std::time::Duration;

use uzram::Result;

use super::*;
use crate::tables::{TABLES, table};
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
    published: "streams",
    cases: &[("one", &[1, 3]), ("two", &[1, 3])],
    unit: Unit::Page,
    designs: || Designs { before: vec!["old".to_owned()], after: "new".to_owned(), beyond: Vec::new() },
    columns: &[("elapsed_s", "elapsed", 1000.0, 1)],
    legend: || vec!["elapsed: milliseconds".to_owned()],
    total: Some("both"),
    open: |_, designs| {
        assert_eq!(designs, (CLOCKWORK.designs)().all());
        Ok(Box::new(Measuring { case: String::new() }))
    },
    ..Series::NEW
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
    // 2 cases, 2 numbers of jobs, 2 designs, 4 rounds and the warm-up.
    assert_eq!(options().estimate(&CLOCKWORK).unwrap(), Duration::from_millis(400));
    // 3 numbers of jobs in all, 3 designs, and as many rounds.
    assert_eq!(options().estimate(&BEYOND).unwrap(), Duration::from_millis(450));
}

#[test]
fn the_json_has_the_documented_form() {
    let options = LabOptions { cases: vec!["two".to_owned()], jobs: vec![3], ..options() };
    let report = run(&CLOCKWORK, &options).unwrap();
    let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
    let wanted = serde_json::json!({
        "table": "clockwork",
        "series": "\"zram: user per-cpu compression streams\", Sergey Senozhatsky, May 2016",
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

/// Returns whether a table needs `uzram` and other programs, which tests of the library do not have.
fn runs_programs(table: &Series) -> bool {
    ["streams-nbd", "zs-lock-disk"].contains(&table.name)
}

/// A short run of each table: every value is measured in every round, whatever it is, and all designs do the
/// same work.
#[test]
fn every_value_of_a_short_run_is_measured() {
    for table in TABLES.into_iter().filter(|table| !table.length.is_fixed()) {
        // Of a table with a total, each case with few and with many jobs.
        let jobs = if table.total.is_some() { vec![1, 2 * cpus() + 1] } else { Vec::new() };
        let rounds = rounds(1, Duration::from_millis(1));
        let options = LabOptions { jobs: jobs.clone(), rounds, corpus: corpus(), ..LabOptions::default() };
        let numbers: usize = table.cases.iter().map(|(_, own)| own.len()).sum();
        let cells = if jobs.is_empty() { numbers } else { (table.cases.len() + 1) * jobs.len() };
        let report = run(table, &options).unwrap();
        assert_eq!(report.rows.len(), cells * ((table.designs)().all().len() - 1));
        for row in &report.rows {
            let name = format!("{}, {}, {} jobs, {}", table.name, row.case, row.jobs, row.before.design);
            for (quantity, values) in row.before.values.iter().chain(&row.after.values) {
                assert_eq!(values.len(), 1, "{name}: {quantity}");
                assert!(values.iter().all(|value| value.is_finite() && *value >= 0.0), "{name}: {quantity}");
            }
            let units =
                |side: &Side| Some(side.values["elapsed_s"][0] / side.values.get(table.unit.costs()[0])?[0]);
            if let Some((before, after)) = units(&row.before).zip(units(&row.after)) {
                assert!((before / after - 1.0).abs() < 1e-6, "{name}: {before} and {after} units of work");
            }
            for side in [&row.before, &row.after] {
                assert!(side.processor_s().is_some_and(|seconds| seconds[0] > 0.0), "{name}");
                let writes = side.values.contains_key("write_mb_per_s");
                // Other quantities are those of what a case does.
                let is_there =
                    |value| side.median(value).is_some() || (value == "sleeps_per_write" && !writes);
                let is_total = Some(row.case.as_str()) == table.total;
                assert!(is_total || table.columns.iter().all(|(value, ..)| is_there(*value)), "{name}");
            }
        }
        let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
        assert!(json["rows"].as_array().unwrap().iter().all(|row| row["p"].is_number()));
        let text = report.to_string();
        assert!(text.contains(&table.source().author) && text.contains("Verdict"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        println!("{text}");
    }
}

#[test]
fn a_stopped_measurement_ends_in_every_table() {
    let stop = AtomicBool::new(true);
    for table in TABLES.into_iter().filter(|table| !runs_programs(table)) {
        for case in table.case_names() {
            let mut experiment = open_case(table, case);
            for design in 0..(table.designs)().all().len() {
                experiment.measure(&Plan { stop: &stop, ..plan(design, 3, 1 << 40) }).unwrap();
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

/// Returns rows of every case with 1, 2 and 64 jobs in which the design after has so many times the least or
/// the most of each expectation: of the time before as many times as is wanted, or of the quantity as much.
fn rows_that(table: &Series, keep: bool) -> Vec<Row> {
    let designs = (table.designs)();
    let of = |case: &str, jobs: usize, before: &str| {
        let is_of = |expect: &&Expect| {
            expect.case.is_none_or(|wanted| wanted == case)
                && expect.before.is_none_or(|wanted| wanted == before)
                && match expect.jobs {
                    Jobs::Exactly(wanted) => jobs == wanted,
                    Jobs::AtLeast(least) => jobs >= least,
                    Jobs::MoreThanCpus => jobs > 2,
                }
        };
        let (mut elapsed_s, mut cpu_s, mut maximum) = (1.0, 2.0, Vec::new());
        for expect in table.expectations.iter().filter(is_of) {
            let bound = match expect.bound {
                Bound::AtLeast(wanted) | Bound::NotBelow(wanted) if keep => wanted + 0.01,
                Bound::AtLeast(wanted) | Bound::NotBelow(wanted) => wanted - 0.01,
                Bound::AtMost(wanted) if keep => wanted,
                Bound::AtMost(wanted) => wanted + 0.01,
                Bound::Within(least, _) if keep => least,
                Bound::Within(least, _) => least - 0.01,
            };
            match expect.figure {
                Figure::Speed => elapsed_s = bound,
                Figure::ProcessorTime => cpu_s = 1.0 / bound,
                Figure::Maximum(quantity) => maximum.push((quantity, bound)),
            }
        }
        let times =
            |elapsed_s: f64, cpu_s: f64| [("elapsed_s", elapsed_s), ("user_s", cpu_s), ("system_s", 0.0)];
        let after = [&times(1.0, 1.0)[..], &maximum].concat();
        row(table, case, jobs, side(before, &times(elapsed_s, cpu_s)), side(&designs.after, &after))
    };
    let mut rows = Vec::new();
    for case in table.case_names() {
        for jobs in [1, 2, 3, 32] {
            rows.extend(designs.before.iter().map(|before| of(case, jobs, before)));
        }
    }
    rows
}

/// What each table expects is met by rows that are as good as it says, and missed by those that are a little
/// worse.
#[test]
fn every_expectation_is_met_or_missed_as_its_bound_says() {
    for table in TABLES {
        for (keep, wanted) in [(true, Outcome::Met), (false, Outcome::Missed)] {
            let (outcomes, said) = expect::verdict(table, &rows_that(table, keep), 2);
            assert!(outcomes.iter().all(|outcome| *outcome == wanted), "{}: {said:#?}", table.name);
            assert!(!said.iter().any(|said| said.contains("NaN")), "{said:#?}");
            let marked = said.iter().filter(|said| said.contains(", MISSED:")).count();
            assert_eq!(marked, if keep { 0 } else { outcomes.len() }, "{said:#?}");
        }
    }
}

/// One interval of 60 below 1 is expected by chance.
#[test]
fn what_chance_explains_is_not_called_a_miss() {
    let table = table("streams").unwrap();
    let designs = (table.designs)();
    let of = |ratio: f64| {
        let of = |design: &str, elapsed_s| side(design, &[("elapsed_s", elapsed_s)]);
        row(table, "randwrite", 1, of(&designs.before[0], ratio), of(&designs.after, 1.0))
    };
    let mut rows = vec![of(1.0); 59];
    rows.push(of(0.99));
    let said = verdict_text(table, &rows);
    assert!(said.contains("Speed: percpu should be at least 1.00"), "{said}");
    assert!(said.contains("is in 59 of 60 rows; ") && !said.contains("MISSED"), "{said}");
}

/// The verdict names rows with their intervals, beside CPU time and what was published.
#[test]
fn a_verdict_names_rows() {
    let table = table("zs-free").unwrap();
    let rows: Vec<Row> = rows_that(table, true).into_iter().filter(|row| row.case == "run-cache").collect();
    let said = verdict_text(table, &rows);
    for wanted in [
        "pool_locks_per_object: class-indexed should have at most 0.00 with any number of jobs, and has 0.00 at most in 4 rows; split has 0.00.",
        "Speed, run-cache: class-indexed should be at least 1.05 times as fast as split with 1 job, and is in 1 of 1 rows; reached with 1 job: 1.060 [1.060, 1.060]. By processor time with 1 job: 2.000 [2.000, 2.000]. Published with 1 job: 1.194.",
        "Speed, no-run-cache: not measured with 1 job,",
    ] {
        assert!(said.contains(wanted), "{wanted}: {said}");
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
