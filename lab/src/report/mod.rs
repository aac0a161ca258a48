//! The report: every table measured, and one page about all of them.
//!
//! [`run`] measures the tables and writes into a folder `report.html`, `report.md` and `report.json`. The page needs no
//! network and no script. Figures in it are those of the rows, published, or expected.
//!
//! * `plan`: how each table is measured so that all of them fit into the time.
//! * `progress`: the bar, and the time left.
//! * `machine`: what it was measured on.
//! * `summary`: wins and losses, and the verdict on a series in a few sentences.
//! * `chart`, `bars`: pictures, as SVG; `figures` says what is in a series' pictures.
//! * `html`: text and tables; `page`, `markdown`, `json`: the three forms.

mod bars;
mod chart;
mod figures;
mod html;
mod json;
mod machine;
mod markdown;
mod page;
mod plan;
mod progress;
mod summary;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::{Source, go_on};

use uzram_bench::harness::report::Table;

use crate::experiment::{self, LabReport, Row, Series, TABLES};
use crate::published;
use crate::scale::ScaleReport;
use machine::{Machine, now_unix_s};
use plan::Planned;
use progress::Progress;
use summary::sentences;

/// What is measured, and where the report goes.
#[derive(Clone)]
pub struct ReportOptions {
    /// The folder.
    pub dir: PathBuf,
    /// Whether all tables together may take a few minutes only, instead of most of an hour.
    pub quick: bool,
    /// The tables, in this order.
    pub tables: Vec<&'static Series>,
    /// The number of rounds; `None` for as many as the time allows.
    pub rounds: Option<usize>,
    /// The length of a measurement; `None` for as long as the time allows.
    pub duration: Option<Duration>,
    /// Numbers of jobs; empty for the tables' own.
    pub jobs: Vec<usize>,
    /// The pages that are stored; `None` for the tables' own.
    pub corpus: Option<Source>,
    /// Setting it ends the run with an error.
    pub stop: Arc<AtomicBool>,
}

/// A report that was written.
#[derive(Debug)]
pub struct Written {
    /// The verdicts, what was left out, and the paths of the forms.
    pub text: String,
    /// `Io` names the tables that could not be measured, of which the report says why.
    pub outcome: Result<()>,
}

/// All results.
struct Report {
    machine: Machine,
    /// The command that makes such a report.
    command: String,
    quick: bool,
    sections: Vec<Section>,
}

/// The result of one table.
struct Section {
    table: &'static Series,
    /// What was measured, or why it could not be; `Unsupported` says what the system lacks.
    outcome: Result<Measured>,
}

/// A measured table.
struct Measured {
    report: LabReport,
    /// When, in seconds since 1970.
    unix_s: u64,
    /// How long it took.
    took_s: f64,
    /// Rounds, and the length of a measurement.
    rounds: usize,
}

impl Report {
    /// Returns the tables that were measured.
    fn measured(&self) -> impl Iterator<Item = (&'static Series, &Measured)> {
        self.sections.iter().filter_map(|section| Some((section.table, section.outcome.as_ref().ok()?)))
    }

    /// Returns the tables that were not measured, and why.
    fn missing(&self) -> impl Iterator<Item = (&'static str, &Error)> {
        self.sections.iter().filter_map(|section| Some((section.table.name, section.outcome.as_ref().err()?)))
    }
}

/// Returns the tables below those of a table's rows, each with its heading: what locks allow, and all published figures.
fn other_tables(table: &Series, rows: &[Row]) -> Vec<(String, Table)> {
    let locks = ScaleReport::new(table, rows).tables();
    locks.into_iter().chain(published::tables(table.published)).collect()
}

/// Returns whether a table is missing because the system lacks something that it takes, which is no failure.
fn is_left_out(error: &Error) -> bool {
    error.kind() == ErrorKind::Unsupported
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
