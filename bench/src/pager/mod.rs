//! The pager: paging out, faulting in and unmapping beside the kernel's swap on zram (`unmap`), one fault (`fault`), memory
//! that fits (`fitting`), and memory of four times the limit (`zipf`).
//!
//! Each side is a process of its own (`user`). The sides take turns, and contents are always checked.

mod fault;
mod fitting;
pub mod limited;
mod memory;
mod report;
pub mod unmap;
pub mod user;
mod zipf;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::units::PAGE_SIZE;
use uzram::{Error, Result};
use uzram_pager::TrapKind;

use crate::block::cgroup::Cgroup;
use crate::harness::rounds::in_turn_by_jobs;
use crate::harness::stats::{median, median_ratio};
pub use report::{FaultRow, FittingRow, PagerReport, UnmapRow};
use unmap::{Owner, Phase, UnmapOptions, kernel_obstacle};
use user::User;
pub use zipf::{PagerAccess, ZipfAccess};

/// The ways to trap touches that are measured.
pub const TRAPS: [TrapKind; 2] = [TrapKind::Uffd, TrapKind::Guard];
/// The algorithm of the kernel's swap area. Pagers have their own default.
const ALGORITHM: &str = "lz4";

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Paging out, faulting in, unmapping.
    Unmap,
    /// One fault.
    Faults,
    /// A loop over memory that fits.
    Fitting,
    /// Zipf access.
    Zipf,
}

impl Part {
    /// All of them.
    pub const ALL: [Part; 4] = [Part::Unmap, Part::Faults, Part::Fitting, Part::Zipf];

    const fn name(self) -> &'static str {
        match self {
            Part::Unmap => "unmap",
            Part::Faults => "faults",
            Part::Fitting => "fitting",
            Part::Zipf => "zipf",
        }
    }
}

impl std::str::FromStr for Part {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Part::ALL.into_iter().find(|part| part.name() == text).ok_or_else(|| {
            let what = format!("unknown part '{text}': write unmap, faults, fitting or zipf");
            Error::invalid(what).with_setting("--only")
        })
    }
}

/// The amounts to measure with.
#[derive(Clone, Debug)]
pub struct Amounts {
    /// Pages that are paged out and unmapped.
    pub unmapped_pages: usize,
    /// Pages that are touched one by one.
    pub fault_pages: usize,
    /// Numbers of threads that touch them.
    pub fault_threads: Vec<usize>,
    /// Pages of memory that fits.
    pub fitting_pages: usize,
    /// Passes over it.
    pub fitting_passes: usize,
    /// The limit for Zipf access; the data set is four times as large.
    pub limit_bytes: u64,
}

impl Default for Amounts {
    fn default() -> Self {
        Amounts {
            unmapped_pages: (256 << 20) / PAGE_SIZE,
            fault_pages: (64 << 20) / PAGE_SIZE,
            fault_threads: vec![1, 4, 16, 64],
            fitting_pages: (64 << 20) / PAGE_SIZE,
            fitting_passes: 101,
            limit_bytes: 64 << 20,
        }
    }
}

impl Amounts {
    /// Returns a sixteenth of them.
    pub fn small(self) -> Amounts {
        Amounts {
            unmapped_pages: self.unmapped_pages / 16,
            fault_pages: self.fault_pages / 16,
            fitting_pages: self.fitting_pages / 16,
            fitting_passes: self.fitting_passes / 16,
            limit_bytes: self.limit_bytes / 8,
            ..self
        }
    }
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct PagerOptions {
    /// A program with the subcommand [`user::SUBCOMMAND`].
    pub program: PathBuf,
    /// A file of pages.
    pub corpus: PathBuf,
    /// A folder for spill files.
    pub dir: PathBuf,
    /// What to measure.
    pub parts: Vec<Part>,
    /// How long one measurement of Zipf access lasts.
    pub duration: Duration,
    /// How many rounds.
    pub repeat: usize,
    /// The amounts.
    pub amounts: Amounts,
    /// Setting it ends the run with an error after removing what it added and started.
    pub stop: Arc<AtomicBool>,
}

/// Runs all measurements that are possible here.
///
/// # Errors
/// A process that fails, contents that have changed, a stop.
pub fn run(options: &PagerOptions) -> Result<PagerReport> {
    if options.repeat == 0 {
        return Err(Error::invalid("there must be at least one round").with_setting("--repeat"));
    }
    let mut report = PagerReport::default();
    let mut traps = Vec::new();
    for trap in TRAPS {
        match trap.check() {
            Ok(()) => traps.push(trap),
            Err(error) => report.notes.push(format!("pager with {} not measured: {error}", trap.name())),
        }
    }
    let kernel = kernel_obstacle();
    if let Some(obstacle) = &kernel {
        report.notes.push(format!("pager not compared with kernel zram: {obstacle}"));
    }
    let has = |part| options.parts.contains(&part);
    if has(Part::Unmap) {
        report.unmap = unmap_rows(options, &traps, kernel.is_none())?;
    }
    if has(Part::Faults) {
        report.faults = fault_rows(options, &traps)?;
    }
    if has(Part::Fitting) {
        report.fitting = fitting_rows(options, &traps)?;
    }
    if has(Part::Zipf) {
        let obstacle = kernel.is_none().then(Cgroup::obstacle).flatten();
        if let Some(obstacle) = &obstacle {
            report.notes.push(format!("Zipf access not compared with kernel zram: {obstacle}"));
        }
        let with_kernel = kernel.is_none() && obstacle.is_none();
        report.zipf = Some(zipf::measure(options, &traps, with_kernel)?);
    }
    Ok(report)
}

fn unmap_rows(options: &PagerOptions, traps: &[TrapKind], kernel: bool) -> Result<Vec<UnmapRow>> {
    let mut owners: Vec<Owner> = kernel.then_some(Owner::Kernel(ALGORITHM)).into_iter().collect();
    owners.extend(traps.iter().map(|trap| Owner::Pager(*trap, None)));
    let once = UnmapOptions {
        program: &options.program,
        corpus: &options.corpus,
        pages: options.amounts.unmapped_pages,
        jobs: 1,
        phases: &Phase::ALL,
        stop: &options.stop,
    };
    let cells = in_turn_by_jobs(options.repeat, &[1], owners.len(), &options.stop, |turn| {
        unmap::measure(&owners[turn.variant], &once)
    })?;
    let ms = |variant: usize, phase| -> Vec<f64> {
        let rounds = cells[0][variant].iter().flatten();
        rounds.filter(|(of, _)| *of == phase).map(|(_, time)| time.as_secs_f64() * 1e3).collect()
    };
    let mut rows = Vec::new();
    for (variant, owner) in owners.iter().enumerate() {
        for phase in Phase::ALL {
            let times = ms(variant, phase);
            let ratio = (kernel && variant > 0).then(|| median_ratio(&times, &ms(0, phase)));
            let side = match owner {
                Owner::Kernel(_) => "kernel",
                Owner::Pager(trap, _) => trap.name(),
            };
            rows.push(UnmapRow { side, phase, ms: median(&times), ratio });
        }
    }
    Ok(rows)
}

fn fault_rows(options: &PagerOptions, traps: &[TrapKind]) -> Result<Vec<FaultRow>> {
    let mut users = Vec::new();
    for trap in traps {
        let (corpus, pages) = (options.corpus.clone(), options.amounts.fault_pages);
        let job = fault::Job { trap: trap.name().to_owned(), corpus, pages };
        users.push(User::start(&options.program, &user::Job::Fault(job))?);
    }
    let threads = &options.amounts.fault_threads;
    let cells = in_turn_by_jobs(options.repeat, threads, traps.len(), &options.stop, |turn| {
        users[turn.variant].ask::<fault::Faults>(&turn.jobs.to_string(), &options.stop)
    })?;
    let mut rows = Vec::new();
    for (threads, cells) in threads.iter().zip(&cells) {
        for (trap, rounds) in traps.iter().zip(cells) {
            let of =
                |figure: fn(&fault::Faults) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
            rows.push(FaultRow {
                trap: trap.name(),
                threads: *threads,
                p50_us: of(|faults| faults.p50_us),
                p99_us: of(|faults| faults.p99_us),
                decode_us: of(|faults| faults.decode_us),
                p50_beyond_us: of(|faults| faults.p50_us - faults.decode_us),
                p99_beyond_us: of(|faults| faults.p99_us - faults.decode_us),
            });
        }
    }
    Ok(rows)
}

fn fitting_rows(options: &PagerOptions, traps: &[TrapKind]) -> Result<Vec<FittingRow>> {
    let amounts = &options.amounts;
    let mut rows = Vec::new();
    for trap in traps {
        let (corpus, pages) = (options.corpus.clone(), amounts.fitting_pages);
        let job = fitting::Job { trap: trap.name().to_owned(), corpus, pages };
        let mut user = User::start(&options.program, &user::Job::Fitting(job))?;
        let time_ratio = user.ask(&amounts.fitting_passes.to_string(), &options.stop)?;
        rows.push(FittingRow { trap: trap.name(), time_ratio });
    }
    Ok(rows)
}
