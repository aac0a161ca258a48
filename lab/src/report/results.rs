//! What a report is asked for, and its results.

use std::path::PathBuf;

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::Source;
use uzram_bench::harness::report::Table;

use super::machine::Machine;
use crate::experiment::{LabReport, Row, Series};
use crate::published;
use crate::scale::ScaleReport;

/// What is measured, and where the report goes: the command line of `uzram lab report`.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram lab report out --quick")]
pub struct ReportOptions {
    /// The folder that the report is written into
    pub dir: PathBuf,
    /// Take less than five minutes, instead of less than an hour
    #[arg(long)]
    pub quick: bool,
    /// Tables, as `uzram lab list` shows them [default: all]
    #[arg(long, value_delimiter = ',', value_name = "TABLE,…", value_parser = crate::tables::table)]
    pub tables: Vec<&'static Series>,
    /// Rounds [default: 15; with --quick, or for tables with slow cases, 5]
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,
    /// About how many seconds one measurement takes [default: 0.15; with --quick, 0.03]
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Numbers of jobs [default: each table's]
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    pub jobs: Vec<usize>,
    /// The pages that are stored, of tables that store some [default: mixed]
    #[arg(long, value_name = "FILE|NAME")]
    pub corpus: Option<Source>,
}

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
    pub(super) took_s: f64,
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
