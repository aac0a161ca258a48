//! Rounds: variants of one thing measured in turn, so that what disturbs the machine for longer than a
//! turn disturbs all of them alike.
//!
//! [`in_turn_by_jobs`] is the loop, [`in_turn`] its form for one number of jobs. [`measure_case`] runs it for
//! an [`Experiment`]: each measurement does a fixed amount of work, calibrated once for each number of jobs so
//! that it takes about as long as was asked for, and a first round warms up (caches, the processor's clock,
//! memory that was never touched) and does not count.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};

/// The most work a measurement is given, whatever a clock says.
const MAX_WORK: u64 = 1 << 40;

/// The most measurements that find out how much work is wanted.
const CALIBRATIONS: usize = 24;

/// Fails once the stop flag is set.
///
/// # Errors
/// `Busy`: interrupted.
pub fn go_on(stop: &AtomicBool) -> Result<()> {
    match stop.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Busy, "interrupted")),
        false => Ok(()),
    }
}

/// One measurement among those of a round.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The round, from 0.
    pub round: usize,
    /// How many jobs at the same time.
    pub jobs: usize,
    /// Which of the variants.
    pub variant: usize,
}

/// Measures `N` variants in turn; returns an array over the rounds for each.
///
/// # Errors
/// The first measurement's that fails; `Busy` once `stop` is set.
pub fn in_turn<const N: usize, T>(
    rounds: usize,
    stop: &AtomicBool,
    mut measure: impl FnMut(usize, usize) -> Result<T>,
) -> Result<[Vec<T>; N]> {
    let mut cells = in_turn_by_jobs(rounds, &[1], N, stop, |turn| measure(turn.round, turn.variant))?;
    Ok(std::array::from_fn(|variant| std::mem::take(&mut cells[0][variant])))
}

/// Measures variants in turn with every number of jobs in each round: `[jobs][variant][round]`.
///
/// # Errors
/// As [`in_turn`].
pub fn in_turn_by_jobs<T>(
    rounds: usize,
    jobs: &[usize],
    variants: usize,
    stop: &AtomicBool,
    mut measure: impl FnMut(Turn) -> Result<T>,
) -> Result<Vec<Vec<Vec<T>>>> {
    let mut cells: Vec<Vec<Vec<T>>> =
        jobs.iter().map(|_| (0..variants).map(|_| Vec::new()).collect()).collect();
    for round in 0..rounds {
        for (cell, &jobs) in cells.iter_mut().zip(jobs) {
            for variant in order(round, variants) {
                go_on(stop)?;
                cell[variant].push(measure(Turn { round, jobs, variant })?);
            }
        }
    }
    go_on(stop)?;
    Ok(cells)
}

/// The order of a round's variants. Within 2 · `variants` rounds each comes first twice, and stands before each
/// other as often as behind it.
fn order(round: usize, variants: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..variants).map(|turn| (turn + round / 2) % variants).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Designs that are ready to be measured.
pub trait Experiment {
    /// About which share of a measurement's time is clocked; the rest is preparation.
    fn clocked_share(&self) -> f64 {
        1.0
    }

    /// Prepares for a case; every design is then in the same state.
    ///
    /// # Errors
    /// What keeps it from measuring.
    fn begin(&mut self, case: &str) -> Result<()>;

    /// Measures one design in the case that was begun last.
    ///
    /// # Errors
    /// What went wrong: a figure of work that failed would mean nothing.
    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample>;
}

/// One measurement to make.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    /// Which of the designs, by its place in what the experiment was opened with.
    pub design: usize,
    /// How many at the same time.
    pub jobs: usize,
    /// The work of all jobs together, in the experiment's unit; a little more may be done.
    pub work: u64,
    /// The same seed means the same operations.
    pub seed: u64,
    /// When it is set, the measurement may end early; it does not count then.
    pub stop: &'a AtomicBool,
}

/// What one measurement gave.
#[derive(Clone, Debug)]
pub struct Sample {
    /// How long the work took. What designs are compared by.
    pub elapsed: Duration,
    /// What else was measured; units are in the names.
    pub values: Vec<(&'static str, f64)>,
}

/// Quantities by name, each with an entry a round.
pub type Values = BTreeMap<&'static str, Vec<f64>>;

/// How an experiment is measured.
#[derive(Clone)]
pub struct RoundOptions {
    /// Rounds that count.
    pub rounds: usize,
    /// About how long one measurement lasts.
    pub duration: Duration,
    /// Set it, from a signal handler say, and the run ends with an error.
    pub stop: Arc<AtomicBool>,
    /// Told what is being measured.
    pub progress: fn(&str),
}

/// Nine rounds: the interval is then from the second smallest ratio to the second largest and
/// covers the median with 96 %, so that one odd round does not spoil it.
const DEFAULT_ROUNDS: usize = 9;

impl Default for RoundOptions {
    fn default() -> Self {
        RoundOptions {
            rounds: DEFAULT_ROUNDS,
            duration: Duration::from_millis(150),
            stop: Arc::default(),
            progress: |_| {},
        }
    }
}

/// Measures all rounds of a case that was begun: `[jobs][design]`, with an array over the rounds for
/// each quantity. `what` names the case in the progress; the amount of work is calibrated on the design
/// `calibrated`.
///
/// # Errors
/// What kept a design from being measured.
pub fn measure_case(
    experiment: &mut dyn Experiment,
    what: &str,
    jobs: &[usize],
    options: &RoundOptions,
    designs: usize,
    calibrated: usize,
) -> Result<Vec<Vec<Values>>> {
    let mut work = BTreeMap::new();
    for &jobs in jobs {
        work.insert(jobs, calibrate(experiment, calibrated, jobs, options)?);
    }
    // Round 0 warms up.
    let samples = in_turn_by_jobs(options.rounds + 1, jobs, designs, &options.stop, |turn| {
        let Turn { round, jobs, variant: design } = turn;
        (options.progress)(&format!("{what}, round {round} of {}", options.rounds));
        let work = work.get(&jobs).copied().unwrap_or(1);
        experiment.measure(&Plan { design, jobs, work, seed: round as u64, stop: &options.stop })
    })?;
    let of_design = |rounds: &Vec<Sample>| {
        let mut values = Values::new();
        rounds.iter().skip(1).for_each(|sample| append(&mut values, sample));
        values
    };
    Ok(samples.iter().map(|designs| designs.iter().map(of_design).collect()).collect())
}

/// Returns the work that takes about as long as was asked for: tries more and more, until two amounts in a row
/// took about as long. One would not do, as starting threads for a few units of work may take that long on a busy
/// machine.
fn calibrate(
    experiment: &mut dyn Experiment,
    design: usize,
    jobs: usize,
    options: &RoundOptions,
) -> Result<u64> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_order_of_variants_is_fair() {
        assert_eq!([order(0, 2), order(1, 2), order(2, 2)], [[0, 1], [1, 0], [1, 0]]);
        let mut orders: Vec<_> = (0..6).map(|round| order(round, 3)).collect();
        orders.sort_unstable();
        orders.dedup();
        assert_eq!(orders.len(), 6);
        let firsts = (0..4).filter(|round| order(*round, 2)[0] == 0).count();
        assert_eq!(firsts, 2);
    }

    #[test]
    fn every_variant_has_every_round() {
        let stop = AtomicBool::new(false);
        let [a, b] = in_turn(3, &stop, |round, variant| Ok((round, variant))).unwrap();
        assert_eq!((a, b), (vec![(0, 0), (1, 0), (2, 0)], vec![(0, 1), (1, 1), (2, 1)]));
        let by_jobs = in_turn_by_jobs(2, &[1, 4], 2, &stop, |turn| Ok((turn.jobs, turn.variant, turn.round)));
        let wanted = [1, 4].map(|jobs| [0, 1].map(|variant| [0, 1].map(|round| (jobs, variant, round))));
        assert_eq!(by_jobs.unwrap(), wanted);
    }

    #[test]
    fn a_stop_ends_it() {
        let stop = AtomicBool::new(false);
        let outcome: Result<[Vec<()>; 2]> = in_turn(9, &stop, |round, _| {
            stop.store(round == 1, Ordering::Relaxed);
            Ok(())
        });
        assert_eq!(outcome.unwrap_err().to_string(), "interrupted");
    }
}
