//! `uzram run`: six programs in half of the memory they take, beside the same in a cgroup of that size whose swap is on kernel zram;
//! a program whose memory fits, beside plain mimalloc; and what starting costs.
//!
//! What the programs print must be the same everywhere. Their memory is looked at every 10 ms (`workload/watched.rs`): the anonymous part of it, which
//! is what is managed, what is compressed, and the rest that is not of files, against the limit.

mod report;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};
use uzram_pager::{LEAST_LIMIT_BYTES, TrapKind};

use crate::block::cgroup::Cgroup;
use crate::block::swap_area::KernelSwap;
use crate::harness::rounds::{in_turn, in_turn_by_jobs};
use crate::harness::stats::{median, median_ratio};
use crate::pager::limited::LimitedCgroup;
use crate::pager::unmap::kernel_obstacle;
use crate::workload::{Amounts, Trial, Watched, Workload, temporary, watch};
pub use report::{ProgramRow, RunReport};

/// The algorithm of the kernel's swap area. `uzram run` has its own default.
const ALGORITHM: &str = "lz4";
/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(900);
/// The most rounds of programs that take seconds. Those that take minutes run once.
const MOST_ROUNDS: usize = 3;
/// How often a program is started that does nothing.
const STARTS: usize = 40;
/// What Python's objects take where they fit, of what they take otherwise, and the least.
const FITTING_SHARE: (u64, u64) = (5, 32);
const LEAST_FITTING_MIB: u64 = 48;
/// Where Debian and others have mimalloc.
const MIMALLOC_DIRS: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
const MIMALLOC: [&str; 2] = ["libmimalloc.so.3", "libmimalloc.so.2"];

/// How to measure.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The program `uzram`, with its library beside it.
    pub uzram: PathBuf,
    /// A folder for files, and for spill files.
    pub dir: PathBuf,
    /// How many rounds.
    pub repeat: usize,
    /// The amounts.
    pub amounts: Amounts,
    /// Setting it ends the run with an error after removing what it added and started.
    pub stop: Arc<AtomicBool>,
}

/// Returns the names of the programs that are run in half of their memory.
pub fn program_names() -> impl Iterator<Item = &'static str> {
    Workload::LIMITED.into_iter().map(Workload::name)
}

/// Returns why nothing can be measured, if so.
pub fn obstacle(uzram: &Path) -> Option<String> {
    if let Err(error) = TrapKind::Uffd.check() {
        return Some(error.to_string());
    }
    let library = uzram.with_file_name("libuzram_run.so");
    (!library.exists()).then(|| format!("there is no {}", library.display()))
}

/// Runs all measurements that are possible here.
///
/// # Errors
/// A program that fails, or prints something else than without a limit; a stop.
pub fn run(options: &RunOptions) -> Result<RunReport> {
    let mut report = RunReport::default();
    let kernel = kernel_obstacle().or_else(Cgroup::obstacle);
    if let Some(obstacle) = &kernel {
        report.notes.push(format!("programs in less memory not compared with kernel zram: {obstacle}"));
    }
    for workload in Workload::LIMITED {
        if let Some(name) = workload.missing() {
            report.notes.push(format!("{} not measured: the program {name} is missing", workload.name()));
            continue;
        }
        let row = measure(options, workload, kernel.is_none())?;
        report.programs.push(row);
    }
    match (mimalloc(), Workload::Python.missing()) {
        (Some(library), None) => report.fitting_ratio = Some(fitting_ratio(options, &library)?),
        (_, Some(name)) => report.notes.push(format!("memory that fits not measured: {name} is missing")),
        (None, None) => report.notes.push("memory that fits not measured: there is no libmimalloc".into()),
    }
    report.start_ms = Some(start_ms(options)?);
    Ok(report)
}

/// Returns the words that start a command in less memory.
fn limited_by_uzram(options: &RunOptions, dir: &Path, limit_bytes: u64) -> Vec<String> {
    let spill = format!("{}:{}B", dir.display(), 4 * limit_bytes);
    let (limit, uzram) = (format!("{limit_bytes}B"), options.uzram.display().to_string());
    [uzram.as_str(), "run", "--limit", &limit, "--spill", &spill, "--"].map(str::to_owned).into()
}

/// Measures one program in half of its memory.
fn measure(options: &RunOptions, workload: Workload, with_kernel: bool) -> Result<ProgramRow> {
    let trial = Trial::new(workload, &options.amounts, &options.dir, PATIENCE, &options.stop)?;
    let limit_bytes = trial.half_bytes(LEAST_LIMIT_BYTES);
    let swap = with_kernel.then(|| KernelSwap::on_named(ALGORITHM, 4 * limit_bytes)).transpose()?;
    let rounds = if workload.is_long(&options.amounts) { 1 } else { options.repeat.min(MOST_ROUNDS) };
    let mut raised = 0;
    let cells = in_turn_by_jobs(rounds, &[1], if with_kernel { 2 } else { 1 }, &options.stop, |turn| {
        if turn.variant == 0 {
            return trial.run(&limited_by_uzram(options, trial.dir(), limit_bytes), "in less memory");
        }
        let cgroup = LimitedCgroup::new(limit_bytes)?;
        let in_cgroup = trial.run(&cgroup.words(), "in a cgroup");
        raised += cgroup.raised();
        in_cgroup
    })?;
    swap.map(KernelSwap::off).transpose()?;
    let seconds = |rounds: &[Watched]| rounds.iter().map(|run| run.seconds).collect::<Vec<_>>();
    let (uzram, kernel) = (&cells[0][0], cells[0].get(1));
    let most = |figure: fn(&Watched) -> u64| uzram.iter().map(figure).max().unwrap_or_default();
    Ok(ProgramRow {
        name: workload.name(),
        plain_s: trial.plain.seconds,
        peak_bytes: trial.plain.peak_bytes,
        limit_bytes,
        rounds,
        kernel_s: kernel.map(|rounds| median(&seconds(rounds))),
        uzram_s: median(&seconds(uzram)),
        ratio: kernel.map(|rounds| median_ratio(&seconds(uzram), &seconds(rounds))),
        anonymous_bytes: most(|run| run.anonymous_bytes),
        file_bytes: most(|run| run.file_bytes),
        kernel_raised: raised,
        last_line: uzram.last().map(|run| run.last_line().to_owned()).unwrap_or_default(),
    })
}

/// Returns the library, if it is installed.
fn mimalloc() -> Option<PathBuf> {
    let places = MIMALLOC_DIRS.iter().flat_map(|dir| MIMALLOC.map(|name| Path::new(dir).join(name)));
    places.into_iter().find(|place| place.exists())
}

/// Returns the time of a program whose memory fits, divided by that with plain mimalloc.
fn fitting_ratio(options: &RunOptions, mimalloc: &Path) -> Result<f64> {
    let dir = temporary(&options.dir)?;
    let (part, of) = FITTING_SHARE;
    let python_mib = (options.amounts.python_mib * part / of).max(LEAST_FITTING_MIB);
    let amounts = Amounts { python_mib, ..options.amounts.clone() };
    Workload::Python.prepare(dir.path(), &amounts)?;
    let limit_bytes = 4 * (amounts.python_mib << 20);
    let prefixes = [
        limited_by_uzram(options, dir.path(), limit_bytes),
        vec!["env".to_owned(), format!("LD_PRELOAD={}", mimalloc.display())],
    ];
    let [uzram, plain] = in_turn(options.repeat, &options.stop, |_, which| {
        let mut command = Workload::Python.command(dir.path(), &amounts, &prefixes[which]);
        Ok(watch(&mut command, PATIENCE, || options.stop.load(Ordering::Relaxed))?.seconds)
    })?;
    Ok(median_ratio(&uzram, &plain))
}

/// Returns by how much longer a program takes that does nothing, in milliseconds.
fn start_ms(options: &RunOptions) -> Result<f64> {
    let prefix = limited_by_uzram(options, &options.dir, 1 << 30);
    let [uzram, plain] = in_turn(STARTS, &options.stop, |_, which| {
        let mut command = Command::new(if which == 0 { prefix[0].as_str() } else { "/bin/true" });
        if which == 0 {
            command.args(&prefix[1..]).arg("/bin/true");
        }
        let start = Instant::now();
        let status = command.stdin(Stdio::null()).stderr(Stdio::null()).status();
        match status {
            Ok(status) if status.success() => Ok(start.elapsed().as_secs_f64() * 1e3),
            failed => Err(Error::new(ErrorKind::Io, format!("/bin/true: {failed:?}"))),
        }
    })?;
    Ok(median(&uzram) - median(&plain))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_folder_without_the_library_is_an_obstacle() {
        if TrapKind::Uffd.check().is_ok() {
            let why = obstacle(Path::new("/nonexistent/uzram")).unwrap();
            assert!(why.contains("/nonexistent/libuzram_run.so"), "{why}");
        }
    }

    #[test]
    fn programs_print_the_same_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let amounts = Amounts { sort_bytes: 1 << 16, sqlite_rows: 1000, python_mib: 1, ..Amounts::small() };
        for workload in [Workload::Sort, Workload::Sqlite, Workload::Python] {
            if let Some(name) = workload.missing() {
                println!("left out: the program {name} is missing");
                continue;
            }
            workload.prepare(dir.path(), &amounts).unwrap();
            let run = |prefix: &[String]| {
                let mut command = workload.command(dir.path(), &amounts, prefix);
                watch(&mut command, Duration::from_secs(60), || false).unwrap().printed
            };
            let printed = run(&[]);
            assert!(!printed.trim().is_empty());
            assert_eq!(run(&["env".to_owned()]), printed);
        }
    }
}
