#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::*;
use crate::experiment::testing::{
    assert_complete, open_case, plan, rounds, row, run_short, side, value, verdict_text,
};
use crate::experiment::{LabOptions, Row, Side};
use uzram_bench::harness::corpus::Kind;

fn corpus() -> Source {
    Source::Built(Kind::Mixed, 192)
}

/// A short run of the whole table: every value is measured, whatever it is.
#[test]
fn every_value_of_the_short_form_is_measured() {
    let options =
        LabOptions { rounds: rounds(1, Duration::from_millis(2)), corpus: corpus(), ..LabOptions::default() };
    // Two numbers of jobs, two designs before and one beyond.
    let said = ["pinned-deferred", "56.2 ms", "51.5 ms", "split-deferred / split, 3 jobs, time:"];
    for row in &run_short(&SERIES, &options, 2 * 3, &said).rows {
        assert_complete(&SERIES, row);
        for side in [&row.before, &row.after] {
            // Memory is back when the last object is freed, or later.
            let [ms, back_ms] = ["full_size_ms", "full_size_back_ms"].map(|name| side.median(name).unwrap());
            assert!(back_ms >= 0.999 * ms, "{}: {back_ms} < {ms}", side.design);
            if !side.design.ends_with("deferred") {
                assert!(back_ms < 1.001 * ms, "{}: {back_ms} > {ms}", side.design);
            }
        }
        assert_eq!(row.published.is_some(), row.before.design == SPLIT);
    }
}

/// A batch takes locks once for many objects.
#[test]
fn deferred_frees_take_fewer_locks() {
    let stop = AtomicBool::new(false);
    let mut pools = open_case(&SERIES, &corpus(), zs_free::RUN_CACHE);
    for (i, (design, _)) in DESIGNS.iter().enumerate() {
        for jobs in [1, 3] {
            let sample = pools.measure(&plan(i, jobs, 60_000, &stop)).unwrap();
            let [pool, class] =
                ["pool_locks_per_object", "class_locks_per_object"].map(|name| value(&sample, name));
            let name = format!("{design}, {jobs} jobs: {pool}, {class}");
            match *design {
                SPLIT => assert_eq!((pool, class), (1.0, 1.0), "{name}"),
                PINNED => assert_eq!((pool, class), (0.0, 1.0), "{name}"),
                PINNED_DEFERRED => assert!(pool == 0.0 && class < 0.5, "{name}"),
                _ => assert!(pool < 0.1 && class < 0.5, "{name}"),
            }
        }
    }
}

fn measured(design: &str, elapsed_s: f64, cpu_s: f64, back_s: f64) -> Side {
    side(design, &[("elapsed_s", elapsed_s), ("user_s", cpu_s), ("system_s", 0.0), ("back_s", back_s)])
}

fn rows(jobs: usize, after: &Side) -> Vec<Row> {
    let row = |before: Side, after: Side| row(&SERIES, zs_free::RUN_CACHE, jobs, before, after);
    vec![
        row(measured(SPLIT, 1.0, 1.0, 1.0), after.clone()),
        row(measured(PINNED, 0.5, 0.5, 0.5), after.clone()),
        row(after.clone(), measured(SPLIT_DEFERRED, 0.25, 0.8, 0.75)),
    ]
}

#[test]
fn the_verdict_judges_both_times_and_tells_all_three() {
    let good = measured(PINNED_DEFERRED, 0.1, 0.5, 0.4);
    let verdict = verdict_text(&SERIES, &[rows(1, &good), rows(3, &good)].concat());
    for said in [
        "Speed: pinned-deferred should be at least 3.00 times as fast as each design before with 1 job, and is in 2 of 2 rows",
        "Published with run-cache, 1 job against split: 3.267.",
        "at least 2.90 times as fast as each design before with 3 jobs, and is in 2 of 2 rows",
        "Processor time: pinned-deferred should take at most 1.00 times the processor time of each design before with 3 jobs, and does in 2 of 2 rows; reached with run-cache, 3 jobs against split: 0.500 [0.500, 0.500], run-cache, 3 jobs against pinned: 1.000 [1.000, 1.000].",
        "split-deferred / split, 1 job, time: until the jobs have freed 0.25 [0.25, 0.25], CPU of all threads 0.80 [0.80, 0.80], until all memory is back 0.75 [0.75, 0.75].",
        "pinned-deferred / pinned, 3 jobs, time: until the jobs have freed 0.20 [0.20, 0.20],",
    ] {
        assert!(verdict.contains(said), "{said}: {verdict}");
    }
    assert!(!verdict.contains("MISSED"), "{verdict}");

    let bad = measured(PINNED_DEFERRED, 0.2, 0.6, 0.4);
    let verdict = verdict_text(&SERIES, &rows(1, &bad));
    for said in [
        "Speed, MISSED: pinned-deferred should be at least 3.00",
        "missed with run-cache, 1 job against pinned: 2.500 [2.500, 2.500]",
        "Processor time, MISSED: pinned-deferred should take at most 1.00",
        "and does in 1 of 2 rows",
        "missed with run-cache, 1 job against pinned: 1.200 [1.200, 1.200].",
    ] {
        assert!(verdict.contains(said), "{said}: {verdict}");
    }
}
