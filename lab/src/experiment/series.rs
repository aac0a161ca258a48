//! What a table is: its cases, designs, columns, expectations, and how to measure it.

use uzram::{Error, Result};
use uzram_bench::harness::Source;
use uzram_bench::harness::bound::Bound;
use uzram_bench::harness::report::jobs_text;
use uzram_bench::harness::rounds::Experiment;

use crate::published::{self, Published};

pub(super) const MAX_JOBS: usize = 256;

/// A measured quantity of a table, by its name in [`Values`](super::Values), and how it is printed: its
/// heading, the factor (1000 for a fraction that is printed per thousand), and decimals.
pub type Column = (&'static str, &'static str, f64, usize);

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
    /// Returns the designs of a table's list, which has [`Designs::after`].
    pub(crate) fn of<T>(designs: &[(&'static str, T)], after: &str) -> Designs {
        let names = |designs: &[(&str, T)]| designs.iter().map(|(name, _)| (*name).to_owned()).collect();
        let at = designs.iter().position(|(name, _)| *name == after).expect("the list has it");
        let (before, others) = designs.split_at(at);
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
}

/// How long a measurement is.
#[derive(Clone, Copy)]
pub enum Length {
    /// About as long as wanted.
    Calibrated,
    /// As long as its work takes, which is always the same. Such a table runs other programs.
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
/// module, with an [`Experiment`], and add it to [`TABLES`](crate::tables::TABLES).
pub struct Series {
    /// Its name on the command line.
    pub name: &'static str,
    /// A line on what it compares.
    pub about: &'static str,
    /// The part of `lab/published.toml` that has the series' title, author and figures.
    pub published: &'static str,
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
    /// A table without all that only some have. Its measurements are calibrated.
    pub const NEW: Series = Series {
        name: "",
        about: "",
        published: "",
        cases: &[],
        slow_cases: &[],
        unit: Unit::Object,
        designs: || Designs { before: Vec::new(), after: String::new(), beyond: Vec::new() },
        columns: &[],
        legend: Vec::new,
        total: None,
        length: Length::Calibrated,
        open: |_, _| Err(Error::invalid("the table measures nothing")),
        expectations: &[],
        locks: &[],
    };

    /// Returns the source of the published figures.
    pub fn source(&self) -> &'static published::Source {
        published::source(self.published)
    }

    /// Returns the title, the author and the date.
    pub fn reference(&self) -> String {
        let published::Source { title, author, date, .. } = self.source();
        format!("\"{title}\", {author}, {date}")
    }

    /// Returns the author's figures for a case (or the total) and a number of jobs, of the design before at
    /// an index in [`Designs`] and of the one after.
    pub fn published_at(&self, case: &str, jobs: usize, before: usize) -> Option<Published> {
        published::beside(self.published, case, jobs, before)
    }

    /// Returns all published figures of a case and a design before, by number of jobs.
    pub(crate) fn all_published(
        &self,
        case: &str,
        before: usize,
    ) -> impl Iterator<Item = (usize, Published)> {
        let of = move |jobs| Some((jobs, self.published_at(case, jobs, before)?));
        (1..=MAX_JOBS).filter_map(of)
    }

    /// Returns the names of its cases.
    pub fn case_names(&self) -> Vec<&'static str> {
        self.cases.iter().map(|(name, _)| *name).collect()
    }
}

/// A lock whose hold time a table measures.
#[derive(Clone, Copy, Debug)]
pub struct HeldLock {
    /// Its name.
    pub name: &'static str,
    /// The quantity that has the ns for which it is held for a page or object.
    pub held: &'static str,
    /// The quantity that has the number of such locks, if there are several.
    pub count: Option<&'static str>,
}

/// A figure that the design after should reach.
#[derive(Clone, Copy, Debug)]
pub struct Expect {
    /// The case; all of them if `None`.
    pub case: Option<&'static str>,
    /// The numbers of jobs.
    pub jobs: Jobs,
    /// The design it is compared with; each design before if `None`.
    pub before: Option<&'static str>,
    /// The figure that is judged.
    pub figure: Figure,
    /// The bound of the figure.
    pub bound: Bound,
}

/// Numbers of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jobs {
    /// This many.
    Exactly(usize),
    /// This many or more.
    AtLeast(usize),
    /// More jobs than this machine has CPUs.
    MoreThanCpus,
}

/// The figure that is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// The speedup of the design after over the one before.
    Speed,
    /// The CPU time of the design after, divided by that of the one before.
    ProcessorTime,
    /// A quantity of the design after: the most of all rounds.
    Maximum(&'static str),
}

impl Expect {
    /// Returns the expectation of a figure in every case, with any number of jobs, against each design
    /// before.
    pub const fn of(figure: Figure, bound: Bound) -> Expect {
        Expect { case: None, jobs: Jobs::AtLeast(1), before: None, figure, bound }
    }
}

impl Jobs {
    pub(super) fn contain(self, jobs: usize, cpus: usize) -> bool {
        match self {
            Jobs::Exactly(wanted) => jobs == wanted,
            Jobs::AtLeast(least) => jobs >= least,
            Jobs::MoreThanCpus => jobs > cpus,
        }
    }

    pub(super) fn words(self) -> String {
        match self {
            Jobs::Exactly(jobs) => jobs_text(jobs),
            Jobs::AtLeast(1) => "any number of jobs".to_owned(),
            Jobs::AtLeast(least) => format!("{least} jobs or more"),
            Jobs::MoreThanCpus => "more jobs than CPUs".to_owned(),
        }
    }
}

/// Returns a design's name in a sentence. The table `streams` calls a list of idle streams by their number.
pub(crate) fn spoken(design: &str) -> String {
    match design.bytes().all(|byte| byte.is_ascii_digit()) {
        true => format!("a list of {design}"),
        false => design.to_owned(),
    }
}

/// Returns the entry of a table for one of its designs or cases, by the name.
pub(crate) fn by_name<T: Copy>(all: &[(&'static str, T)], name: &str) -> Result<T> {
    let found = all.iter().find(|(other, _)| *other == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        Error::invalid(format!("this table has no '{name}', only: {}", names.join(", ")))
    })
}
