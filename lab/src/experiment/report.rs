//! The report of a table: rows, as JSON for programs and as text for people.
//!
//! The JSON is one object with the members of [`LabReport`], [`Row`] and the author's `published` figures.
//! For every quantity `values` has an array with one number a round: entries at one index in `before` and
//! `after` were measured in one round, one shortly after the other. Units are in the names; `…_per_page`,
//! `…_per_write` and `…_per_object` are counts divided by pages or objects. Quantities that a case does not
//! have are left out.

use std::fmt;

use serde::Serialize;

use super::expect::{self, Outcome};
use super::options::{LabOptions, cpus, pages_of};
use super::row::{Row, Side};
use super::series::{Column, Length, Series};
use crate::published::Source as PublishedSource;
use uzram_bench::harness::Source;
use uzram_bench::harness::report::{Table, figure_cell};
use uzram_bench::harness::stats::coverage;

/// The results of a table. `Display` prints it.
#[derive(Clone, Debug, Serialize)]
pub struct LabReport {
    /// The table's name.
    pub table: &'static str,
    /// The patch series: title, author, date.
    pub series: String,
    /// For each case and number of jobs a row for each design before, then one for each beyond.
    pub rows: Vec<Row>,
    /// How it was measured, and what was left out and why.
    #[serde(skip)]
    pub notes: Vec<String>,
    /// The verdict on the rows, in words.
    #[serde(skip)]
    pub verdict: Vec<String>,
    /// What became of each of the table's expectations, in their order.
    #[serde(skip)]
    pub(crate) outcomes: Vec<Outcome>,
    #[serde(skip)]
    columns: &'static [Column],
}

impl LabReport {
    pub(crate) fn new(
        table: &Series,
        options: &LabOptions,
        rows: Vec<Row>,
        left_out: Vec<String>,
    ) -> LabReport {
        let series = table.reference();
        let mut notes = vec![how(table, options), corpus(&options.corpus)];
        notes.extend((table.legend)());
        let after = (table.designs)().after;
        notes.push(format!(
            "gain: of {after} over the line's design; in lines below {after}, of the line's design over {after}"
        ));
        let PublishedSource { machine, command, note, .. } = table.source();
        let note = note.as_ref().map_or_else(String::new, |note| format!("; {note}"));
        notes.push(format!("published: {series}; on {machine}: {command}{note}"));
        notes.extend(left_out);
        let (outcomes, verdict) = expect::verdict(table, &rows, cpus());
        LabReport { table: table.name, series, rows, notes, verdict, outcomes, columns: table.columns }
    }
}

fn how(table: &Series, options: &LabOptions) -> String {
    let length = match table.length {
        Length::Calibrated => format!(" of {:.2} s a measurement", options.rounds.duration.as_secs_f64()),
        Length::Fixed { .. } => String::new(),
    };
    format!(
        "{} rounds{length}, medians; gain: elapsed before / after, the rounds' median, its {:.0}% interval, p of the signed-rank test",
        options.rounds.rounds,
        100.0 * coverage(options.rounds.rounds)
    )
}

/// Describes the corpus, which not every table uses.
fn corpus(source: &Source) -> String {
    let at_most = if matches!(source, Source::Processes(_)) { "at most " } else { "" };
    format!("corpus, for tables that store pages: {}, {at_most}{} pages", source.name(), pages_of(source))
}

impl fmt::Display for LabReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.table, self.series)?;
        for case in self.rows.chunk_by(|a, b| a.case == b.case) {
            write!(f, "\n{}\n{}", case[0].case, self.case_table(case).0)?;
        }
        writeln!(f)?;
        self.notes.iter().try_for_each(|note| wrap(f, note))?;
        writeln!(f, "\nVerdict")?;
        self.verdict.iter().try_for_each(|paragraph| wrap(f, paragraph))
    }
}

impl LabReport {
    /// Returns the table of one case's rows, and for each line the row whose gain it shows, if it shows one.
    pub(crate) fn case_table<'a>(&self, rows: &'a [Row]) -> (Table, Vec<Option<&'a Row>>) {
        let columns = self.columns.iter().map(|(_, heading, ..)| *heading);
        let headings = ["jobs", "<design"].into_iter().chain(columns);
        let mut table = Table::new(headings.chain(["<gain", "p", "published", "gain"]));
        let mut shown = Vec::new();
        for group in rows.chunk_by(|a, b| a.jobs == b.jobs) {
            let published_after = group.first().and_then(|row| row.published.as_ref());
            for (i, (side, row)) in lines(group).into_iter().enumerate() {
                let jobs = if i == 0 { group[0].jobs.to_string() } else { String::new() };
                let mut cells = self.side_cells(jobs, side);
                match (row, row.map_or(published_after, |row| row.published.as_ref())) {
                    (Some(row), None) => cells.extend(gain_cells(row)),
                    (Some(row), Some(published)) => {
                        cells.extend(gain_cells(row));
                        cells.extend([published.before.figure.clone(), format!("{:.2}", published.ratio)]);
                    }
                    (None, Some(published)) => {
                        cells.extend([String::new(), String::new(), published.after.figure.clone()]);
                    }
                    (None, None) => {}
                }
                table.row(cells);
                shown.push(row);
            }
        }
        (table, shown)
    }

    fn side_cells(&self, jobs: String, side: &Side) -> Vec<String> {
        let cell = |(value, _, scale, decimals): &Column| {
            figure_cell(side.median(value).map(|value| value * scale), *decimals)
        };
        [jobs, side.design.clone()].into_iter().chain(self.columns.iter().map(cell)).collect()
    }
}

/// Returns the designs in the rows of one case and number of jobs, in the order of
/// [`Designs::all`](super::Designs::all): each with the row whose gain is shown beside it; the table's
/// `after` has none.
fn lines(rows: &[Row]) -> Vec<(&Side, Option<&Row>)> {
    let Some(first) = rows.first() else { return Vec::new() };
    let same = rows.iter().take_while(|row| row.after.design == first.after.design).count();
    let (before, beyond) = rows.split_at(same);
    let before = before.iter().map(|row| (&row.before, Some(row)));
    let beyond = beyond.iter().map(|row| (&row.after, Some(row)));
    before.chain([(&first.after, None)]).chain(beyond).collect()
}

fn gain_cells(row: &Row) -> Vec<String> {
    vec![format!("{:.2}", row.gain), format!("{:.3}", row.gain.p)]
}

/// Prints a paragraph in lines of at most 100 columns, the second and later ones indented.
pub(crate) fn wrap(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    const COLUMNS: usize = 100;
    let mut column = 0;
    for word in text.split(' ') {
        let len = word.chars().count();
        if column > 0 && column + 1 + len > COLUMNS {
            write!(f, "\n  {word}")?;
            column = 2 + len;
        } else {
            let space = if column > 0 { " " } else { "" };
            write!(f, "{space}{word}")?;
            column += space.len() + len;
        }
    }
    writeln!(f)
}
