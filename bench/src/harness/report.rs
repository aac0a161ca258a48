//! What a benchmark returns: named figures ([`Report`]), which are its tables, its JSON, and what targets
//! look up. And the tables of all reports ([`Table`]).

use std::fmt;

use serde::Serialize;
use uzram::{ErrorKind, Result};

use super::stats::{median, median_ratio};

/// A figure: a cell of a table.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// The table.
    pub table: String,
    /// What it is a figure of.
    pub row: String,
    /// The quantity, with its unit.
    pub column: &'static str,
    /// Of several rounds the median. Not a number, `null` in JSON: there is none.
    pub value: f64,
    /// That of each round, if there are any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<f64>,
}

/// What was measured. `Display` prints a table for each that figures name.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The figures.
    pub figures: Vec<Figure>,
    /// How it was measured, and what was left out and why.
    pub notes: Vec<String>,
}

impl Report {
    /// Adds figures to a row of a table.
    pub fn row(&mut self, table: &str, row: &str, cells: &[(&'static str, f64)]) {
        cells.iter().for_each(|(column, value)| self.push(table, row, column, *value, &[]));
    }

    /// Adds the median of some rounds.
    pub fn rounds(&mut self, table: &str, row: &str, column: &'static str, rounds: &[f64]) {
        self.push(table, row, column, median(rounds), rounds);
    }

    /// Adds the median of the rounds' ratios.
    pub fn ratio(&mut self, table: &str, row: &str, column: &'static str, [a, b]: [&[f64]; 2]) {
        let ratio = median_ratio(a, b);
        self.push(table, row, column, if ratio.is_finite() { ratio } else { f64::NAN }, &[]);
    }

    /// Adds two things that were measured in the same rounds, and their ratio.
    pub fn compared(&mut self, table: &str, row: &str, names: [&'static str; 2], [a, b]: [&[f64]; 2]) {
        self.rounds(table, row, names[0], a);
        self.rounds(table, row, names[1], b);
        self.ratio(table, row, "ratio", [a, b]);
    }

    fn push(&mut self, table: &str, row: &str, column: &'static str, value: f64, rounds: &[f64]) {
        let (table, row) = (table.to_owned(), row.to_owned());
        self.figures.push(Figure { table, row, column, value, rounds: rounds.to_vec() });
    }

    /// Adds the geometric mean and the largest of some ratios, if there are any.
    pub fn mean_and_slowest(&mut self, table: &str, row: &str, ratios: &[f64]) {
        if ratios.is_empty() {
            return;
        }
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let slowest = ratios.iter().copied().fold(f64::NAN, f64::max);
        self.row(table, row, &[("geometric mean", mean), ("slowest", slowest)]);
    }

    /// Adds a note.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds what another benchmark has measured.
    pub fn append(&mut self, other: Report) {
        self.figures.extend(other.figures);
        self.notes
            .extend(other.notes.into_iter().filter(|note| !self.notes.contains(note)).collect::<Vec<_>>());
    }

    /// Adds what a part has measured, or a note that says why it cannot be measured here.
    pub fn part(&mut self, name: &str, outcome: Result<Report>) -> Result<()> {
        match outcome {
            Ok(measured) => self.append(measured),
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                self.note(format!("{name} not measured: {error}"));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Returns a figure.
    pub fn figure(&self, table: &str, row: &str, column: &str) -> Option<&Figure> {
        let is_it = |figure: &&Figure| figure.table == table && figure.row == row && figure.column == column;
        self.figures.iter().find(is_it)
    }

    /// Returns a figure's value, if there is one.
    pub fn get(&self, table: &str, row: &str, column: &str) -> Option<f64> {
        self.figure(table, row, column).map(|figure| figure.value).filter(|value| !value.is_nan())
    }

    /// Returns the values of a column.
    pub fn column(&self, table: &str, column: &str) -> impl Iterator<Item = f64> {
        let figures =
            self.figures.iter().filter(move |figure| figure.table == table && figure.column == column);
        figures.map(|figure| figure.value).filter(|value| !value.is_nan())
    }

    /// Returns the tables, in the order of their first figures.
    pub fn tables(&self) -> Vec<Table> {
        let names = distinct(self.figures.iter().map(|figure| figure.table.as_str()));
        names.into_iter().map(|name| self.table(name)).collect()
    }

    fn table(&self, name: &str) -> Table {
        let figures = || self.figures.iter().filter(|figure| figure.table == name);
        let columns = distinct(figures().map(|figure| figure.column));
        let headings = columns.iter().map(|column| (*column).to_owned());
        let mut table = Table::new(std::iter::once(format!("<{name}")).chain(headings));
        for row in distinct(figures().map(|figure| figure.row.as_str())) {
            let cell = |column: &&str| match self.figure(name, row, column) {
                Some(figure) => cell(figure.value),
                None => String::new(),
            };
            table.row(std::iter::once(row.to_owned()).chain(columns.iter().map(cell)));
        }
        table
    }

    /// Returns the tables and notes in Markdown.
    pub fn to_markdown(&self) -> String {
        let tables = self.tables().into_iter().map(|table| table.to_markdown() + "\n");
        tables.chain(self.notes.iter().map(|note| format!("- {note}\n"))).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tables().iter().try_for_each(|table| writeln!(f, "{table}"))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found = Vec::new();
    names.for_each(|name| {
        if !found.contains(&name) {
            found.push(name)
        }
    });
    found
}

/// Formats a figure: four digits, but not more than three decimals. `-` if there is none.
fn cell(value: f64) -> String {
    let decimals = match value.abs() {
        _ if value.fract() == 0.0 => 0,
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        _ => 3,
    };
    figure_cell(Some(value).filter(|value| !value.is_nan()), decimals)
}

/// A column, or a row, and the figure of a round that is there.
pub type FigureOf<T> = (&'static str, fn(&T) -> f64);

/// Returns a figure of each round.
pub fn each<T>(rounds: &[T], figure: impl Fn(&T) -> f64) -> Vec<f64> {
    rounds.iter().map(figure).collect()
}

/// Returns bytes in MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns `1 job`, `2 jobs`.
pub fn jobs_text(jobs: usize) -> String {
    format!("{jobs} job{}", if jobs == 1 { "" } else { "s" })
}

/// Returns one number divided by another; not a number if that is 0.
pub fn quotient(a: u64, b: u64) -> f64 {
    if b > 0 { a as f64 / b as f64 } else { f64::NAN }
}

/// Headings and rows of cells, every column as wide as its widest cell. Figures are aligned right; the cells
/// of a heading that begins with `<` are aligned left.
pub struct Table {
    headings: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table without rows.
    pub fn new<S: Into<String>>(headings: impl IntoIterator<Item = S>) -> Table {
        Table { headings: headings.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row; missing cells at its end stay empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Returns the table in Markdown, with `|` in cells replaced.
    pub fn to_markdown(&self) -> String {
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let cells: Vec<String> = cells.map(|cell| cell.replace('|', "/")).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let columns = self.columns();
        let names = columns.iter().map(|(name, _)| *name);
        let sides = columns.iter().map(|(_, is_left)| if *is_left { "---" } else { "---:" });
        let rows = self.rows.iter().map(|row| line(&mut row.iter().map(String::as_str)));
        [line(&mut names.into_iter()), line(&mut sides.into_iter())].into_iter().chain(rows).collect()
    }

    /// Returns the headings, each with whether its column is aligned left.
    pub fn columns(&self) -> Vec<(&str, bool)> {
        let column = |heading| str::strip_prefix(heading, "<").map_or((heading, false), |name| (name, true));
        self.headings.iter().map(|heading| column(heading.as_str())).collect()
    }

    /// Returns the rows, each with its cells.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Returns whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns();
        let chars = |text: &str| text.chars().count();
        let width = |(at, (heading, _)): (usize, &(&str, bool))| {
            let cells = self.rows.iter().filter_map(|row| row.get(at)).map(|cell| chars(cell));
            cells.chain([chars(heading)]).max().unwrap_or_default()
        };
        let widths: Vec<usize> = columns.iter().enumerate().map(width).collect();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut text = String::new();
            for ((cell, width), (_, is_left)) in cells.zip(&widths).zip(&columns) {
                let is_first = text.is_empty();
                text += &match (is_first, is_left) {
                    (true, true) => format!("{cell:<width$}"),
                    (true, false) => format!("{cell:>width$}"),
                    (false, true) => format!("  {cell:<width$}"),
                    (false, false) => format!(" {cell:>width$}"),
                };
            }
            writeln!(f, "{}", text.trim_end())
        };
        line(&mut columns.iter().map(|(heading, _)| *heading))?;
        self.rows.iter().try_for_each(|row| line(&mut row.iter().map(String::as_str)))
    }
}

/// Formats a figure for a cell, `-` if there is none.
pub fn figure_cell(figure: Option<f64>, decimals: usize) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.decimals$}"))
}

/// Returns the report as a program prints it: as JSON or as text.
pub fn text(report: &(impl Serialize + fmt::Display), json: bool) -> String {
    if json { to_json(report) + "\n" } else { report.to_string() }
}

/// Returns the report as one line of JSON; figures that do not exist are `null`.
pub fn to_json(report: &impl Serialize) -> String {
    // serde_json fails for keys that are not strings and for failing writers: reports have neither.
    serde_json::to_string(report).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_tables_json_and_looked_up() {
        let mut report = Report::default();
        report.rounds("speed", "a", "MB/s", &[1.0, 2000.4, 3000.0]);
        report.row("memory", "a", &[("MiB", 12.345)]);
        report.row("speed", "b", &[("µs", f64::NAN), ("MB/s", 0.5)]);
        report.ratio("speed", "b", "ratio", [&[2.0], &[1.0]]);
        report.note("a note");
        let mut all = Report::default();
        all.append(report.clone());
        all.append(Report { figures: Vec::new(), ..report });
        let speeds = "speed  MB/s µs ratio\na      2000\nb     0.500  -     2\n\n";
        let text = format!("{speeds}memory   MiB\na      12.35\n\na note\n");
        assert_eq!(all.to_string(), text);
        assert_eq!((all.get("speed", "b", "MB/s"), all.get("speed", "b", "µs")), (Some(0.5), None));
        assert_eq!((all.get("speed", "c", "MB/s"), all.column("speed", "MB/s").sum()), (None, 2000.9));
        assert!(all.to_markdown().ends_with("| a | 12.35 |\n\n- a note\n"), "{}", all.to_markdown());
        let json = serde_json::to_value(&all).unwrap_or_default();
        assert_eq!(json["figures"][0]["rounds"][2], 3000.0);
        assert!(json["figures"][2]["value"].is_null() && json["figures"][2]["rounds"].is_null());
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["<who", "µs", "ratio"]);
        table.row(["uzram", "12", "1.0"].map(str::to_owned));
        table.row(["a".to_owned(), "3".to_owned()]);
        assert_eq!(table.to_string(), "who   µs ratio\nuzram 12   1.0\na      3\n");
        assert_eq!(
            table.to_markdown(),
            "| who | µs | ratio |\n| --- | ---: | ---: |\n| uzram | 12 | 1.0 |\n| a | 3 |\n"
        );
        assert_eq!(figure_cell(None, 2) + &figure_cell(Some(1.0 / 3.0), 2), "-0.33");
    }
}
