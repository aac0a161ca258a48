//! Scaling, predicted: what a table's designs would do with more cores than this machine has.
//!
//! Two cores cannot show what a lock costs 128. But they can measure what a prediction needs: how long an operation is
//! inside and outside of each lock, and how long a cache line takes from one core to another. A simulation of cores and
//! locks does the rest:
//!
//! ```text
//! table, 1 job ── times inside, outside ──┐
//! costs: line, clock, wake-up ────────────┤── simulate ── curves with bands ── against 2 jobs here,
//! parameters.json: sections, locks, lines ┘      │                             against published tasks
//!                                               mva (no lines, exact): cross-check
//! ```
//!
//! * [`model`]: an operation as sections in and outside of locks; the machine's costs.
//! * [`simulate`]: the discrete-event simulation, the reference.
//! * [`mva`]: mean value analysis, which is exact where moving lines costs nothing.
//! * [`costs`]: measures this machine.
//! * [`parameters`]: the structure of each table's workload, and the other machines: `parameters.json`.
//! * [`measured`]: makes models of measurements. [`mod@predict`]: simulates them, with bands.
//! * [`published`]: predicts the rows of the tables' authors from their row of one task, and prints every error.
//! * [`report`]: the report, as text and as JSON.

pub mod costs;
pub mod measured;
pub mod model;
pub mod mva;
pub mod parameters;
pub mod predict;
pub mod published;
mod reasons;
pub mod report;
pub mod simulate;

#[cfg(test)]
mod tests;

use std::time::Duration;

use uzram::units::PAGE_SIZE;
use uzram::{Error, Result};

use crate::experiment::{self, LabOptions, LabReport, Series, Side, cpus};
use costs::Costs;
use measured::Measured;
use parameters::{CaseParameters, Parameters, SectionParameters, modelled_as};
use predict::{Band, Variants};
pub use report::ScaleReport;
use report::{Check, Curve, Point};
use uzram_bench::harness::go_on;
use uzram_bench::harness::stats::median;

/// Measurements have one job, and two to check a prediction.
const JOBS: [usize; 2] = [1, 2];
/// The most cores.
const MAX_CORES: usize = 1024;
/// The most operations of a simulation.
const MAX_OPERATIONS: usize = 10_000_000;
/// The measurements of a machine's cost are that much shorter than a table's.
const COST_SHARE: u32 = 8;
/// But no shorter than this: long enough for a batch.
const SHORTEST: Duration = Duration::from_micros(50);

/// What to predict.
#[derive(Clone)]
pub struct ScaleOptions {
    /// How to measure. The numbers of jobs are not used.
    pub lab: LabOptions,
    /// Numbers of cores.
    pub cores: Vec<usize>,
    /// Operations of each simulation; `None` for those of the parameters.
    pub operations: Option<usize>,
}

impl ScaleOptions {
    /// Checks that they fit a table, without measuring anything.
    ///
    /// # Errors
    /// `Invalid` names what does not fit.
    pub fn check(&self, table: &Series) -> Result<()> {
        let parameters = self.parameters()?;
        let cases = cases(&parameters, table, &self.lab)?;
        self.measuring(&cases).estimate(table).map(drop)
    }

    fn parameters(&self) -> Result<Parameters> {
        let mut parameters = Parameters::built_in()?;
        parameters.operations = self.operations.unwrap_or(parameters.operations);
        if !(1..=MAX_OPERATIONS).contains(&parameters.operations) {
            let what = format!("{} operations: it must be 1 to {MAX_OPERATIONS}", parameters.operations);
            return Err(Error::invalid(what).with_setting("--operations"));
        }
        Ok(parameters)
    }

    /// Returns how the table is measured.
    fn measuring(&self, cases: &[(&str, &CaseParameters)]) -> LabOptions {
        let cases = cases.iter().map(|(case, _)| (*case).to_owned()).collect();
        LabOptions { cases, jobs: JOBS.to_vec(), callgrind: None, ..self.lab.clone() }
    }
}

/// Parses numbers of cores: `1,2,3`, or `1..128` for 1, 2, 4 and so on to 128.
///
/// # Errors
/// `Invalid`: it is neither, or a number is 0 or too large.
pub fn parse_cores(text: &str) -> Result<Vec<usize>> {
    let bad = || {
        let what = format!("'{text}' is no list of cores: write 1,2,4 or 1..128, from 1 to {MAX_CORES}");
        Error::invalid(what).with_setting("--cores")
    };
    let number = |text: &str| {
        let number = text.trim().parse::<usize>().ok().filter(|cores| (1..=MAX_CORES).contains(cores));
        number.ok_or_else(bad)
    };
    let mut cores: Vec<usize> = match text.split_once("..") {
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            let doubling = std::iter::successors(Some(first), |cores| Some(2 * cores));
            doubling.take_while(|cores| *cores < last).chain([last]).collect()
        }
        None => text.split(',').map(number).collect::<Result<_>>()?,
    };
    cores.sort_unstable();
    cores.dedup();
    Ok(cores)
}

/// Returns the names of the tables with a model.
pub fn tables() -> Vec<String> {
    Parameters::built_in().map_or(Vec::new(), |parameters| parameters.table_names())
}

/// Returns the operations of a simulation, unless [`ScaleOptions`] has others.
pub fn default_operations() -> usize {
    Parameters::built_in().map_or(0, |parameters| parameters.operations)
}

/// Returns whether a table's designs can be predicted.
pub fn has_model(table: &Series) -> bool {
    tables().iter().any(|name| name == table.name)
}

/// Measures a table with 1 and 2 jobs, predicts its designs' speeds, and compares the predictions with what two jobs
/// did here and with published figures.
///
/// # Errors
/// `Invalid` names an option that does not fit the table, `Unsupported` says what this machine lacks; any other error is
/// of a design that could not be measured.
pub fn predict(table: &Series, options: &ScaleOptions) -> Result<ScaleReport> {
    let parameters = options.parameters()?;
    let cases = cases(&parameters, table, &options.lab)?;
    (options.lab.rounds.progress)(&format!("{}: cache lines", table.name));
    let costs = measure_costs(&options.lab)?;
    let measured = experiment::run(table, &options.measuring(&cases))?;
    predict_from(table, options, costs, &measured)
}

/// Measures what cache lines, the clock and sleeping cost here, in as many rounds as a table has.
///
/// # Errors
/// Those of [`Costs::measure`], and of the corpus.
pub fn measure_costs(options: &LabOptions) -> Result<Costs> {
    let rounds = &options.rounds;
    let duration = (rounds.duration / COST_SHARE).max(SHORTEST);
    Costs::measure(&options.corpus.load()?, rounds.rounds, duration, &rounds.stop)
}

/// Predicts like [`predict()`], from rows that have been measured: each case's with 1 job, and with 2 to check predictions.
///
/// # Errors
/// `Invalid` names an option that does not fit the table, or the row that is missing; `Busy` once it is to stop.
pub fn predict_from(
    table: &Series,
    options: &ScaleOptions,
    costs: Costs,
    measured: &LabReport,
) -> Result<ScaleReport> {
    let parameters = options.parameters()?;
    let cases = cases(&parameters, table, &options.lab)?;
    let rounds = &options.lab.rounds;
    let mut report = ScaleReport::new(table, parameters.clone(), costs, rounds.rounds);
    for (case, workload) in cases {
        (rounds.progress)(&format!("{}: simulating {case}", table.name));
        go_on(&rounds.stop)?;
        let designs = Design::all(table, measured, case, workload, &report.costs)?;
        for design in &designs {
            go_on(&rounds.stop)?;
            let variants = Variants::here(&parameters, workload, design.sections, design.measured)?;
            report.curves.push(curve(case, design, &variants, &options.cores)?);
            report.checks.extend(check(table, measured, case, workload, design, &variants)?);
        }
        report.published.extend(published::predict(
            table,
            &parameters,
            case,
            workload,
            &designs,
            &rounds.stop,
        )?);
    }
    Ok(report)
}

/// Returns the cases to predict, each with its workload.
fn cases<'a>(
    parameters: &'a Parameters,
    table: &Series,
    options: &LabOptions,
) -> Result<Vec<(&'a str, &'a CaseParameters)>> {
    let workloads = parameters.of_table(table.name)?;
    let all: Vec<(&str, &CaseParameters)> = workloads
        .into_iter()
        .flat_map(|workload| workload.cases.iter().map(move |case| (case.as_str(), workload)))
        .collect();
    if let Some(other) = options.cases.iter().find(|wanted| !all.iter().any(|(case, _)| case == wanted)) {
        let known: Vec<&str> = all.iter().map(|(case, _)| *case).collect();
        let what = format!("there is no model of '{other}' of {}, only of: {}", table.name, known.join(", "));
        return Err(Error::invalid(what).with_setting("--case"));
    }
    let is_wanted =
        |case: &str| options.cases.is_empty() || options.cases.iter().any(|wanted| wanted == case);
    Ok(all.into_iter().filter(|(case, _)| is_wanted(case)).collect())
}

/// A design that is modelled, with its measurements.
pub(crate) struct Design<'a> {
    /// Its name in the table.
    pub(crate) name: String,
    /// Its name in predictions.
    pub(crate) modelled_as: String,
    pub(crate) sections: &'a [SectionParameters],
    pub(crate) measured: Measured<'a>,
}

impl<'a> Design<'a> {
    fn all(
        table: &Series,
        report: &'a LabReport,
        case: &str,
        workload: &'a CaseParameters,
        costs: &'a Costs,
    ) -> Result<Vec<Design<'a>>> {
        let mut designs = Vec::new();
        for name in (table.designs)().all() {
            let modelled_as = modelled_as(&name, cpus());
            let Some(sections) = workload.sections(&modelled_as) else { continue };
            let side = side_of(report, case, 1, &name).ok_or_else(|| {
                Error::invalid(format!("{case}, 1 job: '{name}' was not measured")).with_setting("--jobs")
            })?;
            let measured = Measured { values: &side.values, costs };
            designs.push(Design { name, modelled_as, sections, measured });
        }
        Ok(designs)
    }
}

fn side_of<'a>(report: &'a LabReport, case: &str, jobs: usize, design: &str) -> Option<&'a Side> {
    let rows = report.rows.iter().filter(|row| row.case == case);
    experiment::side(rows, jobs, design)
}

fn curve(case: &str, design: &Design<'_>, variants: &Variants, cores: &[usize]) -> Result<Curve> {
    let mut points = Vec::new();
    for &cores in cores {
        let speeds = variants.speeds(cores)?;
        points.push(Point {
            cores,
            units_per_s: Band::of(&speeds.units_per_s),
            without_lines_per_s: variants.without_lines(cores),
            waiting_share: speeds.waiting_share,
        });
    }
    let (model, _) = variants.middle();
    Ok(Curve { case: case.to_owned(), design: design.modelled_as.clone(), model: model.into(), points })
}

/// Compares a prediction with the speed of two jobs, or of one that keeps all CPUs busy, if that was measured.
fn check(
    table: &Series,
    report: &LabReport,
    case: &str,
    workload: &CaseParameters,
    design: &Design<'_>,
    variants: &Variants,
) -> Result<Option<Check>> {
    let jobs = if workload.threads_per_job > 1 { 1 } else { 2 };
    let cores = cpus().min(jobs * workload.threads_per_job);
    let Some(Side { values, .. }) = side_of(report, case, jobs, &design.name) else { return Ok(None) };
    let median_of =
        |name: &str| values.get(name).filter(|rounds| !rounds.is_empty()).map(|rounds| median(rounds));
    let by_rate = median_of("mb_per_s").map(|mb_per_s| mb_per_s * 1e6 / PAGE_SIZE as f64);
    let by_time = || median_of(table.unit.costs()[0]).map(|ns| 1e9 / ns);
    let Some(measured_per_s) = by_rate.or_else(by_time) else { return Ok(None) };
    let predicted = Band::of(&variants.speeds(cores)?.units_per_s);
    Ok(Some(Check {
        case: case.to_owned(),
        design: design.modelled_as.clone(),
        jobs,
        cores,
        measured_per_s,
        predicted_per_s: predicted,
        error_percent: 100.0 * (predicted.middle / measured_per_s - 1.0),
    }))
}
