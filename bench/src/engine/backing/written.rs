//! All pages of a store written back: the speed, beside fio on the same file; the bytes they take there while
//! none is dead; and the number of device reads when they are read back in random order.

use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::Result;
use uzram::backing::{Backing, Engine, MARK_BYTES};
use uzram::store::{BackingStats, ReclaimPolicy, WritebackLayout};
use uzram::units::page_of;

use super::super::report::quotient;
use super::BackingOptions;
use super::scratch::Scratch;
use crate::harness::fio;
use crate::harness::go_on;
use crate::harness::process::is_missing;
use crate::harness::rounds::in_turn;
use crate::harness::stats::{median, median_ratio};

/// The name of the file.
const NAME: &str = "written";
/// Writes that fio has in flight, as many as a store by default.
const WRITES_IN_FLIGHT: u64 = 4;
/// The lowest speed of fio for which the benchmark waits.
const SLOWEST_BYTES_PER_S: u64 = 2 << 20;
/// Pages that are read back in random order.
const READ_BACK_PAGES: usize = 4096;

/// The results; speeds are medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Written {
    /// Size of the pages, uncompressed.
    pub size_bytes: u64,
    /// The engine of fio's writes, and the store's: `io_uring`, or `psync` with as many threads as writes are
    /// in flight.
    pub engine: &'static str,
    /// Whether both bypassed the page cache.
    pub direct: bool,
    /// 10^6 bytes of compressed pages that left memory in a second.
    pub mb_per_s: f64,
    /// 10^6 bytes that fio wrote in a second, if it is installed.
    pub fio_mb_per_s: Option<f64>,
    /// The median of the rounds' ratios.
    pub speed_ratio: Option<f64>,
    /// Size of the compressed pages.
    pub compressed_bytes: u64,
    /// Bytes written for them.
    pub written_bytes: u64,
    /// Size of the extents that hold them.
    pub extent_bytes: u64,
    /// Pages then read in random order, each from the device.
    pub pages_read_back: u64,
    /// Reads of the device for them.
    pub device_reads: u64,
}

impl Written {
    /// Returns the bytes of the device, written or allocated, whichever are more, divided by compressed
    /// bytes.
    pub fn bytes_ratio(&self) -> Option<f64> {
        quotient(self.written_bytes.max(self.extent_bytes), self.compressed_bytes)
    }

    /// Returns the reads of the device for each page read back.
    pub fn reads_ratio(&self) -> Option<f64> {
        quotient(self.device_reads, self.pages_read_back)
    }
}

/// The result of one round.
struct Round {
    mb_per_s: f64,
    stats: BackingStats,
    pages_read_back: u64,
    device_reads: u64,
}

/// Runs the measurement.
pub(super) fn measure(
    options: &BackingOptions,
    scratch: &Scratch<'_>,
    notes: &mut Vec<String>,
) -> Result<Written> {
    let target = FioTarget::new(scratch, options.written_size_bytes)?;
    let has_fio = !is_missing("fio");
    if has_fio {
        // The first write takes the file system longer.
        target.write()?;
    } else {
        notes.push("writeback not compared with fio, which is missing".to_owned());
    }
    let (mut rounds, mut fio_mb_per_s) = (Vec::new(), Vec::new());
    let _: [_; 2] = in_turn(options.common.repeat, &options.common.stop, |number, which| {
        if which == 0 {
            rounds.push(round(options, scratch, number)?);
        } else if has_fio {
            fio_mb_per_s.push(target.write()?);
        }
        Ok(())
    })?;
    let mb_per_s: Vec<_> = rounds.iter().map(|round| round.mb_per_s).collect();
    let stats = rounds.last().map(|round| round.stats).unwrap_or_default();
    Ok(Written {
        size_bytes: options.written_size_bytes,
        engine: target.engine,
        direct: target.direct,
        mb_per_s: median(&mb_per_s),
        fio_mb_per_s: has_fio.then(|| median(&fio_mb_per_s)),
        speed_ratio: has_fio.then(|| median_ratio(&mb_per_s, &fio_mb_per_s)),
        compressed_bytes: stats.object_bytes,
        written_bytes: stats.written_bytes,
        extent_bytes: stats.extent_bytes,
        pages_read_back: rounds.iter().map(|round| round.pages_read_back).sum(),
        device_reads: rounds.iter().map(|round| round.device_reads).sum(),
    })
}

/// Fills a store, writes all of it back, and reads some pages.
fn round(options: &BackingOptions, scratch: &Scratch<'_>, number: usize) -> Result<Round> {
    let file = scratch.file(NAME, options.written_size_bytes)?;
    let page_count = page_of(options.written_size_bytes) as usize;
    let mut pages =
        scratch.store(page_count, Some((file, WritebackLayout::Packed)), ReclaimPolicy::default())?;
    pages.fill()?;
    go_on(&options.common.stop)?;
    let start = Instant::now();
    pages.write_back()?;
    let elapsed = start.elapsed();
    let stats = pages.backing_stats();
    let mut order = pages.shuffled(options.common.seed.wrapping_add(number as u64));
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
    /// Makes the file.
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
