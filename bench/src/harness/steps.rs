//! The process whose memory is measured, of its own for each measurement, so that none has memory, threads or
//! signal handlers of another. It does a step for each line on its standard input, and prints a line of JSON
//! for it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uzram::{Error, ErrorKind, Result};

use super::process::last_words;
use super::report::to_json;
use super::rounds::go_on;

/// The subcommand by which a program is such a process.
pub const SUBCOMMAND: &str = "memory-user";
const PATIENCE: Duration = Duration::from_secs(180);
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The lines that it is told, and its answers.
pub(crate) struct Steps;

impl Steps {
    /// Waits for the next one; `None` when there are no more.
    pub(crate) fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        match std::io::stdin().read_line(&mut line) {
            Ok(read) if read > 0 => Some(line.trim_end().to_owned()),
            _ => None,
        }
    }

    pub(crate) fn answer(&mut self, answer: &impl Serialize) -> Result<()> {
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{}", to_json(answer))
            .and_then(|()| stdout.flush())
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot write the answer: {error}")))
    }
}

/// A process that does the steps; dropping it kills it.
pub(crate) struct User {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    said: File,
}

impl User {
    /// Starts it: `program` has the [`SUBCOMMAND`], and `kind` is one of its jobs. `Invalid`: a path of the
    /// job is not UTF-8.
    pub(crate) fn start(program: &Path, kind: &str, job: &impl Serialize) -> Result<User> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Io, format!("cannot start {}: {error}", program.display()))
        };
        let said = tempfile::tempfile().map_err(failed)?;
        let mut command = Command::new(program);
        let job = serde_json::to_string(&BTreeMap::from([(kind, job)]))
            .map_err(|error| Error::invalid(format!("the program that is measured: {error}")))?;
        // Signals from the terminal are for this process, which ends the child.
        command.arg(SUBCOMMAND).arg(job).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(said.try_clone().map_err(failed)?);
        let mut child = command.spawn().map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both are pipes")
        };
        Ok(User { child, stdin, stdout: BufReader::new(stdout), said })
    }

    pub(crate) fn tell(&mut self, step: &str) -> Result<()> {
        writeln!(self.stdin, "{step}").map_err(|_| self.failure("ended"))
    }

    pub(crate) fn hear<T: DeserializeOwned>(&mut self, stop: &AtomicBool) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            go_on(stop)?;
            let mut fds = [PollFd::new(self.stdout.get_ref(), PollFlags::IN)];
            match poll(&mut fds, Some(&LOOK)) {
                Ok(ready) if ready > 0 => break,
                _ if Instant::now() > deadline => return Err(self.failure("does not answer")),
                _ => {}
            }
        }
        let mut line = String::new();
        match self.stdout.read_line(&mut line) {
            Ok(read) if read > 0 => serde_json::from_str(&line).map_err(|error| {
                Error::new(ErrorKind::Io, format!("the program answered '{line}': {error}"))
            }),
            _ => Err(self.failure("failed")),
        }
    }

    pub(crate) fn ask<T: DeserializeOwned>(&mut self, step: &str, stop: &AtomicBool) -> Result<T> {
        self.tell(step)?;
        self.hear(stop)
    }

    fn failure(&mut self, what: &str) -> Error {
        let _ = self.child.kill();
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let said = last_words(&self.said);
        Error::new(ErrorKind::Io, format!("the program that is measured {what} ({status}): {}", said.trim()))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_path_that_is_not_utf8_is_an_error() {
        let path = Path::new(OsStr::from_bytes(b"/tmp/\xff"));
        let error = User::start(Path::new("/nonexistent/program"), "Swap", &path).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("UTF-8"), "{error}");
    }
}
