//! Runs a workload and records its locks.

use std::time::Duration;

use uzram::Result;
use uzram::sync::{LockMode, LockStat, LockTimes, lock_stats, record_locks_on_demand, reset_lock_stats};
use uzram_bench::harness::go_on;

use super::Workload;
use super::report::{LockRow, LocksReport};
use crate::experiment::{Plan, RoundOptions};
use uzram_bench::harness::rounds::calibrate;

/// A recording consists of about so many measurements.
const MEASUREMENTS: f64 = 8.0;

/// Runs a design until it was recorded for long enough.
pub(super) fn record((table, case, options): &Workload, design: &str) -> Result<LocksReport> {
    let (rounds, jobs) = (&options.rounds, options.jobs[0]);
    let progress = |what: &str| (rounds.progress)(&format!("{}:{case}, {design}: {what}", table.name));
    progress("preparing");
    record_locks_on_demand();
    let mut experiment = (table.open)(&options.corpus, &[design.to_owned()])?;
    experiment.begin(case)?;
    // Of a measurement's duration only this share is clocked, and recorded.
    let duration = rounds.duration.div_f64(MEASUREMENTS * experiment.clocked_share());
    let part = RoundOptions { duration, ..rounds.clone() };
    // It warms up, too.
    let work = calibrate(experiment.as_mut(), 0, jobs, &part)?;
    reset_lock_stats();
    let (mut elapsed, mut measurements) = (Duration::ZERO, 0);
    while elapsed < rounds.duration {
        progress(&format!("{:.1} s recorded", elapsed.as_secs_f64()));
        measurements += 1;
        let plan = Plan { design: 0, jobs, work, seed: measurements, stop: &rounds.stop };
        elapsed += experiment.measure(&plan)?.elapsed.max(Duration::from_nanos(1));
        go_on(&rounds.stop)?;
    }
    let locks = rows(&lock_stats());
    Ok(LocksReport::new(table, case, design, jobs, (elapsed, work * measurements), locks))
}

fn rows(stats: &[LockStat]) -> Vec<LockRow> {
    let used = |stat: &&LockStat| stat.hold.count > 0 || stat.wait.count > 0;
    let has_readers = |stat: &LockStat| {
        stats.iter().any(|other| other.class == stat.class && other.mode == LockMode::Shared)
    };
    let times = |times: LockTimes| [times.count, times.min_ns, times.max_ns, times.total_ns];
    let row = |stat: &LockStat| {
        let mode = match stat.mode {
            LockMode::Shared => "-R",
            LockMode::Exclusive if has_readers(stat) => "-W",
            LockMode::Exclusive => "",
        };
        LockRow::new(
            &format!("{}{mode}", stat.class),
            (stat.contention_bounces, times(stat.wait)),
            (stat.acquisition_bounces, times(stat.hold)),
        )
    };
    stats.iter().filter(used).map(row).collect()
}
