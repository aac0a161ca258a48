use super::*;
use crate::experiment::testing::value;
use uzram_bench::harness::corpus::Kind;

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
