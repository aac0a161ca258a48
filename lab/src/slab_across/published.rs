//! The published figures, from the file of those: I/O operations a second of a ublk null device.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::{Case, MOST_PAIRS, SERIES};
use crate::experiment::{Published, PublishedSide};
use crate::published::{Source, part};

static REPORT: LazyLock<Report> = LazyLock::new(|| part(SERIES.name));

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Report {
    /// The names of the sides before and after.
    designs: [String; 2],
    /// Jobs that read, beside which stand the most pairs here.
    jobs: usize,
    /// Millions of I/O operations a second.
    before_miops: f64,
    after_miops: f64,
    fork: Fork,
    source: Source,
}

/// Another report of the same sheaves.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fork {
    /// By how many percent fork and execve were slower, at least and at most.
    slower_percent: [u32; 2],
    title: String,
    author: String,
    date: String,
}

/// Returns the figures: beside the case that comes closest, with the most pairs.
pub(super) fn figures(case: &str, jobs: usize) -> Option<Published> {
    if case != Case::BurstsNowait.name() || jobs != MOST_PAIRS {
        return None;
    }
    let Report { designs, before_miops, after_miops, .. } = &*REPORT;
    let side = |design: usize, miops: f64| PublishedSide {
        design: &designs[design],
        figure: format!("{miops:.0} MIOPS"),
        values: BTreeMap::from([("iops", miops * 1e6)]),
    };
    let (before, after) = (side(0, *before_miops), side(1, *after_miops));
    Some(Published { before, after, ratio: after_miops / before_miops })
}

/// Returns the loss that was published, in percent.
pub(super) fn loss_percent() -> f64 {
    100.0 * (1.0 - REPORT.after_miops / REPORT.before_miops)
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let Report { designs: [before, after], jobs, before_miops, after_miops, fork, source } = &*REPORT;
    let Fork { slower_percent: [least, most], title, author, date } = fork;
    format!(
        "published figures: a ublk null device, read by {jobs} jobs on {} ({}), about {before_miops:.0} million IOPS with {before} and {after_miops:.0} million with {after}; also, not in the table: fork and execve {least} to {most} % slower (\"{title}\", {author}, {date})",
        source.machine, source.command
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
