//! How long a client of the block device waits when the process that serves is killed or exchanged.
//!
//! A device is filled. One client uses it all the time. Before each event a stand-by is ready, and the client's longest gap
//! is taken while nothing happens, too: on a busy machine a client waits now and then without any event.

use std::thread;
use std::time::Duration;

use serde::Serialize;
use uzram::Result;
use uzram::units::{bytes_to_pages, format_size};

use super::client::{Client, Disk, used_during};
use super::daemon::Daemon;
use super::memory::MemoryRow;
use super::{TakeOverOptions, TakeOverReport};
use crate::harness::corpus::Corpus;
use crate::harness::go_on;
use crate::harness::stats::quantile;

/// How long nothing happens.
const QUIET: Duration = Duration::from_millis(300);
/// The longest pause before an event, so that events come at any moment of the daemon's own periods.
const MAX_PAUSE: Duration = Duration::from_millis(50);

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Nothing.
    Nothing,
    /// `kill -9` of the process that serves.
    Kill,
    /// `uzram upgrade`.
    Upgrade,
}

impl Cause {
    /// As it stands in the report.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Nothing => "nothing",
            Cause::Kill => "kill -9",
            Cause::Upgrade => "upgrade",
        }
    }
}

/// The daemon's own account of outages, in ms.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Phases {
    /// From the death of a process until the next one serves.
    pub outage_ms: Vec<f64>,
    /// Of it, until no thread of the dead process runs.
    pub gone_ms: Vec<f64>,
    /// Of it, until the contents of all devices are found again.
    pub attach_ms: Vec<f64>,
}

impl Phases {
    /// Returns what a daemon's log says.
    pub(super) fn in_log(log: &str) -> Phases {
        let mut phases = Phases::default();
        for line in log.lines() {
            let found = ["outage_ms=", "gone_ms=", "attach_ms="].map(|name| figure(line, name));
            if let [Some(outage_ms), Some(gone_ms), Some(attach_ms)] = found {
                phases.outage_ms.push(outage_ms);
                phases.gone_ms.push(gone_ms);
                phases.attach_ms.push(attach_ms);
            }
        }
        phases
    }

    /// Returns the first `count`, and the others.
    fn split(&self, count: usize) -> (Phases, Phases) {
        let parts = [&self.outage_ms, &self.gone_ms, &self.attach_ms]
            .map(|times| times.split_at(count.min(times.len())));
        let of = |[outage_ms, gone_ms, attach_ms]: [&[f64]; 3]| Phases {
            outage_ms: outage_ms.to_vec(),
            gone_ms: gone_ms.to_vec(),
            attach_ms: attach_ms.to_vec(),
        };
        (of(parts.map(|(first, _)| first)), of(parts.map(|(_, rest)| rest)))
    }
}

/// Returns the figure after a name in a line.
fn figure(line: &str, name: &str) -> Option<f64> {
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix(name))?.parse().ok()
}

/// The gaps at a client, one for each event.
#[derive(Clone, Debug, Serialize)]
pub struct OutageRow {
    /// The pool's memory, as it was wanted.
    pub pool_bytes: u64,
    /// The pool's memory.
    pub used_bytes: u64,
    /// The size of the device.
    pub size_bytes: u64,
    /// What happened.
    pub cause: Cause,
    /// Half of the longest gaps are at most this.
    pub median_ms: f64,
    /// 99 of 100 are at most this.
    pub p99_ms: f64,
    /// The longest of all.
    pub max_ms: f64,
    /// The longest gap at each event.
    pub gaps_ms: Vec<f64>,
    /// The daemon's own account; empty when nothing happened.
    pub phases: Phases,
}

impl OutageRow {
    fn new(device: &Device, cause: Cause, gaps_ms: Vec<f64>, phases: Phases) -> OutageRow {
        OutageRow {
            pool_bytes: device.pool_bytes,
            used_bytes: device.used_bytes,
            size_bytes: device.size_bytes,
            cause,
            median_ms: quantile(&gaps_ms, 0.5),
            p99_ms: quantile(&gaps_ms, 0.99),
            max_ms: quantile(&gaps_ms, 1.0),
            gaps_ms,
            phases,
        }
    }
}

/// The device that is measured.
struct Device {
    pool_bytes: u64,
    used_bytes: u64,
    size_bytes: u64,
}

/// Adds the rows of a device of this size, and of the memory of its processes.
pub(super) fn measure(
    options: &TakeOverOptions,
    corpus: &Corpus,
    pool_bytes: u64,
    size_bytes: u64,
    report: &mut TakeOverReport,
) -> Result<()> {
    let stop = &options.common.stop;
    go_on(stop)?;
    let algorithm = options.common.algorithm.to_string();
    let daemon = Daemon::start(&options.programs.uzram, &algorithm, size_bytes, stop)?;
    let page_count = bytes_to_pages(size_bytes) as usize;
    let disk = Disk { path: daemon.path(), page_count, corpus, stop };
    disk.fill()?;
    let device = Device { pool_bytes, used_bytes: daemon.pool_bytes()?, size_bytes };
    report.memory.push(MemoryRow::read(pool_bytes, "filled", &daemon.wait_until_ready()?)?);

    let seed = options.common.seed;
    let (gaps, answers) = used_during(&disk, seed, |client| {
        let gaps = disturb(options, &daemon, client)?;
        Ok((gaps, client.answers()))
    })?;

    let phases = daemon.phases();
    let (of_kills, of_upgrades) = phases.split(options.amounts.kills);
    report.outages.extend([
        OutageRow::new(&device, Cause::Nothing, gaps.quiet_ms, Phases::default()),
        OutageRow::new(&device, Cause::Kill, gaps.killed_ms, of_kills),
        OutageRow::new(&device, Cause::Upgrade, gaps.upgraded_ms, of_upgrades),
    ]);
    report.memory.push(MemoryRow::read(pool_bytes, "after all take-overs", &daemon.wait_until_ready()?)?);
    report.notes.push(format!(
        "{answers} answers at the client of {}: {} kills and {} upgrades, no request failed, every page read was right",
        format_size(size_bytes),
        options.amounts.kills,
        options.amounts.upgrades
    ));
    Ok(())
}

/// The longest gaps of a client, one for each event.
#[derive(Default)]
struct Gaps {
    quiet_ms: Vec<f64>,
    killed_ms: Vec<f64>,
    upgraded_ms: Vec<f64>,
}

/// Kills the process that serves, and upgrades the daemon, again and again while a client uses its device.
fn disturb(options: &TakeOverOptions, daemon: &Daemon<'_>, client: &Client) -> Result<Gaps> {
    let stop = &options.common.stop;
    let mut random = fastrand::Rng::with_seed(options.common.seed);
    let mut gaps = Gaps::default();
    for event in 0..options.amounts.kills + options.amounts.upgrades {
        let processes = daemon.wait_until_ready()?;
        gaps.quiet_ms.push(client.longest_gap_ms(stop, || {
            thread::sleep(QUIET);
            Ok(())
        })?);
        thread::sleep(MAX_PAUSE.mul_f64(random.f64()));
        if event < options.amounts.kills {
            gaps.killed_ms.push(client.longest_gap_ms(stop, || daemon.kill_worker(&processes))?);
        } else {
            gaps.upgraded_ms.push(client.longest_gap_ms(stop, || daemon.upgrade())?);
        }
    }
    Ok(gaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_read_from_the_log() {
        let log = "uzram started\n\
             2000-01-01T00:00:00Z  WARN the process that served has died died=7 outage_ms=3.5 gone_ms=1.0 attach_ms=2.0\n\
             WARN something else outage_ms=9\n\
             WARN the same died=8 outage_ms=4.5 gone_ms=2 attach_ms=1.5\nWARN outage_ms=";
        let phases = Phases::in_log(log);
        let wanted = Phases { outage_ms: vec![3.5, 4.5], gone_ms: vec![1.0, 2.0], attach_ms: vec![2.0, 1.5] };
        assert_eq!(phases, wanted);
        let (first, rest) = phases.split(1);
        assert_eq!((first.gone_ms, rest.outage_ms), (vec![1.0], vec![4.5]));
        assert_eq!(phases.split(3), (wanted, Phases::default()));
        assert_eq!(Phases::in_log(""), Phases::default());
    }
}
