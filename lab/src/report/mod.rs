//! The report: every table measured, and one page about all of them.
//!
//! [`run`] measures the tables that are not yet measured with the same options, and writes into a
//! folder `report.html`, `report.md` and `report.json`. The page needs no network and no script. Figures in it are
//! those of the rows, published, predicted from the rows, or expected.
//!
//! * `plan`: how each table is measured so that all of them fit into the time.
//! * `kept`: results of tables as files, so that an interrupted report goes on where it was.
//! * `progress`: the bar, and the time left.
//! * `machine`: what it was measured on.
//! * `summary`: wins and losses, and the verdict on a series in a few sentences.
//! * `published`: published figures that no row stands beside.
//! * `more_cores`: predictions of the measured tables.
//! * `chart`, `bars`: pictures, as SVG; `figures` says what is in a series' pictures.
//! * `html`: text and tables; `page`, `markdown`, `json`: the three forms.

mod bars;
mod chart;
mod figures;
mod html;
mod json;
mod kept;
mod machine;
mod markdown;
mod more_cores;
mod page;
mod plan;
mod progress;
mod published;
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

use crate::experiment::{self, LabReport, Series, TABLES};
use kept::Kept;
use machine::{Machine, now_unix_s};
use more_cores::Predicted;
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
    outcome: Outcome,
    /// Its designs' speeds with more cores, if it was measured and has a model.
    predicted: Option<Predicted>,
}

type Outcome = Result<Measured>;

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

/// Returns whether a table is missing because the system lacks something that it takes, which is no failure.
fn is_left_out(error: &Error) -> bool {
    error.kind() == ErrorKind::Unsupported
}

/// Measures what is missing and writes the report.
///
/// # Errors
/// `Invalid` names the option that fits no table; `Busy`: interrupted, what is measured is kept; `Io`: the
/// folder cannot be written.
pub fn run(options: &ReportOptions) -> Result<Written> {
    let planned = plan::plan(options)?;
    let machine = Machine::of_this_system();
    let kept = Kept::new(&options.dir, &machine)?;
    let found: Vec<Option<Measured>> = planned.iter().map(|planned| kept.load(planned)).collect();
    let missing = planned.iter().zip(&found).filter(|(_, found)| found.is_none());
    let missing = missing.map(|(planned, _)| (planned.table.name, planned.estimate));
    let more_cores =
        more_cores::estimate(&planned, options.quick).map(|estimate| (more_cores::NAME, estimate));
    let mut progress = Progress::new(missing.chain(more_cores));
    let mut sections = Vec::new();
    for (planned, found) in planned.iter().zip(found) {
        let outcome = match found {
            Some(measured) => {
                progress.kept(planned.table.name);
                Ok(measured)
            }
            None => measure(planned, &kept, &mut progress)?,
        };
        sections.push(Section { table: planned.table, outcome, predicted: None });
    }
    more_cores::predict(options, &planned, &kept, &mut progress, &mut sections)?;
    let report = Report { machine, command: command(options), quick: options.quick, sections };
    write(&options.dir, &report)
}

/// Measures one table.
fn measure(planned: &Planned, kept: &Kept, progress: &mut Progress) -> Result<Outcome> {
    let start = Instant::now();
    progress.begin(planned.table.name);
    let outcome = experiment::run(planned.table, &planned.options);
    progress.end(planned.table.name);
    let took_s = start.elapsed().as_secs_f64();
    let rounds = planned.options.rounds.rounds;
    let outcome = outcome.map(|report| Measured { report, unix_s: now_unix_s(), took_s, rounds });
    // What is complete is kept, even if the run is interrupted now.
    if let Ok(measured) = &outcome {
        kept.store(planned, measured)?;
    }
    go_on(&planned.options.rounds.stop)?;
    Ok(outcome)
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
    for Section { table, outcome, predicted } in &report.sections {
        let measured = match outcome {
            Ok(measured) => measured,
            Err(error) => {
                if is_left_out(error) {
                    text += &format!("{}: left out: {error}\n", table.name);
                }
                continue;
            }
        };
        text += &format!("{}: {}\n", table.name, sentences(table, &measured.report).join(" "));
        text += &match predicted {
            None => String::new(),
            Some(Ok(predicted)) => format!("{}: {}\n", table.name, predicted.sentences().join(" ")),
            Some(Err(why)) => format!("{}: not predicted: {why}\n", table.name),
        };
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
