//! The report: every table measured, and one page about all of them.
//!
//! [`run`] measures the tables and writes into a folder `report.html`, `report.md` and `report.json`. The
//! page needs no network and no script. Figures in it are those of the rows, published, or expected.
//!
//! * `results`: what is asked for, and what comes of it.
//! * `plan`: how each table is measured so that all of them fit into the time.
//! * `progress`: the bar, and the time left.
//! * `machine`: what it was measured on.
//! * `summary`: wins and losses, and the verdict on a series in a few sentences.
//! * `chart`, `bars`: pictures, as SVG; `figures` says what is in a series' pictures.
//! * `html`: text and tables; `page`, `markdown`, `json`: the three forms.

mod machine;
mod progress;
mod results;
mod plan;
mod summary;
mod html;
mod bars;
mod chart;
mod figures;
mod page;
mod markdown;
mod json;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;
use std::time::Instant;

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::{Source, go_on};

use crate::experiment;
use crate::tables::TABLES;
use machine::{Machine, now_unix_s};
use plan::Planned;
use progress::Progress;
pub use results::ReportOptions;
use results::{Measured, Report, Section, is_left_out};
use summary::sentences;

/// A report that was written.
#[derive(Debug)]
pub struct Written {
    /// The verdicts, what was left out, and the paths of the forms.
    pub text: String,
    /// `Io` names the tables that could not be measured, of which the report says why.
    pub outcome: Result<()>,
}

/// Measures the tables and writes the report.
///
/// # Errors
/// `Invalid` names the option that fits no table; `Busy`: interrupted; `Io`: the folder cannot be written.
pub fn run(options: &ReportOptions) -> Result<Written> {
    let planned = plan::plan(options)?;
    fs::create_dir_all(&options.dir).map_err(|error| failed(&options.dir, &error))?;
    let mut progress = Progress::new(planned.iter().map(|planned| (planned.table.name, planned.estimate)));
    let sections = planned.iter().map(|planned| measure(planned, &mut progress)).collect::<Result<_>>()?;
    let machine = Machine::of_this_system();
    write(&options.dir, &Report { machine, command: command(options), quick: options.quick, sections })
}

/// Measures one table.
///
/// # Errors
/// `Busy`: interrupted.
fn measure(planned: &Planned, progress: &mut Progress) -> Result<Section> {
    let start = Instant::now();
    progress.begin(planned.table.name);
    let outcome = experiment::run(planned.table, &planned.options);
    progress.end(planned.table.name);
    let took_s = start.elapsed().as_secs_f64();
    let rounds = planned.options.rounds.rounds;
    go_on(&planned.options.rounds.stop)?;
    let outcome = outcome.map(|report| Measured { report, unix_s: now_unix_s(), took_s, rounds });
    Ok(Section { table: planned.table, outcome })
}

/// Returns the command that makes such a report, in a folder called `DIR`.
fn command(options: &ReportOptions) -> String {
    let mut command = "uzram lab report DIR".to_owned();
    if options.quick {
        command += " --quick";
    }
    if options.tables.len() < TABLES.len() {
        let names: Vec<_> = options.tables.iter().map(|table| table.name).collect();
        command += &format!(" --tables {}", names.join(","));
    }
    if let Some(rounds) = options.rounds {
        command += &format!(" --rounds {rounds}");
    }
    if let Some(duration) = options.duration {
        command += &format!(" --seconds {}", duration.as_secs_f64());
    }
    if !options.jobs.is_empty() {
        let jobs: Vec<_> = options.jobs.iter().map(usize::to_string).collect();
        command += &format!(" --jobs {}", jobs.join(","));
    }
    match &options.corpus {
        None => {}
        Some(Source::File(path)) => command += &format!(" --corpus {}", path.display()),
        Some(corpus) => command += &format!(" --corpus {}", corpus.name()),
    }
    command
}

/// Writes the three forms.
fn write(dir: &Path, report: &Report) -> Result<Written> {
    let mut text = String::new();
    for Section { table, outcome } in &report.sections {
        match outcome {
            Ok(measured) => {
                text += &format!("{}: {}\n", table.name, sentences(table, &measured.report).join(" "));
            }
            Err(error) if is_left_out(error) => text += &format!("{}: left out: {error}\n", table.name),
            Err(_) => {}
        }
    }
    let forms = [
        ("report.html", page::page(report)),
        ("report.md", markdown::markdown(report)),
        ("report.json", json::json(report)),
    ];
    for (name, form) in forms {
        let path = dir.join(name);
        write_file(&path, &form)?;
        text += &format!("{}\n", path.display());
    }
    let failed = report.missing().filter(|(_, error)| !is_left_out(error));
    let failed: Vec<String> = failed.map(|(table, error)| format!("{table}: {error}")).collect();
    let page = dir.join("report.html");
    let outcome = match failed.is_empty() {
        true => Ok(()),
        false => {
            let what = format!("not measured, as {} says, too: {}", page.display(), failed.join("; "));
            Err(Error::new(ErrorKind::Io, what))
        }
    };
    Ok(Written { text, outcome })
}

/// Replaces a file atomically: a reader finds the old text or all of the new one.
fn write_file(path: &Path, text: &str) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        let file = tempfile::Builder::new().permissions(readable()).tempfile_in(dir)?;
        fs::write(file.path(), text)?;
        file.persist(path).map(drop).map_err(|error| error.error)
    };
    write().map_err(|error| failed(path, &error))
}

/// Returns the permissions of a usual file, which the user's mask narrows.
fn readable() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}

fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write '{}': {error}", path.display()))
}
