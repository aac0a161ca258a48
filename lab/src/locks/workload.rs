//! The command line of `uzram lab locks`, and what it asks for: a case of a table.

use uzram::{Error, Result};
use uzram_bench::harness::rounds::RoundOptions;
use uzram_bench::harness::{Source, command, process};

use crate::experiment::{LabOptions, Series, cpus};
use crate::tables;

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
    pub(super) design: Vec<String>,
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
    pub(super) json: bool,
}

/// What is recorded. Builds that cannot record it only check it.
#[cfg_attr(not(feature = "lock-stats"), allow(dead_code))]
pub(super) struct Workload {
    pub(super) table: &'static Series,
    pub(super) case: &'static str,
    pub(super) jobs: usize,
    /// The length of the recording, and the pages.
    pub(super) options: LabOptions,
}

impl Workload {
    pub(super) fn new(args: &LocksArgs) -> Result<Workload> {
        let (table, case) = table_and_case(&args.workload)?;
        let jobs = args.jobs.unwrap_or_else(cpus);
        let duration = command::seconds(args.seconds)?;
        let options = LabOptions {
            cases: vec![case.to_owned()],
            jobs: vec![jobs],
            rounds: RoundOptions {
                duration,
                stop: process::stop_flag()?,
                progress: command::show_progress,
                ..RoundOptions::default()
            },
            corpus: args.corpus.clone().unwrap_or(LabOptions::default().corpus),
        };
        // Reports invalid options.
        options.estimate(table)?;
        Ok(Workload { table, case, jobs, options })
    }
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
