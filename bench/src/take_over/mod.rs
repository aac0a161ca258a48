//! What it gives and costs that a daemon outlives the process that serves.
//!
//! * `outage`: the longest gap between two answers at a client of the block device (`client`) while the process that
//!   serves is killed, or exchanged by `uzram upgrade`; beside it the daemon's own phases, and the gap when nothing happens.
//! * `memory`: private memory and page tables of the daemon's processes.
//! * `price`: NBD and swap of such a daemon beside one with `--no-survive`.
//!
//! Block devices and swap need root, FUSE and loop devices; NBD needs fio and nbdcopy. What cannot be measured is left
//! out, and a note says why.

mod client;
mod daemon;
mod memory;
mod outage;
mod price;
mod report;

use uzram::units::{PAGE_SIZE, bytes_to_pages, format_size, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use crate::block::{self, Programs, disk_obstacle};
use crate::engine::{Common, Packed};
use crate::harness::corpus::Corpus;
use crate::harness::lack_of_memory;
pub use memory::{MemoryRow, ProcessMemory};
pub use outage::{Cause, OutageRow, Phases};
pub use price::PriceRow;
pub(crate) use price::names as price_names;
pub use report::TakeOverReport;

/// Memory that a page of a device takes beside its object: slot, handle, LRU node, page tables.
const PAGE_OVERHEAD_BYTES: u64 = 64;
/// Memory of everything else: the corpus, the processes, buffers.
const REST_BYTES: u64 = 256 << 20;

/// How to measure.
#[derive(Clone, Debug)]
pub struct TakeOverOptions {
    /// As of the others, but that pages of one word, repeated, are left out: they take no pool.
    pub common: Common,
    /// The programs that are measured.
    pub programs: Programs,
    /// What is measured.
    pub parts: Vec<Part>,
    /// The amounts for outages.
    pub amounts: Amounts,
    /// The amounts for swap.
    pub swap: block::Amounts,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Outages and upgrades, and the memory of the daemon's processes.
    Outages,
    /// NBD beside a daemon with `--no-survive`.
    Nbd,
    /// Swap beside one.
    Swap,
}

impl Part {
    /// All parts.
    pub const ALL: [Part; 3] = [Part::Outages, Part::Nbd, Part::Swap];
}

/// The amounts for outages.
#[derive(Clone, Debug)]
pub struct Amounts {
    /// The pool of the device whose processes are killed.
    pub pool_bytes: u64,
    /// The pool of another one, with `full`.
    pub large_pool_bytes: u64,
    /// Whether to measure what takes GiB of memory, if the machine has it.
    pub full: bool,
    /// How often the process that serves is killed.
    pub kills: usize,
    /// How often the daemon is upgraded, to the same program.
    pub upgrades: usize,
}

/// The most kills or upgrades.
const MAX_TIMES: usize = 10_000;

impl Default for Amounts {
    fn default() -> Self {
        Amounts { pool_bytes: 1 << 30, large_pool_bytes: 16 << 30, full: false, kills: 40, upgrades: 20 }
    }
}

impl TakeOverOptions {
    fn check(&self) -> Result<()> {
        self.common.check()?;
        for (times, setting) in [(self.amounts.kills, "--kills"), (self.amounts.upgrades, "--upgrades")] {
            if !(1..=MAX_TIMES).contains(&times) {
                return Err(
                    Error::invalid(format!("{times}: it must be 1 to {MAX_TIMES}")).with_setting(setting)
                );
            }
        }
        Ok(())
    }
}

/// Measures all of it that is possible here.
///
/// # Errors
/// `Invalid` names the option that cannot be; a program that fails, a request that fails, a page that does not read back,
/// a stop.
pub fn run(options: &TakeOverOptions) -> Result<TakeOverReport> {
    options.check()?;
    let corpus = options.common.corpus.load_until(&options.common.stop)?.without_same_filled()?;
    // Before anything is measured, so that an impossible size is an error at once.
    let size_bytes = device_bytes(&options.common, &corpus, options.amounts.pool_bytes)?;
    let dir = tempfile::tempdir()
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot make a temporary folder: {error}")))?;
    let path = dir.path().join("pages");
    corpus.save(&path)?;
    let mut report = TakeOverReport::default();
    if !options.parts.is_empty() {
        report.notes.push(format!("pages are of the corpus {}", options.common.corpus.name()));
    }
    if options.parts.contains(&Part::Nbd) {
        price::measure_nbd(options, &corpus, &path, &mut report)?;
    }
    if options.parts.iter().all(|part| *part == Part::Nbd) {
        return Ok(report);
    }
    if let Some(obstacle) = disk_obstacle(&options.programs.uzram)? {
        report.notes.push(format!("outages, memory and swap of a daemon not measured: {obstacle}"));
        return Ok(report);
    }
    if options.parts.contains(&Part::Swap) {
        price::measure_swap(options, &path, &mut report)?;
    }
    if options.parts.contains(&Part::Outages) {
        measure_outages(options, &corpus, size_bytes, &mut report)?;
    }
    Ok(report)
}

/// Measures the device of this size, and the large one.
fn measure_outages(
    options: &TakeOverOptions,
    corpus: &Corpus,
    size_bytes: u64,
    report: &mut TakeOverReport,
) -> Result<()> {
    outage::measure(options, corpus, options.amounts.pool_bytes, size_bytes, report)?;
    let large_bytes = device_bytes(&options.common, corpus, options.amounts.large_pool_bytes)?;
    match reason_to_leave_out(options, large_bytes)? {
        None => outage::measure(options, corpus, options.amounts.large_pool_bytes, large_bytes, report),
        Some(reason) => {
            let pool = format_size(options.amounts.large_pool_bytes);
            report.notes.push(format!("outages with {pool} of pool not measured: {reason}"));
            Ok(())
        }
    }
}

/// Returns the size of a device whose pool takes about so much memory when all its pages are written.
fn device_bytes(common: &Common, corpus: &Corpus, pool_bytes: u64) -> Result<u64> {
    let mean_bytes = Packed::new(&common.algorithm, PAGE_SIZE, corpus)?.mean_bytes();
    let pages = (pool_bytes as f64 / mean_bytes) as u64;
    match pages {
        1..=0xffff_ffff => Ok(pages_to_bytes(pages)),
        _ => Err(Error::invalid(format!("a pool of {} does not fit a device", format_size(pool_bytes)))
            .with_setting("--pool")),
    }
}

/// Why the large device is not measured, if so.
fn reason_to_leave_out(options: &TakeOverOptions, size_bytes: u64) -> Result<Option<String>> {
    if !options.amounts.full {
        return Ok(Some("it takes --full".to_owned()));
    }
    let needed_bytes = options.amounts.large_pool_bytes / 100 * 102
        + bytes_to_pages(size_bytes) * PAGE_OVERHEAD_BYTES
        + REST_BYTES;
    lack_of_memory(needed_bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;
    use crate::harness::Source;
    use crate::harness::corpus::Kind;

    fn tiny(amounts: Amounts) -> TakeOverOptions {
        let common = Common {
            corpus: Source::Built(Kind::Mixed, 96),
            duration: Duration::from_millis(20),
            repeat: 1,
            ..Common::default()
        };
        let programs = Programs { uzram: "/bin/false".into(), bench: "/bin/false".into() };
        TakeOverOptions {
            common,
            programs,
            parts: Part::ALL.into(),
            amounts,
            swap: block::Amounts::default(),
        }
    }

    #[test]
    fn an_option_that_cannot_be_is_named() {
        let amounts = Amounts::default;
        let no_rounds = Common { repeat: 0, ..tiny(amounts()).common };
        let cases = [
            (tiny(Amounts { pool_bytes: 0, ..amounts() }), "--pool"),
            (tiny(Amounts { pool_bytes: 1 << 60, ..amounts() }), "--pool"),
            (tiny(Amounts { kills: 0, ..amounts() }), "--kills"),
            (tiny(Amounts { upgrades: MAX_TIMES + 1, ..amounts() }), "--upgrades"),
            (TakeOverOptions { common: no_rounds, ..tiny(amounts()) }, "--repeat"),
        ];
        for (options, named) in cases {
            let error = run(&options).unwrap_err().to_string();
            assert!(error.contains(named), "{named}: {error}");
        }
    }

    #[test]
    fn a_device_is_as_large_as_its_pool_is_to_be() {
        let common = tiny(Amounts::default()).common;
        let corpus = common.corpus.load_until(&common.stop).unwrap().without_same_filled().unwrap();
        let size_bytes = device_bytes(&common, &corpus, 1 << 30).unwrap();
        assert!(size_bytes > 1 << 30 && size_bytes < 8 << 30, "{size_bytes}");
        assert_eq!(size_bytes % PAGE_SIZE as u64, 0);
    }

    #[test]
    fn the_large_device_is_left_out_and_the_reason_said() {
        let reason = |large_pool_bytes, full, size_bytes| {
            let amounts = Amounts { large_pool_bytes, full, ..Amounts::default() };
            reason_to_leave_out(&tiny(amounts), size_bytes).unwrap()
        };
        assert!(reason(1 << 20, false, 1 << 20).unwrap().contains("--full"));
        assert!(reason(1 << 50, true, 1 << 50).unwrap().contains("is available"));
        assert!(reason(0, true, 0).is_none_or(|reason| reason.contains("is available")));
    }
}
