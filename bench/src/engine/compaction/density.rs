//! How tightly a pool is packed after it was scattered and compacted, compared with what its objects need and
//! with the kernel's.
//!
//! A device is filled and each of its pages overwritten ten times on average, so that objects of ten times
//! the pool's size are written; then it is compacted. The kernel's zram gets the same pages in the same
//! order.

use std::time::Instant;

use serde::Serialize;
use uzram::Result;
use uzram::device::DeviceStats;
use uzram::units::{PAGE_SIZE, pages_to_bytes};
use uzram::zsmalloc::ClassStat;

use super::super::kernel::KernelDevice;
use super::super::report::quotient;
use super::super::{Target, UzramDevice, verify_pages};
use super::CompactionOptions;
use super::churn::{Churn, Halves};
use crate::harness::corpus::Corpus;
use crate::harness::go_on;

/// How often each page is overwritten, on average.
const OVERWRITES_PER_PAGE: usize = 10;
/// Overwrites between two checks of the stop flag.
const LOOK_EVERY: usize = 4096;
/// Bytes before the contents of an object that is not huge.
const HEADER_BYTES: u64 = 8;

/// The memory of a device.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Held {
    /// Pool pages, the kernel's `mem_used_total`.
    pub used_bytes: u64,
    /// Pool pages, metadata and free pages kept.
    pub charged_bytes: u64,
    /// The chunks of 2 MiB that contain these.
    pub chunk_bytes: u64,
}

/// Memory before and after compaction.
#[derive(Clone, Debug, Serialize)]
pub struct Density {
    /// Pages that were overwritten after the device had been filled.
    pub overwrites: usize,
    /// Before `compact`.
    pub scattered: Held,
    /// After it.
    pub compacted: Held,
    /// How long it took.
    pub compact_ms: f64,
    /// Pages that the live objects fill if those of each class are packed without gaps.
    pub ideal_bytes: u64,
    /// The live objects themselves: compressed pages and their headers.
    pub object_bytes: u64,
    /// The kernel's `mem_used_total` before and after its own `compact`, when there is one.
    pub kernel_used_bytes: Option<[u64; 2]>,
}

impl Density {
    /// Returns pool pages after compaction, divided by the ideal.
    pub fn used_per_ideal(&self) -> Option<f64> {
        quotient(self.compacted.used_bytes, self.ideal_bytes)
    }

    /// Returns chunks held after compaction, divided by the pages in use there.
    pub fn chunks_per_charged(&self) -> Option<f64> {
        quotient(self.compacted.chunk_bytes, self.compacted.charged_bytes)
    }

    /// Returns pool pages after compaction, divided by the kernel's after its own.
    pub fn used_per_kernel(&self) -> Option<f64> {
        self.kernel_used_bytes.and_then(|[_, used]| quotient(self.compacted.used_bytes, used))
    }
}

/// Runs the measurement; if the kernel has no zram, a note says so.
pub(super) fn measure(
    options: &CompactionOptions,
    corpus: &Corpus,
    halves: &Halves,
    page_count: usize,
    notes: &mut Vec<String>,
) -> Result<Density> {
    let size_bytes = pages_to_bytes(page_count as u64);
    let scatter = |target: &dyn Target| scatter(target, options, corpus, halves, page_count);
    // Only the explicit `compact` below may compact.
    let device = UzramDevice::with_attributes(&[("compact_threshold", "0".to_owned())], size_bytes)?;
    let contents = scatter(&device)?;
    let scattered = Held::of(&device.stats());
    let start = Instant::now();
    device.set("compact", "1")?;
    let compact_ms = start.elapsed().as_secs_f64() * 1e3;
    let stats = device.stats();
    let classes = device.class_stats();
    verify_pages(&device, corpus, contents.into_iter().enumerate())?;
    drop(device);

    let kernel_used_bytes = match KernelDevice::add(&options.common.algorithm, size_bytes) {
        Ok(kernel) => {
            let contents = scatter(&kernel)?;
            let scattered = kernel.zram.memory()?.used_bytes;
            kernel.zram.compact()?;
            let compacted = kernel.zram.memory()?.used_bytes;
            verify_pages(&kernel, corpus, contents.into_iter().enumerate())?;
            Some([scattered, compacted])
        }
        Err(error) => {
            notes.push(format!("not compared with kernel zram's compaction: {error}"));
            None
        }
    };
    let objects: u64 = classes.iter().map(|class| class.obj_used).sum();
    Ok(Density {
        overwrites: overwrites(page_count),
        scattered,
        compacted: Held::of(&stats),
        compact_ms,
        ideal_bytes: classes.iter().map(side_by_side_bytes).sum(),
        object_bytes: stats.compr_data_bytes + (objects - stats.huge_pages) * HEADER_BYTES,
        kernel_used_bytes,
    })
}

impl Held {
    fn of(stats: &DeviceStats) -> Held {
        Held {
            used_bytes: stats.mem_used_bytes,
            charged_bytes: stats.mem_charged_bytes,
            chunk_bytes: stats.mem_chunk_bytes,
        }
    }
}

fn overwrites(page_count: usize) -> usize {
    page_count.saturating_mul(OVERWRITES_PER_PAGE)
}

/// Fills a target and scatters its pool; returns which corpus page each page then holds.
fn scatter(
    target: &dyn Target,
    options: &CompactionOptions,
    corpus: &Corpus,
    halves: &Halves,
    page_count: usize,
) -> Result<Vec<usize>> {
    target.fill(corpus)?;
    let mut contents: Vec<usize> = (0..page_count).collect();
    let mut worker = target.worker()?;
    let churn = Churn::new(halves, page_count, page_count, options.common.seed);
    for (number, overwrite) in churn.take(overwrites(page_count)).enumerate() {
        worker.write(overwrite.page, corpus.page(overwrite.corpus_page))?;
        contents[overwrite.page] = overwrite.corpus_page;
        if number % LOOK_EVERY == 0 {
            go_on(&options.common.stop)?;
        }
    }
    Ok(contents)
}

/// Returns the size of a class with full zspages only, except one, of which only the needed pages count.
fn side_by_side_bytes(stat: &ClassStat) -> u64 {
    let (pages, objs) = (u64::from(stat.class.pages_per_zspage), u64::from(stat.class.objs_per_zspage));
    let rest_bytes = stat.obj_used % objs * u64::from(stat.class.size_bytes);
    pages_to_bytes(stat.obj_used / objs * pages + rest_bytes.div_ceil(PAGE_SIZE as u64))
}
