//! Programs that swap: in a cgroup of half of the memory that they take, with a swap daemon that survives, with one that does not, and
//! with kernel zram of the same size.
//!
//! What they print must be the same everywhere, and no write may fail. Each turn has a new swap area. `trace` tells where the time of
//! single faults goes.

mod report;
pub mod trace;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};

use crate::block::swap_area::{KernelSwap, SwapDaemon};
use crate::block::{disk_obstacle, io_error, kernel_obstacle};
use crate::harness::rounds::in_turn;
use crate::harness::stats::{median, median_ratio};
use crate::pager::limited::LimitedCgroup;
use crate::workload::{Amounts, Trial, Workload};
pub use report::{ProgramRow, SwapReport};

/// The algorithm of the kernel's swap area. A swap daemon has its own default.
const ALGORITHM: &str = "lz4";
/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// The least limit of a cgroup.
const LEAST_LIMIT_BYTES: u64 = 16 << 20;
/// How much larger the swap area is than the limit.
const AREA_LIMITS: u64 = 4;
/// The columns, in the order of the figures' arrays.
pub const SIDES: [&str; 3] = ["uzram", "uzram --no-survive", "kernel zram"];

/// How to measure.
#[derive(Clone, Debug)]
pub struct SwapOptions {
    /// The program `uzram`.
    pub uzram: PathBuf,
    /// A folder for the programs' files.
    pub dir: PathBuf,
    /// The names of the programs.
    pub only: Vec<String>,
    /// How many rounds.
    pub repeat: usize,
    /// The amounts.
    pub amounts: Amounts,
    /// Setting it ends the run with an error after removing what it added and started.
    pub stop: Arc<AtomicBool>,
}

/// Returns the names of the programs.
pub fn program_names() -> impl Iterator<Item = &'static str> {
    Workload::SWAPPED.into_iter().map(Workload::name)
}

/// Returns why nothing can be measured, if so.
///
/// # Errors
/// No temporary folder can be made.
pub fn obstacle(uzram: &Path) -> Result<Option<String>> {
    Ok(disk_obstacle(uzram)?.or_else(crate::block::swap::obstacle).or_else(kernel_obstacle))
}

/// Runs all programs that are installed.
///
/// # Errors
/// A program that fails, or prints something else than with enough memory; an unknown name; a stop.
pub fn run(options: &SwapOptions) -> Result<SwapReport> {
    if let Some(name) = options.only.iter().find(|name| !program_names().any(|known| known == **name)) {
        return Err(Error::invalid(format!("unknown program '{name}'")).with_setting("--only"));
    }
    let mut report = SwapReport::default();
    for workload in
        Workload::SWAPPED.into_iter().filter(|one| options.only.iter().any(|name| name == one.name()))
    {
        match workload.missing() {
            Some(name) => {
                report.notes.push(format!("{} not measured: the program {name} is missing", workload.name()));
            }
            None => report.programs.push(measure(options, workload)?),
        }
    }
    Ok(report)
}

/// What one turn has shown.
struct Turn {
    seconds: f64,
    counts: Counts,
    raised: usize,
    failed_writes: u64,
}

fn measure(options: &SwapOptions, workload: Workload) -> Result<ProgramRow> {
    let trial = Trial::new(workload, &options.amounts, &options.dir, PATIENCE, &options.stop)?;
    let limit_bytes = trial.half_bytes(LEAST_LIMIT_BYTES);
    let sides = in_turn::<{ SIDES.len() }, _>(options.repeat, &options.stop, |_, side| {
        let area = Area::on(&options.uzram, side, AREA_LIMITS * limit_bytes)?;
        let turn = in_cgroup(limit_bytes, &trial)?;
        Ok(Turn { failed_writes: area.off()?, ..turn })
    })?;
    let figures =
        |figure: fn(&Turn) -> f64| sides.each_ref().map(|turns| turns.iter().map(figure).collect::<Vec<_>>());
    let medians = |figure| figures(figure).map(|figures| median(&figures));
    let [surviving, plainly, kernel] = figures(|turn| turn.seconds);
    Ok(ProgramRow {
        name: workload.name(),
        plain_s: trial.plain.seconds,
        peak_bytes: trial.plain.peak_bytes,
        limit_bytes,
        seconds: medians(|turn| turn.seconds),
        ratios: [median_ratio(&surviving, &kernel), median_ratio(&plainly, &kernel)],
        in_bytes: medians(|turn| turn.counts.in_bytes as f64),
        out_bytes: medians(|turn| turn.counts.out_bytes as f64),
        switches: medians(|turn| turn.counts.switches as f64),
        raised: sides.each_ref().map(|turns| turns.iter().map(|turn| turn.raised).sum()),
        failed_writes: sides.iter().flatten().map(|turn| turn.failed_writes).sum(),
    })
}

/// Runs a program in a cgroup with a limit.
fn in_cgroup(limit_bytes: u64, trial: &Trial<'_>) -> Result<Turn> {
    let cgroup = LimitedCgroup::new(limit_bytes)?;
    let before = Counts::now()?;
    let run = trial.run(&cgroup.words(), "in a cgroup")?;
    let counts = Counts::now()?.since(before);
    Ok(Turn { seconds: run.seconds, counts, raised: cgroup.raised(), failed_writes: 0 })
}

/// A swap area of one of the sides.
enum Area {
    Daemon(SwapDaemon),
    Kernel(KernelSwap),
}

impl Area {
    fn on(uzram: &Path, side: usize, bytes: u64) -> Result<Area> {
        match side {
            0 => SwapDaemon::on(uzram, bytes, &[]).map(Area::Daemon),
            1 => SwapDaemon::on(uzram, bytes, &["--no-survive"]).map(Area::Daemon),
            _ => KernelSwap::on_named(ALGORITHM, bytes).map(Area::Kernel),
        }
    }

    /// Switches it off; returns how many writes have failed.
    fn off(self) -> Result<u64> {
        match self {
            Area::Daemon(daemon) => {
                let failed_writes = daemon.failed_writes()?;
                daemon.off().map(|()| failed_writes)
            }
            Area::Kernel(swap) => swap.off().map(|()| 0),
        }
    }
}

/// What the kernel has counted since the machine started.
#[derive(Clone, Copy)]
struct Counts {
    in_bytes: u64,
    out_bytes: u64,
    switches: u64,
}

impl Counts {
    fn now() -> Result<Counts> {
        let vmstat = read("/proc/vmstat")?;
        let page = rustix::param::page_size() as u64;
        Ok(Counts {
            in_bytes: number(&vmstat, "pswpin ")? * page,
            out_bytes: number(&vmstat, "pswpout ")? * page,
            switches: number(&read("/proc/stat")?, "ctxt ")?,
        })
    }

    fn since(self, before: Counts) -> Counts {
        Counts {
            in_bytes: self.in_bytes - before.in_bytes,
            out_bytes: self.out_bytes - before.out_bytes,
            switches: self.switches - before.switches,
        }
    }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|error| io_error(Path::new(path), error))
}

/// Returns the number of a line that begins with a name.
fn number(text: &str, name: &str) -> Result<u64> {
    let number = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    number.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, format!("the kernel has no count '{}'", name.trim()))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn counts_are_found_by_their_whole_name() {
        let text = "pswpin_more 7\npswpin 12\nctxt 3\n";
        assert_eq!(number(text, "pswpin ").unwrap(), 12);
        assert!(number(text, "pswpout ").unwrap_err().to_string().contains("'pswpout'"));
        let (before, after) = (Counts::now().unwrap(), Counts::now().unwrap());
        assert!(after.since(before).switches < 1 << 40);
    }

    #[test]
    fn a_program_that_is_unknown_is_refused() {
        let options = SwapOptions {
            uzram: "/nonexistent".into(),
            dir: "/tmp".into(),
            only: vec!["node".into(), "emacs".into()],
            repeat: 1,
            amounts: Amounts::small(),
            stop: Arc::default(),
        };
        let error = run(&options).unwrap_err().to_string();
        assert!(error.contains("emacs"), "{error}");
    }
}
