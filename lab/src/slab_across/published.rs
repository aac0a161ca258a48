//! The published figures.
//!
//! Ming Lei, "[Regression] mm:slab/sheaves: severe performance regression in cross-CPU slab allocation", 24 February
//! 2026: IOPS of a ublk null device with 16 queues, read by 16 jobs of fio's t/io_uring, on a NUMA machine with 32 CPUs
//! or more.
//!
//! Aishwarya Rambhadran, "[REGRESSION] slab: replace cpu (partial) slabs with sheaves", 26 March 2026: perf bench
//! syscall fork and execve, on AWS Graviton3 and Sapphire Rapids.

use std::collections::BTreeMap;

use super::{Case, MOST_PAIRS};
use crate::experiment::{Published, PublishedSide};

pub(super) const TITLE: &str =
    "[Regression] mm:slab/sheaves: severe performance regression in cross-CPU slab allocation";
pub(super) const AUTHOR: &str = "Ming Lei";
pub(super) const DATE: &str = "24 February 2026";

/// Millions of I/O operations a second, with Linux 6.19 and with 7.0-rc.
const BEFORE_MIOPS: f64 = 36.0;
const AFTER_MIOPS: f64 = 13.0;
/// By how many percent fork and execve were slower with Linux 7.0-rc1 to rc5 than with 6.19, at least and at most.
const FORK_PERCENT: [u32; 2] = [6, 11];

/// Returns the figures: beside the case that comes closest, with the most pairs.
pub(super) fn figures(case: &str, jobs: usize) -> Option<Published> {
    if case != Case::BurstsNowait.name() || jobs != MOST_PAIRS {
        return None;
    }
    let side = |design, miops: f64| PublishedSide {
        design,
        figure: format!("{miops:.0} MIOPS"),
        values: BTreeMap::from([("iops", miops * 1e6)]),
    };
    let (before, after) = (side("v6.19", BEFORE_MIOPS), side("v7.0-rc", AFTER_MIOPS));
    Some(Published { before, after, ratio: AFTER_MIOPS / BEFORE_MIOPS })
}

/// Returns the loss that was published, in percent.
pub(super) fn loss_percent() -> f64 {
    100.0 * (1.0 - AFTER_MIOPS / BEFORE_MIOPS)
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let [least, most] = FORK_PERCENT;
    format!(
        "published figures: a ublk null device with 16 queues, read by 16 jobs on 32 CPUs, about {BEFORE_MIOPS:.0} million IOPS with Linux 6.19 and {AFTER_MIOPS:.0} million with 7.0-rc; also, not in the table: fork and execve {least} to {most} % slower (\"[REGRESSION] slab: replace cpu (partial) slabs with sheaves\", Aishwarya Rambhadran, 26 March 2026)"
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_figures_of_the_report_are_found() {
        let found = figures("bursts-nowait", 4).unwrap();
        assert_eq!((found.before.figure.as_str(), found.after.figure.as_str()), ("36 MIOPS", "13 MIOPS"));
        assert!((found.ratio - 0.361).abs() < 1e-3 && (loss_percent() - 64.0).abs() < 0.5);
        assert!(figures("bursts-nowait", 1).is_none() && figures("same-cpu", 4).is_none());
        assert!(legend().contains("6 to 11 %"), "{}", legend());
    }
}
