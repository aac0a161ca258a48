//! The project's targets, measured in one run and printed beside the wanted figures.
//!
//! Nearly all are ratios of two things measured in the same run, on the mixed corpus, with lz4 unless stated
//! otherwise; hit ratios are compared by their difference, and measure no time. If a target cannot be
//! measured on a machine, a note says why.

mod pager;
mod programs;
mod remote;
mod run;
mod swap;
mod target;
mod wanted;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::Serialize;
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result, codec};

use crate::block;
use crate::engine::backing;
use crate::engine::compaction;
use crate::engine::hit_ratio;
use crate::engine::recompression;
use crate::engine::survive;
use crate::engine::{self, Against, Common, Pattern};
use crate::harness::corpus::{self, Kind};
use crate::harness::{DEFAULT_CORPUS_PAGES, Source};
use crate::pager::PagerOptions;
use crate::{nbd, take_over};
use pager::pager_targets;
use programs::ProgramsOptions;
pub use programs::{ProgramsReport, SwapOut};
use remote::remote_targets;
use run::run_targets;
use swap::swap_targets;
pub use target::{Target, Targets};
use wanted::{
    backing_targets, block_targets, compaction_targets, hit_ratio_targets, lru_cost_targets, memory_target,
    nbd_targets, programs_targets, recompression_targets, speed_targets, survive_targets, take_over_targets,
};

/// How to measure.
#[derive(Clone, Debug)]
pub struct TargetsOptions {
    /// The programs for the targets of NBD, block devices and swap; without them these are not measured.
    pub programs: Option<block::Programs>,
    /// How long one measurement lasts.
    pub duration: Duration,
    /// How many rounds.
    pub repeat: usize,
    /// Pages of the mixed corpus, and of the device it fills.
    pub corpus_pages: usize,
    /// The size of the device whose memory is measured beside one of the corpus's size.
    pub large_size_bytes: u64,
    /// The size of the device that is scattered and compacted.
    pub compacted_size_bytes: u64,
    /// The size of the device that is recompressed.
    pub recompressed_size_bytes: u64,
    /// The most pages of the corpus `processes`; 0 to start none of its programs.
    pub process_pages: usize,
    /// The pages of a parked Python.
    pub parked_pages: usize,
    /// The sizes of the stores that are attached, and whether the large one is; the rest of it is set by the other options.
    pub survive: survive::SurviveOptions,
    /// The amounts for daemons that outlive the process that serves.
    pub take_over: take_over::Amounts,
    /// Where files of cold pages are put and how large they are; the rest of it is set by the other options.
    pub backing: backing::BackingOptions,
    /// The amounts for block devices and swap.
    pub block: block::Amounts,
    /// The amounts for the pager.
    pub pager: crate::pager::Amounts,
    /// The amounts for programs in less memory.
    pub run: crate::workload::Amounts,
    /// The amounts for programs that swap.
    pub swap: crate::workload::Amounts,
    /// The amounts for cold pages on other machines.
    pub remote: crate::remote::RemoteOptions,
    /// Pages in the traces for the LRU.
    pub trace_pages: u32,
    /// Uses of each trace.
    pub trace_uses: usize,
    /// Setting it ends the run with an error after removing what it added and started.
    pub stop: Arc<AtomicBool>,
}

/// Pages of the corpus `processes`: with more, each program would no longer have about as many as the others. Its part for
/// Python is large beside what the pool's size classes take in part.
const PROCESS_PAGES: usize = 2 * DEFAULT_CORPUS_PAGES;
/// Pages of a parked Python: 1 GiB.
const PARKED_PAGES: usize = (1 << 30) / PAGE_SIZE;

impl Default for TargetsOptions {
    fn default() -> Self {
        let traces = hit_ratio::HitRatioOptions::default();
        TargetsOptions {
            programs: None,
            duration: Duration::from_secs(1),
            repeat: 5,
            corpus_pages: DEFAULT_CORPUS_PAGES,
            large_size_bytes: 1 << 30,
            compacted_size_bytes: 256 << 20,
            recompressed_size_bytes: 1 << 30,
            process_pages: PROCESS_PAGES,
            parked_pages: PARKED_PAGES,
            survive: survive::SurviveOptions::default(),
            take_over: take_over::Amounts::default(),
            backing: backing::BackingOptions::default(),
            block: block::Amounts::default(),
            pager: crate::pager::Amounts::default(),
            run: crate::workload::Amounts::default(),
            swap: crate::workload::Amounts::medium(),
            remote: crate::remote::RemoteOptions::default(),
            trace_pages: traces.pages,
            trace_uses: traces.uses,
            stop: Arc::default(),
        }
    }
}

/// Every target.
#[derive(Clone, Debug, Serialize)]
pub struct TargetsReport {
    /// The targets, in the order they are printed.
    pub targets: Vec<Target>,
    /// How it was measured, and why some figures are missing.
    pub notes: Vec<String>,
    /// The throughputs behind the ratios.
    pub bench: engine::BenchReport,
    /// The throughputs beside a device without an LRU.
    pub lru_cost: engine::BenchReport,
    /// The hit ratios beside an exact LRU's.
    pub hit_ratios: hit_ratio::HitRatioReport,
    /// The gains and costs of compaction.
    pub compaction: compaction::CompactionReport,
    /// The gains and costs of recompression.
    pub recompression: recompression::RecompressionReport,
    /// What is measured on the memory of programs.
    pub programs: ProgramsReport,
    /// What memory that outlives the process costs, when there can be any.
    pub survive: Option<survive::SurviveReport>,
    /// What it gives and costs that a daemon outlives the process that serves, if it was measured.
    pub take_over: Option<take_over::TakeOverReport>,
    /// What a backing file brings and costs, when there could be one.
    pub backing: Option<backing::BackingReport>,
    /// The throughputs over NBD, if they were measured.
    pub nbd: Option<nbd::NbdReport>,
    /// Block devices and swap, as far as they were measured.
    pub block: Option<block::BlockReport>,
    /// The pager, if it was measured.
    pub pager: Option<crate::pager::PagerReport>,
    /// Programs in less memory, if they were measured.
    pub run: Option<crate::run::RunReport>,
    /// Programs that swap, if they were measured.
    pub swap: Option<crate::swap::SwapReport>,
    /// Cold pages in a Redis server, if they were measured.
    pub remote: Option<crate::remote::RemoteReport>,
}

/// Measures every target.
///
/// # Errors
/// As [`engine::run`]. A comparison that is not possible here is a note, not an error.
pub fn run(options: &TargetsOptions) -> Result<TargetsReport> {
    let mut notes = vec!["pages are of the corpus mixed".to_owned()];
    notes.extend(options.programs.as_ref().and_then(other_uzram));
    let dir = tempfile::tempdir()
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot make a temporary folder: {error}")))?;
    let path = dir.path().join("mixed.bin");
    corpus::build(Kind::Mixed, options.corpus_pages)?.save(&path)?;

    let common = Common {
        corpus: Source::File(path.clone()),
        duration: options.duration,
        repeat: options.repeat,
        stop: Arc::clone(&options.stop),
        ..Common::default()
    };
    let base = engine::BenchOptions { common: common.clone(), ..engine::BenchOptions::default() };
    let speed = engine::run(engine::BenchOptions {
        patterns: vec![Pattern::RandRead, Pattern::RandWrite],
        jobs: vec![1, 2],
        against: vec![Against::Codec, Against::Kernel],
        ..base.clone()
    })?;
    let lru_cost = engine::run(engine::BenchOptions {
        patterns: vec![Pattern::RandRead, Pattern::RandWrite],
        jobs: vec![1, 2],
        against: vec![Against::NoLru],
        common: common.clone().in_slices(),
        ..base.clone()
    })?;
    let memory = engine::BenchOptions { patterns: Vec::new(), against: vec![Against::Kernel], ..base };
    let small = engine::run(memory.clone())?;
    let large = engine::run(engine::BenchOptions { size_bytes: Some(options.large_size_bytes), ..memory })?;

    let size_bytes = options.compacted_size_bytes;
    let compaction = compaction::run(&compaction::CompactionOptions { common: common.clone(), size_bytes })?;
    let recompression = recompression::run(&recompression::RecompressionOptions {
        common: common.clone(),
        size_bytes: options.recompressed_size_bytes,
        ..recompression::RecompressionOptions::default()
    })?;

    let hit_ratios = hit_ratio::run(&hit_ratio::HitRatioOptions {
        pages: options.trace_pages,
        uses: options.trace_uses,
        stop: Arc::clone(&options.stop),
        ..hit_ratio::HitRatioOptions::default()
    })?;

    let mut targets = speed_targets(&speed);
    targets.extend(lru_cost_targets(&lru_cost));
    targets.extend(hit_ratio_targets(&hit_ratios));
    targets.push(memory_target(&small, 1.065, &mut notes));
    targets.push(memory_target(&large, 1.02, &mut notes));
    targets.extend(compaction_targets(&compaction));
    targets.extend(recompression_targets(&recompression, &mut notes));
    let programs = programs_report(options, &common, dir.path(), &mut notes)?;
    targets.extend(programs_targets(&programs, &mut notes));
    let survive_options = survive::SurviveOptions { common: common.clone(), ..options.survive.clone() };
    let survive = survive_report(&survive_options, &mut notes)?;
    targets.extend(survive_targets(&survive_options, survive.as_ref(), &mut notes));
    let backing = backing_report(&backing::BackingOptions { common, ..options.backing.clone() }, &mut notes)?;
    targets.extend(backing_targets(backing.as_ref()));
    let nbd = nbd_report(options, path.clone(), &mut notes)?;
    targets.extend(nbd_targets(nbd.as_ref()));
    let block = block_report(options, path.clone(), &mut notes)?;
    targets.extend(block_targets(&options.block, block.as_ref()));
    let pager = pager_report(options, path.clone(), &mut notes)?;
    targets.extend(pager_targets(&options.pager, pager.as_ref()));
    let run = run_report(options, &mut notes)?;
    targets.extend(run_targets(run.as_ref()));
    let swap = swap_report(options, &mut notes)?;
    targets.extend(swap_targets(swap.as_ref()));
    let remote = remote_report(options, &mut notes)?;
    targets.extend(remote_targets(remote.as_ref()));
    let take_over = take_over_report(options, path, &mut notes)?;
    targets.extend(take_over_targets(&options.take_over, take_over.as_ref(), &mut notes));
    Ok(TargetsReport {
        targets,
        notes,
        bench: speed,
        lru_cost,
        hit_ratios,
        compaction,
        recompression,
        programs,
        survive,
        backing,
        nbd,
        block,
        pager,
        run,
        swap,
        remote,
        take_over,
    })
}

impl TargetsReport {
    /// Returns a release's page of figures, in Markdown: every target beside its measured figure, and how it
    /// was measured.
    pub fn to_markdown(&self, options: &TargetsOptions) -> String {
        let machine = rustix::system::uname();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let mut page = format!(
            "# Figures of uzram {}\n\nWritten by `uzram bench --targets --markdown`: medians of {} rounds of {} s, which are \
             interleaved, on {cpus} CPUs, {} {}. Figures are ratios of things measured in this run, unless they say what \
             else. What they mean: [benchmarks](benchmarks.md).\n\n{}",
            env!("CARGO_PKG_VERSION"),
            options.repeat,
            options.duration.as_secs_f64(),
            machine.sysname().to_string_lossy(),
            machine.release().to_string_lossy(),
            Targets(&self.targets).table().to_markdown(),
        );
        for note in &self.notes {
            page += &format!("\n- {note}");
        }
        page.trim_end().to_owned() + "\n"
    }
}

/// Returns a note that names the measured `uzram`, if it is not the one beside `uzram-bench`.
fn other_uzram(programs: &block::Programs) -> Option<String> {
    let block::Programs { uzram, bench } = programs;
    (uzram.parent() != bench.parent()).then(|| {
        let (uzram, bench) = (uzram.display(), bench.display());
        format!("NBD, block devices and swap are measured with {uzram}: there is no uzram beside {bench}")
    })
}

/// Runs the benchmarks of the memory of programs, as far as they are possible here.
fn programs_report(
    options: &TargetsOptions,
    common: &Common,
    dir: &Path,
    notes: &mut Vec<String>,
) -> Result<ProgramsReport> {
    let options = ProgramsOptions {
        common,
        pages: options.process_pages,
        parked_pages: options.parked_pages,
        algorithm: codec::Kind::Memory.into(),
        programs: options.programs.as_ref(),
        amounts: &options.block,
        dir,
    };
    programs::run(&options, notes)
}

/// The benchmark of memory that outlives the process, or a note that says why there is none.
fn survive_report(
    options: &survive::SurviveOptions,
    notes: &mut Vec<String>,
) -> Result<Option<survive::SurviveReport>> {
    match options.obstacle() {
        Some(obstacle) => {
            notes.push(format!("memory that outlives the process not measured: {obstacle}"));
            Ok(None)
        }
        None => survive::run(options).map(Some),
    }
}

/// Runs the benchmark of a backing file, or adds a note that says why not.
fn backing_report(
    options: &backing::BackingOptions,
    notes: &mut Vec<String>,
) -> Result<Option<backing::BackingReport>> {
    match options.obstacle()? {
        Some(obstacle) => {
            notes.push(format!("backing not measured: {obstacle}"));
            Ok(None)
        }
        None => backing::run(options).map(Some),
    }
}

/// Runs the NBD benchmark, or adds a note that says why not. If a program is installed but fails, that is an
/// error.
fn nbd_report(
    options: &TargetsOptions,
    corpus: PathBuf,
    notes: &mut Vec<String>,
) -> Result<Option<nbd::NbdReport>> {
    let Some(programs) = options.programs.clone() else {
        notes.push("NBD not measured: no uzram program was found".into());
        return Ok(None);
    };
    if let Some(name) = nbd::missing_program() {
        notes.push(format!("NBD not measured: the program {name} is missing"));
        return Ok(None);
    }
    nbd::run(&nbd::NbdOptions {
        program: programs.uzram,
        corpus,
        jobs: vec![1, 2],
        duration: options.duration.max(nbd::MIN_DURATION),
        repeat: options.repeat,
        stop: Arc::clone(&options.stop),
    })
    .map(Some)
}

/// Runs the benchmark of block devices and swap, or adds a note that says why not. Its own notes say what it
/// had to leave out.
fn block_report(
    options: &TargetsOptions,
    corpus: PathBuf,
    notes: &mut Vec<String>,
) -> Result<Option<block::BlockReport>> {
    let Some(programs) = options.programs.clone() else {
        notes.push("block devices and swap not measured: no uzram program was found".into());
        return Ok(None);
    };
    block::run(&block::BlockOptions {
        programs,
        corpus,
        repeat: options.repeat,
        amounts: options.block.clone(),
        stop: Arc::clone(&options.stop),
    })
    .map(Some)
}

/// The most rounds of programs that swap: each takes seconds, three times a round.
const SWAP_ROUNDS: usize = 3;
/// The most rounds of the pager: paging out 256 MiB takes seconds.
const PAGER_ROUNDS: usize = 3;

/// Runs the benchmark of the pager, or adds a note that says why not. Its own notes say what it had to leave out.
fn pager_report(
    options: &TargetsOptions,
    corpus: PathBuf,
    notes: &mut Vec<String>,
) -> Result<Option<crate::pager::PagerReport>> {
    let Some(programs) = &options.programs else {
        notes.push("the pager not measured: no uzram program was found".into());
        return Ok(None);
    };
    crate::pager::run(&PagerOptions {
        program: programs.bench.clone(),
        corpus,
        dir: options.backing.dir.clone(),
        parts: crate::pager::Part::ALL.into(),
        duration: options.duration,
        repeat: options.repeat.min(PAGER_ROUNDS),
        amounts: options.pager.clone(),
        stop: Arc::clone(&options.stop),
    })
    .map(Some)
}

/// Runs the benchmark of programs in less memory, or adds a note that says why not. Its own notes say what it had to leave out.
fn run_report(options: &TargetsOptions, notes: &mut Vec<String>) -> Result<Option<crate::run::RunReport>> {
    let Some(programs) = &options.programs else {
        notes.push("programs in less memory not measured: no uzram program was found".into());
        return Ok(None);
    };
    if let Some(obstacle) = crate::run::obstacle(&programs.uzram) {
        notes.push(format!("programs in less memory not measured: {obstacle}"));
        return Ok(None);
    }
    crate::run::run(&crate::run::RunOptions {
        uzram: programs.uzram.clone(),
        dir: options.backing.dir.clone(),
        repeat: options.repeat,
        amounts: options.run.clone(),
        stop: Arc::clone(&options.stop),
    })
    .map(Some)
}

/// Runs the benchmark of programs that swap, or adds a note that says why not. Its own notes say what it had to leave out.
fn swap_report(options: &TargetsOptions, notes: &mut Vec<String>) -> Result<Option<crate::swap::SwapReport>> {
    let Some(programs) = &options.programs else {
        notes.push("programs that swap not measured: no uzram program was found".into());
        return Ok(None);
    };
    if let Some(obstacle) = crate::swap::obstacle(&programs.uzram)? {
        notes.push(format!("programs that swap not measured: {obstacle}"));
        return Ok(None);
    }
    crate::swap::run(&crate::swap::SwapOptions {
        uzram: programs.uzram.clone(),
        dir: options.backing.dir.clone(),
        only: crate::swap::program_names().map(str::to_owned).collect(),
        repeat: options.repeat.min(SWAP_ROUNDS),
        amounts: options.swap.clone(),
        stop: Arc::clone(&options.stop),
    })
    .map(Some)
}

/// Runs the benchmark of cold pages in a Redis server, or adds a note that says why not.
fn remote_report(
    options: &TargetsOptions,
    notes: &mut Vec<String>,
) -> Result<Option<crate::remote::RemoteReport>> {
    if let Some(obstacle) = crate::remote::obstacle() {
        notes.push(format!("cold pages in Redis not measured: {obstacle}"));
        return Ok(None);
    }
    let remote = crate::remote::RemoteOptions { stop: Arc::clone(&options.stop), ..options.remote.clone() };
    crate::remote::run(&remote).map(Some)
}

/// Runs the benchmark of daemons that outlive the process that serves, or adds a note that says why not. Its own notes
/// say what it had to leave out.
fn take_over_report(
    options: &TargetsOptions,
    corpus: PathBuf,
    notes: &mut Vec<String>,
) -> Result<Option<take_over::TakeOverReport>> {
    let Some(programs) = options.programs.clone() else {
        notes.push("daemons that outlive their process not measured: no uzram program was found".into());
        return Ok(None);
    };
    let common = Common {
        corpus: Source::File(corpus),
        duration: options.duration,
        repeat: options.repeat,
        stop: Arc::clone(&options.stop),
        ..Common::default()
    };
    take_over::run(&take_over::TakeOverOptions {
        common,
        programs,
        parts: take_over::Part::ALL.into(),
        amounts: options.take_over.clone(),
        swap: options.block.clone(),
    })
    .map(Some)
}

impl fmt::Display for TargetsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Targets(&self.targets))?;
        writeln!(f)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))?;
        write!(f, "\n{}\n{}\n{}\n{}", self.bench, self.lru_cost, self.hit_ratios, self.compaction)?;
        write!(f, "\n{}\n{}", self.recompression, self.programs)?;
        if let Some(survive) = &self.survive {
            write!(f, "\n{survive}")?;
        }
        if let Some(backing) = &self.backing {
            write!(f, "\n{backing}")?;
        }
        if let Some(nbd) = &self.nbd {
            write!(f, "\n{nbd}")?;
        }
        if let Some(block) = &self.block {
            write!(f, "\n{block}")?;
        }
        if let Some(pager) = &self.pager {
            write!(f, "\n{pager}")?;
        }
        if let Some(run) = &self.run {
            write!(f, "\n{run}")?;
        }
        if let Some(swap) = &self.swap {
            write!(f, "\n{swap}")?;
        }
        if let Some(remote) = &self.remote {
            write!(f, "\n{remote}")?;
        }
        match &self.take_over {
            Some(take_over) => write!(f, "\n{take_over}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::harness::to_json;

    #[test]
    fn another_uzram_than_the_one_beside_is_named() {
        let programs = |uzram: &str| block::Programs { uzram: uzram.into(), bench: "/b/uzram-bench".into() };
        assert_eq!(other_uzram(&programs("/b/uzram")), None);
        let note = other_uzram(&programs("/usr/bin/uzram")).unwrap();
        assert!(note.contains("with /usr/bin/uzram: ") && note.contains("beside /b/uzram-bench"), "{note}");
    }

    #[test]
    fn every_target_is_listed_measured_or_not() {
        let options = TargetsOptions {
            duration: Duration::from_millis(2),
            repeat: 1,
            corpus_pages: 48,
            large_size_bytes: 1 << 20,
            compacted_size_bytes: 1 << 20,
            recompressed_size_bytes: 1 << 20,
            // Measured by its own tests.
            process_pages: 0,
            parked_pages: 0,
            remote: crate::remote::RemoteOptions::small(),
            survive: survive::SurviveOptions { size_bytes: 1 << 20, ..survive::SurviveOptions::default() },
            // Measured by its own tests.
            backing: backing::BackingOptions {
                dir: "/nonexistent".into(),
                ..backing::BackingOptions::default()
            },
            trace_pages: 1000,
            trace_uses: 5000,
            ..TargetsOptions::default()
        };
        let report = run(&options).unwrap();
        assert_eq!(
            report.targets.len(),
            2 + 2 + 4 + 4 + 6 + 2 + 7 + 2 + 14 + 6 + 5 + 6 + 11 + 28 + 10 + 5 + 6 + 10
        );
        let measured =
            |name: &str| report.targets.iter().find(|target| target.name == name).unwrap().measured;
        assert!(measured("randwrite, 1 job / the bare encode loop").unwrap() > 0.0);
        assert!(measured("randread, gain from 1 to 2 jobs / the bare codec's").unwrap() > 0.0);
        assert!(measured("randwrite, 2 jobs / a device without an LRU").unwrap() > 0.0);
        assert!(measured("attach of a store of 1 MiB that was mapped ahead: ms").unwrap() > 0.0);
        assert_eq!(measured("attach of a store of 16 GiB that was mapped ahead: ms"), None);
        assert!(measured("randread, 2 jobs, memory that outlives the process / private").unwrap() > 0.0);
        let points = measured("hits, scan through Zipf, 5 % in memory: points above exact LRU").unwrap();
        assert!((-100.0..100.0).contains(&points), "{points}");
        assert_eq!(measured("NBD randread, 2 jobs, lz4 / nbdkit memory malloc"), None);
        assert_eq!(measured("its fault-in: time / kernel zram"), None);
        assert_eq!(measured("pager, uffd, unmap: time / kernel zram"), None);
        assert_eq!(measured("pager, guard, one fault, 64 threads, beyond decoding: p50 µs"), None);
        assert_eq!(measured("longest wait at a client, process killed, 16 GiB of pool: p99 ms"), None);
        assert_eq!(measured("run, starting: ms more"), None);
        assert_eq!(measured("NBD randread, 2 jobs, default / --no-survive: speed"), None);
        let text = report.to_string();
        assert!(text.contains("not measured") && text.contains("no uzram program"), "{text}");
        assert!(text.contains("backing not measured") && text.contains("/nonexistent"), "{text}");
        let page = report.to_markdown(&options);
        assert!(
            page.contains("\n| hits, scan through Zipf, 5 % in memory: points above exact LRU | ≥ 0 |"),
            "{page}"
        );
        assert!(
            page.contains("medians of 1 rounds of 0.002 s") && page.contains("\n- backing not measured"),
            "{page}"
        );
        let json: serde_json::Value = serde_json::from_str(&to_json(&report)).unwrap();
        assert_eq!(json["targets"][0]["bound"], "at_least");
    }
}
