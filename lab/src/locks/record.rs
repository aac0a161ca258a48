//! Runs a workload and records its locks.

use std::time::Duration;

use uzram::Result;
use uzram::sync::{LockMode, LockStat, LockTimes, lock_stats, record_locks_on_demand, reset_lock_stats};
use uzram_bench::harness::go_on;

use super::report::{LockRow, LocksReport, Times};
use super::workload::Workload;
use crate::experiment::Plan;

/// A recording consists of at least about so many measurements.
const MEASUREMENTS: u32 = 8;
/// The most work of a measurement.
const MAX_WORK: u64 = 1 << 40;

/// Runs a design until it was recorded for long enough.
pub(super) fn record(workload: &Workload, design: &str) -> Result<LocksReport> {
    let Workload { table, case, jobs, options } = workload;
    let rounds = &options.rounds;
    let progress = |what: &str| (rounds.progress)(&format!("{}:{case}, {design}: {what}", table.name));
    progress("preparing");
    record_locks_on_demand();
    let mut experiment = (table.open)(&options.corpus, &[design.to_owned()])?;
    experiment.begin(case)?;
    let mut elapsed_of = |work, seed| -> Result<Duration> {
        let sample = experiment.measure(&Plan { design: 0, jobs: *jobs, work, seed, stop: &rounds.stop })?;
        go_on(&rounds.stop)?;
        Ok(sample.elapsed.max(Duration::from_nanos(1)))
    };
    let work = work_that_takes(rounds.duration / MEASUREMENTS, *jobs, |work| elapsed_of(work, 0))?;
    reset_lock_stats();
    let (mut elapsed, mut measurements) = (Duration::ZERO, 0);
    while elapsed < rounds.duration {
        progress(&format!("{:.1} s recorded", elapsed.as_secs_f64()));
        measurements += 1;
        elapsed += elapsed_of(work, measurements)?;
    }
    let locks = rows(&lock_stats());
    Ok(LocksReport::new(table, case, design, *jobs, (elapsed, work * measurements), locks))
}

/// Returns an amount of work that takes at least `wanted`. Finding it warms up.
fn work_that_takes(
    wanted: Duration,
    jobs: usize,
    mut elapsed_of: impl FnMut(u64) -> Result<Duration>,
) -> Result<u64> {
    let mut work = 64 * jobs as u64;
    while work < MAX_WORK {
        let factor = wanted.as_secs_f64() / elapsed_of(work)?.as_secs_f64();
        if factor <= 1.0 {
            break;
        }
        work = (work as f64 * factor.clamp(1.25, 16.0)) as u64;
    }
    Ok(work)
}

/// Returns a row for each class and mode that was recorded.
fn rows(stats: &[LockStat]) -> Vec<LockRow> {
    let used = |stat: &&LockStat| stat.hold.count > 0 || stat.wait.count > 0;
    let has_readers = |stat: &LockStat| {
        stats.iter().any(|other| other.class == stat.class && other.mode == LockMode::Shared)
    };
    let times = |times: LockTimes| Times {
        count: times.count,
        min_ns: times.min_ns,
        max_ns: times.max_ns,
        total_ns: times.total_ns,
    };
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
