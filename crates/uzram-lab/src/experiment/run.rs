//! Runs a table: rounds in which before and after alternate.
//!
//! * One *measurement* is one design doing a fixed amount of work, the same for all designs of a row:
//!   the same operations too, as a round's seed gives them. How much is calibrated on the design
//!   after, so that it takes about as long as was asked for.
//! * In a *round* every number of jobs has its turn, and in each turn every design, one after the
//!   other: what disturbs the machine for longer than a turn disturbs them alike. The order of the
//!   designs changes from round to round ([`order`]).
//! * The first round warms up (caches, the processor's clock, memory that was never touched) and is
//!   thrown away.

use std::collections::BTreeMap;
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};

use super::report::{Report, Row, Side, Values};
use super::{Experiment, Options, Plan, Sample, Table, callgrind};
use crate::bench::go_on;

/// The most work a measurement is given, whatever a clock says.
const MAX_WORK: u64 = 1 << 40;

/// The most measurements that find out how much work is wanted.
const CALIBRATIONS: usize = 24;

/// Quantities that the total of all cases adds up.
const ADDED_UP: [&str; 3] = ["elapsed_s", "user_s", "system_s"];

/// Runs a table.
///
/// # Errors
/// `Invalid` names the option that cannot be; anything else is what kept a design from being
/// measured.
pub fn run(table: &dyn Table, options: &Options) -> Result<Report> {
    let cases = options.resolve(table)?;
    let designs = table.designs();
    (options.progress)(&format!("{}: preparing", table.name()));
    let mut experiment = table.open(&options.corpus, &designs.all())?;
    let mut rows = Vec::new();
    // The seconds of all cases, by number of jobs and design.
    let mut totals: BTreeMap<usize, Vec<Values>> = BTreeMap::new();
    let mut notes = Vec::new();
    for (case, jobs) in &cases {
        (options.progress)(&format!("{}: {case}", table.name()));
        experiment.begin(case)?;
        let what = format!("{}: {case}", table.name());
        let all = designs.all().len();
        let mut cells = measure_case(experiment.as_mut(), &what, jobs, options, all, designs.before.len())?;
        for (jobs, cells) in jobs.iter().zip(&cells) {
            let totals = totals.entry(*jobs).or_insert_with(|| vec![Values::new(); cells.len()]);
            totals.iter_mut().zip(cells).for_each(|(total, cell)| add_up(total, cell));
        }
        if let Some(program) = &options.callgrind {
            (options.progress)(&format!("{}: {case} under callgrind", table.name()));
            count(table, case, program, jobs, &mut cells, &mut notes)?;
            go_on(&options.stop)?;
        }
        for (jobs, cells) in jobs.iter().zip(&cells) {
            rows.extend(rows_of(table, case, *jobs, cells)?);
        }
    }
    if let Some(total) = table.total().filter(|_| cases.len() == table.cases().len()) {
        for (jobs, totals) in &totals {
            rows.extend(rows_of(table, total, *jobs, totals)?);
        }
    }
    Ok(Report::new(table, options, rows, notes))
}

/// The order in which designs are measured in a round: for two of them each comes first in every
/// other round, and three stand in all six orders in turn.
fn order(round: usize, designs: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..designs).map(|turn| (turn + round / 2) % designs).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// All rounds of a case that was begun: `[jobs][design]`, with an array over the rounds for each
/// quantity. `what` names the case while it runs; how much work there is, is calibrated on the
/// design `calibrated`.
///
/// # Errors
/// What kept a design from being measured.
pub fn measure_case(
    experiment: &mut dyn Experiment,
    what: &str,
    jobs: &[usize],
    options: &Options,
    designs: usize,
    calibrated: usize,
) -> Result<Vec<Vec<Values>>> {
    let mut work = Vec::new();
    for &jobs in jobs {
        work.push(calibrate(experiment, calibrated, jobs, options)?);
    }
    let mut cells = vec![vec![Values::new(); designs]; jobs.len()];
    // Round 0 warms up.
    for round in 0..=options.rounds {
        (options.progress)(&format!("{what}, round {round} of {}", options.rounds));
        for ((cell, &jobs), &work) in cells.iter_mut().zip(jobs).zip(&work) {
            for design in order(round, designs) {
                let plan = Plan { design, jobs, work, seed: round as u64, stop: &options.stop };
                let sample = experiment.measure(&plan)?;
                go_on(&options.stop)?;
                if round > 0 {
                    append(&mut cell[design], &sample);
                }
            }
        }
    }
    Ok(cells)
}

/// How much work takes about as long as was asked for. Tried with more and more, until two amounts in a
/// row took about as long: a few units of work may do so by themselves, as starting threads takes time
/// on a busy machine.
fn calibrate(experiment: &mut dyn Experiment, design: usize, jobs: usize, options: &Options) -> Result<u64> {
    let wanted = options.duration.as_secs_f64() * experiment.clocked_share();
    let mut work = 64 * jobs as u64;
    let mut confirmed = 0;
    for _ in 0..CALIBRATIONS {
        let plan = Plan { design, jobs, work, seed: 0, stop: &options.stop };
        let elapsed = experiment.measure(&plan)?.elapsed.max(Duration::from_nanos(1)).as_secs_f64();
        go_on(&options.stop)?;
        let factor = wanted / elapsed;
        confirmed = if (0.5..=2.0).contains(&factor) { confirmed + 1 } else { 0 };
        work = ((work as f64 * factor.clamp(1.0 / 16.0, 16.0)) as u64).clamp(1, MAX_WORK);
        if confirmed == 2 {
            break;
        }
    }
    Ok(work)
}

/// Adds a round's measurement to the arrays.
fn append(values: &mut Values, sample: &Sample) {
    values.entry("elapsed_s").or_default().push(sample.elapsed.as_secs_f64());
    for (name, value) in &sample.values {
        values.entry(name).or_default().push(*value);
    }
}

/// Adds a case to the total, round by round.
fn add_up(total: &mut Values, case: &Values) {
    for name in ADDED_UP {
        let Some(rounds) = case.get(name) else { continue };
        let sums = total.entry(name).or_insert_with(|| vec![0.0; rounds.len()]);
        sums.iter_mut().zip(rounds).for_each(|(sum, value)| *sum += value);
    }
}

/// Adds callgrind's counts of one job to that row's values, or a note that says why there are none.
fn count(
    table: &dyn Table,
    case: &str,
    program: &callgrind::Program,
    jobs: &[usize],
    cells: &mut [Vec<Values>],
    notes: &mut Vec<String>,
) -> Result<()> {
    let Some(cell) = jobs.iter().position(|jobs| *jobs == 1).and_then(|one| cells.get_mut(one)) else {
        return Ok(());
    };
    if !callgrind::is_there() {
        if notes.is_empty() {
            notes.push("callgrind left out: the program valgrind is missing".to_owned());
        }
        return Ok(());
    }
    let designs = table.designs().all();
    for (values, counts) in cell.iter_mut().zip(program.count(table, case, &designs)?) {
        values.extend(counts.into_iter().map(|(name, value)| (name, vec![value])));
    }
    Ok(())
}

/// The rows of one case and number of jobs: each design before against `after`, and `after` against
/// each beyond. `cells` are in the order of [`Designs::all`](super::Designs::all).
fn rows_of(table: &dyn Table, case: &str, jobs: usize, cells: &[Values]) -> Result<Vec<Row>> {
    let designs = table.designs();
    let side = |(design, values): (String, &Values)| Side { design, values: values.clone() };
    let sides: Vec<Side> = designs.all().into_iter().zip(cells).map(side).collect();
    let (before, others) = sides.split_at(designs.before.len().min(sides.len()));
    let Some((after, beyond)) = others.split_first() else { return Ok(Vec::new()) };
    let before = before.iter().enumerate().map(|(i, side)| (side, after, table.published(case, jobs, i)));
    let beyond = beyond.iter().map(|side| (after, side, None));
    let row = |(before, after, published): (&Side, &Side, _)| {
        Row::new(case, jobs, before.clone(), after.clone(), published).ok_or_else(|| {
            let what = format!("{case}, {jobs} jobs: a measurement took no time at all");
            Error::new(ErrorKind::Invalid, what).with_setting("--seconds")
        })
    };
    before.chain(beyond).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_designs_is_fair() {
        assert_eq!([order(0, 2), order(1, 2), order(2, 2)], [[0, 1], [1, 0], [1, 0]]);
        let mut orders: Vec<_> = (0..6).map(|round| order(round, 3)).collect();
        orders.sort_unstable();
        orders.dedup();
        assert_eq!(orders.len(), 6);
        let firsts = (0..4).filter(|round| order(*round, 2)[0] == 0).count();
        assert_eq!(firsts, 2);
    }
}
