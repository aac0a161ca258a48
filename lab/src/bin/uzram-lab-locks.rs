//! The program `uzram-lab-locks`: `uzram lab locks`, with an engine that records its locks.

use std::process::ExitCode;

use clap::Parser;
use uzram_bench::harness::command;
use uzram_lab::locks::{self, LocksArgs};

/// Record the locks of a table's case, and print them in the columns of /proc/lock_stat
#[derive(Parser)]
#[command(name = "uzram-lab-locks", bin_name = "uzram lab locks", version)]
struct Args {
    #[command(flatten)]
    locks: LocksArgs,
}

fn main() -> ExitCode {
    command::main("uzram-lab-locks", |args: &Args| locks::run(&args.locks))
}
