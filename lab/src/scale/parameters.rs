//! The structures of the tables' workloads, and the machines whose figures were published: `parameters.json`.
//!
//! Everything that a prediction takes is in that file, with its reason, or measured: no figure here was fitted to a
//! published row but the time of one task. For each table's cases it has
//!
//! * `time`: the quantity of a measurement with one job from which an operation's time comes;
//! * `locks`, and which of a kind a core takes;
//! * `designs`: for designs of these names ([`modelled_as`]) the sections of an operation. An amount is a number, a
//!   quantity of the measurement (for each page or object), or a cost of this machine; `rest` is what is left of `time`;
//! * `published`: the machine, the quantity, the numbers of jobs, and what the model leaves out.

use serde::{Deserialize, Serialize};
use uzram::{Error, Result};

use super::model::Spread;

const TEXT: &str = include_str!("parameters.json");

/// The file.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    /// Operations of a simulation.
    pub operations: usize,
    /// The seed of all simulations.
    pub seed: u64,
    /// Lines by which each spinning waiter delays a hand-over here: the least, a guess, the most. The kernel's waiters
    /// spin on a line each.
    pub spin_lines_per_waiter: [f64; 3],
    /// The reasons for these.
    pub why: String,
    /// The machines of published figures.
    pub machines: Vec<MachineParameters>,
    /// The workloads.
    pub tables: Vec<CaseParameters>,
}

/// A machine whose figures were published.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MachineParameters {
    /// Its name.
    pub name: String,
    /// Physical cores: more tasks take turns.
    pub cores: usize,
    /// Nodes, each with the same number of cores.
    pub nodes: usize,
    /// The reasons for these numbers.
    pub why: String,
    /// The least and the most that moving a line may take, in nanoseconds.
    pub line_ns: [f64; 2],
    /// Where that range is from.
    pub line_source: String,
}

/// The workload of some cases of a table.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CaseParameters {
    /// The table.
    pub table: String,
    /// Its cases.
    pub cases: Vec<String>,
    /// The quantity that an operation's time is taken from: nanoseconds of a page or object, or `mb_per_s`.
    pub time: String,
    /// Pages or objects of an operation.
    #[serde(default = "one")]
    pub units_per_operation: f64,
    /// Threads of a job.
    #[serde(default = "one_thread")]
    pub threads_per_job: usize,
    /// The reasons for the structure.
    pub why: String,
    /// The locks.
    pub locks: Vec<LockParameters>,
    /// The sections of each design; designs that none of them names are not modelled.
    pub designs: Vec<DesignParameters>,
    /// The published figures.
    pub published: Vec<PublishedParameters>,
}

/// A lock.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LockParameters {
    /// Its name.
    pub name: String,
    /// Which of a kind a core takes.
    pub of: SpreadName,
    /// The number of those from which one is taken at random.
    #[serde(default)]
    pub count: Amount,
}

/// The names of [`Spread`].
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpreadName {
    /// There is one.
    One,
    /// One at random.
    Random,
    /// The node's.
    PerNode,
    /// A stack of things.
    Stack,
}

/// The sections of some designs.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DesignParameters {
    /// Their names in predictions.
    pub names: Vec<String>,
    /// The sections of one operation.
    pub sections: Vec<SectionParameters>,
}

/// A section.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SectionParameters {
    /// Its name.
    pub name: String,
    /// The name of the lock that it holds.
    #[serde(default)]
    pub lock: Option<String>,
    /// Visits of an operation.
    #[serde(default = "Amount::one")]
    pub visits: Amount,
    /// Nanoseconds of an operation, all visits together.
    #[serde(default)]
    pub ns: Amount,
    /// Whether each visit's time contains a reading of the clock.
    #[serde(default)]
    pub is_timed: bool,
    /// Lines that a visit moves one after the other.
    #[serde(default)]
    pub lines: Amount,
    /// Lines that it moves side by side.
    #[serde(default)]
    pub bulk_lines: Amount,
}

/// A number, or a quantity by its name, or a part of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Amount {
    /// A number.
    Number(f64),
    /// A measured quantity.
    Quantity(String),
    /// `times` a measured quantity.
    Part {
        /// Its name.
        of: String,
        /// The factor.
        times: f64,
    },
}

/// The published figures of a machine.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedParameters {
    /// The machine's name.
    pub machine: String,
    /// The quantity.
    pub figure: String,
    /// What a report calls it.
    pub heading: String,
    /// Whether it is the time of a fixed amount of work for each task; else it is a rate of all.
    pub is_time: bool,
    /// Pages or objects of a task in that time, or a second's for a rate of 1.
    pub units: f64,
    /// The reasons for these units, and for the numbers below.
    pub why: String,
    /// Numbers of jobs of the table's rows.
    pub jobs: Vec<usize>,
    /// The numbers of tasks that these rows stand for, if they are others.
    #[serde(default)]
    pub tasks: Vec<usize>,
    /// Whether there is a figure of one task, to which the times are scaled.
    pub fits_one_task: bool,
    /// What the model leaves out.
    pub not_modelled: String,
}

/// The rest of an operation's time.
pub const REST: &str = "rest";

impl Default for Amount {
    fn default() -> Self {
        Amount::Number(0.0)
    }
}

impl Amount {
    fn one() -> Amount {
        Amount::Number(1.0)
    }

    /// Returns its value, by that of quantities.
    ///
    /// # Errors
    /// That of `quantity`.
    pub fn value(&self, quantity: impl FnOnce(&str) -> Result<f64>) -> Result<f64> {
        match self {
            Amount::Number(number) => Ok(*number),
            Amount::Quantity(name) => quantity(name),
            Amount::Part { of, times } => Ok(times * quantity(of)?),
        }
    }

    /// Returns whether it is the rest of an operation's time.
    pub fn is_rest(&self) -> bool {
        matches!(self, Amount::Quantity(name) if name == REST)
    }
}

impl LockParameters {
    /// Returns which of a kind a core takes.
    pub(super) fn spread(&self, count: f64) -> Spread {
        match self.of {
            SpreadName::One => Spread::One,
            SpreadName::Random => Spread::Random((count.round() as usize).max(1)),
            SpreadName::PerNode => Spread::PerNode,
            SpreadName::Stack => Spread::Stack,
        }
    }
}

impl CaseParameters {
    /// Returns the sections of a design, by its name in predictions; `None` if it is not modelled.
    pub fn sections(&self, design: &str) -> Option<&[SectionParameters]> {
        let entry = self.designs.iter().find(|entry| entry.names.iter().any(|name| name == design));
        entry.map(|entry| entry.sections.as_slice())
    }
}

impl PublishedParameters {
    /// Returns each row's number of jobs in the table and the number of tasks that it stands for.
    pub fn points(&self) -> impl Iterator<Item = (usize, usize)> {
        let tasks = if self.tasks.is_empty() { &self.jobs } else { &self.tasks };
        self.jobs.iter().copied().zip(tasks.iter().copied())
    }

    /// Returns the figure of so many pages or objects a second by all tasks together.
    pub fn figure_of(&self, units_per_s: f64, tasks: usize) -> f64 {
        match self.is_time {
            true => tasks as f64 * self.units / units_per_s,
            false => units_per_s / self.units,
        }
    }

    /// Returns the pages or objects a second of all tasks together that a figure means.
    pub fn units_per_s(&self, figure: f64, tasks: usize) -> f64 {
        match self.is_time {
            true => tasks as f64 * self.units / figure,
            false => figure * self.units,
        }
    }
}

impl Parameters {
    /// Reads the file that was built in.
    ///
    /// # Errors
    /// `Invalid`: it cannot be read.
    pub fn built_in() -> Result<Parameters> {
        serde_json::from_str(TEXT).map_err(|error| Error::invalid(format!("scale/parameters.json: {error}")))
    }

    /// Returns a machine.
    ///
    /// # Errors
    /// `Invalid`: there is none of that name.
    pub fn machine(&self, name: &str) -> Result<&MachineParameters> {
        let found = self.machines.iter().find(|machine| machine.name == name);
        found.ok_or_else(|| Error::invalid(format!("scale/parameters.json has no machine '{name}'")))
    }

    /// Returns the workloads of a table.
    ///
    /// # Errors
    /// `Invalid`: it has none.
    pub fn of_table(&self, table: &str) -> Result<Vec<&CaseParameters>> {
        let found: Vec<_> = self.tables.iter().filter(|case| case.table == table).collect();
        if found.is_empty() {
            let known = self.table_names().join(", ");
            return Err(Error::invalid(format!(
                "there is no model of the table '{table}', only of: {known}"
            )));
        }
        Ok(found)
    }

    /// Returns the names of the tables that have workloads.
    pub fn table_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tables.iter().map(|case| case.table.clone()).collect();
        names.dedup();
        names
    }
}

/// Returns the name of a design in predictions. A table calls a list of streams by their number, which goes with the
/// number of CPUs; with any number of cores it is modelled with as many for each of them as it has here for each CPU.
pub fn modelled_as(design: &str, cpus: usize) -> String {
    match design.parse::<usize>().map(|streams| streams / cpus) {
        Ok(1) => "list of 1 stream per core".to_owned(),
        Ok(per_core) => format!("list of {per_core} streams per core"),
        Err(_) => design.to_owned(),
    }
}

const fn one() -> f64 {
    1.0
}

const fn one_thread() -> usize {
    1
}
