//! The author's figures.
//!
//! Chengming Zhou, "slub: Delay freezing of CPU partial slabs", cover letter of October 2023, on a server
//! with 128 CPUs in 2 nodes; three runs each before and after. The fifth version, which was merged for Linux
//! 6.8, measured the side after again.

use std::collections::BTreeMap;

use super::{Case, MOST_THREADS};
use crate::experiment::{Published, PublishedSide};
use uzram_bench::harness::stats::median;

/// Groups of `perf bench sched messaging -g 5 -t -l 100000`.
pub(super) const MESSAGING_GROUPS: usize = 5;
/// CPUs of the author's machine that share a node's `list_lock`.
pub(super) const CPUS_PER_NODE: usize = 64;

/// Seconds of three runs each.
pub(super) struct Runs {
    command: &'static str,
    before: [f64; 3],
    after: [f64; 3],
    /// With the fifth version.
    merged: [f64; 3],
}

const MESSAGING: Runs = Runs {
    command: "perf bench sched messaging -g 5 -t -l 100000",
    before: [7.042, 7.022, 7.054],
    after: [6.966, 7.045, 6.985],
    merged: [6.934, 6.865, 7.009],
};

const RAWPKT: Runs = Runs {
    command: "stress-ng --rawpkt 128 --rawpkt-ops 100000000",
    before: [2.42, 2.45, 2.44],
    after: [2.15, 2.16, 2.17],
    merged: [2.18, 2.16, 2.17],
};

const fn runs(case: Case) -> &'static Runs {
    match case {
        Case::Messaging => &MESSAGING,
        Case::Rawpkt => &RAWPKT,
    }
}

/// Returns the published figures: those of rawpkt with 128 threads go with the most threads here.
pub(super) fn figures(case: Case, jobs: usize) -> Option<Published> {
    let beside = match case {
        Case::Messaging => MESSAGING_GROUPS,
        Case::Rawpkt => MOST_THREADS,
    };
    if jobs != beside {
        return None;
    }
    let side = |design, seconds: &[f64]| {
        let elapsed_s = median(seconds);
        let values = BTreeMap::from([("elapsed_s", elapsed_s)]);
        PublishedSide { design, figure: format!("{elapsed_s:.3} s"), values }
    };
    let (before, after) = (side("baseline", &runs(case).before), side("RFC", &runs(case).after));
    Some(Published { before, after, ratio: median(&runs(case).before) / median(&runs(case).after) })
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let of = |case: Case| {
        let Runs { command, before, after, merged } = runs(case);
        format!(
            "{command}: {:.3} s before, {:.3} s after, {:.3} s with the version that was merged",
            median(before),
            median(after),
            median(merged)
        )
    };
    format!(
        "published figures are medians of three runs on 128 CPUs in 2 nodes: {}; {} (so not {MOST_THREADS} threads)",
        of(Case::Messaging),
        of(Case::Rawpkt)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_medians_of_the_letter_are_found() {
        let messaging = figures(Case::Messaging, 5).unwrap();
        assert_eq!(
            (messaging.before.values["elapsed_s"], messaging.after.values["elapsed_s"]),
            (7.042, 6.985)
        );
        let rawpkt = figures(Case::Rawpkt, 8).unwrap();
        assert_eq!((rawpkt.before.figure.as_str(), rawpkt.after.figure.as_str()), ("2.440 s", "2.160 s"));
        assert!((rawpkt.ratio - 2.44 / 2.16).abs() < 1e-9 && (messaging.ratio - 7.042 / 6.985).abs() < 1e-9);
        assert!(figures(Case::Messaging, 8).is_none() && figures(Case::Rawpkt, 1).is_none());
        assert!(legend().contains("6.934 s") && legend().contains("2.170 s"), "{}", legend());
    }
}
