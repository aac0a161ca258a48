//! The wanted figures: the targets, and the fields of reports that they are compared with.

use uzram::lru::LruDesign;
use uzram::units::format_size;

use super::Target;
use super::programs::ProgramsReport;
use crate::engine::compaction::{self, Compactor};
use crate::engine::hit_ratio::{self, Trace};
use crate::engine::recompression::parked::ParkedReport;
use crate::engine::survive::{self, MappedWhen, WriteOrder};
use crate::engine::{self, Pattern, backing, recompression};
use crate::harness::stats::median;
use crate::take_over::{self, Cause};
use crate::{block, nbd};

/// Returns the targets of the in-process benchmark.
pub(super) fn speed_targets(report: &engine::BenchReport) -> Vec<Target> {
    let ratio = |rw, jobs, target| report.row(rw, jobs, target).and_then(|row| row.ratio);
    let mut targets = Vec::new();
    for (rw, what, wanted) in [(Pattern::RandWrite, "encode", 0.90), (Pattern::RandRead, "decode", 0.85)] {
        let name = format!("{rw}, 1 job / the bare {what} loop");
        targets.push(Target::at_least(name, wanted, ratio(rw, 1, "codec")));
    }
    for rw in [Pattern::RandWrite, Pattern::RandRead] {
        let name = format!("{rw}, gain from 1 to 2 jobs / the bare codec's");
        targets.push(Target::at_least(name, 0.95, scaling(report, rw)));
    }
    for (rw, wanted) in [(Pattern::RandRead, 1.4), (Pattern::RandWrite, 1.1)] {
        for jobs in [1, 2] {
            let name = format!("{rw}, {} / kernel zram", jobs_text(jobs));
            targets.push(Target::at_least(name, wanted, ratio(rw, jobs, "kernel")));
        }
    }
    targets
}

/// Returns the targets of the LRU's cost.
pub(super) fn lru_cost_targets(report: &engine::BenchReport) -> Vec<Target> {
    let mut targets = Vec::new();
    for rw in [Pattern::RandRead, Pattern::RandWrite] {
        for jobs in [1, 2] {
            let name = format!("{rw}, {} / a device without an LRU", jobs_text(jobs));
            let ratio = report.row(rw, jobs, "no-lru").and_then(|row| row.ratio);
            targets.push(Target::at_least(name, 0.97, ratio));
        }
    }
    targets
}

/// Returns uzram's gain from a second job, divided by the bare codec's gain: the median of the rounds'
/// ratios.
fn scaling(report: &engine::BenchReport, rw: Pattern) -> Option<f64> {
    let rounds = |jobs, target| report.row(rw, jobs, target).map(|row| &row.rounds_mb_per_s);
    let (uzram_1, uzram_2) = (rounds(1, "uzram")?, rounds(2, "uzram")?);
    let (codec_1, codec_2) = (rounds(1, "codec")?, rounds(2, "codec")?);
    let gains: Vec<_> = (0..uzram_1.len())
        .map(|round| (uzram_2[round] / uzram_1[round]) / (codec_2[round] / codec_1[round]))
        .collect();
    Some(median(&gains))
}

/// Returns the targets of the LRU's hit ratio, for the default design of devices.
pub(super) fn hit_ratio_targets(report: &hit_ratio::HitRatioReport) -> Vec<Target> {
    let mut targets = Vec::new();
    for trace in Trace::ALL {
        let wanted_points = match trace {
            Trace::Zipf | Trace::Loop => -1.0,
            Trace::ScanThroughZipf => 0.0,
        };
        for percent in hit_ratio::MEMORY_PERCENT {
            let row = report.row(trace, percent, LruDesign::default().name());
            let name = format!("hits, {}, {percent} % in memory: points above exact LRU", trace.name());
            targets.push(Target::at_least(name, wanted_points, row.map(hit_ratio::Row::points)));
        }
    }
    targets
}

pub(super) fn memory_target(report: &engine::BenchReport, wanted: f64, notes: &mut Vec<String>) -> Target {
    let size = format_size(report.size_bytes);
    if let Some(ratio) = report.memory.kernel.as_ref().and_then(|kernel| kernel.used_per_compressed) {
        notes.push(format!("kernel zram's own pool memory / compressed at {size}: {ratio:.3}"));
    }
    let name = format!("pool memory / compressed after filling {size} in order");
    Target::at_most(name, wanted, report.memory.used_per_compressed)
}

/// Returns the targets of a pool that was scattered and compacted, and of reads meanwhile.
pub(super) fn compaction_targets(report: &compaction::CompactionReport) -> Vec<Target> {
    let density = &report.density;
    let mut targets = vec![
        Target::at_most("scattered, then compacted: pool memory / ideal", 1.05, density.used_per_ideal()),
        Target::at_most("the same: chunks held / memory in use there", 1.1, density.chunks_per_charged()),
        Target::at_most("the same: pool memory / kernel zram's", 0.98, density.used_per_kernel()),
    ];
    for jobs in [1, 2] {
        let row = report.reads(jobs, Compactor::Background);
        let name = |what| format!("randread, {}, {what} during compaction / idle", jobs_text(jobs));
        targets.push(Target::at_least(name("speed"), 0.9, row.map(|row| row.speed_ratio)));
        targets.push(Target::at_most(name("p99.9"), 2.0, row.map(|row| row.p999_ratio)));
    }
    targets
}

/// Returns the targets of reads during recompression; its time and savings go into a note.
pub(super) fn recompression_targets(
    report: &recompression::RecompressionReport,
    notes: &mut Vec<String>,
) -> Vec<Target> {
    if let Some(ratio) = report.used_ratio() {
        let (size, elapsed_s) = (format_size(report.size_bytes), report.elapsed_s);
        let (from, to) = (&report.algorithm, report.again);
        notes.push(format!("recompression of {size} from {from} to {to}: {elapsed_s:.1} s, pool memory {ratio:.3} of what it was"));
    }
    let target = |jobs| {
        let name = format!("randread, {}, speed during recompression / idle", jobs_text(jobs));
        Target::at_least(name, 0.85, report.reads(jobs).map(|row| row.speed_ratio))
    };
    [1, 2].map(target).into()
}

/// Returns the targets on the memory of programs. What else was measured there goes into notes.
pub(super) fn programs_targets(report: &ProgramsReport, notes: &mut Vec<String>) -> Vec<Target> {
    let (all, mixed) = (report.per_lz4("processes"), report.per_lz4("mixed"));
    let writes = |beside| report.writes.as_ref()?.row(Pattern::RandWrite, 1, beside)?.ratio;
    let (has_vbmi2, wanted_speed) = if has_vbmi2() { ("with", 1.6) } else { ("without", 1.4) };
    if let Some(parked) = &report.parked {
        let ([before, after], cpu_ms) = (parked.ratios(), parked.cpu_ms_per_mib());
        let (size, from, to) = (format_size(parked.stored_bytes), &parked.algorithm, parked.again);
        let [before, after] = [before, after].map(|ratio| ratio.unwrap_or(f64::NAN));
        notes.push(format!("a parked Python of {size}, {from} to {to}: ratio {before:.2}, then {after:.2}, {cpu_ms:.1} ms of CPU time per MiB"));
    }
    vec![
        Target::at_least(
            format!("pages of programs, memory / lz4: compression speed ({has_vbmi2} AVX-512 VBMI2)"),
            wanted_speed,
            all.as_ref().map(|all| all.compression),
        ),
        Target::at_least("the same: ratio", 1.08, all.as_ref().map(|all| all.ratio)),
        Target::at_least("the same: decompression speed", 1.0, all.and_then(|all| all.decompression)),
        Target::at_least(
            "any one program's pages, memory / lz4: lowest compression speed",
            0.98,
            report.lowest_of_programs(|program| program.compression),
        ),
        Target::at_least("the same: lowest ratio", 1.0, report.lowest_of_programs(|program| program.ratio)),
        Target::at_least(
            "pages of programs that memory does not leave to lz4: compression speed / lz4's",
            2.0,
            report.per_lz4("words").map(|words| words.compression),
        ),
        Target::at_most(
            "pages of random bytes: time that memory takes to find out / lz4's",
            0.2,
            report.per_lz4("random").map(|random| 1.0 / random.compression),
        ),
        Target::at_most(
            "pages of programs and mixed that lz4 makes smaller, and memory stores as they are: per cent",
            0.5,
            report.misjudged.map(|share| 100.0 * share),
        ),
        Target::at_least(
            "mixed pages, memory / lz4: compression speed",
            0.98,
            mixed.as_ref().map(|mixed| mixed.compression),
        ),
        Target::at_least("mixed pages, memory / lz4: ratio", 1.0, mixed.map(|mixed| mixed.ratio)),
        Target::at_least("randwrite of programs' pages, 1 job, memory / lz4", 1.3, writes("lz4")),
        Target::at_least(
            "randwrite of programs' pages, 1 job, memory / kernel zram with lz4",
            1.7,
            writes("kernel"),
        ),
        Target::at_least(
            "swap-out of a Python heap, memory / lz4: speed",
            1.2,
            report.swap_out.map(|swap_out| swap_out.out_speed_ratio),
        ),
        Target::at_least(
            "a parked Python, recompressed from lz4 with zstd:3: ratio after / before",
            1.6,
            report.parked.as_ref().and_then(ParkedReport::gain),
        ),
    ]
}

/// Returns whether the CPU has AVX-512 VBMI2, with which `memory` is to compress faster.
fn has_vbmi2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512vbmi2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Of memory that outlives the process; what attaching takes in other cases is a note.
pub(super) fn survive_targets(
    options: &survive::SurviveOptions,
    report: Option<&survive::SurviveReport>,
    notes: &mut Vec<String>,
) -> Vec<Target> {
    let mut targets = Vec::new();
    for (size_bytes, wanted_ms) in [(options.size_bytes, 30.0), (options.large_size_bytes, 600.0)] {
        let size = format_size(size_bytes);
        let rows =
            report.into_iter().flat_map(|report| &report.attach).filter(|row| row.size_bytes == size_bytes);
        for row in rows {
            let (written, mapped, attach_ms) = (row.written.name(), row.mapped.name(), row.attach_ms);
            notes.push(format!(
                "attach of a store of {size}, written {written}, mapped {mapped}: {attach_ms:.1} ms"
            ));
        }
        let wanted =
            report.and_then(|report| report.attach(size_bytes, WriteOrder::InOrder, MappedWhen::Ahead));
        let name = format!("attach of a store of {size} that was mapped ahead: ms");
        targets.push(Target::at_most(name, wanted_ms, wanted.map(|row| row.attach_ms)));
    }
    for rw in [Pattern::RandRead, Pattern::RandWrite] {
        for jobs in [1, 2] {
            let name = format!("{rw}, {}, memory that outlives the process / private", jobs_text(jobs));
            let ratio = report.and_then(|report| report.speed_ratio(rw, jobs));
            targets.push(Target::at_least(name, 0.98, ratio));
        }
    }
    targets
}

/// Of a backing file.
pub(super) fn backing_targets(report: Option<&backing::BackingReport>) -> Vec<Target> {
    let written = report.map(|report| &report.written);
    let fullest = report.and_then(backing::BackingReport::fullest);
    vec![
        Target::at_least(
            "writeback, compressed bytes / fio's sequential 1 MiB writes",
            0.8,
            written.and_then(|written| written.speed_ratio),
        ),
        Target::at_most(
            "backing bytes / compressed while nothing dies",
            1.05,
            written.and_then(backing::Written::bytes_ratio),
        ),
        Target::at_most(
            format!(
                "backing bytes written / compressed, overwritten with {} % live",
                backing::MOST_LIVE_PERCENT
            ),
            2.0,
            fullest.and_then(backing::Overwrites::bytes_ratio),
        ),
        Target::at_most(
            "reads of the backing file / random read-back",
            1.0,
            written.and_then(backing::Written::reads_ratio),
        ),
        Target::at_least(
            "Zipf access, 4 x the limit: speed / speed computed from hits and misses",
            0.8,
            report.map(|report| report.zipf.speed_ratio),
        ),
    ]
}

/// Returns the targets of NBD.
pub(super) fn nbd_targets(report: Option<&nbd::NbdReport>) -> Vec<Target> {
    let mut targets = Vec::new();
    for comparison in &nbd::COMPARISONS {
        for jobs in [1, 2] {
            let (rw, algorithm, allocator) = (comparison.rw, comparison.algorithm, comparison.allocator);
            let row = report.and_then(|report| report.row(rw, jobs, algorithm));
            targets.push(Target::at_least(
                format!("NBD {rw}, {}, {algorithm} / nbdkit memory {allocator}", jobs_text(jobs)),
                comparison.wanted_ratio,
                row.map(|row| row.ratio),
            ));
        }
    }
    targets
}

/// Returns the targets of block devices and swap.
pub(super) fn block_targets(amounts: &block::Amounts, report: Option<&block::BlockReport>) -> Vec<Target> {
    let ext4 = report.and_then(|report| report.file_system("ext4"));
    let swap = report.and_then(|report| report.swap.as_ref());
    let idle = report.and_then(block::BlockReport::largest_idle);
    let swapped = format_size(amounts.swapped_bytes);
    let idle_size = format_size(amounts.idle_sizes_bytes.iter().copied().max().unwrap_or_default());
    vec![
        Target::at_least(
            "ext4, fs_mark: files/s / kernel zram",
            0.9,
            ext4.and_then(|ext4| ext4.files_per_s.ratio),
        ),
        Target::at_least(
            "ext4, large file written and synced: speed / kernel zram",
            0.8,
            ext4.and_then(|ext4| ext4.write_mb_per_s.ratio),
        ),
        Target::at_least(
            "ext4, large file read: speed / kernel zram",
            0.8,
            ext4.and_then(|ext4| ext4.read_mb_per_s.ratio),
        ),
        Target::at_most(
            format!("swap-out of {swapped}: time / kernel zram"),
            0.8,
            swap.and_then(|swap| swap.swap_out_ms.ratio),
        ),
        Target::at_most(
            "its fault-in: time / kernel zram",
            1.2,
            swap.and_then(|swap| swap.fault_in_ms.ratio),
        ),
        Target::at_most(
            "its fault-in in no order: time / kernel zram",
            1.3,
            swap.and_then(|swap| swap.random_in_ms.ratio),
        ),
        Target::at_most(
            "the same with --no-survive, swap-out: time / kernel zram",
            0.8,
            swap.and_then(|swap| swap.no_survive[0].ratio),
        ),
        Target::at_most(
            "the same, fault-in: time / kernel zram",
            1.2,
            swap.and_then(|swap| swap.no_survive[1].ratio),
        ),
        Target::at_most(
            "the same, in no order: time / kernel zram",
            1.3,
            swap.and_then(|swap| swap.no_survive[2].ratio),
        ),
        Target::at_most(
            format!("idle swap daemon of {idle_size}: % CPU"),
            0.1,
            idle.map(|idle| idle.cpu_percent),
        ),
        Target::at_most(
            "the same: MiB resident beyond the slot table",
            20.0,
            idle.map(|idle| idle.resident_bytes as f64 / f64::from(1 << 20)),
        ),
    ]
}

/// Returns the targets of daemons that outlive the process that serves; how long the daemon itself says that each outage
/// was is a note.
pub(super) fn take_over_targets(
    amounts: &take_over::Amounts,
    report: Option<&take_over::TakeOverReport>,
    notes: &mut Vec<String>,
) -> Vec<Target> {
    let small = format_size(amounts.pool_bytes);
    let large = format_size(amounts.large_pool_bytes);
    for row in report.into_iter().flat_map(|report| &report.outages) {
        let (cause, pool, times) = (row.cause.name(), format_size(row.pool_bytes), row.gaps_ms.len());
        notes.push(format!(
            "longest wait at a client with {pool} of pool, {cause}, {times} times: median {:.1} ms, longest {:.1} ms",
            row.median_ms, row.max_ms
        ));
    }
    let p99_ms =
        |pool_bytes, cause| report.and_then(|report| report.outage(pool_bytes, cause)).map(|row| row.p99_ms);
    let mut targets = vec![
        Target::at_most(
            format!("longest wait at a client, process killed, {small} of pool: p99 ms"),
            50.0,
            p99_ms(amounts.pool_bytes, Cause::Kill),
        ),
        Target::at_most(
            format!("longest wait at a client, process killed, {large} of pool: p99 ms"),
            1000.0,
            p99_ms(amounts.large_pool_bytes, Cause::Kill),
        ),
        Target::at_most(
            format!("longest wait at a client, upgrade, {small} of pool: p99 ms"),
            20.0,
            p99_ms(amounts.pool_bytes, Cause::Upgrade),
        ),
        Target::at_most(
            format!("private memory of the holder, {small} of pool: MiB"),
            1.0,
            report
                .and_then(|report| report.holder_bytes(amounts.pool_bytes))
                .map(|bytes| bytes as f64 / f64::from(1 << 20)),
        ),
    ];
    targets.extend(take_over::price_names().map(|what| {
        let ratio = report.and_then(|report| report.price(&what)).map(|row| row.speed_ratio);
        Target::at_least(format!("{what}, default / --no-survive: speed"), 0.97, ratio)
    }));
    targets
}

fn jobs_text(jobs: usize) -> &'static str {
    if jobs == 1 { "1 job" } else { "2 jobs" }
}
