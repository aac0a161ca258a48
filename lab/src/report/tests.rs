use std::collections::BTreeSet;
use std::path::PathBuf;

use super::html::escape;
use super::summary::{Comparison, Effect, tally, telling};
use super::*;
use crate::experiment::LabOptions;
use crate::experiment::testing::{row, side};
use crate::tables::{self, TABLES};

pub(super) fn options() -> ReportOptions {
    ReportOptions {
        dir: PathBuf::from("unused"),
        quick: true,
        tables: Vec::new(),
        rounds: None,
        seconds: None,
        jobs: Vec::new(),
        corpus: None,
    }
}

/// Returns rows of a whole table, of 9 rounds, with every printed quantity. Each row has its own gain.
fn rows(table: &Series) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut gain = 0.8;
    let names = table.columns.iter().map(|(value, ..)| *value);
    let names: BTreeSet<&'static str> =
        names.chain(table.unit.costs()).chain(["user_s", "system_s"]).collect();
    for (case, jobs) in table.cases {
        for jobs in *jobs {
            for comparison in Comparison::all(&(table.designs)()) {
                gain += 0.0137;
                let measured = |design: &str, elapsed_s: f64| {
                    let mut values: Vec<_> = names.iter().map(|name| (*name, 0.5)).collect();
                    values.retain(|(name, _)| *name != "elapsed_s");
                    values.push(("elapsed_s", elapsed_s));
                    side(design, &values)
                };
                let (before, after) = (measured(&comparison.before, gain), measured(&comparison.after, 1.0));
                rows.push(row(table, case, *jobs, before, after));
            }
        }
    }
    rows
}

fn measured(table: &Series) -> Measured {
    let report =
        LabReport::new(table, &LabOptions::default(), rows(table), vec!["<b>nothing</b> & more".into()]);
    Measured { report, unix_s: 1_800_000_000, took_s: 61.0, rounds: 9 }
}

fn report() -> Report {
    let section = |table: &'static Series| Section { table, outcome: Ok(measured(table)) };
    let sections = TABLES.into_iter().map(section).collect();
    let command = "uzram lab report DIR".to_owned();
    Report { machine: Machine::of_this_system(), command, quick: true, sections }
}

fn parse(page: &str) -> roxmltree::Document<'_> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..roxmltree::ParsingOptions::default() };
    roxmltree::Document::parse_with_options(page, options).unwrap()
}

fn text_of(node: roxmltree::Node<'_, '_>) -> String {
    node.descendants().filter_map(|node| node.text().filter(|_| node.is_text())).collect()
}

#[test]
fn the_page_is_well_formed_and_needs_nothing_else() {
    let page = page::page(&report());
    let document = parse(&page);
    let ids: Vec<_> = document.descendants().filter_map(|node| node.attribute("id")).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
    for node in document.descendants().filter(|node| node.is_element()) {
        let name = node.tag_name().name();
        let forbidden =
            ["script", "link", "img", "iframe", "object", "embed", "image", "use", "base", "form"];
        assert!(!forbidden.contains(&name), "{name}");
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            let refers =
                ["src", "srcset", "action", "data", "poster"].contains(&name) || name.starts_with("on");
            assert!(!refers, "{name}={value}");
            assert!(name != "href" || ids.contains(&value.trim_start_matches('#')), "{name}={value}");
            assert!(!value.contains("url(") && !value.contains("//"), "{name}={value}");
        }
        if name == "style" {
            let style = text_of(node);
            assert!(["url(", "@import", "http"].iter().all(|word| !style.contains(word)));
        }
    }
    let head = document.descendants().find(|node| node.has_tag_name("head")).unwrap();
    let is_viewport = |node: &roxmltree::Node<'_, '_>| node.attribute("name") == Some("viewport");
    assert!(head.children().any(|node| is_viewport(&node)));
}

#[test]
fn every_row_of_every_table_is_on_the_page() {
    let report = report();
    let page = page::page(&report);
    let document = parse(&page);
    for (table, measured) in report.measured() {
        let section = document.descendants().find(|node| node.attribute("id") == Some(table.name)).unwrap();
        let lines = section.descendants().filter(|node| node.has_tag_name("tr"));
        let lines: Vec<Vec<String>> = lines
            .map(|line| line.children().filter(|node| node.is_element()).map(text_of).collect())
            .collect();
        for row in &measured.report.rows {
            let gain = format!("{:.2}", row.gain);
            let designs = [&row.before.design, &row.after.design];
            let is_row = |line: &&Vec<String>| {
                line.contains(&gain) && designs.iter().any(|design| line.contains(design))
            };
            let name = format!("{}, {}, {} jobs, {gain}", table.name, row.case, row.jobs);
            let line = lines.iter().find(is_row).unwrap_or_else(|| panic!("{name}: {lines:?}"));
            if let Some(published) = &row.published {
                assert!(line.contains(&published.before.figure), "{name}: {line:?}");
            }
        }
        // Every published figure has a line, whether it was measured here or not.
        let published = published::tables(table.published);
        for cells in published.iter().flat_map(|(_, published)| published.rows()) {
            assert!(lines.contains(cells), "{}: {cells:?}", table.name);
        }
        let text = text_of(section);
        let source = table.source();
        for said in [&source.machine, &source.command, &source.title, &source.author, &source.date] {
            assert!(text.contains(said), "{}: {said}", table.name);
        }
        for paragraph in measured.report.verdict.iter().chain(&measured.report.notes) {
            assert!(text.contains(paragraph), "{}: {paragraph}", table.name);
        }
        let pictures = section.descendants().filter(|node| node.has_tag_name("figure")).count();
        let cases = measured.report.rows.chunk_by(|a, b| a.case == b.case).count();
        assert!(pictures >= cases, "{}: {pictures} pictures of {cases} cases", table.name);
    }
}

#[test]
fn what_was_measured_is_told_though_other_tables_are_missing() {
    let dir = tempfile::tempdir().unwrap();
    let mut report = report();
    let [left_out, failed] = [1, 2].map(|at| report.sections[at].table.name);
    report.sections[1].outcome = Err(Error::new(ErrorKind::Unsupported, "no disk"));
    let (text, outcome) = write(dir.path(), &report).unwrap();
    assert!(text.contains(&format!("{left_out}: left out: no disk\n")), "{text}");
    assert_eq!(outcome, Ok(()), "what the system lacks is no failure");
    report.sections[2].outcome = Err(Error::new(ErrorKind::Io, "no <disk> & no \"luck\""));
    let (text, outcome) = write(dir.path(), &report).unwrap();
    assert!(text.contains("splice against single-lock") && text.contains("report.json"), "{text}");
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains(&format!("{failed}: no <disk>")) && !error.contains("no disk"), "{error}");
    let page = fs::read_to_string(dir.path().join("report.html")).unwrap();
    let said = text_of(parse(&page).root());
    assert!(said.contains("Left out: no disk") && said.contains("Not measured: no <disk> & no \"luck\""));
    let json: serde_json::Value = serde_json::from_str(&json::json(&report)).unwrap();
    assert_eq!(
        (&json["tables"][1]["left_out"], &json["tables"][2]["failed"]),
        (&"no disk".into(), &"no <disk> & no \"luck\"".into())
    );
    let all = json["tables"].as_array().unwrap();
    assert_eq!(all.len(), TABLES.len());
    assert_eq!(all.iter().filter(|table| table["failed"].is_string()).count(), 1);
}

#[test]
fn the_page_names_its_command_and_the_cases_that_a_quick_report_skips() {
    let mut report = report();
    let skipped = "A quick report leaves out cases that take long: btrfs.";
    assert!(page::page(&report).contains(skipped));
    report.quick = false;
    assert!(!page::page(&report).contains(skipped));
    report.command = "uzram lab report out --corpus a&b".to_owned();
    assert!(page::page(&report).contains("report out --corpus a&amp;b</code>"));
}

#[test]
fn text_is_escaped_for_markup_and_attributes() {
    assert_eq!(escape("a<b>&\"c'\u{1}\n"), "a&lt;b&gt;&amp;&quot;c&#39; \n");
}

#[test]
fn losses_are_counted_and_shown_like_wins() {
    let table = tables::table("zs-lock").unwrap();
    let designs = (table.designs)();
    let whole = &Comparison::all(&designs)[0];
    let at = |jobs: usize, ratio: f64| {
        let of = |design: &str, elapsed_s| side(design, &[("elapsed_s", elapsed_s)]);
        row(table, "files", jobs, of(&whole.before, ratio), of(&whole.after, 1.0))
    };
    let rows = [at(1, 1.0), at(100, 1.2), at(101, 1.5), at(102, 0.9), at(103, 0.7)];
    assert_eq!(tally(&rows).map(|(_, rows)| rows), [2, 2, 1, 0]);
    let shown: Vec<usize> = telling(whole, &rows).iter().map(|row| row.jobs).collect();
    assert_eq!(shown, [1, 101, 103], "the usual one, the largest gain, the largest loss");
    let report = LabReport::new(table, &LabOptions::default(), rows.to_vec(), Vec::new());
    let [here, compared] = sentences(table, &report);
    assert_eq!(
        here,
        "consolidated against split is faster in 2 of 5 rows, slower in 2 and within the noise in 1, with a median gain of 1.00 (0.70 to 1.50)."
    );
    assert_eq!(compared, "No row has published figures; the expectation is not judged.");
    let mut short = at(2, 1.5);
    short.after.values.insert("elapsed_s", vec![1.0; 4]);
    assert_eq!(Effect::of(&short), Effect::Unknown);
}

#[test]
fn losses_against_every_design_before_are_told() {
    let table = tables::table("zs-defer").unwrap();
    let of = |design: &str, elapsed_s| side(design, &[("elapsed_s", elapsed_s)]);
    let at = |before: &str, ratio| row(table, "run-cache", 1, of(before, ratio), of("pinned-deferred", 1.0));
    let rows = vec![at("split", 2.0), at("pinned", 0.8)];
    let report = LabReport::new(table, &LabOptions::default(), rows, Vec::new());
    let [here, _] = sentences(table, &report);
    assert_eq!(
        here,
        "pinned-deferred against split is faster in 1 of 1 rows, slower in 0 and within the noise in 0, with a median gain of 2.00 (2.00 to 2.00). Against pinned it is faster in 0 of 1 rows, slower in 1 and within the noise in 0, with a median gain of 0.80 (0.80 to 0.80)."
    );
    let section = Measured { report, unix_s: 0, took_s: 0.0, rounds: 9 };
    let mut report = self::report();
    report.sections = vec![Section { table, outcome: Ok(section) }];
    assert!(page::page(&report).contains("<span class=\"count slower\">1 slower</span>"));
}

/// The order of sentences' parts, for tables with published figures and several expectations.
#[test]
fn sentences_compare_with_what_was_published_and_expected() {
    for table in TABLES {
        let report = measured(table).report;
        let [here, compared] = sentences(table, &report);
        assert!(here.contains("is faster in") && here.ends_with(")."), "{here}");
        let is_published = report.rows.iter().any(|row| row.published.is_some());
        let begin = if is_published { "Published is a " } else { "No row has published figures;" };
        assert!(compared.starts_with(begin), "{}: {compared}", table.name);
        let judged = match table.expectations.len() {
            0 => "nothing was expected in figures".to_owned(),
            1 => "the expectation is".to_owned(),
            all => format!("of {all} expectations"),
        };
        assert!(compared.contains(&judged), "{}: {compared}", table.name);
    }
}

#[test]
fn an_interrupted_report_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let stopped = ReportOptions { dir: dir.path().join("stopped"), ..options() };
    assert_eq!(run(&stopped, String::new(), &Arc::new(true.into())).unwrap_err().to_string(), "interrupted");
    assert!(!stopped.dir.join("report.html").exists());
}
