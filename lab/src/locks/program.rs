//! Finds and becomes the program that records locks, in builds that cannot.

use std::os::unix::process::CommandExt;
use std::process::Command;

use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::{command, process};

use super::workload::Workload;

const NAME: &str = "uzram-lab-locks";
/// The command that builds it.
const BUILD: &str = "cargo build --release -p uzram-lab --features lock-stats --bin uzram-lab-locks";

/// Replaces this process, which runs `uzram-lab locks ARGUMENTS…`, by the program that records: the one
/// beside this one, else the first in `PATH`.
pub(super) fn become_recorder(_: &Workload) -> Result<()> {
    let beside = command::this_program()?.with_file_name(NAME);
    let program = Some(beside).filter(|program| program.is_file()).or_else(|| process::find(NAME));
    let Some(program) = program else {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "locks are recorded by a program of its own, {NAME}, which is neither beside uzram-lab nor in PATH: build it with `{BUILD}`"
            ),
        ));
    };
    let error = Command::new(&program).args(std::env::args_os().skip(2)).exec();
    Err(Error::new(ErrorKind::Io, format!("cannot run {}: {error}", program.display())))
}
