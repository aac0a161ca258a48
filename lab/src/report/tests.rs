#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use uzram_bench::harness::Source;
use uzram_bench::harness::corpus::Kind;

use super::html::escape;
use super::markdown::plain;
use super::summary::{Comparison, Effect, Tally, published_only, telling};
use super::*;
use crate::experiment::testing::{row, side};
use crate::experiment::{LabOptions, Row, TABLES};
use crate::published::source;

/// Returns options for all tables.
pub(super) fn options() -> ReportOptions {
    ReportOptions {
        dir: PathBuf::from("unused"),
        quick: true,
        tables: TABLES.to_vec(),
        rounds: None,
        duration: None,
        jobs: Vec::new(),
        corpus: None,
        stop: Arc::default(),
    }
}

/// Returns rows of a whole table, of 9 rounds, with every printed quantity. Each row has its own gain.
fn rows(table: &Series) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut gain = 0.8;
    let names = table.columns.iter().map(|column| column.value);
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

/// Returns a report of all tables.
fn report() -> Report {
    let section = |table: &'static Series| Section { table, outcome: Ok(measured(table)), predicted: None };
    let sections = TABLES.into_iter().map(section).collect();
    let command = command(&options());
    Report { machine: Machine::of_this_system(), command, quick: true, sections }
}

fn parse(page: &str) -> roxmltree::Document<'_> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..roxmltree::ParsingOptions::default() };
    roxmltree::Document::parse_with_options(page, options).unwrap()
}

/// Returns all text in a part of the page.
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
fn every_row_of_every_table_is_on_the_page_and_in_the_markdown() {
    let report = report();
    let (page, markdown) = (page::page(&report), markdown::markdown(&report));
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
            assert!(markdown.contains(&format!("| {gain} |")), "{name}");
        }
        // Every published figure has a line, whether it was measured here or not.
        let all: Vec<String> = lines.into_iter().flatten().collect();
        for (case, jobs, published) in published_only(table, &measured.report.rows) {
            let figures = [published.before.figure, published.after.figure];
            assert!(figures.iter().all(|figure| all.contains(figure)), "{case}, {jobs}: {figures:?}");
        }
        let text = text_of(section);
        let source = source(table).unwrap();
        for said in [&source.machine, &source.command, &source.title, &source.author, &source.date] {
            assert!(text.contains(said) && markdown.contains(&plain(said)), "{}: {said}", table.name);
        }
        for paragraph in measured.report.verdict.iter().chain(&measured.report.notes) {
            let is_there = text.contains(paragraph) && markdown.contains(&plain(paragraph));
            assert!(is_there, "{}: {paragraph}", table.name);
        }
        let pictures = section.descendants().filter(|node| node.has_tag_name("figure")).count();
        let cases = measured.report.rows.chunk_by(|a, b| a.case == b.case).count();
        assert!(pictures >= cases, "{}: {pictures} pictures of {cases} cases", table.name);
    }
}

#[test]
fn a_table_that_could_not_be_measured_says_why() {
    let mut report = report();
    report.sections[1].outcome = Err(Error::new(ErrorKind::Io, "no <disk> & no \"luck\""));
    let (page, markdown) = (page::page(&report), markdown::markdown(&report));
    assert!(text_of(parse(&page).root()).contains("Not measured: no <disk> & no \"luck\""));
    assert!(markdown.contains("not measured: no &lt;disk> &amp; no"), "{markdown}");
    let json: serde_json::Value = serde_json::from_str(&json::json(&report)).unwrap();
    assert_eq!(json["tables"].as_array().unwrap().len(), TABLES.len());
    let failed = json["tables"].as_array().unwrap().iter().filter(|table| table["failed"].is_string());
    assert_eq!(failed.count(), 1);
}

#[test]
fn what_was_measured_is_told_though_other_tables_are_missing() {
    let dir = tempfile::tempdir().unwrap();
    let mut report = report();
    let [left_out, failed] = [1, 2].map(|at| report.sections[at].table.name);
    report.sections[1].outcome = Err(Error::new(ErrorKind::Unsupported, "no disk"));
    let written = write(dir.path(), &report).unwrap();
    assert!(written.text.contains(&format!("{left_out}: left out: no disk\n")), "{}", written.text);
    assert_eq!(written.outcome, Ok(()), "what the system lacks is no failure");
    report.sections[2].outcome = Err(Error::new(ErrorKind::Io, "no luck"));
    let Written { text, outcome } = write(dir.path(), &report).unwrap();
    assert!(text.contains("splice against single-lock") && text.contains("report.md"), "{text}");
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains(&format!("{failed}: no luck")) && !error.contains("no disk"), "{error}");
    let page = fs::read_to_string(dir.path().join("report.html")).unwrap();
    assert!(page.contains("Left out: no disk") && page.contains("Not measured: no luck"));
    assert!(markdown::markdown(&report).contains(&format!("- {left_out}: left out: no disk\n")));
    let json: serde_json::Value = serde_json::from_str(&json::json(&report)).unwrap();
    assert_eq!(
        (&json["tables"][1]["left_out"], &json["tables"][2]["failed"]),
        (&"no disk".into(), &"no luck".into())
    );
}

#[test]
fn the_page_names_its_command_and_the_cases_that_a_quick_report_skips() {
    let mut report = report();
    let skipped = "A quick report leaves out cases that take long: btrfs, build-linux.";
    for form in [page::page(&report), markdown::markdown(&report)] {
        assert!(form.contains(skipped), "{form}");
    }
    report.quick = false;
    for form in [page::page(&report), markdown::markdown(&report)] {
        assert!(!form.contains(skipped), "{form}");
    }
    let asked = ReportOptions {
        tables: vec![experiment::table("streams").unwrap(), experiment::table("unmap").unwrap()],
        rounds: Some(7),
        duration: Some(Duration::from_millis(50)),
        jobs: vec![1, 2],
        corpus: Some("a&b".parse().unwrap()),
        ..options()
    };
    report.command = command(&asked);
    assert_eq!(
        report.command,
        "uzram lab report DIR --quick --tables streams,unmap --rounds 7 --seconds 0.05 --jobs 1,2 --corpus a&b"
    );
    assert!(page::page(&report).contains("--jobs 1,2 --corpus a&amp;b</code>"));
}

/// Returns the texts and the numbers of a part of the file of published figures: a rate in 10^6 bytes a second, a gain
/// over the first number of its array as the number that it makes.
fn values_of(
    value: &toml::Value,
    path: &str,
    texts: &mut Vec<(String, String)>,
    numbers: &mut Vec<(String, f64)>,
) {
    let of = |value: &toml::Value| value.as_float().or(value.as_integer().map(|integer| integer as f64));
    match value {
        toml::Value::Table(table) => {
            table.iter().for_each(|(key, value)| values_of(value, &format!("{path}.{key}"), texts, numbers));
        }
        toml::Value::Array(values) => {
            let first = values.first().and_then(of);
            for value in values {
                let gain = value.as_str().and_then(|text| text.strip_suffix(" %")?.parse::<f64>().ok());
                match gain.zip(first) {
                    Some((gain, first)) => numbers.push((path.to_owned(), first * (1.0 + gain / 100.0))),
                    None => values_of(value, path, texts, numbers),
                }
            }
        }
        toml::Value::String(text) => {
            let rate =
                |unit: &str, bytes: f64| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * bytes / 1e6);
            match rate("MB/s", 1_048_576.0).or(rate("KB/s", 1024.0)) {
                Some(rate) => numbers.push((path.to_owned(), rate)),
                None => texts.push((path.to_owned(), text.clone())),
            }
        }
        other => numbers.push((path.to_owned(), of(other).unwrap())),
    }
}

/// Every value of the file is in the section of its table: as it is, rounded to three digits or more, or as a part of a
/// row's figure.
#[test]
fn every_published_value_is_shown() {
    let page = page::page(&report());
    let document = parse(&page);
    let mut parts = 0;
    for (part, values) in crate::published::FILE.iter() {
        // Other parts are no tables'.
        let Ok(table) = experiment::table(part) else { continue };
        parts += 1;
        let section = document.descendants().find(|node| node.attribute("id") == Some(part)).unwrap();
        let shown = section.descendants().filter_map(|node| node.text().filter(|_| node.is_text()));
        let shown = shown.collect::<Vec<_>>().join(" ");
        let shown_numbers: BTreeSet<&str> = shown
            .split(|char: char| !char.is_ascii_digit() && char != '.')
            .map(|number| number.trim_matches('.'))
            .collect();
        let mut in_rows = Vec::new();
        for case in table.case_names() {
            for before in 0..(table.designs)().before.len() {
                for (_, published) in summary::published(table, case, before) {
                    let sides = [published.before.values, published.after.values];
                    let values = sides.into_iter().flatten();
                    let is_of_figure =
                        |name: &str| ["read_mb_per_s", "write_mb_per_s", "faults_per_s"].contains(&name);
                    in_rows.extend(values.filter(|(name, _)| is_of_figure(name)).map(|(_, value)| value));
                }
            }
        }
        let is_shown = |number: f64| {
            let rounded = (0..3).map(|decimals| format!("{number:.decimals$}"));
            let mut rounded = rounded.filter(|text| text.bytes().filter(u8::is_ascii_digit).count() >= 3);
            shown_numbers.contains(number.to_string().as_str())
                || rounded.any(|text| shown_numbers.contains(text.as_str()))
                || in_rows.iter().any(|value| (value / number - 1.0).abs() < 1e-9)
        };
        assert!(!is_shown(98_765.4), "{part}");
        let (mut texts, mut numbers) = (Vec::new(), Vec::new());
        values_of(values, part, &mut texts, &mut numbers);
        for (path, text) in texts {
            assert!(shown.contains(&text), "{path}: {text}");
        }
        for (path, number) in numbers {
            assert!(is_shown(number), "{path}: {number}");
        }
    }
    assert!(parts >= 6, "{parts}");
}

#[test]
fn text_is_escaped_for_markup_and_attributes() {
    assert_eq!(escape("a<b>&\"c'\u{1}\n"), "a&lt;b&gt;&amp;&quot;c&#39; \n");
}

#[test]
fn losses_are_counted_and_shown_like_wins() {
    let table = experiment::table("zs-lock").unwrap();
    let designs = (table.designs)();
    let whole = &Comparison::all(&designs)[0];
    let at = |jobs: usize, ratio: f64| {
        let of = |design: &str, elapsed_s| side(design, &[("elapsed_s", elapsed_s)]);
        row(table, "files", jobs, of(&whole.before, ratio), of(&whole.after, 1.0))
    };
    let rows = [at(1, 1.0), at(100, 1.2), at(101, 1.5), at(102, 0.9), at(103, 0.7)];
    assert_eq!(Tally::of(&rows), Tally { faster: 2, slower: 2, even: 1, unknown: 0 });
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
    let table = experiment::table("zs-defer").unwrap();
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
    report.sections = vec![Section { table, outcome: Ok(section), predicted: None }];
    assert!(page::page(&report).contains("<span class=\"count slower\">1 slower</span>"));
    assert!(
        markdown::markdown(&report)
            .contains("| pinned-deferred against pinned | 0.80 [0.80, 0.80] | slower |")
    );
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
fn a_report_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = Source::Built(Kind::Mixed, 64);
    let options = ReportOptions {
        dir: dir.path().join("new"),
        tables: vec![experiment::table("zs-free").unwrap()],
        rounds: Some(2),
        duration: Some(Duration::from_micros(500)),
        jobs: vec![1],
        corpus: Some(corpus),
        ..options()
    };
    let text = run(&options).unwrap().text;
    // It has the medians of all quantities.
    let figures = || fs::read_to_string(options.dir.join("report.md")).unwrap();
    let (page, first) = (fs::read_to_string(options.dir.join("report.html")).unwrap(), figures());
    parse(&page);
    assert!(text.contains("class-indexed against split") && text.contains("report.md"), "{text}");
    // Nothing is measured again: the figures would be others.
    assert_eq!(run(&options).unwrap().text, text);
    assert_eq!(figures(), first);
    // With other options everything is.
    let more = ReportOptions { rounds: Some(3), ..options.clone() };
    run(&more).unwrap();
    assert_ne!(figures(), first);
    // A damaged file is replaced.
    fs::write(options.dir.join("tables/zs-free.json"), "{\"key\":1}").unwrap();
    let before = figures();
    run(&more).unwrap();
    assert_ne!(figures(), before);
    // What was left out may be possible now.
    let kept = options.dir.join("tables/zs-free.json");
    let complete = fs::read_to_string(&kept).unwrap();
    fs::write(&kept, complete.replace("\"left_out\":[]", "\"left_out\":[\"a case left out: no disk\"]"))
        .unwrap();
    let before = figures();
    run(&more).unwrap();
    assert_ne!(figures(), before);
    // The same name, another file.
    let file = dir.path().join("pages");
    let pages = |count: usize| -> Vec<u8> { (0..count << 12).map(|at| (at / 7) as u8).collect() };
    fs::write(&file, pages(64)).unwrap();
    let of_file = ReportOptions { corpus: Some(Source::File(file.clone())), ..more.clone() };
    run(&of_file).unwrap();
    let before = figures();
    run(&of_file).unwrap();
    assert_eq!(figures(), before);
    fs::write(&file, pages(65)).unwrap();
    run(&of_file).unwrap();
    assert_ne!(figures(), before);
    // What is interrupted leaves no report.
    let stopped = ReportOptions { dir: dir.path().join("stopped"), stop: Arc::new(true.into()), ..options };
    assert_eq!(run(&stopped).unwrap_err().to_string(), "interrupted");
    assert!(!stopped.dir.join("report.html").exists());
}
