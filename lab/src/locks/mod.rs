//! `uzram lab locks`: the locks of a table's case, recorded while it runs, in the columns of the kernel's
//! `/proc/lock_stat`.
//!
//! The engine records locks in builds with its feature `lock-stats` only, as that takes time at every lock.
//!
//! Only what a table clocks is recorded: not the preparations, nor a second run that counts.

mod report;
mod workload;
#[cfg(feature = "lock-stats")]
mod record;

use uzram::Result;
#[cfg(feature = "lock-stats")]
use uzram_bench::harness::command;

pub use report::{HEADINGS, LockRow, LocksReport, Times};
pub use workload::LocksArgs;
use workload::Workload;

/// The command that builds a program that records locks, beside the ordinary one.
#[cfg(not(feature = "lock-stats"))]
const BUILD: &str = "cargo build --release -p uzram-lab --features lock-stats --target-dir target/lock-stats";

/// Runs the command: records each design and prints its locks.
///
/// # Errors
/// `Invalid` names what the command line asks for and there is not; `Unsupported` if this build cannot
/// record; any other error is of a design that could not be run.
pub fn run(args: &LocksArgs) -> Result<()> {
    let workload = Workload::new(args)?;
    #[cfg(not(feature = "lock-stats"))]
    {
        drop(workload);
        let what = format!("this uzram-lab cannot record locks: build one that can: `{BUILD}`");
        Err(uzram_bench::harness::unsupported(what))
    }
    #[cfg(feature = "lock-stats")]
    record_all(args, &workload)
}

#[cfg(feature = "lock-stats")]
fn record_all(args: &LocksArgs, workload: &Workload) -> Result<()> {
    let after = [(workload.table.designs)().after];
    let designs = if args.design.is_empty() { &after[..] } else { &args.design };
    for (at, design) in designs.iter().enumerate() {
        let outcome = record::record(workload, design);
        command::show_progress("");
        let text = uzram_bench::harness::report::text(&outcome?, args.json);
        command::print(&format!("{}{text}", if at > 0 && !args.json { "\n" } else { "" }))?;
    }
    Ok(())
}
