//! The wanted figures of programs that swap.

use super::Target;
use crate::swap::{SIDES, SwapReport};

/// Returns its targets.
pub(super) fn swap_targets(report: Option<&SwapReport>) -> Vec<Target> {
    let mut targets = Vec::new();
    for (side, name) in SIDES.into_iter().enumerate().take(2) {
        targets.push(Target::at_most(
            format!("programs in swap, {name}: time / kernel zram, geometric mean"),
            1.2,
            report.and_then(|report| report.mean_ratio(side)),
        ));
        targets.push(Target::at_most(
            "the same: the slowest",
            1.5,
            report.and_then(|report| report.worst_ratio(side)),
        ));
    }
    targets.push(Target::at_most(
        "programs in swap: failed writes",
        0.0,
        report.and_then(SwapReport::failed_writes).map(|writes| writes as f64),
    ));
    targets
}
