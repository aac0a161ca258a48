//! Measures the slab caches beside mimalloc, jemalloc, snmalloc and the system's allocator, and prints the
//! project's targets for them.
//!
//! * Times: the harness's rounds. Every allocator handles the same fixed number of objects, calibrated on
//!   mimalloc, in an order that changes from round to round; a ratio is the median of the rounds' ratios.
//!   Threads are not pinned, as in a user's program.
//! * Memory, also of compressed pages: [`memory`].
//!
//! The allocators are called by their own functions; the process's global allocator stays the system's.

mod heap;
mod measured;
mod memory;
mod peers;
mod ring;

use std::process::ExitCode;

use clap::Parser;
use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::report::text;
use uzram_bench::harness::rounds::{Experiment, Plan, RoundOptions, Sample, Values, measure_case};
use uzram_bench::harness::stats::{MAX_PAIRS, PairedRatio, coverage};
use uzram_bench::harness::{Report, command, go_on, process};
use uzram_bench::targets::{TargetsReport, judge};

use heap::SIZES_BYTES;
use measured::{CASES, Case, Measured, names, open};

/// Measure uzram's slab caches beside other allocators, in this process
#[derive(Parser)]
#[command(name = "bench-allocators")]
struct Args {
    /// About how many seconds one measurement lasts
    #[arg(long, value_name = "S", default_value_t = 0.01)]
    seconds: f64,
    /// Rounds, without the first, which warms up
    #[arg(long, value_name = "R", default_value_t = 50, value_parser = clap::value_parser!(u8).range(1..=MAX_PAIRS as i64))]
    rounds: u8,
    /// Objects of which 90 % are freed, to measure the memory that is kept
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1000..=10_000_000))]
    objects: u32,
    /// Pages that are compressed and stored, to measure the memory that they take
    #[arg(long, value_name = "N", default_value_t = 65536, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    pages: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Only print the bytes in memory for each byte that this allocator stores
    #[arg(long, value_name = "ALLOCATOR", hide = true)]
    memory_of: Option<String>,
    /// The size of its objects; without one it stores compressed pages
    #[arg(long, value_name = "BYTES", hide = true)]
    size: Option<usize>,
}

fn main() -> ExitCode {
    command::main("bench-allocators", |args: &Args| command::print(&measure(args)?))
}

/// Measures everything, or the memory of one allocator; returns the text to print.
fn measure(args: &Args) -> Result<String> {
    let Some(allocator) = &args.memory_of else { return Ok(text(&run(args)?, args.json)) };
    let [all, rest] = memory::measure(allocator, args.size, args.objects as usize, args.pages as usize)?;
    Ok(format!("{all} {rest}\n"))
}

const TARGETS: &str = include_str!("targets.txt");

fn run(args: &Args) -> Result<TargetsReport> {
    let duration = command::seconds(args.seconds)?;
    if duration.is_zero() {
        return Err(Error::invalid("a measurement must last more than 0 s").with_setting("--seconds"));
    }
    let (stop, progress) = (process::stop_flag()?, command::show_progress);
    let options = RoundOptions { rounds: args.rounds.into(), duration, progress, stop };
    let mut report = Report::default();
    for (name, case) in CASES {
        for size_bytes in SIZES_BYTES {
            let table = format!("{name}, {size_bytes} bytes");
            measure_times(&table, case, size_bytes, &options, &mut report)?;
        }
    }
    progress("memory");
    go_on(&options.stop)?;
    memory::measure_all(args.objects as usize, args.pages as usize, &mut report)?;
    progress("");
    report.notes = notes(args);
    Ok(TargetsReport { targets: judge(TARGETS, &report), report })
}

/// Measures all rounds of a case, a row for each allocator.
fn measure_times(
    table: &str,
    case: Case,
    size_bytes: usize,
    options: &RoundOptions,
    report: &mut Report,
) -> Result<()> {
    let names = names();
    let heaps = names.iter().filter_map(|name| open(name, size_bytes).transpose()).collect::<Result<_>>()?;
    let mut round = Round { case, heaps };
    let cells = measure_case(&mut round, table, &[1], options, names.len(), names.len() - 1)?;
    let ns = |values: &Values| values.get("ns_per_object").cloned().unwrap_or_default();
    let ns: Vec<Vec<f64>> = cells.iter().flatten().map(ns).collect();
    let Some(yardstick) = ns.last() else { return Ok(()) };
    for (name, ns) in names.into_iter().zip(&ns) {
        let ratio = PairedRatio::new(ns, yardstick).ok_or_else(|| {
            let what = format!("{table}: a measurement took no time at all");
            Error::new(ErrorKind::Invalid, what).with_setting("--seconds")
        })?;
        report.rounds(table, name, "ns/object", ns);
        let cells = [
            ("time / mimalloc", ratio.ratio),
            ("from", ratio.low),
            ("to", ratio.high),
            ("rate / mimalloc", ratio.ratio.recip()),
        ];
        report.row(table, name, &cells);
    }
    Ok(())
}

/// One case at one size, with fresh heaps of every allocator of this build: an experiment of the lab.
struct Round {
    case: Case,
    heaps: Vec<Box<dyn Measured>>,
}

impl Experiment for Round {
    fn begin(&mut self, _case: &str) -> Result<()> {
        Ok(())
    }

    fn measure(&mut self, plan: &Plan<'_>) -> Result<Sample> {
        let elapsed = self.heaps[plan.design].time(self.case, plan.work, plan.seed)?;
        let ns_per_object = elapsed.as_secs_f64() * 1e9 / plan.work as f64;
        Ok(Sample { elapsed, values: vec![("ns_per_object", ns_per_object)] })
    }
}

fn notes(args: &Args) -> Vec<String> {
    let mut notes = vec![
        format!(
            "{} rounds of {:.3} s a measurement, threads not pinned; processor time, but elapsed time for \
             producer/consumer; ratios: the rounds' median, from and to: its {:.0}% interval",
            args.rounds,
            args.seconds,
            100.0 * coverage(args.rounds.into())
        ),
        format!("memory: {} objects, 90 % of them freed at random, memory given back", args.objects),
        format!(
            "compressed pages: {} of the corpus mixed, with lz4, each a blob of its length; half of them freed at \
             random, memory given back, which compacts uzram's pool",
            args.pages
        ),
    ];
    notes.extend(peers::LEFT_OUT.iter().map(|name| format!("{name} is left out: it was not built")));
    notes
}
