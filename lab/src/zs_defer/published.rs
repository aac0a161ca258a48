//! The author's figures.
//!
//! Wenchao Hao, "Re: [RFC PATCH v2 0/4] mm/zsmalloc: reduce zs_free() latency on swap release path", 30 April 2026:
//! processes on a Raspberry Pi 4B that unmap 256 MB each, swapped out to zram, at the same time. His "Base" has no patch of
//! the series; "Deferred" also has the class's index in the object word.

use std::collections::BTreeMap;

use super::JOBS;
use crate::experiment::{Published, PublishedSide};

/// Milliseconds, by the number of processes in [`JOBS`].
const BASE_MS: [f64; JOBS.len()] = [56.2, 153.2];
const DEFERRED_MS: [f64; JOBS.len()] = [17.2, 51.5];

/// Returns the published figures.
pub(super) fn figures(jobs: usize) -> Option<Published> {
    let at = JOBS.iter().position(|published| *published == jobs)?;
    let side = |design, ms: f64| PublishedSide {
        design,
        figure: format!("{ms:.1} ms"),
        values: BTreeMap::from([("elapsed_s", ms / 1000.0)]),
    };
    let (before, after) = (side("Base", BASE_MS[at]), side("Deferred", DEFERRED_MS[at]));
    Some(Published { before, after, ratio: BASE_MS[at] / DEFERRED_MS[at] })
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let text = |at: usize| format!("{:.1} -> {:.1} ms", BASE_MS[at], DEFERRED_MS[at]);
    format!(
        "published: 1 and 3 processes unmap 256 MB each, in the kernel, on a Raspberry Pi 4B: {}, {}; no figures of CPU time, nor of when the memory is back",
        text(0),
        text(1)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_gains_are_those_of_the_letter() {
        let rounded = |jobs| (100.0 * figures(jobs).unwrap().ratio).round() / 100.0;
        assert_eq!([1, 3].map(rounded), [3.27, 2.97]);
        assert!(figures(2).is_none());
        assert!(legend().contains("56.2 -> 17.2 ms, 153.2 -> 51.5 ms"), "{}", legend());
    }
}
