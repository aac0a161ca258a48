//! Results of tables as files: `DIR/tables/NAME.json` is written as soon as a table is measured, and
//! `DIR/tables/cache-lines.json` when that is known for predictions.
//!
//! A file has the rows' measurements and a key: the program, the machine, and everything that the measurements
//! depend on. A later run reads the file if it has the same key and nothing was left out; ratios, published figures
//! and the verdict are computed anew. Any other file is measured again and replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::Deserialize;
use serde_json::{Value, json};
use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::{Source, command};

use super::machine::Machine;
use super::plan::Planned;
use super::{Measured, failed, write_file};
use crate::experiment::{LabOptions, LabReport, Row, Series, Side};
use crate::scale::costs::Costs;

/// The file of the costs of cache lines: no table is called that.
const COSTS: &str = "cache-lines.json";

/// The folder of a report's results.
pub(super) struct Kept<'a> {
    dir: PathBuf,
    machine: &'a Machine,
    /// Identifies this build of the program: who changes a design wants it measured again.
    program: Value,
    /// Identifies the program `uzram`, which tables start that run programs; `null` without one.
    uzram: Value,
}

#[derive(Deserialize)]
struct File {
    key: Value,
    unix_s: u64,
    took_s: f64,
    left_out: Vec<String>,
    report: KeptReport,
}

/// The part of [`LabReport`]'s JSON that nothing else can be computed from.
#[derive(Deserialize)]
struct KeptReport {
    rows: Vec<KeptRow>,
}

#[derive(Deserialize)]
struct KeptRow {
    case: String,
    jobs: usize,
    before: KeptSide,
    after: KeptSide,
}

#[derive(Deserialize)]
struct KeptSide {
    design: String,
    /// JSON has no NaN: it is `null`.
    values: BTreeMap<String, Vec<Option<f64>>>,
}

impl<'a> Kept<'a> {
    /// Makes the folder.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn new(dir: &Path, machine: &'a Machine) -> Result<Kept<'a>> {
        let dir = dir.join("tables");
        fs::create_dir_all(&dir).map_err(|error| failed(&dir, &error))?;
        let uzram = command::uzram_program().and_then(|path| version_of(&path).ok());
        Ok(Kept { dir, machine, program: this_build()?, uzram: json!(uzram) })
    }

    /// Writes a result.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn store(&self, planned: &Planned, measured: &Measured) -> Result<()> {
        let Measured { report, unix_s, took_s, .. } = measured;
        let file = json!({
            "key": self.key(planned),
            "unix_s": unix_s,
            "took_s": took_s,
            "left_out": report.left_out,
            "report": report,
        });
        write_file(&self.path(planned.table), &format!("{file}\n"))
    }

    /// Reads a table's result, if there is one that was measured in the same way.
    pub(super) fn load(&self, planned: &Planned) -> Option<Measured> {
        let text = fs::read_to_string(self.path(planned.table)).ok()?;
        let file: File = serde_json::from_str(&text).ok()?;
        // What was missing may be there now.
        if file.key != self.key(planned) || !file.left_out.is_empty() {
            return None;
        }
        let rows = file.report.rows.into_iter().map(|row| row.read(planned.table));
        let rows = rows.collect::<Option<_>>()?;
        let report = LabReport::new(planned.table, &planned.options, rows, Vec::new());
        let rounds = planned.options.rounds.rounds;
        Some(Measured { report, unix_s: file.unix_s, took_s: file.took_s, rounds })
    }

    /// Writes what cache lines cost here.
    ///
    /// # Errors
    /// `Io`.
    pub(super) fn store_costs(&self, options: &LabOptions, costs: &Costs) -> Result<()> {
        let file = json!({ "key": self.common_key(options), "costs": costs });
        write_file(&self.dir.join(COSTS), &format!("{file}\n"))
    }

    /// Reads what cache lines cost here, if that was measured in the same way.
    pub(super) fn load_costs(&self, options: &LabOptions) -> Option<Costs> {
        #[derive(Deserialize)]
        struct File {
            key: Value,
            costs: Costs,
        }
        let text = fs::read_to_string(self.dir.join(COSTS)).ok()?;
        let file: File = serde_json::from_str(&text).ok()?;
        (file.key == self.common_key(options)).then_some(file.costs)
    }

    fn path(&self, table: &Series) -> PathBuf {
        self.dir.join(format!("{}.json", table.name))
    }

    /// Returns everything that a table's measurements depend on.
    fn key(&self, planned: &Planned) -> Value {
        let Planned { table, options, .. } = planned;
        json!({
            "common": self.common_key(options),
            "uzram": table.length.is_fixed().then_some(&self.uzram),
            "designs": (table.designs)().all(),
            "cases": table.cases,
            "chosen_cases": options.cases,
            "jobs": options.jobs,
        })
    }

    /// Returns what all measurements depend on.
    fn common_key(&self, options: &LabOptions) -> Value {
        let corpus = match &options.corpus {
            Source::File(path) => {
                let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
                json!([whole.to_string_lossy(), version_of(path).ok()])
            }
            Source::Built(kind, pages) => json!([kind.name(), pages]),
            Source::Processes(pages) => json!(["processes", pages]),
        };
        json!({
            "program": self.program,
            "machine": self.machine,
            "rounds": options.rounds.rounds,
            "measurement_us": options.rounds.duration.as_micros() as u64,
            "corpus": corpus,
        })
    }
}

/// Returns what distinguishes this build of the program from others.
fn this_build() -> Result<Value> {
    let path = command::this_program()?;
    let version = version_of(&path).map_err(|error| {
        Error::new(ErrorKind::Io, format!("cannot examine '{}': {error}", path.display()))
    })?;
    Ok(json!([env!("CARGO_PKG_VERSION"), version]))
}

/// Returns what changes when a file is written or replaced.
fn version_of(path: &Path) -> std::io::Result<Value> {
    let file = path.metadata()?;
    Ok(json!([file.size(), file.mtime(), file.mtime_nsec()]))
}

impl KeptRow {
    /// Returns the row, with its published figures.
    fn read(self, table: &Series) -> Option<Row> {
        let designs = (table.designs)();
        let is_of_series = self.after.design == designs.after;
        let before = designs.before.iter().position(|design| *design == self.before.design);
        let published = before.filter(|_| is_of_series);
        let published = published.and_then(|before| (table.published)(&self.case, self.jobs, before));
        Row::new(&self.case, self.jobs, self.before.read(), self.after.read(), published)
    }
}

impl KeptSide {
    fn read(self) -> Side {
        let rounds =
            |rounds: Vec<Option<f64>>| rounds.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect();
        let values = self.values.into_iter().map(|(name, values)| (interned(name), rounds(values)));
        Side { design: self.design, values: values.collect() }
    }
}

/// Returns the name of a quantity, kept in memory until the program ends: there are a few dozen of them.
fn interned(name: String) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    match names.get(name.as_str()) {
        Some(&name) => name,
        None => {
            let name: &'static str = Box::leak(name.into_boxed_str());
            names.insert(name);
            name
        }
    }
}
