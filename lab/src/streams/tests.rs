use super::*;
use crate::experiment::testing::{corpus, plan, value};

/// With a list of one stream and more jobs than CPUs, a holder is soon preempted, and the others find the
/// list empty.
#[test]
fn a_list_that_runs_dry_is_seen_to() {
    let mut devices = (SERIES.open)(&corpus(), &["1".to_owned()]).unwrap();
    devices.begin("randwrite").unwrap();
    let slept = (0..50).any(|seed| {
        let plan = Plan { seed, ..plan(0, 2 * cpus(), 4000) };
        let sample = devices.measure(&plan).unwrap();
        value(&sample, "sleeps_per_write") > 0.0
    });
    assert!(slept);
}
