//! How long a client of the block device waits when the process that serves is killed or exchanged.
//!
//! A device is filled. One client uses it all the time. Before each event a stand-by is ready, and the
//! client's longest gap is taken while nothing happens, too: on a busy machine a client waits now and then
//! without any event.

use std::thread;
use std::time::Duration;

use uzram::units::{PAGE_SIZE, bytes_to_pages, format_size, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::client::{Client, Disk, used_during};
use super::daemon::{Daemon, Processes};
use crate::block::check_disk;
use crate::block::disk::Attached;
use crate::engine::Packed;
use crate::harness::corpus::Corpus;
use crate::harness::memory::proc_bytes;
use crate::harness::report::mib;
use crate::harness::stats::quantile;
use crate::harness::{Options, Report, SEED, lack_of_memory};

const QUIET: Duration = Duration::from_millis(300);
/// The longest pause before an event, so that events come at any moment of the daemon's own periods.
const MAX_PAUSE: Duration = Duration::from_millis(50);
/// Memory that a page of a device takes beside its object: slot, handle, LRU node, page tables.
const PAGE_OVERHEAD_BYTES: u64 = 64;
/// Memory of everything else: the corpus, the processes, buffers.
const REST_BYTES: u64 = 256 << 20;
const MEMORY: &str = "memory of a daemon";

/// Measures a device with a pool of 1 GiB, and with `full` one of 16 GiB.
pub(super) fn measure(options: &Options, corpus: &Corpus) -> Result<Report> {
    check_disk(options.uzram()?)?;
    let mut report = Report::default();
    let mean_bytes = Packed::new(&options.algorithm, PAGE_SIZE, corpus)?.mean_bytes();
    for (name, pool_bytes) in
        [("small", options.amount(1 << 30, 4 << 20)), ("large", options.amount(16 << 30, 6 << 20))]
    {
        // When all its pages are written, its pool takes about that much.
        let size_bytes = pages_to_bytes((pool_bytes as f64 / mean_bytes) as u64);
        let needed_bytes =
            pool_bytes / 100 * 102 + bytes_to_pages(size_bytes) * PAGE_OVERHEAD_BYTES + REST_BYTES;
        let missing = match (name, options.full) {
            ("large", false) => Some("it takes --full".to_owned()),
            ("large", true) => lack_of_memory(needed_bytes)?,
            _ => None,
        };
        match missing {
            None => of_device(options, corpus, name, size_bytes, &mut report)?,
            Some(why) => {
                report.note(format!("outages with {} of pool not measured: {why}", format_size(pool_bytes)));
            }
        }
    }
    Ok(report)
}

/// Adds the rows of a device of this size, and of the memory of its processes.
fn of_device(
    options: &Options,
    corpus: &Corpus,
    name: &str,
    size_bytes: u64,
    report: &mut Report,
) -> Result<()> {
    const TABLE: &str = "longest gap at a client";
    options.go_on()?;
    let algorithm = options.algorithm.to_string();
    let disk = Attached::new(options.uzram()?, &algorithm, size_bytes, &[])?;
    let daemon = Daemon { disk, stop: &options.stop };
    let page_count = bytes_to_pages(size_bytes) as usize;
    let disk = Disk { path: daemon.disk.path(), page_count, corpus, stop: &options.stop };
    disk.fill()?;
    let pool_bytes = daemon.pool_bytes()?;
    add_memory(&format!("{name} pool, filled"), &daemon.wait_until_ready()?, report)?;

    let kills = options.amount(40, 3);
    let events = kills + options.amount(20, 2);
    let (gaps, answers) = used_during(&disk, SEED, |client| {
        Ok((disturb(options, &daemon, client, kills, events)?, client.answers()))
    })?;

    for (cause, gaps_ms) in ["nothing", "kill -9", "upgrade"].into_iter().zip(&gaps) {
        let row = format!("{name} pool, {cause}");
        let gap = |fraction| quantile(gaps_ms, fraction);
        let cells = [
            ("pool MiB", mib(pool_bytes)),
            ("device MiB", mib(size_bytes)),
            ("times", gaps_ms.len() as f64),
            ("median ms", gap(0.5)),
            ("p99 ms", gap(0.99)),
            ("longest ms", gap(1.0)),
        ];
        report.row(TABLE, &row, &cells);
    }
    add_memory(&format!("{name} pool, after all take-overs"), &daemon.wait_until_ready()?, report)?;
    let holder = ["filled", "after all take-overs"].map(|when| format!("{name} pool, {when}, holder"));
    let most = holder.map(|row| report.get(MEMORY, &row, "private dirty MiB").unwrap_or(f64::NAN));
    let most = most.into_iter().fold(f64::NAN, f64::max);
    report.row(MEMORY, &format!("{name} pool, holder at most"), &[("private dirty MiB", most)]);
    report.note(format!(
        "{answers} answers at the client of {}: {kills} kills and {} upgrades, no request failed, every page read was right",
        format_size(size_bytes),
        events - kills
    ));
    Ok(())
}

/// Kills the process that serves, and upgrades the daemon, again and again while a client uses its device.
/// Returns the longest gaps while nothing happened, at each kill, and at each upgrade.
fn disturb(
    options: &Options,
    daemon: &Daemon<'_>,
    client: &Client,
    kills: usize,
    events: usize,
) -> Result<[Vec<f64>; 3]> {
    let stop = &options.stop;
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut gaps: [Vec<f64>; 3] = Default::default();
    for event in 0..events {
        let processes = daemon.wait_until_ready()?;
        gaps[0].push(client.longest_gap_ms(stop, || {
            thread::sleep(QUIET);
            Ok(())
        })?);
        thread::sleep(MAX_PAUSE.mul_f64(random.f64()));
        if event < kills {
            gaps[1].push(client.longest_gap_ms(stop, || daemon.kill_worker(&processes))?);
        } else {
            gaps[2].push(client.longest_gap_ms(stop, || daemon.upgrade())?);
        }
    }
    Ok(gaps)
}

/// Adds the private memory and the page tables of a daemon's processes.
fn add_memory(when: &str, processes: &Processes, report: &mut Report) -> Result<()> {
    for (name, pid) in [
        ("holder", processes.holder_pid),
        ("worker", Some(processes.worker_pid)),
        ("stand-by", processes.standby_pid),
    ] {
        let pid = pid.map(|pid| pid.to_string()).unwrap_or_default();
        let bytes = |file, field| {
            let what = || Error::new(ErrorKind::Io, format!("cannot read the memory of the {name}"));
            proc_bytes(&pid, file, &[field]).map(mib).ok_or_else(what)
        };
        let cells = [
            ("private dirty MiB", bytes("smaps_rollup", "Private_Dirty")?),
            ("page tables MiB", bytes("status", "VmPTE")?),
        ];
        report.row(MEMORY, &format!("{when}, {name}"), &cells);
    }
    Ok(())
}
