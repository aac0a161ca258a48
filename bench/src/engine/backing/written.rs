//! All pages of a store written back: how fast, beside fio on the same file; how many bytes they take there while
//! none of them dies; and how often the device is read when they are read back in random order.

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

/// The file.
const NAME: &str = "written";
/// Writes that fio has in flight, as many as a store unless told otherwise.
const WRITES_IN_FLIGHT: u64 = 4;
/// fio is not waited for when it writes fewer bytes a second.
const SLOWEST_BYTES_PER_S: u64 = 2 << 20;
/// Pages that are read back in random order.
const READ_BACK_PAGES: usize = 4096;

/// What was found; speeds are medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Written {
    /// Pages, uncompressed.
    pub size_bytes: u64,
    /// What moved fio's bytes, and the store's: `io_uring`, or `psync` by as many threads as writes are in flight.
    pub engine: &'static str,
    /// Whether they went past the page cache, in fio as well.
    pub direct: bool,
    /// 10^6 bytes of compressed pages that left memory in a second.
    pub mb_per_s: f64,
    /// 10^6 bytes that fio wrote in a second, if it is there.
    pub fio_mb_per_s: Option<f64>,
    /// The median of the rounds' ratios.
    pub speed_ratio: Option<f64>,
    /// Compressed pages.
    pub compressed_bytes: u64,
    /// What was written for them.
    pub written_bytes: u64,
    /// The extents that hold them.
    pub extent_bytes: u64,
    /// Pages that were then read in random order, each from the device.
    pub pages_read_back: u64,
    /// Reads of the device that took.
    pub device_reads: u64,
}

impl Written {
    /// Bytes of the device, those written or those taken, whichever are more, divided by compressed bytes.
    pub fn bytes_ratio(&self) -> Option<f64> {
        quotient(self.written_bytes.max(self.extent_bytes), self.compressed_bytes)
    }

    /// Reads of the device for a page that is read back.
    pub fn reads_ratio(&self) -> Option<f64> {
        quotient(self.device_reads, self.pages_read_back)
    }
}

/// One round's.
struct Round {
    mb_per_s: f64,
    stats: BackingStats,
    pages_read_back: u64,
    device_reads: u64,
}

/// Measures it.
pub(super) fn measure(
    options: &BackingOptions,
    scratch: &Scratch<'_>,
    notes: &mut Vec<String>,
) -> Result<Written> {
    let target = FioTarget::new(scratch, options.written_size_bytes)?;
    let has_fio = !is_missing("fio");
    if has_fio {
        // What is written for the first time takes the file system longer.
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

/// Fills a store, writes all of it back, and reads some.
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

/// What fio writes to: the same bytes of the same file, past the page cache if the store does, with as many writes in
/// flight.
struct FioTarget<'a> {
    scratch: &'a Scratch<'a>,
    /// Where the store's bytes begin, behind uzram's header.
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

    /// Writes all of it: 10^6 bytes a second. From start to end with io_uring; else each thread its part, for a
    /// thread waits for one write at a time, as the store's do.
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
        fio::speed(command, "write", Duration::from_secs(self.size_bytes / SLOWEST_BYTES_PER_S))
    }
}
