//! The report in Markdown: the page's texts and tables, without its pictures, and the counts of wins and
//! losses.

use std::fmt::Write;

use uzram_bench::harness::report::Table;

use super::machine::date;
use super::page::{designs, how};
use super::plan::skipped;
use super::results::{Measured, Report, is_left_out, other_tables};
use super::summary::{Comparison, Effect, sentences, telling};
use crate::experiment::Series;
use crate::published::Source;

/// Returns the report.
pub(super) fn markdown(report: &Report) -> String {
    let mut text = format!("# Kernel patch series, measured here\n\n{}\n\n", how(report));
    for (name, value) in report.machine.facts() {
        let _ = writeln!(text, "- {name}: {value}");
    }
    let _ = write!(text, "\n## Wins and losses\n\n{}\n", summary(report).to_markdown());
    for (table, error) in report.missing() {
        let what = if is_left_out(error) { "left out" } else { "not measured" };
        let _ = writeln!(text, "- {table}: {what}: {}", plain(&error.to_string()));
    }
    for (table, measured) in report.measured() {
        section(&mut text, table, measured, report.quick);
    }
    text.trim_end().to_owned() + "\n"
}

/// Returns a text in which nothing is HTML.
pub(super) fn plain(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Returns a table with the rows that the page's bars show.
fn summary(report: &Report) -> Table {
    let mut table = Table::new(["<table", "<case", "jobs", "<designs", "<gain", "<effect"]);
    for (series, measured) in report.measured() {
        for comparison in Comparison::all(&(series.designs)()) {
            for row in telling(&comparison, &measured.report.rows) {
                table.row([
                    series.name.to_owned(),
                    row.case.clone(),
                    row.jobs.to_string(),
                    comparison.name(),
                    format!("{:.2}", row.gain),
                    Effect::of(row).name().to_owned(),
                ]);
            }
        }
    }
    table
}

fn section(text: &mut String, table: &Series, measured: &Measured, quick: bool) {
    let report = &measured.report;
    let _ = writeln!(text, "\n## {}: {}\n", table.name, plain(&table.source().title));
    let _ = writeln!(text, "{}\n", plain(&sentences(table, report).join(" ")));
    let mut facts = vec![
        format!("what it changed: {}", table.about),
        format!("designs: {}", designs(table)),
        format!("series: {}", report.series),
    ];
    let Source { machine, command, note, .. } = table.source();
    facts.push(format!("published on {machine}, with {command}"));
    facts.extend(note.clone());
    facts.push(format!("measured: {}", date(measured.unix_s)));
    items(text, &facts);
    for case in report.rows.chunk_by(|a, b| a.case == b.case) {
        let name = case.first().map_or("", |row| &row.case);
        let _ = write!(text, "\n### {name}\n\n{}", report.case_table(case).0.to_markdown());
    }
    if let Some(skipped) = skipped(table, quick) {
        let _ = writeln!(text, "\n{}", plain(&skipped));
    }
    for (heading, table) in other_tables(table, &report.rows) {
        let _ = write!(text, "\n### {}\n\n{}", plain(&heading), table.to_markdown());
    }
    for (heading, paragraphs) in [("Verdict", &report.verdict), ("How to read it", &report.notes)] {
        let _ = writeln!(text, "\n### {heading}\n");
        items(text, paragraphs);
    }
}

/// Writes a list.
fn items(text: &mut String, items: &[String]) {
    for item in items {
        let _ = writeln!(text, "- {}", plain(item));
    }
}
