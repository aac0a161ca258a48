//! All pages of a store written back: the speed, beside fio on the same file; the bytes they take there while
//! none is dead; and the number of device reads when they are read back in random order.

use std::time::{Duration, Instant};

use uzram::Result;
use uzram::backing::{Blocks, Engine, MARK_BYTES};
use uzram::store::BackingStats;
use uzram::units::page_of;

use super::scratch::Scratch;
use crate::engine::compare::ROUNDS;
use crate::harness::fio;
use crate::harness::process::find;
use crate::harness::report::{each, mib, quotient};
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, SEED};

const NAME: &str = "written";
/// Writes that fio has in flight, as many as a store by default.
const WRITES_IN_FLIGHT: u64 = 4;
/// The lowest speed of fio for which the benchmark waits.
const SLOWEST_BYTES_PER_S: u64 = 2 << 20;
const READ_BACK_PAGES: usize = 4096;

struct Round {
    mb_per_s: f64,
    stats: BackingStats,
    pages_read_back: u64,
    device_reads: u64,
}

pub(super) fn measure(
    options: &Options,
    size_bytes: u64,
    scratch: &Scratch<'_>,
    report: &mut Report,
) -> Result<()> {
    const TABLE: &str = "writeback";
    const ROW: &str = "all pages";
    let target = FioTarget::new(scratch, size_bytes)?;
    let has_fio = find("fio").is_some();
    if has_fio {
        // The first write takes the file system longer.
        target.write()?;
    } else {
        report.note("writeback not compared with fio, which is missing");
    }
    let (mut rounds, mut fio) = (Vec::new(), Vec::new());
    let _: [_; 2] = in_turn(options.rounds(ROUNDS), &options.stop, |number, which| {
        if which == 0 {
            rounds.push(round(options, size_bytes, scratch, number)?);
        } else if has_fio {
            fio.push(target.write()?);
        }
        Ok(())
    })?;
    let mb_per_s = each(&rounds, |round: &Round| round.mb_per_s);
    report.rounds(TABLE, ROW, "MB/s", &mb_per_s);
    if has_fio {
        report.rounds(TABLE, ROW, "fio MB/s", &fio);
        report.ratio(TABLE, ROW, "/ fio", [&mb_per_s, &fio]);
    }
    let stats = rounds.last().map(|round| round.stats).unwrap_or_default();
    let sum = |figure: fn(&Round) -> u64| rounds.iter().map(figure).sum();
    let most_bytes = stats.written_bytes.max(stats.extent_bytes);
    let cells = [
        ("compressed MiB", mib(stats.object_bytes)),
        ("written MiB", mib(stats.written_bytes)),
        ("extents MiB", mib(stats.extent_bytes)),
        // Written or allocated, whichever are more.
        ("bytes / compressed", quotient(most_bytes, stats.object_bytes)),
        ("reads / page", quotient(sum(|round| round.device_reads), sum(|round| round.pages_read_back))),
    ];
    report.row(TABLE, ROW, &cells);
    let cache = if target.direct { "O_DIRECT" } else { "the page cache" };
    report.note(format!("writeback of {:.0} MiB by {} and {cache}", mib(size_bytes), target.engine));
    Ok(())
}

/// Fills a store, writes all of it back, and reads some pages.
fn round(options: &Options, size_bytes: u64, scratch: &Scratch<'_>, number: usize) -> Result<Round> {
    let file = scratch.file(NAME, size_bytes)?;
    let page_count = page_of(size_bytes) as usize;
    let mut pages = scratch.store(page_count, Some(file))?;
    pages.fill()?;
    options.go_on()?;
    let start = Instant::now();
    pages.write_back()?;
    let elapsed = start.elapsed();
    let stats = pages.backing_stats();
    let mut order = pages.shuffled(SEED.wrapping_add(number as u64));
    order.truncate(READ_BACK_PAGES);
    order.iter().try_for_each(|page| pages.read(*page))?;
    let device_reads = pages.backing_stats().reads - stats.reads;
    pages.check()?;
    Ok(Round {
        mb_per_s: stats.object_bytes as f64 / elapsed.as_secs_f64() / 1e6,
        stats,
        pages_read_back: order.len() as u64,
        device_reads,
    })
}

/// The target of fio's writes: the same bytes of the same file, bypassing the page cache if the store does,
/// with as many writes in flight.
struct FioTarget<'a> {
    scratch: &'a Scratch<'a>,
    /// The offset of the store's data, after uzram's header.
    start_bytes: usize,
    size_bytes: u64,
    engine: &'static str,
    direct: bool,
}

impl<'a> FioTarget<'a> {
    fn new(scratch: &'a Scratch<'a>, size_bytes: u64) -> Result<FioTarget<'a>> {
        let file = scratch.file(NAME, size_bytes)?;
        let engine = match file.engine() {
            Engine::Uring => "io_uring",
            _ => "psync",
        };
        let start_bytes = file.block_bytes().max(MARK_BYTES);
        Ok(FioTarget { scratch, start_bytes, size_bytes, engine, direct: file.is_direct() })
    }

    /// Writes all of it; returns 10^6 bytes a second. With io_uring from start to end; else each thread
    /// writes its own part, because a thread waits for one write at a time, as the store's threads do.
    fn write(&self) -> Result<f64> {
        let mut command = fio::command();
        command.args(["--rw=write", "--bs=1m", "--allow_file_create=0", "--fallocate=none"]);
        command.arg("--filename").arg(self.scratch.path(NAME)).arg(format!("--offset={}", self.start_bytes));
        command.arg(format!("--ioengine={}", self.engine)).arg(format!("--direct={}", u8::from(self.direct)));
        if self.engine == "io_uring" {
            command.arg(format!("--size={}", self.size_bytes)).arg(format!("--iodepth={WRITES_IN_FLIGHT}"));
        } else {
            let part_bytes = self.size_bytes / WRITES_IN_FLIGHT;
            command.arg(format!("--size={part_bytes}")).arg(format!("--offset_increment={part_bytes}"));
            command.arg("--thread").arg(format!("--numjobs={WRITES_IN_FLIGHT}"));
        }
        fio::speed(command, &["write"], Duration::from_secs(self.size_bytes / SLOWEST_BYTES_PER_S))
    }
}
