//! The author's figures, from the file of published figures.
//!
//! The fifth version, which was merged for Linux 6.8, measured the side after again.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::{Case, MOST_THREADS, SERIES};
use crate::experiment::{Published, PublishedSide};
use crate::published::{Source, part};
use uzram_bench::harness::stats::median;

/// Groups of `perf bench sched messaging -g 5 -t -l 100000`.
pub(super) const MESSAGING_GROUPS: usize = 5;

/// The author's tables.
static LETTER: LazyLock<Letter> = LazyLock::new(|| part(SERIES.name));

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Letter {
    /// The names of the sides before and after.
    designs: [String; 2],
    cpus_per_node: usize,
    messaging: Runs,
    rawpkt: Runs,
    source: Source,
}

/// Seconds of three runs each.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Runs {
    command: String,
    /// Groups or threads.
    jobs: usize,
    before_s: [f64; 3],
    after_s: [f64; 3],
    /// With the fifth version.
    merged_s: [f64; 3],
}

fn runs(case: Case) -> &'static Runs {
    match case {
        Case::Messaging => &LETTER.messaging,
        Case::Rawpkt => &LETTER.rawpkt,
    }
}

/// Returns the number of the author's CPUs that share a node's `list_lock`.
pub(super) fn cpus_per_node() -> usize {
    LETTER.cpus_per_node
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
    let side = |design: usize, seconds: &[f64]| {
        let elapsed_s = median(seconds);
        let values = BTreeMap::from([("elapsed_s", elapsed_s)]);
        PublishedSide { design: &LETTER.designs[design], figure: format!("{elapsed_s:.3} s"), values }
    };
    let Runs { before_s, after_s, .. } = runs(case);
    let (before, after) = (side(0, before_s), side(1, after_s));
    Some(Published { before, after, ratio: median(before_s) / median(after_s) })
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let of = |case: Case| {
        let Runs { command, before_s, after_s, merged_s, .. } = runs(case);
        let said = |seconds: &[f64]| {
            let all: Vec<_> = seconds.iter().map(f64::to_string).collect();
            format!("{:.3} s ({})", median(seconds), all.join(", "))
        };
        format!(
            "{command}: {} before, {} after, {} with the version that was merged",
            said(before_s),
            said(after_s),
            said(merged_s)
        )
    };
    format!(
        "published figures are medians of three runs, which are in brackets, on {}: {}; {} (so {} threads, not {MOST_THREADS})",
        LETTER.source.machine,
        of(Case::Messaging),
        of(Case::Rawpkt),
        LETTER.rawpkt.jobs
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
        assert_eq!(LETTER.messaging.jobs, MESSAGING_GROUPS);
        assert!(legend().contains("6.934 s") && legend().contains("2.170 s"), "{}", legend());
    }
}
