//! The pager, with each way to trap touches: a mapping beside the kernel's swap on zram (`unmap`), one fault
//! (`fault`), memory that fits (`fitting`), and memory of four times the limit (`zipf`).
//!
//! Each side is a process of its own ([`crate::user`]). The sides take turns, and contents are always
//! checked.

pub(crate) mod fault;
pub(crate) mod fitting;
mod memory;
pub(crate) mod settings;
pub mod unmap;
pub(crate) mod zipf;

use std::path::Path;

use uzram::Result;
use uzram_pager::Trap;

use crate::block::cgroup::Cgroup;
use crate::harness::corpus::Saved;
use crate::harness::report::{FigureOf, each};
use crate::harness::rounds::in_turn_by_jobs;
use crate::harness::steps::User;
use crate::harness::{Options, Report};
use settings::Touched;
use unmap::{Owner, Phase, UnmapOptions, check_kernel};

/// The parts of the benchmark.
pub const PARTS: [&str; 4] = ["unmap", "faults", "fitting", "zipf"];
/// Rounds, unless the options say otherwise: paging out 256 MiB takes seconds.
const ROUNDS: usize = 3;
/// Numbers of threads that touch pages one by one.
const FAULT_THREADS: [usize; 4] = [1, 4, 16, 64];

/// Runs all measurements that are possible here.
pub fn run(options: &Options) -> Result<Report> {
    options.check(&PARTS)?;
    let saved = Saved::of(&options.corpus, &options.stop)?;
    let mut report = Report::default();
    let mut traps = Vec::new();
    for trap in Trap::ALL {
        match trap.check() {
            Ok(()) => traps.push(trap),
            Err(error) => report.note(format!("pager with {} not measured: {error}", trap.name())),
        }
    }
    let kernel = check_kernel();
    if let Err(error) = &kernel {
        report.note(format!("pager not compared with kernel zram: {error}"));
    }
    if options.has("unmap") {
        unmapped(options, saved.path(), &traps, kernel.is_ok(), &mut report)?;
    }
    if options.has("faults") {
        faults(options, saved.path(), &traps, &mut report)?;
    }
    if options.has("fitting") {
        for trap in &traps {
            let job = Touched::new(*trap, saved.path(), options.amount(16384, 512));
            let passes = options.amount(101, 4);
            let mut user = User::start(&options.bench, "Fitting", &job)?;
            let ratio = user.ask(&passes.to_string(), &options.stop)?;
            report.row("memory that fits", trap.name(), &[("time / plain memory", ratio)]);
        }
    }
    if options.has("zipf") {
        let cgroup = Cgroup::check();
        if let Err(error) = &cgroup {
            report.note(format!("Zipf access not compared with kernel zram: {error}"));
        }
        let with_kernel = kernel.is_ok() && cgroup.is_ok();
        zipf::measure(options, options.rounds(ROUNDS), saved.path(), &traps, with_kernel, &mut report)?;
    }
    Ok(report)
}

/// Paging out, faulting in, unmapping: the time of each phase, of each side.
fn unmapped(
    options: &Options,
    corpus: &Path,
    traps: &[Trap],
    kernel: bool,
    report: &mut Report,
) -> Result<()> {
    let mut owners: Vec<Owner> = kernel.then_some(Owner::Kernel("lz4")).into_iter().collect();
    owners.extend(traps.iter().map(|trap| Owner::Pager(*trap, None)));
    let once = UnmapOptions {
        program: &options.bench,
        corpus,
        pages: options.amount(65536, 2048),
        jobs: 1,
        phases: &Phase::ALL,
        stop: &options.stop,
    };
    let cells = in_turn_by_jobs(options.rounds(ROUNDS), &[1], owners.len(), &options.stop, |turn| {
        unmap::measure(&owners[turn.variant], &once)
    })?;
    let ms = |variant: usize, phase| -> Vec<f64> {
        let rounds = cells[0][variant].iter().flatten();
        rounds.filter(|(of, _)| *of == phase).map(|(_, time)| time.as_secs_f64() * 1e3).collect()
    };
    for (variant, owner) in owners.iter().enumerate() {
        let side = match owner {
            Owner::Kernel(_) => "kernel",
            Owner::Pager(trap, _) => trap.name(),
        };
        for phase in Phase::ALL {
            let (row, times) = (format!("{side}, {}", phase.name()), ms(variant, phase));
            report.rounds("paged out", &row, "ms", &times);
            if kernel && variant > 0 {
                report.ratio("paged out", &row, "/ kernel zram", [&times, &ms(0, phase)]);
            }
        }
    }
    Ok(())
}

/// Touches of pages that were paged out, by several threads at the same time.
fn faults(options: &Options, corpus: &Path, traps: &[Trap], report: &mut Report) -> Result<()> {
    const TABLE: &str = "one fault";
    let start = |trap: &Trap| {
        User::start(&options.bench, "Fault", &Touched::new(*trap, corpus, options.amount(16384, 1024)))
    };
    let mut users = traps.iter().map(start).collect::<Result<Vec<_>>>()?;
    let (rounds, stop) = (options.rounds(ROUNDS), &options.stop);
    let cells = in_turn_by_jobs(rounds, &FAULT_THREADS, traps.len(), stop, |turn| {
        users[turn.variant].ask::<fault::Faults>(&turn.jobs.to_string(), stop)
    })?;
    for (threads, cells) in FAULT_THREADS.into_iter().zip(&cells) {
        for (trap, rounds) in traps.iter().zip(cells) {
            let row = format!("{}, {threads} threads", trap.name());
            let figures: [FigureOf<fault::Faults>; 5] = [
                ("p50 µs", |faults| faults.p50_us),
                ("p99 µs", |faults| faults.p99_us),
                ("decode µs", |faults| faults.decode_us),
                ("p50 beyond µs", |faults| faults.p50_us - faults.decode_us),
                ("p99 beyond µs", |faults| faults.p99_us - faults.decode_us),
            ];
            for (column, figure) in figures {
                report.rounds(TABLE, &row, column, &each(rounds, figure));
            }
        }
    }
    Ok(())
}
