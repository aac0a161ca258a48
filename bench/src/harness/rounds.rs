//! Rounds: variants of one thing measured in interleaved rounds, so that a disturbance of the machine that
//! outlasts one measurement affects all variants alike.
//!
//! [`in_turn_by_jobs`] is the loop, [`in_turn`] its form for one number of jobs. [`measure_case`] runs it for
//! an [`Experiment`]: each measurement does a fixed amount of work, calibrated for each number of jobs to
//! take about the wanted time. A first round warms up (caches, the CPU's clock, untouched memory) and does
//! not count.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};

/// The most work of a measurement, whatever a clock says.
const MAX_WORK: u64 = 1 << 40;

const CALIBRATIONS: usize = 24;

/// Fails once the stop flag is set.
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
    /// The number of concurrent jobs.
    pub jobs: usize,
    /// The index of the variant.
    pub variant: usize,
}

/// Measures `N` variants in interleaved rounds; returns an array over the rounds for each.
pub fn in_turn<const N: usize, T>(
    rounds: usize,
    stop: &AtomicBool,
    mut measure: impl FnMut(usize, usize) -> Result<T>,
) -> Result<[Vec<T>; N]> {
    let mut cells = in_turn_by_jobs(rounds, &[1], N, stop, |turn| measure(turn.round, turn.variant))?;
    Ok(std::array::from_fn(|variant| std::mem::take(&mut cells[0][variant])))
}

/// Measures variants with every number of jobs in each round: `[jobs][variant][round]`.
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

/// Returns the order of a round's variants. Within 2 · `variants` rounds each comes first twice, and is
/// before each other as often as after it.
pub(crate) fn order(round: usize, variants: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..variants).map(|turn| (turn + round / 2) % variants).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Designs that are ready to be measured.
pub trait Experiment {
    /// Returns about which share of a measurement's time is timed; the rest is preparation.
    fn clocked_share(&self) -> f64 {
        1.0
    }

    /// Returns the work of a measurement with so many jobs, if it is always the same.
    fn fixed_work(&self, _jobs: usize) -> Option<u64> {
        None
    }

    /// Prepares for a case; every design is then in the same state.
    fn begin(&mut self, case: &str) -> Result<()>;

    /// Measures one design in the case begun last.
    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample>;
}

/// The parameters of one measurement.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    /// The index of the design in the list that the experiment was opened with.
    pub design: usize,
    /// The number of concurrent jobs.
    pub jobs: usize,
    /// The work of all jobs together, in the experiment's unit; a little more may be done.
    pub work: u64,
    /// The same seed means the same operations.
    pub seed: u64,
    /// If it is set, the measurement may end early, and does not count.
    pub stop: &'a AtomicBool,
}

/// The result of one measurement.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The time of the work, by which designs are compared.
    pub elapsed: Duration,
    /// Other measured quantities; units are in the names.
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
    /// Setting it, for example from a signal handler, ends the run with an error.
    pub stop: Arc<AtomicBool>,
    /// Called with a description of each measurement.
    pub progress: fn(&str),
}

/// Nine rounds: the interval is then from the second smallest ratio to the second largest and covers the
/// median with 96 %, so that one outlier does not spoil it.
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

/// Measures all rounds of a case that was begun: `[jobs][design]`, with an array over the rounds for each
/// quantity. `what` names the case in the progress; the amount of work is calibrated on the design
/// `calibrated`.
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
        let fixed = experiment.fixed_work(jobs);
        work.insert(jobs, fixed.map_or_else(|| calibrate(experiment, calibrated, jobs, options), Ok)?);
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
        for sample in &rounds[1..] {
            let elapsed = ("elapsed_s", sample.elapsed.as_secs_f64());
            for (name, value) in sample.values.iter().chain([&elapsed]) {
                values.entry(*name).or_default().push(*value);
            }
        }
        values
    };
    Ok(samples.iter().map(|designs| designs.iter().map(of_design).collect()).collect())
}

/// Returns the amount of work that takes about the wanted time: increases it until two amounts in a row took
/// about that long. One would not suffice, because on a busy machine starting threads for a few units of work
/// may take that long.
pub fn calibrate(
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

#[cfg(test)]
mod tests {
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
