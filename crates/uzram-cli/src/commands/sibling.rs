//! `uzram bench` and `uzram lab`: separate programs, which this process executes (execve(2)). The daemon
//! locks its program in memory, so they are not part of it.

use std::convert::Infallible;
use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::failure::{Failure, Result};
use crate::output;
use crate::system::find_program::find_program;

/// Arguments passed on unchanged, including `--help`.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct SiblingArgs {
    /// Arguments of the program
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// Executes the program of that name: the one in this program's directory, or the first in `PATH`.
pub fn run(name: &str, args: &SiblingArgs) -> Result<Infallible> {
    let Some(program) = find(name) else {
        return Err(Failure::line(format!(
            "the program {name} is neither beside uzram nor in PATH: `cargo build --release -p {name}` builds it; \
             install them in one directory"
        )));
    };
    // It is this program's if it comes first.
    let json = output::is_json().then_some("--json");
    let error = Command::new(&program).args(json).args(&args.arguments).exec();
    Err(Failure::line(format!("cannot run {}: {error}", program.display())))
}

fn find(name: &str) -> Option<PathBuf> {
    let beside = env::current_exe().ok().and_then(|program| Some(program.parent()?.join(name)));
    beside.filter(|program| program.is_file()).or_else(|| find_program(name.as_ref()).ok())
}
