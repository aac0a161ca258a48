//! The authors' figures, from the file of published figures: pages a second of will-it-scale's `page_fault1`.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::{AFTER_AT, DESIGNS, SERIES, TWO_PASSES, ZONE_BATCH};
use crate::experiment::{Published, PublishedSide};
use crate::published::{Source, part};

/// The kernel, and the steps of the series: the index of each in the authors' columns.
const BASE: usize = 0;
const SPLICE: usize = 3;
const COLUMNS: usize = 4;

/// The authors' table.
static LETTER: LazyLock<Letter> = LazyLock::new(|| part(SERIES.name));

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Letter {
    designs: [String; COLUMNS],
    /// The setting of the per-CPU page lists' batch, from the second column on.
    zone_batch_pages: usize,
    rows: Vec<Tasks>,
    longer: Longer,
    source: Source,
}

/// Page faults a second of so many tasks in all.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tasks {
    tasks: usize,
    faults_per_s: [Faults; COLUMNS],
}

/// A figure of the letter.
#[derive(Deserialize)]
#[serde(untagged)]
enum Faults {
    PerSecond(f64),
    /// The gain over the kernel, as `2.6 %`.
    Gain(String),
}

/// What the letter says of longer batches.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Longer {
    batch_pages: usize,
    tasks: usize,
    slower_percent: f64,
}

impl Tasks {
    /// Returns a column's faults a second; `None` if the file has neither a number nor a gain there.
    fn per_second(&self, column: usize) -> Option<f64> {
        match &self.faults_per_s[column] {
            Faults::PerSecond(faults) => Some(*faults),
            Faults::Gain(_) if column == BASE => None,
            Faults::Gain(percent) => {
                let percent: f64 = percent.strip_suffix(" %")?.parse().ok()?;
                Some(self.per_second(BASE)? * (1.0 + percent / 100.0))
            }
        }
    }
}

/// Returns the authors' column of one of our designs, if there is one.
fn column(design: &str) -> Option<usize> {
    match design {
        super::SINGLE_LOCK => Some(BASE),
        ZONE_BATCH => Some(1),
        TWO_PASSES => Some(2),
        super::AFTER => Some(SPLICE),
        _ => None,
    }
}

/// Returns the published figures for the design at `before`.
pub(super) fn figures(jobs: usize, before: usize) -> Option<Published> {
    let tasks = LETTER.rows.iter().find(|row| row.tasks == jobs)?;
    let side = |at: usize| {
        let column = column(DESIGNS.get(at)?.0)?;
        let faults_per_s = tasks.per_second(column)?;
        let design = LETTER.designs[column].as_str();
        let figure = format!("{:.0} k/s", faults_per_s / 1000.0);
        let values = BTreeMap::from([("faults_per_s", faults_per_s)]);
        Some((faults_per_s, PublishedSide { design, figure, values }))
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
    let Letter { zone_batch_pages, rows, longer, source, .. } = &*LETTER;
    let line = |row: &Tasks| {
        let thousands = |column| row.per_second(column).map(|faults| format!("{:.0}", faults / 1000.0));
        let thousands: Option<Vec<String>> = (BASE..COLUMNS).map(thousands).collect();
        Some(format!("{}: {}", row.tasks, thousands?.join(" / ")))
    };
    format!(
        "published: thousands of page faults a second by so many processes, on {}, of Linux {} / with {ZONE_BATCH} ({zone_batch_pages} pages) / with batch locks / with splicing: {}; batches of {}: the same, with {} processes about {} % slower",
        source.machine,
        LETTER.designs[BASE],
        rows.iter().filter_map(line).collect::<Vec<_>>().join("; "),
        longer.batch_pages,
        longer.tasks,
        longer.slower_percent
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::lru::DEFAULT_PAGEVEC_PAGES;

    use super::super::{LONGER, ZONE_BATCH_PAGES};
    use super::*;

    const LONG_BATCH_PAGES: usize = DEFAULT_PAGEVEC_PAGES * LONGER;

    #[test]
    fn the_gains_are_those_of_the_letter() {
        let percent = |tasks| (1000.0 * (gain(tasks).unwrap() - 1.0)).round() / 10.0;
        assert_eq!([1, 4, 16, 32, 64].map(percent), [2.3, 4.7, 28.2, 26.2, 21.9]);
        let sixteen = figures(16, 3).unwrap();
        assert_eq!((sixteen.before.figure.as_str(), sixteen.after.figure.as_str()), ("7625 k/s", "8264 k/s"));
        assert!(figures(16, 2).is_none(), "one pass was not measured by itself");
        assert!(figures(2, 0).is_none() && gain(8).is_none());
        assert_eq!(
            (LETTER.zone_batch_pages, LETTER.longer.batch_pages),
            (ZONE_BATCH_PAGES, LONG_BATCH_PAGES)
        );
        assert!(legend().contains("1: 706 / 723 / 724 / 722; 4: 2525 / 2591 / 2584 / 2643;"), "{}", legend());
    }
}
