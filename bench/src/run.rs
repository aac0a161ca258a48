//! `uzram run`: six programs in half of the memory they take, beside the same in a cgroup of that size whose
//! swap is on kernel zram; a program whose memory fits; one that takes much memory at once; and what starting
//! costs.
//!
//! What the programs print must be the same everywhere. Their memory is looked at every 10 ms
//! (`workload::watch`): the anonymous part of it, which is what is managed, what is compressed, and the
//! rest that is not of files, against the limit. What exceeds it for less than a second in all is a burst.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};
use uzram_pager::LEAST_LIMIT_BYTES;

use crate::block::cgroup::Cgroup;
use crate::block::swap_area::KernelSwap;
use crate::harness::process::temporary;
use crate::harness::report::{each, mib};
use crate::harness::rounds::{in_turn, in_turn_by_jobs};
use crate::harness::stats::median;
use crate::harness::{Options, Report, unsupported};
use crate::pager::unmap::check_kernel;
use crate::workload::{BURST, LIMITED, PYTHON, Trial, Watched, Workload, watch};

/// The algorithm of the kernel's swap area. `uzram run` has its own default.
const ALGORITHM: &str = "lz4";
const PATIENCE: Duration = Duration::from_secs(900);
/// How often a program is started that does nothing.
const STARTS: usize = 40;
/// What Python's objects take where they fit, of what they take otherwise, and the least.
const FITTING_SHARE: (u64, u64) = (5, 32);
const LEAST_FITTING_MIB: u64 = 48;

const ROUNDS: usize = 3;
const TABLE: &str = "program in less memory";
/// Memory beyond the limit: the most, and the most without bursts, which leaves out one second.
const BEYOND: [(&str, f64); 2] = [("beyond limit MiB", 0.0), ("without bursts MiB", 1.0)];

/// Runs all measurements that are possible here.
pub fn run(options: &Options) -> Result<Report> {
    options.check(&[])?;
    let uzram = options.uzram()?;
    let check = Command::new(uzram).args(["check", "--for", "run"]).output();
    let check = check.map_err(|error| unsupported(format!("{}: {error}", uzram.display())))?;
    if !check.status.success() {
        return Err(unsupported(String::from_utf8_lossy(&check.stderr).trim().to_owned()));
    }
    let mut report = Report::default();
    let kernel = check_kernel().and_then(|()| Cgroup::check());
    if let Err(error) = &kernel {
        report.note(format!("programs in less memory not compared with kernel zram: {error}"));
    }
    for workload in LIMITED {
        report.part(workload.name, measure(options, uzram, workload, kernel.is_ok()))?;
    }
    let ratios: Vec<f64> = report.column(TABLE, "ratio").collect();
    report.mean_and_slowest("all programs", "uzram run", &ratios);
    for (column, _) in BEYOND {
        let most = report.column(TABLE, column).fold(f64::NAN, f64::max);
        report.row("all programs", "uzram run", &[(column, most)]);
    }
    report.part("memory that fits", fitting(options, uzram))?;
    report.part("a burst", burst(options, uzram))?;
    report.row("run, starting", "/bin/true", &[("ms more", start_ms(options, uzram)?)]);
    Ok(report)
}

fn limited_by_uzram(uzram: &Path, dir: &Path, limit_bytes: u64) -> Vec<String> {
    let spill = format!("{}:{}B", dir.display(), 4 * limit_bytes);
    let (limit, uzram) = (format!("{limit_bytes}B"), uzram.display().to_string());
    [uzram.as_str(), "run", "--limit", &limit, "--spill", &spill, "--"].map(str::to_owned).into()
}

fn amount(options: &Options, workload: &Workload) -> u64 {
    options.amount(workload.amounts[0], workload.amounts[2])
}

fn measure(
    options: &Options,
    uzram: &Path,
    workload: &'static Workload,
    with_kernel: bool,
) -> Result<Report> {
    workload.check()?;
    let mut report = Report::default();
    let (amount, name) = (amount(options, workload), workload.name);
    let trial = Trial::new(workload, amount, &options.dir, PATIENCE, &options.stop)?;
    let limit_bytes = trial.half_bytes(LEAST_LIMIT_BYTES);
    let swap = with_kernel.then(|| KernelSwap::on(ALGORITHM, 4 * limit_bytes)).transpose()?;
    // Those that take minutes run once.
    let rounds = if workload.is_long && !options.small { 1 } else { options.rounds(ROUNDS) };
    let cells = in_turn_by_jobs(rounds, &[1], if with_kernel { 2 } else { 1 }, &options.stop, |turn| {
        if turn.variant == 0 {
            return trial.run(&limited_by_uzram(uzram, trial.dir(), limit_bytes), "in less memory");
        }
        trial.run_in_cgroup(limit_bytes)
    })?;
    swap.map(KernelSwap::off).transpose()?;
    let seconds = |rounds: &[Watched]| each(rounds, |run| run.seconds);
    let uzram = &cells[0][0];
    trial.describe(TABLE, name, limit_bytes, &mut report);
    if let Some(kernel) = cells[0].get(1) {
        let sides = ["uzram s", "kernel zram s"];
        report.compared(TABLE, name, sides, [&seconds(uzram), &seconds(kernel)]);
    } else {
        report.rounds(TABLE, name, "uzram s", &seconds(uzram));
    }
    for (column, seconds) in BEYOND {
        let most = uzram.iter().map(|run| run.anonymous_bytes(seconds)).max().unwrap_or_default();
        report.row(TABLE, name, &[(column, mib(most) - mib(limit_bytes))]);
    }
    Ok(report)
}

/// Measures the time of a program whose memory fits, divided by that without a limit.
fn fitting(options: &Options, uzram: &Path) -> Result<Report> {
    PYTHON.check()?;
    let dir = temporary(&options.dir)?;
    let (part, of) = FITTING_SHARE;
    let python_mib = (amount(options, &PYTHON) * part / of).max(LEAST_FITTING_MIB);
    PYTHON.prepare(dir.path(), python_mib)?;
    let limit_bytes = 4 * (python_mib << 20);
    let prefixes = [limited_by_uzram(uzram, dir.path(), limit_bytes), Vec::new()];
    let [limited, plain] = in_turn(options.rounds(ROUNDS), &options.stop, |_, which| {
        let mut command = PYTHON.command(dir.path(), python_mib, &prefixes[which]);
        Ok(watch(&mut command, PATIENCE, || options.stop.load(Ordering::Relaxed))?.seconds)
    })?;
    let mut report = Report::default();
    report.ratio("run, memory that fits", "python", "time / plain", [&limited, &plain]);
    Ok(report)
}

/// Measures how far memory goes beyond the limit when one thread writes to four times as much at once.
fn burst(options: &Options, uzram: &Path) -> Result<Report> {
    BURST.check()?;
    let dir = temporary(&options.dir)?;
    let burst_mib = amount(options, &BURST);
    let limit_bytes = burst_mib << 20 >> 2;
    let prefix = limited_by_uzram(uzram, dir.path(), limit_bytes);
    let mut most_bytes = 0;
    for _ in 0..options.rounds(ROUNDS) {
        let mut command = BURST.command(dir.path(), burst_mib, &prefix);
        let watched = watch(&mut command, PATIENCE, || options.stop.load(Ordering::Relaxed))?;
        most_bytes = most_bytes.max(watched.anonymous_bytes(0.0));
    }
    let mut report = Report::default();
    report.row("run, a burst", "python", &[("beyond limit MiB", mib(most_bytes) - mib(limit_bytes))]);
    Ok(report)
}

/// Returns by how much longer a program takes that does nothing, in milliseconds.
fn start_ms(options: &Options, uzram: &Path) -> Result<f64> {
    let prefix = limited_by_uzram(uzram, &options.dir, 1 << 30);
    let [limited, plain] = in_turn(options.amount(STARTS, 4), &options.stop, |_, which| {
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
    Ok(median(&limited) - median(&plain))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{SORT, SQLITE};

    #[test]
    fn programs_print_the_same_each_time() {
        let dir = tempfile::tempdir().unwrap();
        for (workload, amount) in [(&SORT, 1 << 16), (&SQLITE, 1000), (&PYTHON, 1)] {
            if let Err(error) = workload.check() {
                println!("left out: {error}");
                continue;
            }
            workload.prepare(dir.path(), amount).unwrap();
            let run = |prefix: &[String]| {
                let mut command = workload.command(dir.path(), amount, prefix);
                watch(&mut command, Duration::from_secs(60), || false).unwrap().printed
            };
            let printed = run(&[]);
            assert!(!printed.trim().is_empty());
            assert_eq!(run(&["env".to_owned()]), printed);
        }
    }
}
