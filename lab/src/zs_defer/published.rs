//! The author's figures, from the file of published figures: times to unmap memory that is swapped out to zram.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::{JOBS, SERIES};
use crate::experiment::{Published, PublishedSide, Row, Side};
use crate::published::{Source, part, times_table};
use crate::zs_free::passes::FULL_SIZE_PAGES;
use uzram::units::pages_to_bytes;
use uzram_bench::harness::report::{Table, figure_cell};

/// The author's table.
static LETTER: LazyLock<Letter> = LazyLock::new(|| part(SERIES.name));

/// Milliseconds, by number of processes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Letter {
    /// The names of the sides before and after.
    designs: [String; 2],
    processes: [usize; JOBS.len()],
    base_ms: [f64; JOBS.len()],
    deferred_ms: [f64; JOBS.len()],
    sizes: Sizes,
    source: Source,
}

/// Milliseconds of one process, by the size of its memory.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sizes {
    mb: [u64; SIZES],
    base_ms: [f64; SIZES],
    deferred_ms: [f64; SIZES],
}

const SIZES: usize = 5;

/// Returns the published figures.
pub(super) fn figures(jobs: usize) -> Option<Published> {
    let Letter { designs, processes, base_ms, deferred_ms, .. } = &*LETTER;
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
    let Letter { processes: [one, most], base_ms, deferred_ms, source, .. } = &*LETTER;
    let text = |at: usize| format!("{:.1} -> {:.1} ms", base_ms[at], deferred_ms[at]);
    format!(
        "published: in the kernel, on {}: {}; with {one} process and with {most}: {}, {}; no figures of CPU time, nor of when the memory is back",
        source.machine,
        source.command,
        text(0),
        text(1)
    )
}

/// Returns the times of one process by the size of its memory, beside ours of the size that is measured here.
pub(crate) fn sizes(rows: &[Row]) -> (String, Table) {
    let Letter { designs: [before, after], sizes: Sizes { mb, base_ms, deferred_ms }, .. } = &*LETTER;
    let times = mb.iter().zip(base_ms.iter().zip(deferred_ms)).map(|(mb, (base, deferred))| {
        let is_of_size = *mb == pages_to_bytes(FULL_SIZE_PAGES) >> 20;
        let ours = rows.iter().find(|row| is_of_size && row.jobs == 1 && row.published.is_some());
        let ours = ours.map_or_else(String::new, |row| {
            let ms = |side: &Side| format!("{} {}", side.design, figure_cell(side.median("full_size_ms"), 2));
            format!("{}, {}, gain {:.2}", ms(&row.before), ms(&row.after), row.gain)
        });
        (mb.to_string(), [*base, *deferred], ours)
    });
    let table = times_table("MB", [before, after], "here, 1 job, ms", times);
    ("Published for one process, by the size of its memory".to_owned(), table)
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
