//! The author's figures, from the file of published figures: times to unmap memory that is swapped out to zram.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::{JOBS, SERIES};
use crate::experiment::{Published, PublishedSide};
use crate::published::part;

/// The author's table.
static LETTER: LazyLock<Letter> = LazyLock::new(|| part(SERIES.name));

/// Milliseconds, by number of processes.
#[derive(Deserialize)]
struct Letter {
    /// The names of the sides before and after.
    designs: [String; 2],
    processes: [usize; JOBS.len()],
    base_ms: [f64; JOBS.len()],
    deferred_ms: [f64; JOBS.len()],
}

/// Returns the published figures.
pub(super) fn figures(jobs: usize) -> Option<Published> {
    let Letter { designs, processes, base_ms, deferred_ms } = &*LETTER;
    let at = processes.iter().position(|published| *published == jobs)?;
    let side = |design: usize, ms: f64| PublishedSide {
        design: &designs[design],
        figure: format!("{ms:.1} ms"),
        values: BTreeMap::from([("elapsed_s", ms / 1000.0)]),
    };
    let (before, after) = (side(0, base_ms[at]), side(1, deferred_ms[at]));
    Some(Published { before, after, ratio: base_ms[at] / deferred_ms[at] })
}

/// Returns the text about the source of the figures.
pub(super) fn legend() -> String {
    let Letter { base_ms, deferred_ms, .. } = &*LETTER;
    let text = |at: usize| format!("{:.1} -> {:.1} ms", base_ms[at], deferred_ms[at]);
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
