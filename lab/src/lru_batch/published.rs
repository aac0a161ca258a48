//! The authors' figures.
//!
//! Daniel Jordan and Steve Sistare, "lru_lock scalability", RFC of 31 January 2018: will-it-scale's `page_fault1`
//! as processes, pages a second, on two sockets with 44 cores in all; Linux 4.15-rc2, with the per-CPU page lists'
//! batch at 310, with batch locks besides, and with splicing besides.

use std::collections::BTreeMap;

use super::{AFTER_AT, DESIGNS, TWO_PASSES, ZONE_BATCH};
use crate::experiment::{Published, PublishedSide};

/// Page faults a second of so many tasks in all.
struct Tasks {
    tasks: usize,
    base: f64,
    zone_batch: f64,
    lru_batch: f64,
    splice: f64,
}

/// For 4 tasks the letter gives the second and the third figure in percent only.
const MEASURED: [Tasks; 5] = [
    Tasks { tasks: 1, base: 705_533.0, zone_batch: 722_912.0, lru_batch: 724_215.0, splice: 721_746.0 },
    Tasks {
        tasks: 4,
        base: 2_525_487.0,
        zone_batch: 2_525_487.0 * 1.026,
        lru_batch: 2_525_487.0 * 1.023,
        splice: 2_643_251.0,
    },
    Tasks {
        tasks: 16,
        base: 6_444_656.0,
        zone_batch: 6_566_846.0,
        lru_batch: 7_624_749.0,
        splice: 8_264_125.0,
    },
    Tasks {
        tasks: 32,
        base: 11_564_988.0,
        zone_batch: 11_777_119.0,
        lru_batch: 13_426_746.0,
        splice: 14_593_745.0,
    },
    Tasks {
        tasks: 64,
        base: 12_080_629.0,
        zone_batch: 12_551_136.0,
        lru_batch: 13_892_933.0,
        splice: 14_728_765.0,
    },
];

/// Returns the figure for one of our designs, if there is one, and its name there.
fn side(tasks: &Tasks, design: &str) -> Option<(&'static str, f64)> {
    match design {
        super::SINGLE_LOCK => Some(("4.15-rc2", tasks.base)),
        ZONE_BATCH => Some(("zone batch", tasks.zone_batch)),
        TWO_PASSES => Some(("lru batch", tasks.lru_batch)),
        super::AFTER => Some(("splice", tasks.splice)),
        _ => None,
    }
}

/// Returns the published figures for the design at `before`.
pub(super) fn figures(jobs: usize, before: usize) -> Option<Published> {
    let tasks = MEASURED.iter().find(|measured| measured.tasks == jobs)?;
    let side = |at: usize| {
        let (design, faults_per_s) = side(tasks, DESIGNS.get(at)?.0)?;
        let figure = format!("{:.0} k/s", faults_per_s / 1000.0);
        Some((
            faults_per_s,
            PublishedSide { design, figure, values: BTreeMap::from([("faults_per_s", faults_per_s)]) },
        ))
    };
    let ((base, before), (splice, after)) = (side(before)?, side(AFTER_AT)?);
    Some(Published { before, after, ratio: splice / base })
}

/// Returns the speedup of the whole series over the base kernel with so many tasks.
pub(super) fn gain(tasks: usize) -> Option<f64> {
    figures(tasks, 0).map(|published| published.ratio)
}

/// Returns the text about all figures.
pub(super) fn legend() -> String {
    let line = |measured: &Tasks| {
        let thousands = |faults_per_s: f64| faults_per_s / 1000.0;
        format!(
            "{}: {:.0} / {:.0} / {:.0} / {:.0}",
            measured.tasks,
            thousands(measured.base),
            thousands(measured.zone_batch),
            thousands(measured.lru_batch),
            thousands(measured.splice)
        )
    };
    format!(
        "published: thousands of page faults a second by so many processes, on 44 cores of Xeon E5-2699 v4, of Linux 4.15-rc2 / with {ZONE_BATCH} / with batch locks / with splicing: {}; batches of 56: the same, with 64 processes about 10 % slower",
        MEASURED.iter().map(line).collect::<Vec<_>>().join("; ")
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_gains_are_those_of_the_letter() {
        let percent = |tasks| (1000.0 * (gain(tasks).unwrap() - 1.0)).round() / 10.0;
        assert_eq!([1, 4, 16, 32, 64].map(percent), [2.3, 4.7, 28.2, 26.2, 21.9]);
        let sixteen = figures(16, 3).unwrap();
        assert_eq!((sixteen.before.figure.as_str(), sixteen.after.figure.as_str()), ("7625 k/s", "8264 k/s"));
        assert!(figures(16, 2).is_none(), "one pass was not measured by itself");
        assert!(figures(2, 0).is_none() && gain(8).is_none());
        assert!(legend().contains("1: 706 / 723 / 724 / 722; 4: 2525 / 2591 / 2584 / 2643;"), "{}", legend());
    }
}
