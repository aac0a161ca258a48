//! The page: HTML with its style and pictures inside. It needs no network and no script, fits a phone, and
//! follows the reader's choice of light or dark.

use std::fmt::Write;

use uzram::Error;

use super::bars;
use super::chart::charts;
use super::html::{details, escape, paragraph, table as html_table};
use super::machine::date;
use super::plan::skipped;
use super::progress::words;
use super::summary::{Comparison, sentences, tally, telling};
use super::{Measured, Report, Section, is_left_out, other_tables};
use crate::experiment::{Row, Series, jobs_text};

const STYLE: &str = include_str!("style.css");

pub(super) fn page(report: &Report) -> String {
    let sections: String = report.sections.iter().map(|one| section(one, report.quick)).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<meta name=\"color-scheme\" content=\"light dark\"/>\n<title>Kernel patch series, measured here</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{}<main>\n{}{sections}</main>\n{}</body>\n</html>\n",
        header(report),
        summary(report),
        footer(report)
    )
}

fn how(report: &Report) -> String {
    let measured: Vec<&Measured> = report.measured().map(|(_, measured)| measured).collect();
    let rows: usize = measured.iter().map(|measured| measured.report.rows.len()).sum();
    let rounds = |pick: fn(usize, usize) -> usize| measured.iter().map(|one| one.rounds).reduce(pick);
    let rounds = match rounds(usize::min).zip(rounds(usize::max)) {
        Some((least, most)) if least < most => format!("{least} to {most} rounds"),
        Some((_, most)) => format!("{most} rounds"),
        None => "no rounds".to_owned(),
    };
    format!(
        "{} tables, each about a change of the Linux kernel whose designs are rebuilt in user space: the designs before it are measured against the one after it, by turns, in {rounds}. {rows} rows compare two designs, in {} all together{}.",
        measured.len(),
        words(measured.iter().map(|measured| measured.took_s).sum()),
        if report.quick { ", a quick run with short measurements: intervals are wide" } else { "" }
    )
}

fn designs(table: &Series) -> String {
    let comparisons = Comparison::all(&(table.designs)());
    comparisons.iter().map(Comparison::name).collect::<Vec<_>>().join(", ")
}

fn header(report: &Report) -> String {
    let mut facts = report.machine.facts();
    let times = || report.measured().map(|(_, measured)| measured.unix_s);
    if let Some((first, last)) = times().min().zip(times().max()) {
        let (first, last) = (date(first), date(last));
        let is_one_day = first.split(' ').next() == last.split(' ').next();
        facts.push(("measured", if is_one_day { last } else { format!("{first} to {last}") }));
    }
    let links = report.sections.iter().map(|section| {
        let name = escape(section.table.name);
        format!("<a href=\"#{name}\">{name}</a> ")
    });
    format!(
        "<header>\n<h1>Kernel patch series, measured here</h1>\n{}{}<nav>{}</nav>\n</header>\n",
        paragraph(&how(report)),
        definitions("facts", &facts),
        links.collect::<String>()
    )
}

fn summary(report: &Report) -> String {
    let mut html = String::from("<section id=\"summary\">\n<h2>Wins and losses</h2>\n");
    html += &paragraph(
        "Times as fast as the design that it is compared with: of each case with the most jobs that have a CPU each, else with the fewest jobs, then its largest gain and its largest loss. A thin line is the interval; a bar is grey if its interval contains 1.",
    );
    html += "<ul class=\"legend\"><li class=\"faster\"><span class=\"chip\"></span>faster</li><li class=\"slower\"><span class=\"chip\"></span>slower</li><li class=\"even\"><span class=\"chip\"></span>within the noise</li><li class=\"unknown\"><span class=\"chip\"></span>too few rounds to tell</li></ul>\n";
    for section in &report.sections {
        let name = escape(section.table.name);
        let _ = writeln!(html, "<h3><a href=\"#{name}\">{name}</a></h3>");
        html += &match &section.outcome {
            Err(error) => missing(error),
            Ok(measured) => {
                paragraph(&sentences(section.table, &measured.report).join(" "))
                    + &wins_and_losses(section.table, &measured.report.rows)
            }
        };
    }
    html += "</section>\n";
    html
}

fn wins_and_losses(table: &Series, rows: &[Row]) -> String {
    let mut html = String::from("<div class=\"bars\">\n");
    html += &bars::axis();
    for comparison in Comparison::all(&(table.designs)()) {
        let all = comparison.rows(rows);
        if all.is_empty() {
            continue;
        }
        let counts = tally(all).into_iter().filter(|(_, rows)| *rows > 0);
        let counts = counts.map(|(effect, rows)| {
            let name = effect.name();
            format!("<span class=\"count {name}\">{rows} {name}</span>")
        });
        let _ = writeln!(
            html,
            "<p class=\"compared\">{} {}</p>",
            escape(&comparison.name()),
            counts.collect::<Vec<_>>().join(" ")
        );
        for row in telling(&comparison, rows) {
            html += &bars::bar(&format!("{}, {}", row.case, jobs_text(row.jobs)), row);
        }
    }
    html += "</div>\n";
    html
}

fn missing(error: &Error) -> String {
    let what = if is_left_out(error) { "Left out" } else { "Not measured" };
    paragraph(&format!("{what}: {error}"))
}

fn section(section: &Section, quick: bool) -> String {
    let table = section.table;
    let mut html = format!(
        "<section id=\"{}\">\n<h2>{}</h2>\n<p class=\"title\">{}</p>\n",
        escape(table.name),
        escape(table.name),
        escape(&table.reference())
    );
    html += &facts(table);
    match &section.outcome {
        Err(error) => html += &missing(error),
        Ok(measured) => html += &results(table, measured, quick),
    }
    html += "</section>\n";
    html
}

/// Returns what a series changed, and the source of the published figures.
fn facts(table: &Series) -> String {
    let mut facts = vec![("changed", table.about.to_owned()), ("designs", designs(table))];
    let source = table.source();
    facts.extend([("published on", source.machine.clone()), ("with", source.command.clone())]);
    facts.extend(source.note.iter().map(|note| ("note", note.clone())));
    definitions("source", &facts)
}

fn definitions(class: &str, facts: &[(&str, String)]) -> String {
    let fact = |(name, value): &(&str, String)| {
        format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(name), escape(value))
    };
    format!("<dl class=\"{class}\">\n{}</dl>\n", facts.iter().map(fact).collect::<String>())
}

/// Returns the pictures, the tables behind them, and the verdict.
fn results(table: &Series, measured: &Measured, quick: bool) -> String {
    let report = &measured.report;
    let mut html = String::from("<div class=\"charts\">\n");
    for chart in charts(table, report) {
        html += &chart.to_figure();
    }
    html += "</div>\n<p class=\"small\">Times as fast, by number of jobs, with the interval of the rounds' median; dashed: published.</p>\n";
    for rows in report.rows.chunk_by(|a, b| a.case == b.case) {
        let (text, shown) = report.case_table(rows);
        let _ = writeln!(html, "<h3>{}</h3>", escape(rows.first().map_or("", |row| &row.case)));
        html += &html_table(&text, &shown);
    }
    html += &skipped(table, quick).map(|skipped| paragraph(&skipped)).unwrap_or_default();
    for (heading, table) in other_tables(table, &report.rows) {
        let _ = writeln!(html, "<h3>{}</h3>", escape(&heading));
        html += &html_table(&table, &[]);
    }
    let _ = write!(
        html,
        "<div class=\"verdict\"><h3>Verdict</h3>\n{}</div>\n",
        paragraph(&sentences(table, report).join(" "))
    );
    let paragraphs = |texts: &[String]| texts.iter().map(|text| paragraph(text)).collect::<String>();
    html += &details("The verdict in detail", &paragraphs(&report.verdict));
    html += &details("How to read the tables", &paragraphs(&report.notes));
    html += &format!(
        "<p class=\"small\">Measured {}, in {}.</p>\n",
        escape(&date(measured.unix_s)),
        words(measured.took_s)
    );
    html
}

fn footer(report: &Report) -> String {
    format!(
        "<footer>\n<p>Written by <code>{}</code>, uzram {}. Figures are measured, unless they are named as published or expected. Every round's figures are in <code>report.json</code>.</p>\n</footer>\n",
        escape(&report.command),
        env!("CARGO_PKG_VERSION")
    )
}
