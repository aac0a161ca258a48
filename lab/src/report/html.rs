//! Parts of the page: escaped text, tables. All of it is well-formed XML, too.

use uzram_bench::harness::report::Table;

use super::summary::Effect;
use crate::experiment::Row;

/// Returns a text in which nothing is markup.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // XML has no other control characters.
            char if char < ' ' && !"\n\t".contains(char) => escaped.push(' '),
            char => escaped.push(char),
        }
    }
    escaped
}

pub(super) fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", escape(text))
}

/// Returns a part that opens when its heading is clicked, if there is anything in it.
pub(super) fn details(heading: &str, body: &str) -> String {
    match body {
        "" => String::new(),
        _ => format!("<details><summary>{}</summary>\n{body}</details>\n", escape(heading)),
    }
}

/// Returns a table in a box of its own, in which it scrolls. `shown` are the rows whose gains the lines show,
/// which are coloured by their effect; it may have fewer entries than there are lines.
pub(super) fn table(table: &Table, shown: &[Option<&Row>]) -> String {
    let columns = table.columns();
    let cell = |tag: &str, at: usize, text: &str, more: &str| {
        let is_left = columns.get(at).is_some_and(|(_, is_left)| *is_left);
        let side = if is_left { "left" } else { "right" };
        format!("<{tag} class=\"{side}{more}\">{}</{tag}>", escape(text))
    };
    let heading: String =
        columns.iter().enumerate().map(|(at, (heading, _))| cell("th", at, heading, "")).collect();
    let gain_at = columns.iter().position(|(heading, is_left)| *heading == "gain" && *is_left);
    let line = |(line, cells): (usize, &Vec<String>)| {
        let effect = shown.get(line).copied().flatten().map(|row| format!(" {}", Effect::of(row).name()));
        // Lines end with their last figure: fill them up.
        let text = |at: usize| cells.get(at).map_or("", String::as_str);
        let more = |at: usize| match &effect {
            Some(effect) if Some(at) == gain_at => effect.as_str(),
            _ => "",
        };
        let cells: String = (0..columns.len()).map(|at| cell("td", at, text(at), more(at))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let lines: String = table.rows().iter().enumerate().map(line).collect();
    format!(
        "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr>{heading}</tr></thead><tbody>\n{lines}</tbody></table></div>\n"
    )
}
