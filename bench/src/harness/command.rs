//! Shared by the programs `uzram-bench`, `uzram-lab` and `bench-allocators`: one-line errors, exit statuses,
//! signals that end a run cleanly, the progress line, and the other programs that they start.
//!
//! The statuses are those of `uzram`: 0, success; 1, failure; 2, the command line is invalid and nothing was
//! tried.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use uzram::{Error, ErrorKind, Result};
use uzram_cli::{USAGE_STATUS, parse_command_line};

use super::process::find;

/// Parses this process's command line and runs the command; prints its error on standard error.
pub fn main<C: clap::Parser>(name: &str, run: impl FnOnce(&C) -> Result<()>) -> ExitCode {
    let command = match parse_command_line(|line| error_line(name, line)) {
        Ok(command) => command,
        Err(status) => return status,
    };
    match run(&command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error_line(name, &error.to_string());
            ExitCode::from(if error.kind() == ErrorKind::Invalid { USAGE_STATUS } else { 1 })
        }
    }
}

/// Prints a command's result. Succeeds if the reader has closed the pipe: `uzram lab list | head -1`.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::new(ErrorKind::Io, format!("cannot write the output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Parses the value of `--seconds`.
pub fn seconds(seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| Error::invalid(error.to_string()).with_setting("--seconds"))
}

/// Replaces the last line on standard error by this one, if that is a terminal.
pub fn show_progress(line: &str) {
    let mut stderr = io::stderr().lock();
    if stderr.is_terminal() {
        // If standard error is closed, nobody sees the line.
        let _ = write!(stderr, "\r\x1b[K{line}").and_then(|()| stderr.flush());
    }
}

/// Returns the path of this program.
pub fn this_program() -> Result<PathBuf> {
    std::env::current_exe()
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot find this program: {error}")))
}

/// Returns the path of the `uzram` program: the one beside this program, else the first in `PATH`.
pub fn uzram_program() -> Option<PathBuf> {
    let beside = this_program().ok().and_then(|program| Some(program.parent()?.join("uzram")));
    beside.filter(|program| program.is_file()).or_else(|| find("uzram"))
}

fn error_line(name: &str, line: &str) {
    let _ = writeln!(io::stderr().lock(), "{name}: {line}");
}
