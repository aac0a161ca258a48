//! The report: every table measured, and one page about all of them.
//!
//! [`run`] measures the tables and writes into a folder `report.html` and `report.json`. The page needs no
//! network and no script. Figures in it are those of the rows, published, or expected.
//!
//! * `results`: what is asked for, and what comes of it.
//! * `plan`: how each table is measured so that all of them fit into the time.
//! * `progress`: the time left.
//! * `machine`: what it was measured on.
//! * `summary`: wins and losses, and the verdict on a series in a few sentences.
//! * `chart`, `bars`: pictures, as SVG; `figures` says what is in a series' pictures.
//! * `html`: text and tables; `page`, `json`: the two forms.

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
mod json;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::go_on;

use crate::experiment;
use machine::{Machine, now_unix_s};
use plan::Planned;
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

/// Measures the tables and writes the report; setting `stop` ends that with an error. The page says that it
/// was written by `command`.
///
/// # Errors
/// `Invalid` names the option that fits no table; `Busy`: interrupted; `Io`: the folder cannot be written.
pub fn run(options: &ReportOptions, command: String, stop: &Arc<AtomicBool>) -> Result<Written> {
    let planned = plan::plan(options, stop)?;
    fs::create_dir_all(&options.dir).map_err(|error| failed(&options.dir, &error))?;
    let left_s = |at: usize| planned[at..].iter().map(|planned| planned.estimate_s).sum();
    let measured = planned.iter().enumerate().map(|(at, planned)| measure(planned, left_s(at)));
    let sections = measured.collect::<Result<_>>()?;
    let machine = Machine::of_this_system();
    write(&options.dir, &Report { machine, command, quick: options.quick, sections })
}

/// Measures one table, which with those after it takes about so long; fails if it is interrupted.
fn measure(planned: &Planned, left_s: f64) -> Result<Section> {
    let start = Instant::now();
    progress::begin(planned.table.name, left_s);
    let outcome = experiment::run(planned.table, &planned.options);
    let took_s = start.elapsed().as_secs_f64();
    progress::end(planned.table.name, took_s);
    let rounds = planned.options.rounds.rounds;
    go_on(&planned.options.rounds.stop)?;
    let outcome = outcome.map(|report| Measured { report, unix_s: now_unix_s(), took_s, rounds });
    Ok(Section { table: planned.table, outcome })
}

/// Writes the two forms.
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
    for (name, form) in [("report.html", page::page(report)), ("report.json", json::json(report))] {
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
