//! The wanted figures of cold pages on other machines.

use super::Target;
use crate::remote::RemoteReport;

/// Returns its targets.
pub(super) fn remote_targets(report: Option<&RemoteReport>) -> Vec<Target> {
    let of = |figure: fn(&RemoteReport) -> f64| report.map(figure);
    vec![
        Target::at_least(
            "cold pages in Redis, out: speed / SET of values as long as extents",
            0.7,
            of(|report| report.out_ratio),
        ),
        Target::at_most("the same, a page in: p50 / GET's", 1.5, of(|report| report.read_ratios[0])),
        Target::at_most("the same: p99 / GET's", 4.0, of(|report| report.read_ratios[1])),
        Target::at_least(
            "the same, pages in in order / in no order: speed",
            3.0,
            of(|report| report.order_ratio),
        ),
        Target::at_least(
            "a backing file, encrypted / not, out: speed",
            0.9,
            of(|report| report.file_ratios[0]),
        ),
        Target::at_least("the same, pages in in no order: speed", 0.9, of(|report| report.file_ratios[1])),
    ]
}
