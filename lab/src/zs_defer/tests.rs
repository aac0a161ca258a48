use super::*;
use crate::experiment::testing::{open_case, plan, value};

/// A deferred free takes the same locks, later.
#[test]
fn deferring_a_free_saves_no_lock() {
    let mut pools = open_case(&SERIES, zs_free::RUN_CACHE);
    for (i, (design, _)) in DESIGNS.iter().enumerate() {
        for jobs in [1, 3] {
            let sample = pools.measure(&plan(i, jobs, 60_000)).unwrap();
            let [pool, class] =
                ["pool_locks_per_object", "class_locks_per_object"].map(|name| value(&sample, name));
            let name = format!("{design}, {jobs} jobs: {pool}, {class}");
            // Memory is back when the last object is freed, or later.
            let back = value(&sample, "back_s") / sample.elapsed.as_secs_f64();
            assert!(back > 0.999 && (back < 1.001 || design.ends_with("deferred")), "{name}: {back}");
            match *design {
                SPLIT | SPLIT_DEFERRED => assert_eq!((pool, class), (1.0, 1.0), "{name}"),
                _ => assert_eq!((pool, class), (0.0, 1.0), "{name}"),
            }
        }
    }
}
