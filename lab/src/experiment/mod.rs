//! Experiments: the changes of kernel patch series, measured here, a table for each series.
//!
//! A patch series is a *before* and an *after*. Both exist in the engine as designs that are chosen at run
//! time, so one process can measure them against each other. A [`Series`] has the designs, the cases and
//! numbers of jobs, its author's figures and the expectations; its [`Experiment`] does one measurement.
//! Everything else is here, bottom up, and the same for every series.

pub(crate) mod clock;
mod kept_arena;
mod series;
mod row;
mod options;
mod expect;
mod report;
mod run;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use uzram_bench::harness::bound::Bound;
pub use uzram_bench::harness::rounds::{Experiment, Plan, RoundOptions, Sample, Values};

pub use expect::Outcome;
pub(crate) use kept_arena::kept_arena;
pub use options::LabOptions;
pub(crate) use options::{cpus, pages_of};
pub use report::LabReport;
pub(crate) use report::wrap;
pub(crate) use row::busiest;
pub use row::{Row, Side, side};
pub use run::{run, work};
pub use series::{Column, Designs, Expect, Figure, HeldLock, Jobs, Length, Open, Series, Unit};
pub(crate) use series::{by_name, spoken};
pub use uzram_bench::harness::report::jobs_text;
