//! The report: every table measured, and one page about all of them.
//!
//! [`run`] measures the tables and writes into a folder `report.html` and `report.json`. The page needs no
//! network and no script. Figures in it are those of the rows, published, or expected.

mod machine;
mod progress;
mod plan;
mod summary;
mod html;
mod bars;
mod chart;
mod page;
mod json;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::go_on;
use uzram_bench::harness::report::Table;

use crate::experiment::{self, LabReport, Row, Series};
use crate::out_file::{OutFile, failed};
use crate::published;
use crate::scale::ScaleReport;
use machine::Machine;
use plan::Planned;
pub use plan::ReportOptions;
use summary::sentences;

struct Report {
    machine: Machine,
    /// The command that makes such a report.
    command: String,
    quick: bool,
    sections: Vec<Section>,
}

struct Section {
    table: &'static Series,
    /// What was measured, or why it could not be; `Unsupported` says what the system lacks.
    outcome: Result<Measured>,
}

struct Measured {
    report: LabReport,
    /// When, in seconds since 1970.
    unix_s: u64,
    took_s: f64,
    rounds: usize,
}

impl Report {
    fn measured(&self) -> impl Iterator<Item = (&'static Series, &Measured)> {
        self.sections.iter().filter_map(|section| Some((section.table, section.outcome.as_ref().ok()?)))
    }
}

/// Returns the tables below those of a table's rows, each with its heading: what locks allow, and all
/// published figures.
fn other_tables(table: &Series, rows: &[Row]) -> Vec<(String, Table)> {
    let locks = ScaleReport::new(table, rows).tables();
    locks.into_iter().chain(published::tables(table.published)).collect()
}

/// Returns whether a table is missing because the system lacks something that it takes, which is no failure.
fn is_left_out(error: &Error) -> bool {
    error.kind() == ErrorKind::Unsupported
}

/// Measures the tables and writes the report; setting `stop` ends that with an error. The page says that it
/// was written by `command`. Returns a text, with the verdicts, what was left out, and the paths of the
/// forms; and the outcome: `Io` names the tables that could not be measured, of which the report says why.
pub fn run(options: &ReportOptions, command: String, stop: &Arc<AtomicBool>) -> Result<(String, Result<()>)> {
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
    let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let outcome = outcome.map(|report| Measured { report, unix_s, took_s, rounds });
    Ok(Section { table: planned.table, outcome })
}

/// Writes the two forms.
fn write(dir: &Path, report: &Report) -> Result<(String, Result<()>)> {
    let (mut text, mut failed) = (String::new(), Vec::new());
    for Section { table, outcome } in &report.sections {
        match outcome {
            Ok(measured) => {
                text += &format!("{}: {}\n", table.name, sentences(table, &measured.report).join(" "));
            }
            Err(error) if is_left_out(error) => text += &format!("{}: left out: {error}\n", table.name),
            Err(error) => failed.push(format!("{}: {error}", table.name)),
        }
    }
    for (name, form) in [("report.html", page::page(report)), ("report.json", json::json(report))] {
        let path = dir.join(name);
        OutFile::create(&path)?.write(&form)?;
        text += &format!("{}\n", path.display());
    }
    let page = dir.join("report.html");
    let outcome = match failed.is_empty() {
        true => Ok(()),
        false => {
            let what = format!("not measured, as {} says, too: {}", page.display(), failed.join("; "));
            Err(Error::new(ErrorKind::Io, what))
        }
    };
    Ok((text, outcome))
}
