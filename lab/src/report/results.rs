//! What a report is asked for, and its results.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::Source;
use uzram_bench::harness::report::Table;

use super::machine::Machine;
use crate::experiment::{LabReport, Row, Series};
use crate::published;
use crate::scale::ScaleReport;

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
pub(super) struct Report {
    pub(super) machine: Machine,
    /// The command that makes such a report.
    pub(super) command: String,
    pub(super) quick: bool,
    pub(super) sections: Vec<Section>,
}

/// The result of one table.
pub(super) struct Section {
    pub(super) table: &'static Series,
    /// What was measured, or why it could not be; `Unsupported` says what the system lacks.
    pub(super) outcome: Result<Measured>,
}

/// A measured table.
pub(super) struct Measured {
    pub(super) report: LabReport,
    /// When, in seconds since 1970.
    pub(super) unix_s: u64,
    /// How long it took.
    pub(super) took_s: f64,
    /// Rounds.
    pub(super) rounds: usize,
}

impl Report {
    /// Returns the tables that were measured.
    pub(super) fn measured(&self) -> impl Iterator<Item = (&'static Series, &Measured)> {
        self.sections.iter().filter_map(|section| Some((section.table, section.outcome.as_ref().ok()?)))
    }

    /// Returns the tables that were not measured, and why.
    pub(super) fn missing(&self) -> impl Iterator<Item = (&'static str, &Error)> {
        self.sections.iter().filter_map(|section| Some((section.table.name, section.outcome.as_ref().err()?)))
    }
}

/// Returns the tables below those of a table's rows, each with its heading: what locks allow, and all
/// published figures.
pub(super) fn other_tables(table: &Series, rows: &[Row]) -> Vec<(String, Table)> {
    let locks = ScaleReport::new(table, rows).tables();
    locks.into_iter().chain(published::tables(table.published)).collect()
}

/// Returns whether a table is missing because the system lacks something that it takes, which is no failure.
pub(super) fn is_left_out(error: &Error) -> bool {
    error.kind() == ErrorKind::Unsupported
}
