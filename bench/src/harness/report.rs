//! The parts of reports: tables of figures, and JSON.

use std::fmt;

use serde::Serialize;

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
