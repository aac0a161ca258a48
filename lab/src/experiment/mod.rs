//! Experiments: the changes of kernel patch series, measured here, a table for each series.
//!
//! A patch series is a *before* and an *after*. Both exist in the engine as designs that are chosen at run
//! time, so one process can measure them against each other. A [`Series`] has the designs, the cases and
//! numbers of jobs, its author's figures and the expectations; its [`Experiment`] does one measurement.
//! Everything else is here and the same for every series:
//!
//! * `run`: the harness's rounds ([`uzram_bench::harness::rounds`]), in which the designs alternate on the
//!   same operations.
//! * `expect`: judges the expectations.
//! * `report`: rows of medians, the ratio of the rounds' elapsed times with its interval and rank
//!   test ([`uzram_bench::harness::stats::PairedRatio`]), as a table and as JSON.
//! * `clock`: runs a thread's work with or without the clock.
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

use uzram::units::PAGE_SIZE;
use uzram::{Error, Result};

use crate::published::{self, Published, Source as PublishedSource};
use crate::scale::HeldLock;
use crate::{lru_batch, slab_freeze, streams, unmap, zs_defer, zs_free, zs_lock};

pub(crate) use expect::busiest;
pub use expect::{Expect, Figure, Jobs, Outcome, jobs_text, side};
pub(crate) use kept_arena::kept_arena;
pub(crate) use report::wrap;
pub use report::{LabReport, Row, Side};
pub use run::run;
pub use uzram_bench::harness::bound::Bound;
use uzram_bench::harness::corpus::Kind;
pub use uzram_bench::harness::rounds::{Experiment, Plan, RoundOptions, Sample, Values};
use uzram_bench::harness::stats::MAX_PAIRS;
use uzram_bench::harness::{DEFAULT_CORPUS_PAGES, Source};

/// Every table, in the order they are listed.
pub static TABLES: [&Series; 9] = [
    &streams::SERIES,
    &streams::nbd::SERIES,
    &slab_freeze::SERIES,
    &zs_lock::SERIES,
    &zs_lock::disk::SERIES,
    &zs_free::SERIES,
    &zs_defer::SERIES,
    &lru_batch::SERIES,
    &unmap::SERIES,
];

/// Returns the table with that name.
///
/// # Errors
/// `Invalid`, with the existing names.
pub fn table(name: &str) -> Result<&'static Series> {
    TABLES.into_iter().find(|table| table.name == name).ok_or_else(|| {
        let names: Vec<_> = TABLES.iter().map(|table| table.name).collect();
        Error::invalid(format!("there is no table '{name}', only: {}", names.join(", ")))
    })
}

/// A measured quantity of a table, and how it is printed.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its name in [`Values`].
    pub value: &'static str,
    /// Its heading.
    pub heading: &'static str,
    /// The factor by which it is printed: 1000 for a fraction that is printed per thousand.
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

/// The designs of a table, by the names that its experiment uses.
#[derive(Clone, Debug)]
pub struct Designs {
    /// The designs that the series replaced; each is compared with `after`.
    pub before: Vec<String>,
    /// The design that it introduced.
    pub after: String,
    /// Later designs; `after` is compared with each.
    pub beyond: Vec<String>,
}

impl Designs {
    /// Returns the designs of a table's list; the one at `after` is [`Designs::after`].
    pub(crate) fn of<T>(designs: &[(&'static str, T)], after: usize) -> Designs {
        let names = |designs: &[(&str, T)]| designs.iter().map(|(name, _)| (*name).to_owned()).collect();
        let (before, others) = designs.split_at(after);
        Designs { before: names(before), after: others[0].0.to_owned(), beyond: names(&others[1..]) }
    }

    /// Returns all of them, in this order: those before, `after`, those beyond.
    pub fn all(&self) -> Vec<String> {
        self.before.iter().chain([&self.after]).chain(&self.beyond).cloned().collect()
    }
}

/// The unit of a table's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Pages that are read or written.
    Page,
    /// Objects that are allocated and freed.
    Object,
}

impl Unit {
    /// Returns its name in text.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Page => "page",
            Unit::Object => "object",
        }
    }

    /// Returns the names of elapsed time, CPU time, and context switches of both kinds for a unit.
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

    /// Returns the names of callgrind's counts for a unit: instructions, branches, mispredicted branches.
    pub const fn counts(self) -> [&'static str; 3] {
        match self {
            Unit::Page => ["instructions_per_page", "branches_per_page", "mispredictions_per_page"],
            Unit::Object => ["instructions_per_object", "branches_per_object", "mispredictions_per_object"],
        }
    }
}

/// How long a measurement is.
#[derive(Clone, Copy)]
pub enum Length {
    /// About as long as wanted.
    Calibrated,
    /// As long as its work takes, which is always the same. Such a table runs other programs, so that callgrind cannot
    /// count it.
    Fixed {
        /// About how many seconds a measurement of a case takes with so many jobs, with the default corpus.
        seconds: fn(&str, usize) -> f64,
        /// Whether it takes that much less with a smaller corpus.
        is_of_corpus: bool,
    },
}

impl Length {
    /// Returns whether the work is always the same.
    pub const fn is_fixed(&self) -> bool {
        matches!(self, Length::Fixed { .. })
    }
}

/// Prepares the designs of these names for measuring, on pages of this source.
pub type Open = fn(&Source, &[String]) -> Result<Box<dyn Experiment>>;

/// A kernel patch series, its measurements, and its expectations. To add one, write such a static in a new
/// module, with an [`Experiment`], and add it to [`TABLES`].
pub struct Series {
    /// Its name on the command line.
    pub name: &'static str,
    /// A line on what it compares.
    pub about: &'static str,
    /// The part of `lab/published.toml` that has the series' title, author and figures.
    pub published: &'static str,
    /// The index of the design before that is the first one there.
    pub first_published: fn() -> usize,
    /// The cases in the order they are run, each with its default numbers of jobs. A job is a thread, or what
    /// the legend says.
    pub cases: &'static [(&'static str, &'static [usize])],
    /// Those of the cases that take minutes: a quick report leaves them out.
    pub slow_cases: &'static [&'static str],
    /// The unit of work.
    pub unit: Unit,
    /// The designs that are compared.
    pub designs: fn() -> Designs,
    /// The quantities that are printed.
    pub columns: &'static [Column],
    /// The meaning of the columns, and the names of the designs: lines below the table.
    pub legend: fn() -> Vec<String>,
    /// The name of the rows that sum the seconds of all cases, if all were run; `None` if cases have
    /// different numbers of jobs.
    pub total: Option<&'static str>,
    /// The function that callgrind counts, by its path: it does the measured work and nothing else. Counting
    /// is turned on when it is entered and off when it returns, so it must not call itself.
    pub counted_function: &'static str,
    /// How long a measurement is.
    pub length: Length,
    /// Prepares to measure these designs.
    pub open: Open,
    /// What the table should show.
    pub expectations: &'static [Expect],
    /// The locks whose hold times are measured.
    pub locks: &'static [HeldLock],
}

impl Series {
    /// A table without all that only some have. Its measurements are calibrated, and its work is run by
    /// [`clock::clocked`].
    pub const NEW: Series = Series {
        name: "",
        about: "",
        published: "",
        first_published: || 0,
        cases: &[],
        slow_cases: &[],
        unit: Unit::Object,
        designs: || Designs { before: Vec::new(), after: String::new(), beyond: Vec::new() },
        columns: &[],
        legend: Vec::new,
        total: None,
        counted_function: clock::CLOCKED,
        length: Length::Calibrated,
        open: |_, _| Err(Error::invalid("the table measures nothing")),
        expectations: &[],
        locks: &[],
    };

    /// Returns the source of the published figures.
    pub fn source(&self) -> &'static PublishedSource {
        published::source(self.published)
    }

    /// Returns the title, the author and the date.
    pub fn reference(&self) -> String {
        let PublishedSource { title, author, date, .. } = self.source();
        format!("\"{title}\", {author}, {date}")
    }

    /// Returns the author's figures for a case (or the total) and a number of jobs, of the design before at an index in
    /// [`Designs`] and of the one after.
    pub fn published_at(&self, case: &str, jobs: usize, before: usize) -> Option<Published> {
        published::beside(self.published, case, jobs, before.checked_sub((self.first_published)())?)
    }

    /// Returns the names of its cases.
    pub fn case_names(&self) -> Vec<&'static str> {
        self.cases.iter().map(|(name, _)| *name).collect()
    }
}

/// Returns all published figures of a case and a design before, by number of jobs.
pub(crate) fn all_published(
    table: &Series,
    case: &str,
    before_at: usize,
) -> impl Iterator<Item = (usize, Published)> {
    let of = move |jobs| Some((jobs, table.published_at(case, jobs, before_at)?));
    (1..=MAX_JOBS).filter_map(of)
}

/// Returns a design's name in a sentence. The table `streams` calls a list of idle streams by their number.
pub(crate) fn spoken(design: &str) -> String {
    match design.bytes().all(|byte| byte.is_ascii_digit()) {
        true => format!("a list of {design}"),
        false => design.to_owned(),
    }
}

/// Returns the entry of a table for one of its designs or cases, by the name.
///
/// # Errors
/// `Invalid`, with the existing names.
pub(crate) fn by_name<T: Copy>(all: &[(&'static str, T)], name: &str) -> Result<T> {
    let found = all.iter().find(|(other, _)| *other == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        Error::invalid(format!("this table has no '{name}', only: {}", names.join(", ")))
    })
}

/// Returns the number of CPUs that jobs can run on.
pub(crate) fn cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of a corpus's pages, as far as it is known before they are loaded.
pub(crate) fn pages_of(corpus: &Source) -> usize {
    match corpus {
        Source::Built(_, pages) | Source::Processes(pages) => *pages,
        // Loading complains about a file that does not exist.
        Source::File(path) => path.metadata().map_or(0, |metadata| metadata.len() as usize / PAGE_SIZE),
    }
}

/// How to run a table.
#[derive(Clone)]
pub struct LabOptions {
    /// The cases; empty for all of them.
    pub cases: Vec<String>,
    /// Numbers of jobs; empty for the table's own.
    pub jobs: Vec<usize>,
    /// The number of rounds, and the length of a measurement.
    pub rounds: RoundOptions,
    /// The pages, if a table needs some.
    pub corpus: Source,
    /// Whether to count instructions too, by running this program under callgrind ([`callgrind`]).
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
    /// Returns the cases of a table to run, each with its numbers of jobs.
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
        let counts = self.callgrind.is_some() && !table.length.is_fixed();
        if counts && !jobs().any(|jobs| *jobs == 1) {
            return bad("callgrind counts one job: 1 must be among the jobs".into(), "--jobs");
        }
        let RoundOptions { rounds, duration, .. } = self.rounds;
        if !(1..=MAX_PAIRS).contains(&rounds) {
            return bad(format!("{rounds} rounds: it must be 1 to {MAX_PAIRS}"), "--rounds");
        }
        if duration.is_zero() || duration > MAX_DURATION {
            return bad("a measurement must last more than 0 s and at most an hour".into(), "--seconds");
        }
        Ok(cases)
    }

    /// Estimates how long a table takes: every round, and the one that warms up.
    ///
    /// # Errors
    /// `Invalid` names the option that does not fit this table.
    pub fn estimate(&self, table: &Series) -> Result<Duration> {
        let designs_and_rounds = (table.designs)().all().len() * (self.rounds.rounds + 1);
        let mut seconds = 0.0;
        for (case, jobs) in self.resolve(table)? {
            let measurement_s = |jobs| match table.length {
                Length::Calibrated => self.rounds.duration.as_secs_f64(),
                Length::Fixed { seconds, .. } => seconds(case, jobs),
            };
            seconds += jobs.into_iter().map(measurement_s).sum::<f64>();
        }
        let all_s = seconds * designs_and_rounds as f64;
        Ok(Duration::try_from_secs_f64(all_s).unwrap_or(Duration::MAX))
    }
}
