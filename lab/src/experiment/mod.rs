//! Experiments: the changes of kernel patch series, measured here, a table for each series.
//!
//! A patch series is a *before* and an *after*. Both exist in the engine as designs that are chosen at run
//! time, so one process can measure them against each other. A [`Series`] has the designs, the cases and
//! numbers of jobs, its author's figures and the expectations; its [`Experiment`] does one measurement.
//! Everything else is here and the same for every series, bottom up:
//!
//! * `clock`: runs a thread's work with or without the clock; `kept_arena`: an arena that keeps freed memory.
//! * `series`: what a table is; `row`: two designs compared.
//! * `options`: how to run a table.
//! * `expect`: judges the expectations.
//! * `report`: rows of medians, the ratio of the rounds' elapsed times with its interval and rank
//!   test ([`uzram_bench::harness::stats::PairedRatio`]), as a table and as JSON.
//! * `run`: the harness's rounds ([`uzram_bench::harness::rounds`]), in which the designs alternate on the
//!   same operations.

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
