#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::testing::rounds;
use super::*;

/// What was measured: case, design, jobs, work, seed.
type Log = Arc<Mutex<Vec<(String, usize, usize, u64, u64)>>>;

/// A table whose measurements take 2 µs a unit of work before and 1 µs after.
#[derive(Default)]
struct Clockwork {
    log: Log,
    /// Whether there is a design beyond, of 0.5 µs, and another number of jobs in case two.
    beyond: bool,
}

struct Measuring {
    log: Log,
    case: String,
}

impl Table for Clockwork {
    fn name(&self) -> &'static str {
        "clockwork"
    }

    fn about(&self) -> &'static str {
        "two speeds"
    }

    fn series(&self) -> Series {
        Series { title: "clockwork: faster", author: "Nobody", date: "2000" }
    }

    fn cases(&self) -> Vec<&'static str> {
        vec!["one", "two"]
    }

    fn jobs(&self, case: &str) -> Vec<usize> {
        if self.beyond && case == "two" { vec![2] } else { vec![1, 3] }
    }

    fn designs(&self) -> Designs {
        let beyond = self.beyond.then(|| "even-newer".to_owned()).into_iter().collect();
        Designs { before: vec!["old".to_owned()], after: "new".to_owned(), beyond }
    }

    fn unit(&self) -> Unit {
        Unit::Page
    }

    fn columns(&self) -> &'static [Column] {
        &[Column { value: "elapsed_s", heading: "elapsed", scale: 1000.0, decimals: 1 }]
    }

    fn legend(&self) -> Vec<String> {
        vec!["elapsed: milliseconds".to_owned()]
    }

    fn total(&self) -> Option<&'static str> {
        (!self.beyond).then_some("both")
    }

    fn open(&self, _: &Source, designs: &[String]) -> Result<Box<dyn Experiment>> {
        assert_eq!(designs, self.designs().all());
        Ok(Box::new(Measuring { log: Arc::clone(&self.log), case: String::new() }))
    }

    fn published(&self, _: &str, _: usize, _: usize) -> Option<Published> {
        None
    }

    fn counted_function(&self) -> &'static str {
        ""
    }

    fn verdict(&self, rows: &[Row]) -> Vec<String> {
        vec![format!("{} rows", rows.len())]
    }
}

impl Experiment for Measuring {
    fn begin(&mut self, case: &str) -> Result<()> {
        self.case = case.to_owned();
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let Plan { design, jobs, work, seed, .. } = *plan;
        self.log.lock().unwrap().push((self.case.clone(), design, jobs, work, seed));
        let elapsed = Duration::from_nanos(work * [2000, 1000, 500][design]);
        Ok(Sample { elapsed, values: vec![("user_s", 0.25)] })
    }
}

fn options() -> Options {
    Options { rounds: rounds(4, Duration::from_millis(10)), ..Options::default() }
}

#[test]
fn rounds_alternate_on_the_same_fixed_work() {
    let table = Clockwork::default();
    let report = run(&table, &options()).unwrap();
    let log = table.log.lock().unwrap();
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
        assert!((row.ratio - 2.0).abs() < 1e-9, "{row:?}");
        assert_eq!((row.ratio_low, row.ratio_high), (row.ratio, row.ratio));
        assert_eq!(row.p, 0.125, "the least that 4 rounds can give");
    }
    let total = report.rows.last().unwrap();
    assert_eq!((total.case.as_str(), total.after.median("user_s")), ("both", Some(0.5)));
    assert!(report.to_string().contains("\nVerdict\n6 rows\n"), "{report}");
}

#[test]
fn a_design_beyond_is_compared_with_the_one_after() {
    let table = Clockwork { beyond: true, ..Clockwork::default() };
    let report = run(&table, &options()).unwrap();
    let rows: Vec<_> = report.rows.iter().map(|row| (row.case.as_str(), row.jobs)).collect();
    // Each case with its own numbers of jobs, and no total.
    assert_eq!(rows, [("one", 1), ("one", 1), ("one", 3), ("one", 3), ("two", 2), ("two", 2)]);
    for pair in report.rows.chunks(2) {
        let designs = pair.iter().map(|row| (row.before.design.as_str(), row.after.design.as_str()));
        assert!(designs.eq([("old", "new"), ("new", "even-newer")]));
        assert!(pair.iter().all(|row| (row.ratio - 2.0).abs() < 1e-9), "{pair:?}");
    }
    let text = report.to_string();
    let gains: Vec<_> = text
        .lines()
        .skip_while(|line| *line != "two")
        .skip(2)
        .take(3)
        .map(|line| (line[5..15].trim(), line.contains("2.00 [")))
        .collect();
    // The work is calibrated on the design after.
    assert_eq!(gains, [("old", true), ("new", false), ("even-newer", true)], "{text}");
    assert!(text.contains("     new           10.0\n"), "{text}");
    // 3 numbers of jobs in all, 3 designs, 4 rounds and the warm-up.
    assert_eq!(options().estimate(&table).unwrap(), Duration::from_millis(450));
}

#[test]
fn the_json_has_the_documented_form() {
    let options = Options { cases: vec!["two".to_owned()], jobs: vec![3], ..options() };
    let report = run(&Clockwork::default(), &options).unwrap();
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
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
    let timed = |count, duration| Options { rounds: rounds(count, duration), ..options() };
    let second = Duration::from_secs(1);
    let cases = [
        (Options { cases: vec!["three".to_owned()], ..options() }, "--case"),
        (Options { jobs: vec![1, 0], ..options() }, "--jobs"),
        (Options { jobs: vec![257], ..options() }, "--jobs"),
        (timed(0, second), "--rounds"),
        (timed(101, second), "--rounds"),
        (timed(4, Duration::ZERO), "--seconds"),
        (timed(4, 3601 * second), "--seconds"),
    ];
    for (options, named) in cases {
        let error = run(&Clockwork::default(), &options).err().unwrap().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
    assert!(table("slabs").err().unwrap().to_string().contains("streams"));
}

#[test]
fn the_stop_flag_ends_a_run() {
    let options = options();
    options.rounds.stop.store(true, Ordering::Relaxed);
    assert_eq!(run(&Clockwork::default(), &options).err().unwrap().to_string(), "interrupted");
}

#[test]
fn the_estimate_counts_every_measurement() {
    // 2 cases, 2 numbers of jobs, 2 designs, 4 rounds and the warm-up.
    assert_eq!(options().estimate(&Clockwork::default()).unwrap(), Duration::from_millis(400));
}
