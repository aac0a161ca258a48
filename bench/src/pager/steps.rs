//! The process whose memory is measured, of its own for each measurement, so that none has memory, threads or
//! signal handlers of another. It does a step for each line on its standard input, and prints a line of JSON
//! for it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzram::designs::PoolDesign;
use uzram::{Error, ErrorKind, Result};
use uzram_pager::{Pager, TrapKind};

use crate::harness::process::last_words;
use crate::harness::{go_on, to_json};

/// The subcommand by which a program is such a process.
pub const SUBCOMMAND: &str = "memory-user";
const PATIENCE: Duration = Duration::from_secs(180);
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// A process that touches memory of a pager.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Touched {
    /// How the pager traps touches.
    trap: String,
    /// A file of pages.
    pub(super) corpus: PathBuf,
    /// Pages of the memory, which those of the corpus fill again and again.
    pub(super) pages: usize,
}

impl Touched {
    pub(super) fn new(trap: TrapKind, corpus: &Path, pages: usize) -> Touched {
        Touched { trap: trap.name().to_owned(), corpus: corpus.to_owned(), pages }
    }

    pub(super) fn trap(&self) -> Result<TrapKind> {
        trap_named(&self.trap)
    }
}

/// The settings of a pager that is measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PagerSettings {
    pub(super) trap: String,
    /// The design of the pool's locks, if not the default.
    pub(super) pool_design: Option<String>,
    pub(super) limit_bytes: u64,
    /// The folder and the size of the spill file, if there is one.
    pub(super) spill: Option<(PathBuf, u64)>,
}

impl PagerSettings {
    pub(super) fn new(trap: TrapKind, limit_bytes: u64) -> PagerSettings {
        PagerSettings { trap: trap.name().to_owned(), pool_design: None, limit_bytes, spill: None }
    }

    pub(super) fn build(&self) -> Result<Pager> {
        let mut builder = Pager::builder().limit(self.limit_bytes).trap(trap_named(&self.trap)?);
        if let Some(design) = &self.pool_design {
            builder = builder.pool_design(design.parse::<PoolDesign>()?);
        }
        if let Some((dir, bytes)) = &self.spill {
            builder = builder.spill(dir, *bytes);
        }
        builder.build()
    }
}

fn trap_named(name: &str) -> Result<TrapKind> {
    let found = TrapKind::ALL.into_iter().find(|trap| trap.name() == name);
    found.ok_or_else(|| Error::invalid(format!("there is no trap '{name}'")))
}

pub(super) struct Steps;

impl Steps {
    /// Waits for the next one; `None` when there are no more.
    pub(super) fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        match std::io::stdin().read_line(&mut line) {
            Ok(read) if read > 0 => Some(line.trim_end().to_owned()),
            _ => None,
        }
    }

    pub(super) fn answer(&mut self, answer: &impl Serialize) -> Result<()> {
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{}", to_json(answer))
            .and_then(|()| stdout.flush())
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot write the answer: {error}")))
    }
}

/// A process that does the steps; dropping it kills it.
pub(super) struct User {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    said: File,
}

impl User {
    /// Starts it: `program` has the [`SUBCOMMAND`], and `kind` is one of its jobs.
    pub(super) fn start(program: &Path, kind: &str, job: &impl Serialize) -> Result<User> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Io, format!("cannot start {}: {error}", program.display()))
        };
        let said = tempfile::tempfile().map_err(failed)?;
        let mut command = Command::new(program);
        // Signals from the terminal are for this process, which ends the child.
        let job = serde_json::json!({ kind: job }).to_string();
        command.arg(SUBCOMMAND).arg(job).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(said.try_clone().map_err(failed)?);
        let mut child = command.spawn().map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both are pipes")
        };
        Ok(User { child, stdin, stdout: BufReader::new(stdout), said })
    }

    pub(super) fn tell(&mut self, step: &str) -> Result<()> {
        writeln!(self.stdin, "{step}").map_err(|_| self.failure("ended"))
    }

    pub(super) fn hear<T: DeserializeOwned>(&mut self, stop: &AtomicBool) -> Result<T> {
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

    pub(super) fn ask<T: DeserializeOwned>(&mut self, step: &str, stop: &AtomicBool) -> Result<T> {
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
