//! The figures that others published: the file `lab/published.toml`, which is part of the program.
//!
//! Each table's `published` module reads its part of the file, once, into its own types; what the
//! parts have in common, where the figures come from, is a [`Source`]. A file that cannot be read is a mistake
//! in the source tree, which a test finds.

use std::sync::LazyLock;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use uzram_bench::harness::report::Table;

use crate::experiment::Series;

/// The file.
const TEXT: &str = include_str!("../published.toml");

pub(crate) static FILE: LazyLock<toml::Table> = LazyLock::new(|| match TEXT.parse() {
    Ok(file) => file,
    Err(error) => panic!("lab/published.toml: {error}"),
});

/// The sources of all parts, by the names of their tables.
static SOURCES: LazyLock<Vec<(String, Source)>> =
    LazyLock::new(|| FILE.keys().map(|table| (table.clone(), part::<Part>(table).source)).collect());

/// Where a table's figures come from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The title of the series or of the letter.
    pub title: String,
    /// Who published the figures.
    pub author: String,
    /// When.
    pub date: String,
    /// The machine on which they were measured.
    pub machine: String,
    /// How.
    pub command: String,
    /// What must be known to read them.
    pub note: Option<String>,
}

/// What all parts have.
#[derive(Deserialize)]
struct Part {
    source: Source,
}

/// Reads the part of a table.
///
/// # Panics
/// The file has no such part, or not in this form.
pub(crate) fn part<T: DeserializeOwned>(table: &str) -> T {
    let part = FILE.get(table).cloned().unwrap_or_else(|| panic!("lab/published.toml has no part {table}"));
    part.try_into().unwrap_or_else(|error| panic!("lab/published.toml: {table}: {error}"))
}

/// Returns a table of published times in ms, before and after, by what is varied, each with its gain, and beside what was
/// measured here.
pub(crate) fn times_table(
    varied: &str,
    [before, after]: [&String; 2],
    here: &str,
    times: impl Iterator<Item = (String, [f64; 2], String)>,
) -> Table {
    let [before, after] = [before, after].map(|design| format!("{design}, ms"));
    let mut table = Table::new([varied, &before, &after, "gain", &format!("<{here}")]);
    for (varied, [before_ms, after_ms], ours) in times {
        let times = [before_ms, after_ms].map(|ms| format!("{ms:.1}"));
        table.row([varied].into_iter().chain(times).chain([format!("{:.2}", before_ms / after_ms), ours]));
    }
    table
}

/// Returns the source of the figures beside a table: that of its own part, else that of the same series.
pub fn source(table: &Series) -> Option<&'static Source> {
    let own = SOURCES.iter().find(|(name, _)| name == table.name);
    let source = own.or_else(|| SOURCES.iter().find(|(_, source)| source.title == table.title));
    source.map(|(_, source)| source)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::experiment::TABLES;

    #[test]
    fn every_table_has_a_source_and_names_the_same_series() {
        for table in TABLES {
            let source = source(table).unwrap_or_else(|| panic!("{} has no source", table.name));
            assert_eq!((source.title.as_str(), source.author.as_str()), (table.title, table.author));
            assert!(source.date.contains(table.date), "{}: {} and {}", table.name, source.date, table.date);
            for said in [&source.machine, &source.command] {
                assert!(!said.is_empty(), "{}", table.name);
            }
        }
    }

    #[test]
    fn every_part_has_a_source() {
        assert!(SOURCES.len() >= 6);
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        for (table, source) in SOURCES.iter() {
            let texts = [&source.title, &source.machine, &source.command].into_iter().chain(&source.note);
            for text in texts {
                assert_eq!(words(text), *text, "{table}: broken lines leave no gaps");
            }
        }
    }

    #[derive(Deserialize)]
    struct Times {
        processes: Vec<usize>,
        base_ms: Vec<f64>,
        deferred_ms: Vec<f64>,
    }

    #[test]
    fn deferred_frees_gained_what_the_letter_says() {
        let times: Times = part("zs-defer");
        assert_eq!(times.processes, [1, 3]);
        let gains = times.base_ms.iter().zip(&times.deferred_ms).map(|(base, deferred)| base / deferred);
        let rounded: Vec<f64> = gains.map(|gain| (100.0 * gain).round() / 100.0).collect();
        assert_eq!(rounded, [3.27, 2.97]);
    }
}
