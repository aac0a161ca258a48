//! The report: every table measured, and one page about all of them.
//!
//! [`run`] measures the tables that are not yet measured with the same options, and writes into a
//! folder `report.html`, `report.md` and `report.json`. The page needs no network and no script. All figures
//! in it are those of the rows, or published.
//!
//! * `plan`: how each table is measured so that all of them fit into the time.
//! * `kept`: results of tables as files, so that an interrupted report goes on where it was.
//! * `progress`: the bar, and the time left.
//! * `machine`: what it was measured on.
//! * `summary`: wins and losses, and the verdict on a series in two sentences.
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

use crate::experiment::{self, LabReport, Series};
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

/// All results.
struct Report {
    machine: Machine,
    quick: bool,
    sections: Vec<Section>,
}

/// The result of one table.
struct Section {
    table: &'static Series,
    /// What was measured, or why it could not be.
    outcome: Outcome,
    /// Its designs' speeds with more cores, if it was measured and has a model.
    predicted: Option<Predicted>,
}

type Outcome = std::result::Result<Measured, String>;

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

    /// Returns the tables that could not be measured, and why.
    fn failed(&self) -> Vec<(&'static str, &str)> {
        let failed = |section| {
            let Section { table, outcome, .. }: &Section = section;
            Some((table.name, outcome.as_ref().err()?.as_str()))
        };
        self.sections.iter().filter_map(failed).collect()
    }
}

/// Measures what is missing and writes the report; returns a text about it.
///
/// # Errors
/// `Invalid` names the option that fits no table; `Busy`: interrupted, what is measured is kept; `Io`: the
/// folder cannot be written, or a table could not be measured, of which the report, which is written, says why.
pub fn run(options: &ReportOptions) -> Result<String> {
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
    let report = Report { machine, quick: options.quick, sections };
    write(&options.dir, &report)
}

/// Measures one table.
fn measure(planned: &Planned, kept: &Kept, progress: &mut Progress) -> Result<Outcome> {
    let start = Instant::now();
    progress.begin(planned.table.name);
    let outcome = experiment::run(planned.table, &planned.options);
    progress.end(planned.table.name);
    go_on(&planned.options.rounds.stop)?;
    let report = match outcome {
        Ok(report) => report,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let took_s = start.elapsed().as_secs_f64();
    let measured = Measured { report, unix_s: now_unix_s(), took_s, rounds: planned.options.rounds.rounds };
    kept.store(planned, &measured)?;
    Ok(Ok(measured))
}

/// Writes the three forms.
fn write(dir: &Path, report: &Report) -> Result<String> {
    let mut text = String::new();
    for Section { table, outcome, predicted } in &report.sections {
        let Ok(measured) = outcome else { continue };
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
    let failed = report.failed();
    if failed.is_empty() {
        return Ok(text);
    }
    let failed: Vec<String> = failed.iter().map(|(table, why)| format!("{table}: {why}")).collect();
    let what =
        format!("not measured, as {} says, too: {}", dir.join("report.html").display(), failed.join("; "));
    Err(Error::new(ErrorKind::Io, what))
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
