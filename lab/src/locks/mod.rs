//! `uzram lab locks`: the locks of a table's case, recorded while it runs, in the columns of the kernel's
//! `/proc/lock_stat`.
//!
//! The engine records locks in builds with its feature `lock-stats` only, as that takes time at every lock.
//!
//! Only what a table clocks is recorded: not the preparations, nor a second run that counts.

#[cfg_attr(not(feature = "lock-stats"), allow(dead_code))]
mod report;
#[cfg(feature = "lock-stats")]
mod record;

use uzram::{Error, Result};
use uzram_bench::harness::rounds::RoundOptions;
use uzram_bench::harness::{Source, command, process};

use crate::experiment::{LabOptions, Series, cpus};
use crate::tables;
pub use report::HEADINGS;

type Workload = (&'static Series, &'static str, LabOptions);

/// Runs the command: records each design and prints its locks.
pub fn run(args: &LocksArgs) -> Result<()> {
    let workload = workload(args)?;
    #[cfg(not(feature = "lock-stats"))]
    {
        drop(workload);
        Err(uzram_bench::harness::unsupported(
            "this uzram-lab cannot record locks: build one that can: `cargo build --release -p uzram-lab \
             --features lock-stats --target-dir target/lock-stats`",
        ))
    }
    #[cfg(feature = "lock-stats")]
    record_all(args, &workload)
}

#[cfg(feature = "lock-stats")]
fn record_all(args: &LocksArgs, workload: &Workload) -> Result<()> {
    let after = [(workload.0.designs)().after];
    let designs = if args.design.is_empty() { &after[..] } else { &args.design };
    for (at, design) in designs.iter().enumerate() {
        let outcome = record::record(workload, design);
        command::show_progress("");
        let text = uzram_bench::harness::report::text(&outcome?, args.json);
        command::print(&format!("{}{text}", if at > 0 && !args.json { "\n" } else { "" }))?;
    }
    Ok(())
}

/// The command line of `uzram lab locks`.
#[derive(clap::Args)]
#[command(
    after_help = "Example: uzram lab locks zs-free:run-cache --design split,class-indexed --jobs 2 --seconds 0.2"
)]
pub struct LocksArgs {
    /// A case of a table, or a table that has only one: `uzram lab list` shows them
    #[arg(value_name = "TABLE:CASE")]
    workload: String,
    /// Designs of the table, each recorded by itself [default: the one after the series]
    #[arg(long, value_delimiter = ',', value_name = "DESIGN,…")]
    design: Vec<String>,
    /// Number of jobs: threads, or what the table says [default: the number of CPUs]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// About how many seconds are recorded, of each design
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// The pages that are stored, of tables that store some [default: mixed]
    #[arg(long, value_name = "FILE|NAME")]
    corpus: Option<Source>,
    /// Print JSON, a line for each design
    #[arg(long)]
    json: bool,
}

/// Returns the table and the case, whose locks are recorded, and how long and with how many jobs it runs.
fn workload(args: &LocksArgs) -> Result<Workload> {
    let (table, case) = table_and_case(&args.workload)?;
    let rounds = RoundOptions {
        duration: command::seconds(args.seconds)?,
        stop: process::stop_flag()?,
        progress: command::show_progress,
        ..RoundOptions::default()
    };
    let default = LabOptions::default();
    let options = LabOptions {
        cases: vec![case.to_owned()],
        jobs: vec![args.jobs.unwrap_or_else(cpus)],
        rounds,
        corpus: args.corpus.clone().unwrap_or(default.corpus),
    };
    // Reports invalid options.
    options.estimate(table)?;
    Ok((table, case, options))
}

/// Parses `TABLE:CASE`, or `TABLE`.
fn table_and_case(workload: &str) -> Result<(&'static Series, &'static str)> {
    let (name, case) = match workload.split_once(':') {
        Some((name, case)) => (name, Some(case)),
        None => (workload, None),
    };
    let table = tables::table(name)?;
    if table.length.is_fixed() {
        return Err(Error::invalid(format!("{name} runs other programs, whose locks are not recorded")));
    }
    let cases = table.case_names();
    let found = match case {
        Some(case) => cases.iter().find(|name| **name == case),
        None => cases.first().filter(|_| cases.len() == 1),
    };
    let found = found.ok_or_else(|| {
        let cases: Vec<_> = cases.iter().map(|case| format!("{name}:{case}")).collect();
        Error::invalid(format!("'{workload}' is no case of {name}, only: {}", cases.join(", ")))
    })?;
    Ok((table, found))
}
