//! fio's NBD engine against a uzram server and against nbdkit's memory plugin, 4 KiB pages,
//! 16 requests in flight.
//!
//! nbdkit's `malloc` allocator compresses nothing: it shows the cost of the protocol alone. Its `zstd`
//! allocator is the existing alternative for compressed memory.
//!
//! Every disk is filled with the corpus before it is read. fio cannot write the pages of a file: its own
//! buffers contain noise, which no server could compress. So fio maps its buffers shared from a file of this
//! program, which replaces their contents by random pages of the corpus a thousand times a second while fio
//! runs; the server receives the corpus's mix. Some pages are sent while they are replaced, and are half one
//! page and half another.
//!
//! Both servers of a comparison run for the whole of it, idle while the other is measured; the order
//! alternates from round to round.

mod fio;
mod report;
mod server;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use uzram::units::pages_to_bytes;
use uzram::{Error, ErrorKind, Result};

use crate::harness::corpus::{self, Corpus};
use crate::harness::process::{is_missing, run_to_end};
use crate::harness::rounds::in_turn;
pub use fio::Fio;
pub use report::{NbdReport, Row};
pub use server::Server;

/// What to measure.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The `uzram` program. It is started as
    /// `PROGRAM up --runtime-dir DIR --size BYTES --algorithm A` and must listen on `DIR/nbd.sock`.
    pub program: PathBuf,
    /// A file of pages; the disks are as large as it is.
    pub corpus: PathBuf,
    /// Numbers of fio jobs; each has its own connection.
    pub jobs: Vec<usize>,
    /// How long one measurement lasts.
    pub duration: Duration,
    /// How many rounds.
    pub repeat: usize,
    /// Setting it ends the run with an error after stopping what it started.
    pub stop: Arc<AtomicBool>,
}

/// One comparison: a pattern, and the two servers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    pub(crate) rw: &'static str,
    /// uzram's algorithm.
    pub(crate) algorithm: &'static str,
    /// nbdkit's allocator.
    pub(crate) allocator: &'static str,
    /// The ratio uzram / nbdkit to reach.
    pub(crate) wanted_ratio: f64,
}

/// Reads come first: they need the disks as they were filled.
pub(crate) const COMPARISONS: [Comparison; 3] = [
    Comparison { rw: "randread", algorithm: "lz4", allocator: "malloc", wanted_ratio: 1.2 },
    Comparison { rw: "randwrite", algorithm: "lz4", allocator: "malloc", wanted_ratio: 0.6 },
    Comparison { rw: "randwrite", algorithm: "zstd", allocator: "zstd", wanted_ratio: 3.0 },
];

/// Returns the first missing program of those this needs besides uzram.
pub fn missing_program() -> Option<&'static str> {
    ["nbdkit"].into_iter().find(|name| is_missing(name)).or_else(missing_client)
}

/// Returns the first missing program of those that use a server.
pub fn missing_client() -> Option<&'static str> {
    ["fio", "nbdcopy"].into_iter().find(|name| is_missing(name))
}

/// The shortest duration that fio can measure.
pub const MIN_DURATION: Duration = Duration::from_millis(100);

/// Runs every comparison.
///
/// # Errors
/// `Unsupported` if a program is missing, `Io` with the end of its output if one fails, `Invalid` for an
/// invalid option.
pub fn run(options: &NbdOptions) -> Result<NbdReport> {
    check(options)?;
    let corpus = corpus::load(&options.corpus)?;
    let size_bytes = pages_to_bytes(corpus.page_count() as u64);
    let mut rows = Vec::new();
    for comparison in &COMPARISONS {
        let uzram = Server::uzram(&options.program, comparison.algorithm, size_bytes, &[], None)?;
        let nbdkit = Server::nbdkit(comparison.allocator, size_bytes, None)?;
        for server in [&uzram, &nbdkit] {
            fill(server, &options.corpus)?;
        }
        for &jobs in &options.jobs {
            rows.push(compare(options, comparison, jobs, &corpus, [&uzram, &nbdkit])?);
        }
    }
    Ok(NbdReport { size_bytes, rows, notes: report::notes(options) })
}

fn check(options: &NbdOptions) -> Result<()> {
    if let Some(name) = missing_program() {
        return Err(Error::new(ErrorKind::Unsupported, format!("the program {name} is missing: install it")));
    }
    if options.repeat == 0 || options.duration < MIN_DURATION {
        return Err(
            Error::invalid("fio needs at least one round of at least 0.1 s").with_setting("--seconds")
        );
    }
    match options.jobs.iter().find(|jobs| !(1..=64).contains(*jobs)) {
        Some(jobs) => Err(Error::invalid(format!("{jobs} jobs: it must be 1 to 64")).with_setting("--jobs")),
        None => Ok(()),
    }
}

/// Copies the corpus to a server's disk.
///
/// # Errors
/// `Io`, with the end of the error output of `nbdcopy`.
pub fn fill(server: &Server, corpus: &Path) -> Result<()> {
    run_to_end(Command::new("nbdcopy").arg(corpus).arg(server.uri()), Duration::from_secs(120)).map(drop)
}

/// Measures the rounds of one row.
fn compare(
    options: &NbdOptions,
    comparison: &Comparison,
    jobs: usize,
    corpus: &Corpus,
    servers: [&Server; 2],
) -> Result<Row> {
    let [uzram, nbdkit] = in_turn(options.repeat, &options.stop, |round, which| {
        let fio = Fio { rw: comparison.rw, jobs, duration: options.duration, seed: round as u64 + 1 };
        fio.run(servers[which].uri(), corpus)
    })?;
    Ok(Row::new(comparison, jobs, uzram, nbdkit))
}

#[cfg(test)]
mod tests;
