//! Experiments: what a kernel patch series changed, measured here, a table for each series.
//!
//! A patch series is a *before* and an *after*. Both exist in the engine as designs that are chosen
//! at run time, so one process can measure them against each other. A [`Series`] says which designs,
//! under which cases and numbers of jobs, what its author measured and what is expected; its
//! [`Experiment`] does one measurement. Everything else is here and the same for every series:
//!
//! * `run`: the harness's rounds ([`uzram_bench::harness::rounds`]), in which the designs take turns on
//!   the same operations.
//! * `expect`: judges what was expected.
//! * `report`: rows of medians, the ratio of the rounds' elapsed times with its interval and rank
//!   test ([`uzram_bench::harness::stats::PairedRatio`]), as a table and as JSON.
//! * `clock`: runs a thread's work with the clock, or without.
//! * `callgrind`: the slow mode, which counts instructions instead of seconds.

pub mod callgrind;
pub(crate) mod clock;
pub(crate) mod expect;
mod kept_arena;
mod report;
mod run;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::thread;
use std::time::Duration;

use uzram::{Error, Result};

use crate::{lru_batch, slab_freeze, streams, zs_free, zs_lock};

pub use expect::{Expect, Figure, Jobs, jobs_text, side};
pub(crate) use expect::{busiest, median_of};
pub(crate) use kept_arena::kept_arena;
pub use report::{LabReport, Published, PublishedSide, Row, Side};
pub use run::run;
pub use uzram_bench::harness::bound::Bound;
use uzram_bench::harness::corpus::Kind;
pub use uzram_bench::harness::rounds::{Experiment, Plan, RoundOptions, Sample, Values};
use uzram_bench::harness::stats::MAX_PAIRS;
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source};

/// Every table, in the order they are listed.
pub static TABLES: [&Series; 5] =
    [&streams::SERIES, &slab_freeze::SERIES, &zs_lock::SERIES, &zs_free::SERIES, &lru_batch::SERIES];

/// The table of a name.
///
/// # Errors
/// `Invalid`, with the names there are.
pub fn table(name: &str) -> Result<&'static Series> {
    TABLES.into_iter().find(|table| table.name == name).ok_or_else(|| {
        let names: Vec<_> = TABLES.iter().map(|table| table.name).collect();
        Error::invalid(format!("there is no table '{name}', only: {}", names.join(", ")))
    })
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
    /// The designs of a table's list; the one at `after` is [`Designs::after`].
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

    /// What a unit costs: the names of elapsed time, processor time, context switches of both kinds.
    pub(crate) const fn costs(self) -> [&'static str; 4] {
        match self {
            Unit::Page => [
                "ns_per_page",
                "cpu_ns_per_page",
                "voluntary_switches_per_page",
                "involuntary_switches_per_page",
            ],
            Unit::Object => [
                "ns_per_object",
                "cpu_ns_per_object",
                "voluntary_switches_per_object",
                "involuntary_switches_per_object",
            ],
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

/// Makes the designs of these names ready to be measured, on pages of this source.
pub type Open = fn(&Source, &[String]) -> Result<Box<dyn Experiment>>;

/// A kernel patch series, what is measured for it, and what it is expected to show. To add one, write
/// such a static in a module of its own, with an [`Experiment`], and put it into [`TABLES`].
pub struct Series {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it compares, in a line.
    pub about: &'static str,
    /// The title of the patch, or of the cover letter.
    pub title: &'static str,
    /// Who wrote it.
    pub author: &'static str,
    /// When it was merged.
    pub date: &'static str,
    /// The cases in the order they are run, each with its numbers of jobs unless the user wants others. A
    /// job is a thread, or what the legend says.
    pub cases: &'static [(&'static str, &'static [usize])],
    /// What the work is counted in.
    pub unit: Unit,
    /// The designs that are compared.
    pub designs: fn() -> Designs,
    /// What is printed of a measurement.
    pub columns: &'static [Column],
    /// What the columns mean, and the names of the designs: lines below the table.
    pub legend: fn() -> Vec<String>,
    /// The name of the rows that add up the seconds of all cases, if all were run; `None` where cases have
    /// different numbers of jobs.
    pub total: Option<&'static str>,
    /// What callgrind is to count: the path of a function that does the measured work and nothing
    /// else. Counting is turned on when it is entered and off when it returns, so it must not call
    /// itself.
    pub counted_function: &'static str,
    /// Prepares to measure these designs.
    pub open: Open,
    /// What the author measured for a case (or the total) and a number of jobs, of the design before at
    /// a place in [`Designs`] and of the one after.
    pub published: fn(&str, usize, usize) -> Option<Published>,
    /// What it should show.
    pub expectations: &'static [Expect],
    /// What else the rows say, in paragraphs; the number is that of the machine's CPUs.
    pub findings: fn(&[Row], usize) -> Vec<String>,
}

impl Series {
    /// The title, the author and the date.
    pub fn reference(&self) -> String {
        format!("\"{}\", {}, {}", self.title, self.author, self.date)
    }

    /// The names of its cases.
    pub fn case_names(&self) -> Vec<&'static str> {
        self.cases.iter().map(|(name, _)| *name).collect()
    }
}

/// What a table has for one of its designs or cases, by the name.
///
/// # Errors
/// `Invalid`, with the names there are.
pub(crate) fn by_name<T: Copy>(all: &[(&'static str, T)], name: &str) -> Result<T> {
    let found = all.iter().find(|(other, _)| *other == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        Error::invalid(format!("this table has no '{name}', only: {}", names.join(", ")))
    })
}

/// The number of CPUs that jobs can run on.
pub(crate) fn cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// How to run a table.
#[derive(Clone)]
pub struct LabOptions {
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

impl Default for LabOptions {
    fn default() -> Self {
        LabOptions {
            cases: Vec::new(),
            jobs: Vec::new(),
            rounds: RoundOptions::default(),
            corpus: Source::Built(Kind::Mixed, DEFAULT_CORPUS_PAGES),
            callgrind: None,
        }
    }
}

impl LabOptions {
    /// The cases to run of a table, each with its numbers of jobs.
    fn resolve(&self, table: &Series) -> Result<Vec<(&'static str, Vec<usize>)>> {
        let bad = |what: String, setting| Err(Error::invalid(what).with_setting(setting));
        let known = table.case_names();
        if let Some(case) = self.cases.iter().find(|case| !known.contains(&case.as_str())) {
            let name = table.name;
            return bad(format!("'{case}' is no case of {name}, which has: {}", known.join(", ")), "--case");
        }
        let wanted = |case: &str| self.cases.is_empty() || self.cases.iter().any(|wanted| wanted == case);
        let jobs_of = |(case, jobs): &(&'static str, &[usize])| {
            let mut jobs = if self.jobs.is_empty() { jobs.to_vec() } else { self.jobs.clone() };
            jobs.sort_unstable();
            jobs.dedup();
            (*case, jobs)
        };
        let cases: Vec<_> = table.cases.iter().filter(|(case, _)| wanted(case)).map(jobs_of).collect();
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
    /// `Invalid` names the option that does not fit this table.
    pub fn estimate(&self, table: &Series) -> Result<Duration> {
        let turns: usize = self.resolve(table)?.iter().map(|(_, jobs)| jobs.len()).sum();
        let measurements = turns * (table.designs)().all().len() * (self.rounds.rounds + 1);
        Ok(self.rounds.duration * u32::try_from(measurements).unwrap_or(u32::MAX))
    }
}
