use super::*;
use crate::experiment::testing::{open_case, plan, value};

/// With one task, the number of lock acquisitions is deterministic.
#[test]
fn each_step_takes_its_locks() {
    let mut lrus = open_case(&SERIES, CASE);
    const PAGES: u64 = 20 * 14 * 512;
    let mut lru_locks = |design: usize| {
        let sample = lrus.measure(&plan(design, 1, PAGES)).unwrap();
        let value = |name: &str| value(&sample, name);
        assert!(value("lru_lock_hold_ns_per_page") > 0.0 && value("ns_per_page") > 1.0);
        assert_eq!(value("batch_locks_per_page") > 0.0, design >= 2);
        value("lru_locks_per_page")
    };
    let locks: Vec<f64> = (0..DESIGNS.len()).map(&mut lru_locks).collect();
    let is_about = |at: usize, wanted: f64| {
        let of = locks[at] / wanted;
        assert!((0.9..1.1).contains(&of), "{}: {} of {wanted}", DESIGNS[at].0, locks[at]);
    };
    // A pagevec of 14 is added at once, and 32 pages are removed at once.
    is_about(0, 1.0 / 14.0 + 1.0 / 32.0);
    is_about(1, 1.0 / 14.0 + 1.0 / 32.0);
    // A batch is added under one hold and removed under another: in one pass each page removed makes the next
    // a sentinel.
    is_about(2, 2.0 / 14.0);
    // In two passes the two sentinels of each batch are removed, 16 at a time, of 512 pages that are removed
    // together.
    is_about(3, 1.0 / 14.0 + 5.0 / 512.0);
    is_about(4, 1.0 / 14.0 + 5.0 / 512.0);
    is_about(5, 1.0 / 56.0 + 2.0 / 512.0);
}
