#![allow(clippy::unwrap_used)]

use std::time::Duration;

use super::*;
use crate::experiment::testing::{rounds, run_short, value};
use crate::experiment::{LabOptions, Side};
use uzram_bench::harness::corpus::Kind;

/// A short run of the whole table: every value is measured, whatever it is.
#[test]
fn every_value_of_the_short_form_is_measured() {
    let jobs = 2 * cpus() + 1;
    let options = LabOptions {
        jobs: vec![1, jobs],
        rounds: rounds(2, Duration::from_millis(15)),
        corpus: Source::Built(Kind::Mixed, 192),
        ..LabOptions::default()
    };
    // Six patterns and all six, with two numbers of jobs, two lists each.
    let report = run_short(&SERIES, &options, 7 * 2 * 2, &["randrw"]);
    let mut seconds = Vec::new();
    for row in &report.rows {
        let name = format!("{}, {} jobs, {}", row.case, row.jobs, row.before.design);
        for side in [&row.before, &row.after] {
            seconds.extend(&side.values["elapsed_s"]);
            let cpu_s = side.median("user_s").unwrap() + side.median("system_s").unwrap();
            assert!(cpu_s > 0.0, "{name}");
        }
        let gain = row.gain;
        assert!(gain.low <= gain.ratio && gain.ratio <= gain.high, "{name}");
        assert!(gain.p > 0.0 && gain.p <= 1.0, "{name}");
        assert_eq!(row.published.is_some(), row.jobs <= published::JOBS, "{name}");
        let Ok(pattern) = row.case.parse::<Pattern>() else { continue };
        assert_eq!(row.after.values.contains_key("sleeps_per_write"), pattern.writes(), "{name}");
        assert_eq!(row.after.values.contains_key("read_mb_per_s"), pattern.reads(), "{name}");
        // All designs did the same work in every round.
        let work = |side: &Side, round: usize| {
            (side.values["mb_per_s"][round] * side.values["elapsed_s"][round] * 1e6).round()
        };
        let first = work(&row.before, 0);
        for round in 0..2 {
            assert_eq!((work(&row.before, round), work(&row.after, round)), (first, first), "{name}");
        }
    }
    seconds.sort_unstable_by(f64::total_cmp);
    seconds.dedup();
    assert!(seconds.len() > 80, "only {} different times", seconds.len());
}

/// With a list of one stream and more jobs than CPUs, a holder is soon preempted, and the others find the
/// list empty.
#[test]
fn a_list_that_runs_dry_is_seen_to() {
    let mut devices = (SERIES.open)(&Source::Built(Kind::Mixed, 64), &["1".to_owned()]).unwrap();
    devices.begin("randwrite").unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let slept = (0..50).any(|seed| {
        let plan = Plan { design: 0, jobs: 2 * cpus(), work: 4000, seed, stop: &stop };
        let sample = devices.measure(&plan).unwrap();
        value(&sample, "sleeps_per_write") > 0.0
    });
    assert!(slept);
}
