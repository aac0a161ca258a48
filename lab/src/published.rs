//! The figures that others published: the file `lab/published.toml`, which is part of the program.
//!
//! Its head says how figures are written. `beside` finds those that stand beside a row of a table; `tables`
//! shows all of a series as they are written. A file that cannot be read is a mistake in the source tree,
//! which a test finds.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use uzram_bench::harness::report::Table;
use uzram_bench::harness::stats::median;

/// The file's parts, by their names.
static PARTS: LazyLock<BTreeMap<String, Part>> =
    LazyLock::new(|| match toml::from_str(include_str!("../published.toml")) {
        Ok(parts) => parts,
        Err(error) => panic!("lab/published.toml: {error}"),
    });

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    /// The author's names of the columns.
    designs: Vec<String>,
    source: Source,
    figures: Vec<Figures>,
}

/// Where figures come from.
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Figures {
    about: String,
    unit: Option<String>,
    /// The cases that they stand beside.
    #[serde(default)]
    cases: Vec<String>,
    /// The designs before that the first columns are, by index.
    #[serde(default)]
    before: Vec<usize>,
    #[serde(default)]
    quantity: String,
    scale: Option<f64>,
    #[serde(default)]
    decimals: usize,
    /// What differs between the rows; jobs if `None`.
    varied: Option<String>,
    rows: Vec<Line>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    jobs: usize,
    /// The number of jobs here that it stands beside, if that is another one.
    beside: Option<usize>,
    figures: Vec<Figure>,
}

/// A figure as its source writes it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Figure {
    Number(f64),
    Text(String),
    Runs(Vec<f64>),
}

/// The author's figure for one design.
#[derive(Clone, Debug, Serialize)]
pub struct PublishedSide {
    /// The author's name for it.
    pub design: &'static str,
    /// The figure as it is shown in the table.
    #[serde(skip)]
    pub figure: String,
    /// The figure by the name of its quantity.
    pub values: BTreeMap<&'static str, f64>,
}

/// The author's figures for a row.
#[derive(Clone, Debug, Serialize)]
pub struct Published {
    /// The design before.
    pub before: PublishedSide,
    /// The design after.
    pub after: PublishedSide,
    /// How many times as fast the design after was.
    pub ratio: f64,
}

fn part(name: &str) -> &'static Part {
    PARTS.get(name).unwrap_or_else(|| panic!("lab/published.toml has no part {name}"))
}

/// Returns the source of a part.
pub fn source(name: &str) -> &'static Source {
    &part(name).source
}

/// Returns the figures of a part for a case and a number of jobs, of the design before at an index and the
/// one after.
pub(crate) fn beside(name: &str, case: &str, jobs: usize, before: usize) -> Option<Published> {
    let part = part(name);
    let figures = part.figures.iter().find(|figures| figures.cases.iter().any(|of| of == case))?;
    let row = figures.rows.iter().find(|row| row.beside.unwrap_or(row.jobs) == jobs)?;
    let (before, after) = (figures.before.iter().position(|of| *of == before)?, figures.before.len());
    let side = |column: usize| {
        let value = row.value(column)?;
        let (shown, unit) =
            (value * figures.scale.unwrap_or(1.0), figures.unit.as_deref().unwrap_or_default());
        let decimals = figures.decimals;
        Some((
            value,
            PublishedSide {
                design: part.designs.get(column)?,
                figure: format!("{shown:.decimals$} {unit}"),
                values: BTreeMap::from([(figures.quantity.as_str(), value)]),
            },
        ))
    };
    let ((of_before, before), (of_after, after)) = (side(before)?, side(after)?);
    let ratio = if figures.is_rate() { of_after / of_before } else { of_before / of_after };
    Some(Published { before, after, ratio })
}

/// Returns all figures of a part as they are written, each kind with its heading.
pub(crate) fn tables(name: &str) -> Vec<(String, Table)> {
    let part = part(name);
    let table = |figures: &Figures| {
        let varied = figures.varied.as_deref().unwrap_or("jobs");
        let mut table = Table::new([varied].into_iter().chain(part.designs.iter().map(String::as_str)));
        for row in &figures.rows {
            table.row([row.jobs.to_string()].into_iter().chain(row.figures.iter().map(Figure::text)));
        }
        let unit = figures.unit.as_ref().filter(|_| figures.scale.is_none());
        let unit = unit.map_or_else(String::new, |unit| format!(", {unit}"));
        (format!("Published: {}{unit}", figures.about), table)
    };
    part.figures.iter().map(table).collect()
}

impl Figures {
    /// Returns whether more is better.
    fn is_rate(&self) -> bool {
        self.unit.as_ref().is_some_and(|unit| unit.ends_with("/s"))
    }
}

impl Line {
    /// Returns a figure as a number; a rate in 10^6 bytes a second.
    fn value(&self, column: usize) -> Option<f64> {
        let rate = |text: &str| {
            let in_unit =
                |unit: &str, bytes: f64| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * bytes / 1e6);
            in_unit("MB/s", 1_048_576.0).or_else(|| in_unit("KB/s", 1024.0))
        };
        match self.figures.get(column)? {
            Figure::Number(number) => Some(*number),
            Figure::Runs(runs) => Some(median(runs)),
            Figure::Text(text) => match text.strip_suffix(" %") {
                Some(_) if column == 0 => None,
                Some(percent) => Some(self.value(0)? * (1.0 + percent.parse::<f64>().ok()? / 100.0)),
                None => text.split(" + ").map(rate).sum(),
            },
        }
    }
}

impl Figure {
    fn text(&self) -> String {
        match self {
            Figure::Number(number) => number.to_string(),
            Figure::Text(text) => text.clone(),
            Figure::Runs(runs) => runs.iter().map(f64::to_string).collect::<Vec<_>>().join(", "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::TABLES;

    /// Every figure is a number; a part's columns have names; texts have no gaps where the file breaks lines.
    #[test]
    fn the_file_is_complete() {
        for (name, part) in PARTS.iter() {
            let used = TABLES.iter().any(|table| table.published == name);
            assert!(used && !part.figures.is_empty(), "{name}");
            for row in part.figures.iter().flat_map(|figures| &figures.rows) {
                assert!((1..=part.designs.len()).contains(&row.figures.len()), "{name}");
                let is_number = |column| row.value(column).is_some_and(|value| value > 0.0);
                assert!((0..row.figures.len()).all(is_number), "{name}, {}", row.jobs);
            }
            for figures in part.figures.iter().filter(|figures| !figures.cases.is_empty()) {
                assert!(!figures.quantity.is_empty() && figures.unit.is_some(), "{name}: {}", figures.about);
            }
            let Source { title, author, date, machine, command, note } = &part.source;
            for text in [title, author, date, machine, command].into_iter().chain(note) {
                let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
                assert!(!text.is_empty() && words == *text, "{name}: {text}");
            }
        }
    }

    #[test]
    fn figures_stand_beside_their_rows() {
        for (name, case, jobs, before, figures, gain) in [
            ("streams", "randwrite", 4, 0, ["3784 MB/s", "6066 MB/s"], 1.60),
            ("streams", "randrw", 1, 1, ["830 MB/s", "826 MB/s"], 1.00),
            ("streams", "all six", 10, 1, ["43.9 s", "35.6 s"], 1.23),
            ("slab-freeze", "messaging", 5, 0, ["7.042 s", "6.985 s"], 1.01),
            ("slab-freeze", "rawpkt", 8, 0, ["2.440 s", "2.160 s"], 1.13),
            ("zs-lock", "files", 32, 0, ["13575 /s", "13531 /s"], 1.00),
            ("zs-lock", "ext4", 32, 0, ["16986 /s", "16839 /s"], 0.99),
            ("zs-free", "run-cache", 1, 0, ["11.7 ms", "9.8 ms"], 1.19),
            ("zs-free", "paged-out", 4, 0, ["63.0 ms", "45.3 ms"], 1.39),
            ("zs-defer", "run-cache", 1, 0, ["56.2 ms", "17.2 ms"], 3.27),
            ("zs-defer", "run-cache", 3, 0, ["153.2 ms", "51.5 ms"], 2.97),
            ("lru-batch", "page-fault", 16, 3, ["7625 k/s", "8264 k/s"], 1.08),
            ("lru-batch", "page-fault", 4, 1, ["2591 k/s", "2643 k/s"], 1.02),
            ("lru-batch", "page-fault", 64, 0, ["12081 k/s", "14729 k/s"], 1.22),
        ] {
            let Published { before, after, ratio } = beside(name, case, jobs, before).unwrap();
            assert_eq!([before.figure, after.figure], figures, "{name}, {case}");
            assert_eq!((100.0 * ratio).round() / 100.0, gain, "{name}, {case}, {jobs}");
        }
        for (name, case, jobs, before) in [
            ("streams", "read", 11, 0),
            ("slab-freeze", "rawpkt", 128, 0),
            ("zs-free", "run-cache", 3, 0),
            ("zs-free", "run-cache", 4, 1),
            ("lru-batch", "page-fault", 16, 2),
            ("zs-lock", "build", 32, 0),
        ] {
            assert!(beside(name, case, jobs, before).is_none(), "{name}, {case}, {jobs}");
        }
    }

    /// The units of the letter of 2016 change from KB/s to MB/s within columns; a mistake would stand out.
    #[test]
    fn no_rate_is_out_of_line() {
        for case in ["read", "randread", "write", "randwrite", "rw", "randrw"] {
            for (jobs, before) in (1..=10).flat_map(|jobs| [(jobs, 0), (jobs, 1)]) {
                let gain = beside("streams", case, jobs, before).unwrap().ratio;
                assert!((0.95..1.85).contains(&gain), "{case}, {jobs} jobs: {gain}");
            }
        }
    }
}
