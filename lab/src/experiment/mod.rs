//! Experiments: what a kernel patch series changed, measured here, a table for each series.
//!
//! A patch series is a *before* and an *after*. Both exist in the engine as designs that are chosen
//! at run time, so one process can measure them against each other. A [`Table`] says which designs,
//! under which cases and numbers of jobs, and what the series' author measured; its [`Experiment`]
//! does one measurement. Everything else is here and the same for every table:
//!
//! * `run`: rounds. Before and after alternate, in every order equally often, on the same
//!   operations, each doing the same fixed amount of work, which is calibrated once for each case
//!   and number of jobs; a first round warms up and is not counted.
//! * `report`: rows of medians, the ratio of the rounds' elapsed times with its interval and rank
//!   test ([`uzram_bench::harness::stats::PairedRatio`]), as a table and as JSON.
//! * `callgrind`: the slow mode, which counts instructions instead of seconds.

pub mod callgrind;
mod report;
mod run;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::time::Duration;

use uzram::{Error, Result};

use crate::lru_batch::LruBatch;
use crate::slab_freeze::SlabFreeze;
use crate::streams::Streams;
use crate::zs_free::ZsFree;
use crate::zs_lock::ZsLock;
pub use report::{Published, PublishedSide, Report, Row, Side};
pub use run::run;
use uzram_bench::harness::corpus::Kind;
pub use uzram_bench::harness::rounds::{Experiment, Plan, RoundOptions, Sample, Values};
use uzram_bench::harness::stats::MAX_PAIRS;
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source};

/// Every table, in the order they are listed.
pub static TABLES: [&dyn Table; 5] = [&Streams, &SlabFreeze, &ZsLock, &ZsFree, &LruBatch];

/// The table of a name.
///
/// # Errors
/// `Invalid`, with the names there are.
pub fn table(name: &str) -> Result<&'static dyn Table> {
    TABLES.into_iter().find(|table| table.name() == name).ok_or_else(|| {
        let names: Vec<_> = TABLES.iter().map(|table| table.name()).collect();
        Error::invalid(format!("there is no table '{name}', only: {}", names.join(", ")))
    })
}

/// A patch series.
#[derive(Clone, Copy, Debug)]
pub struct Series {
    /// The title of the patch, or of the cover letter.
    pub title: &'static str,
    /// Who wrote it.
    pub author: &'static str,
    /// When it was merged.
    pub date: &'static str,
}

impl std::fmt::Display for Series {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\", {}, {}", self.title, self.author, self.date)
    }
}

/// A quantity that a table's measurements have, and how it is printed.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its name in [`Values`].
    pub value: &'static str,
    /// Its name on paper.
    pub heading: &'static str,
    /// What one is printed as: 1000 for a share that is printed for a thousand.
    pub scale: f64,
    /// Decimals.
    pub decimals: usize,
}

impl Column {
    /// A quantity, its heading, what one is printed as, and decimals.
    pub(crate) const fn new(
        value: &'static str,
        heading: &'static str,
        scale: f64,
        decimals: usize,
    ) -> Column {
        Column { value, heading, scale, decimals }
    }
}

/// The designs of a table, by the names that its experiment knows them by.
#[derive(Clone, Debug)]
pub struct Designs {
    /// Those that the series replaced; each is compared with `after`.
    pub before: Vec<String>,
    /// The one it introduced.
    pub after: String,
    /// Those that came after it; `after` is compared with each.
    pub beyond: Vec<String>,
}

impl Designs {
    /// Those of a list with what a table has for each; the one at `after` is [`Designs::after`].
    pub(crate) fn of<T>(designs: &[(&'static str, T)], after: usize) -> Designs {
        let names = |designs: &[(&str, T)]| designs.iter().map(|(name, _)| (*name).to_owned()).collect();
        let (before, others) = designs.split_at(after);
        Designs { before: names(before), after: others[0].0.to_owned(), beyond: names(&others[1..]) }
    }

    /// All of them, in this order: those before, `after`, those beyond.
    pub fn all(&self) -> Vec<String> {
        self.before.iter().chain([&self.after]).chain(&self.beyond).cloned().collect()
    }
}

/// What a table's work is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Pages that are read or written.
    Page,
    /// Objects that are allocated and freed.
    Object,
}

impl Unit {
    /// In words.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Page => "page",
            Unit::Object => "object",
        }
    }

    /// What callgrind counts for each: the names of instructions, branches, mispredicted branches.
    pub const fn counts(self) -> [&'static str; 3] {
        match self {
            Unit::Page => ["instructions_per_page", "branches_per_page", "mispredictions_per_page"],
            Unit::Object => ["instructions_per_object", "branches_per_object", "mispredictions_per_object"],
        }
    }
}

/// What is measured for one patch series. To add one, implement this and [`Experiment`] in a module
/// of the lab, and put it into [`TABLES`].
pub trait Table: Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// What it compares, in a line.
    fn about(&self) -> &'static str;

    /// The series it repeats.
    fn series(&self) -> Series;

    /// The cases, in the order they are run.
    fn cases(&self) -> Vec<&'static str>;

    /// A case's numbers of jobs, unless the user wants others. A job is a thread, or what the table
    /// says.
    fn jobs(&self, case: &str) -> Vec<usize>;

    /// What the work is counted in.
    fn unit(&self) -> Unit;

    /// The designs that are compared.
    fn designs(&self) -> Designs;

    /// What is printed of a measurement.
    fn columns(&self) -> &'static [Column];

    /// What the columns mean, and the names of the designs: lines below the table.
    fn legend(&self) -> Vec<String>;

    /// Under what name the rows stand that add up the seconds of all cases, when all were run; none
    /// where cases have different numbers of jobs.
    fn total(&self) -> Option<&'static str> {
        None
    }

    /// Prepares to measure `designs`.
    ///
    /// # Errors
    /// What keeps it from measuring.
    fn open(&self, corpus: &Source, designs: &[String]) -> Result<Box<dyn Experiment>>;

    /// What the series' author measured for a case (or the total), of the design `before` (its place
    /// in [`Designs`]) and of the one after.
    fn published(&self, case: &str, jobs: usize, before: usize) -> Option<Published>;

    /// What callgrind is to count: the path of a function that does the measured work and nothing
    /// else. Counting is turned on when it is entered and off when it returns, so it must not call
    /// itself.
    fn counted_function(&self) -> &'static str;

    /// What the rows say, in words: paragraphs.
    fn verdict(&self, rows: &[Row]) -> Vec<String>;
}

/// What a table has for one of its designs, by the design's name.
///
/// # Errors
/// `Invalid`, with the names there are.
pub(crate) fn by_name<T: Copy>(designs: &[(&'static str, T)], name: &str) -> Result<T> {
    let found = designs.iter().find(|(other, _)| *other == name);
    found.map(|(_, design)| *design).ok_or_else(|| {
        let names: Vec<_> = designs.iter().map(|(name, _)| *name).collect();
        Error::invalid(format!("'{name}' is no design of this table, only: {}", names.join(", ")))
    })
}

/// How to run a table.
#[derive(Clone)]
pub struct Options {
    /// The cases; none for all of them.
    pub cases: Vec<String>,
    /// Numbers of jobs; none for the table's own.
    pub jobs: Vec<usize>,
    /// How many rounds, and how long a measurement lasts.
    pub rounds: RoundOptions,
    /// The pages, where a table needs some.
    pub corpus: Source,
    /// Count instructions as well, by running this program under callgrind ([`callgrind`]).
    pub callgrind: Option<callgrind::Program>,
}

const MAX_JOBS: usize = 256;
const MAX_DURATION: Duration = Duration::from_hours(1);

impl Default for Options {
    fn default() -> Self {
        Options {
            cases: Vec::new(),
            jobs: Vec::new(),
            rounds: RoundOptions::default(),
            corpus: Source::Built(Kind::Mixed, DEFAULT_CORPUS_PAGES),
            callgrind: None,
        }
    }
}

impl Options {
    /// What these options come to for a table: its cases, each with its numbers of jobs.
    fn resolve(&self, table: &dyn Table) -> Result<Vec<(&'static str, Vec<usize>)>> {
        let bad = |what: String, setting| Err(Error::invalid(what).with_setting(setting));
        let known = table.cases();
        if let Some(case) = self.cases.iter().find(|case| !known.contains(&case.as_str())) {
            let name = table.name();
            return bad(format!("'{case}' is no case of {name}, which has: {}", known.join(", ")), "--case");
        }
        let wanted = |case: &&str| self.cases.is_empty() || self.cases.iter().any(|wanted| wanted == case);
        let jobs_of = |case| {
            let mut jobs = if self.jobs.is_empty() { table.jobs(case) } else { self.jobs.clone() };
            jobs.sort_unstable();
            jobs.dedup();
            (case, jobs)
        };
        let cases: Vec<_> = known.into_iter().filter(wanted).map(jobs_of).collect();
        let jobs = || cases.iter().flat_map(|(_, jobs)| jobs);
        if let Some(jobs) = jobs().find(|jobs| !(1..=MAX_JOBS).contains(*jobs)) {
            return bad(format!("{jobs} jobs: it must be 1 to {MAX_JOBS}"), "--jobs");
        }
        if self.callgrind.is_some() && !jobs().any(|jobs| *jobs == 1) {
            return bad("callgrind counts what one job does: 1 must be among the jobs".into(), "--jobs");
        }
        let RoundOptions { rounds, duration, .. } = self.rounds;
        if !(1..=MAX_PAIRS).contains(&rounds) {
            return bad(format!("{rounds} rounds: it must be 1 to {MAX_PAIRS}"), "--rounds");
        }
        if duration.is_zero() || duration > MAX_DURATION {
            return bad("a measurement must last more than nothing and at most an hour".into(), "--seconds");
        }
        Ok(cases)
    }

    /// About how long a table takes: every round, and the one that warms up.
    ///
    /// # Errors
    /// An option that cannot be, for this table.
    pub fn estimate(&self, table: &dyn Table) -> Result<Duration> {
        let turns: usize = self.resolve(table)?.iter().map(|(_, jobs)| jobs.len()).sum();
        let measurements = turns * table.designs().all().len() * (self.rounds.rounds + 1);
        Ok(self.rounds.duration * u32::try_from(measurements).unwrap_or(u32::MAX))
    }
}
