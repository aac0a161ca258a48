//! Runs a table: for each case the harness's rounds ([`measure_case`]), calibrated on the design after, and a
//! row for each design that is compared.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use uzram::{Error, ErrorKind, Result};

use super::options::LabOptions;
use super::report::LabReport;
use super::row::{Row, Side};
use super::series::{Series, Unit};
use uzram_bench::harness::Source;
use uzram_bench::harness::rounds::{Plan, Values, measure_case};

/// Quantities that are summed over all cases for the total.
const ADDED_UP: [&str; 3] = ["elapsed_s", "user_s", "system_s"];

/// Runs a table.
pub fn run(table: &Series, options: &LabOptions) -> Result<LabReport> {
    let cases = options.resolve(table)?;
    let designs = (table.designs)();
    (options.rounds.progress)(&format!("{}: preparing", table.name));
    let mut experiment = (table.open)(&options.corpus, &designs.all())?;
    let mut rows = Vec::new();
    // The seconds of all cases, by number of jobs and design.
    let mut totals: BTreeMap<usize, Vec<Values>> = BTreeMap::new();
    let mut notes = Vec::new();
    for (case, jobs) in &cases {
        (options.rounds.progress)(&format!("{}: {case}", table.name));
        match experiment.begin(case) {
            Ok(()) => {}
            // What the system lacks for one case need not keep the others from being measured.
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                notes.push(format!("{case} left out: {error}"));
                continue;
            }
            Err(error) => return Err(error),
        }
        let what = format!("{}: {case}", table.name);
        let (all, calibrated) = (designs.all().len(), designs.before.len());
        let cells = measure_case(experiment.as_mut(), &what, jobs, &options.rounds, all, calibrated)?;
        for (jobs, cells) in jobs.iter().zip(&cells) {
            let totals = totals.entry(*jobs).or_insert_with(|| vec![Values::new(); cells.len()]);
            totals.iter_mut().zip(cells).for_each(|(total, cell)| add_up(total, cell));
            rows.extend(rows_of(table, case, *jobs, cells)?);
        }
    }
    if let Some(total) = table.total.filter(|_| cases.len() == table.cases.len()) {
        for (jobs, totals) in &totals {
            rows.extend(rows_of(table, total, *jobs, totals)?);
        }
    }
    match rows.is_empty() {
        true => Err(Error::new(ErrorKind::Unsupported, notes.join("; "))),
        false => Ok(LabReport::new(table, options, rows, notes)),
    }
}

/// Does a fixed amount of a design's work once, with one job, for a profiler to look at.
pub fn work(table: &Series, case: &str, design: &str, corpus: &Path) -> Result<()> {
    let mut experiment = (table.open)(&Source::File(corpus.to_owned()), &[design.to_owned()])?;
    experiment.begin(case)?;
    let stop = AtomicBool::new(false);
    let work = match table.unit {
        // A multiple of seven, because the benchmark's jobs check the clock every seventh page.
        Unit::Page => 1022,
        // Many times the number in flight.
        Unit::Object => 120_000,
    };
    experiment.measure(&Plan { design: 0, jobs: 1, work, seed: 1, stop: &stop }).map(drop)
}

fn add_up(total: &mut Values, case: &Values) {
    for name in ADDED_UP {
        let Some(rounds) = case.get(name) else { continue };
        let sums = total.entry(name).or_insert_with(|| vec![0.0; rounds.len()]);
        sums.iter_mut().zip(rounds).for_each(|(sum, value)| *sum += value);
    }
}

/// Returns the rows of one case and number of jobs: each design before against `after`, and `after` against
/// each beyond. `cells` are in the order of [`Designs::all`](super::Designs::all).
fn rows_of(table: &Series, case: &str, jobs: usize, cells: &[Values]) -> Result<Vec<Row>> {
    let designs = (table.designs)();
    let side = |(design, values): (String, &Values)| Side { design, values: values.clone() };
    let sides: Vec<Side> = designs.all().into_iter().zip(cells).map(side).collect();
    let (before, others) = sides.split_at(designs.before.len().min(sides.len()));
    let Some((after, beyond)) = others.split_first() else { return Ok(Vec::new()) };
    let before = before.iter().enumerate().map(|(i, side)| (side, after, table.published_at(case, jobs, i)));
    let beyond = beyond.iter().map(|side| (after, side, None));
    let row = |(before, after, published): (&Side, &Side, _)| {
        Row::new(case, jobs, before.clone(), after.clone(), published).ok_or_else(|| {
            let what = format!("{case}, {jobs} jobs: a measurement took no time at all");
            Error::new(ErrorKind::Invalid, what).with_setting("--seconds")
        })
    };
    before.chain(beyond).map(row).collect()
}
