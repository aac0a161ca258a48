#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::*;
use crate::experiment::LabOptions;
use crate::experiment::testing::{assert_complete, open_case, plan, rounds, run_short, value};
use uzram::ErrorKind;
use uzram_bench::harness::corpus::Kind;

/// A short run of the whole table: every value is measured, whatever it is.
#[test]
fn every_value_of_the_short_form_is_measured() {
    let options = LabOptions { rounds: rounds(1, Duration::from_millis(5)), ..LabOptions::default() };
    // Five cases with two numbers of jobs, with one design before and two beyond.
    let said =
        ["same-cpu", "bursts-nowait", "elastic-sheaves", "36 MIOPS", "13 MIOPS", "collapse", "Why, for 1000"];
    for row in &run_short(&SERIES, &options, 5 * 2 * 3, &said).rows {
        assert_complete(&SERIES, row);
        let published = row.case == "bursts-nowait" && row.jobs == 4 && row.before.design == "delayed";
        assert_eq!(row.published.is_some(), published, "{}, {} jobs", row.case, row.jobs);
    }
}

/// Returns a case's counters for one object, of each design: by turns, they hardly depend on the scheduler.
fn counters(case: &str, jobs: usize, names: &[&str]) -> Vec<Vec<f64>> {
    let stop = AtomicBool::new(false);
    let mut caches = open_case(&SERIES, &Source::Built(Kind::Mixed, 1), case);
    let counts = |design| {
        let sample = caches.measure(&plan(design, jobs, 100_000, &stop)).unwrap();
        names.iter().map(|name| value(&sample, &format!("{name}_per_object"))).collect()
    };
    (0..DESIGNS.len()).map(counts).collect()
}

/// A burst that the barn cannot hold is emptied into slabs and comes back from there, in an elastic barn only at
/// first.
#[test]
fn an_elastic_barn_learns_to_hold_a_burst() {
    let counted =
        counters("bursts", 1, &["sheaf_refill", "sheaf_flush", "alloc_slowpath", "list_lock_acquired"]);
    let [delayed, bare, sheaves, elastic] = &counted[..] else { unreachable!() };
    assert!(delayed[0] == 0.0 && delayed[1] == 0.0, "{counted:?}");
    for fixed in [bare, sheaves] {
        assert!(fixed[0] > 0.001 && fixed[1] > 0.001, "{counted:?}");
    }
    for (fixed, elastic) in sheaves.iter().zip(elastic) {
        assert!(*elastic < 0.2 * fixed, "{counted:?}");
    }
}

/// An allocation that may not wait fills a sheaf in all designs but that of Linux 7.0-rc1, which takes `list_lock`
/// for each object.
#[test]
fn only_bare_sheaves_are_not_filled_without_waiting() {
    let counted = counters("bursts-nowait", 1, &["sheaf_refill", "alloc_slowpath", "list_lock_acquired"]);
    let [_, bare, sheaves, _] = &counted[..] else { unreachable!() };
    assert!(bare[0] < 0.001 && sheaves[0] > 0.001, "{counted:?}");
    assert!(bare[1] > 0.1 && bare[2] > bare[1] && bare[2] > 5.0 * sheaves[2], "{counted:?}");
}

/// The arena is too small for the objects in flight: some threads fail, and the others, which wait for them,
/// must not wait for ever.
#[test]
fn memory_that_runs_out_is_an_error() {
    let stop = AtomicBool::new(false);
    let cpus = work::cpus().unwrap();
    for (_, case) in CASES {
        for (name, measure) in DESIGNS {
            let arena = Arc::new(Arena::new(1 << 20).unwrap());
            arena.set_limit_pages(5);
            let error = measure(&arena, &cpus, case, &plan(0, 2, 1 << 30, &stop)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{case:?}, {name}: {error}");
        }
    }
}
