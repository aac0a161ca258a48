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

mod server;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use uzram::units::{PAGE_SIZE, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use crate::engine::ROUNDS;
use crate::harness::corpus::{Corpus, Saved};
use crate::harness::process::{self, require, run_to_end};
use crate::harness::report::jobs_text;
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, fio};
pub use server::Server;

/// The comparisons: a pattern, uzram's algorithm, and nbdkit's allocator. Reads come first: they need the
/// disks as they were filled.
const COMPARISONS: [(&str, &str, &str); 3] =
    [("randread", "lz4", "malloc"), ("randwrite", "lz4", "malloc"), ("randwrite", "zstd", "zstd")];
/// The shortest duration that fio can measure.
const MIN_DURATION: Duration = Duration::from_millis(100);

const IO_DEPTH: usize = 16;
/// The interval at which the buffers get new contents.
const REFRESH: Duration = Duration::from_millis(1);

/// The programs that use a server.
pub const CLIENTS: [&str; 2] = ["fio", "nbdcopy"];

/// Runs every comparison.
pub fn run(options: &Options) -> Result<Report> {
    let uzram = options.uzram()?;
    require(&CLIENTS)?;
    require(&["nbdkit"])?;
    let corpus = options.load_corpus()?;
    let saved = Saved::new(&options.corpus, &corpus)?;
    let size_bytes = pages_to_bytes(corpus.page_count() as u64);
    let mut report = Report::default();
    for (rw, algorithm, allocator) in COMPARISONS {
        let servers =
            [Server::uzram(uzram, algorithm, size_bytes, &[])?, Server::nbdkit(allocator, size_bytes)?];
        servers.iter().try_for_each(|server| fill(server, saved.path()))?;
        let row = |jobs: &str| format!("{rw}, {jobs}, {algorithm} / {allocator}");
        let names = ["uzram MB/s", "nbdkit MB/s"];
        compare(options, rw, &corpus, &servers, ("NBD", names), row, &mut report)?;
    }
    report.note(format!(
        "NBD: fio over a Unix socket, 4 KiB, iodepth 16, {} interleaved rounds; disks filled with the corpus; the contents \
         of fio's write buffers are replaced by random corpus pages 1000 times a second",
        options.rounds(ROUNDS)
    ));
    Ok(report)
}

/// Copies the corpus to a server's disk.
pub fn fill(server: &Server, corpus: &Path) -> Result<()> {
    run_to_end(process::command("nbdcopy").arg(corpus).arg(server.uri()), Duration::from_secs(120)).map(drop)
}

/// Measures two servers in turn, with one job and with two, and adds a row of a table for each.
pub(crate) fn compare(
    options: &Options,
    rw: &str,
    corpus: &Corpus,
    servers: &[Server; 2],
    (table, names): (&str, [&'static str; 2]),
    row: impl Fn(&str) -> String,
    report: &mut Report,
) -> Result<()> {
    let duration = options.duration.max(MIN_DURATION);
    for jobs in [1, 2] {
        let [one, other] = in_turn(options.rounds(ROUNDS), &options.stop, |round, which| {
            run_fio(servers[which].uri(), corpus, rw, jobs, duration, round as u64 + 1)
        })?;
        report.compared(table, &row(&jobs_text(jobs)), names, [&one, &other]);
    }
    Ok(())
}

/// Runs fio with its NBD engine on a server's disk, which is as large as the corpus: pages of 4 KiB, 16
/// requests in flight for each job, which has its own connection. Returns 10^6 bytes a second, read and
/// written together.
pub fn run_fio(
    uri: &str,
    corpus: &Corpus,
    rw: &str,
    jobs: usize,
    duration: Duration,
    seed: u64,
) -> Result<f64> {
    let buffers = buffers()?;
    let mut command = fio::command();
    command.args(["--ioengine=nbd", "--bs=4k", "--time_based", "--norandommap", "--scramble_buffers=0"]);
    command.arg(format!("--uri={uri}")).arg(format!("--rw={rw}"));
    command.arg(format!("--iodepth={IO_DEPTH}")).arg(format!("--numjobs={jobs}"));
    command.arg(format!("--size={}", corpus.page_count() * PAGE_SIZE));
    command.arg(format!("--runtime={}ms", duration.as_millis())).arg(format!("--randseed={seed}"));
    let directions: &[&str] = match rw {
        "read" | "randread" => &["read"],
        "write" | "randwrite" => &["write"],
        _ => &["read", "write"],
    };
    let writes = directions.contains(&"write");
    if writes {
        let (process, file) = (std::process::id(), buffers.as_raw_fd());
        command.arg(format!("--mem=mmapshared:/proc/{process}/fd/{file}"));
    }
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        if writes {
            thread::Builder::new()
                .spawn_scoped(scope, || keep_fresh(&buffers, corpus, seed, &ended))
                .map_err(io_error)?;
        }
        let speed = fio::speed(command, directions, duration);
        ended.store(true, Ordering::Relaxed);
        speed
    })
}

/// Returns fio's write buffers: a memory file that fio maps shared, with the same pages for all its jobs.
fn buffers() -> Result<File> {
    let file = memfd_create("fio-buffers", MemfdFlags::CLOEXEC).map_err(|error| io_error(error.into()))?;
    let file = File::from(file);
    // Twice what fio needs: it maps without growing the file.
    file.set_len((2 * IO_DEPTH * PAGE_SIZE) as u64).map_err(io_error)?;
    Ok(file)
}

/// Puts random pages of the corpus into the buffers repeatedly until fio has ended: at its start fio fills
/// them with noise.
fn keep_fresh(buffers: &File, corpus: &Corpus, seed: u64, ended: &AtomicBool) {
    let mut rng = fastrand::Rng::with_seed(seed);
    while !ended.load(Ordering::Relaxed) {
        for buffer in 0..IO_DEPTH {
            let page = corpus.page(rng.usize(..corpus.page_count()));
            // If the write fails, the old contents stay.
            let _ = buffers.write_all_at(page, (buffer * PAGE_SIZE) as u64);
        }
        thread::sleep(REFRESH);
    }
}

fn io_error(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("the NBD benchmark's files: {error}"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::harness::corpus::{Kind, build, load};

    #[test]
    fn fio_writes_pages_of_the_corpus() {
        if let Err(error) = require(&CLIENTS).and_then(|()| require(&["nbdkit"])) {
            return println!("skipped: {error}");
        }
        let corpus = build(Kind::Mixed, 512).unwrap();
        let server = Server::nbdkit("malloc", pages_to_bytes(512)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("disk.bin");
        let known: HashSet<_> = corpus.pages().collect();
        // On a busy machine fio may write little in its time, and then gets more tries.
        let counts = (3..8).map(|seed| {
            let duration = Duration::from_millis(1500) * (1 << (seed - 3));
            assert!(run_fio(server.uri(), &corpus, "randwrite", 2, duration, seed).unwrap() > 0.0);
            let mut nbdcopy = process::command("nbdcopy");
            run_to_end(nbdcopy.arg(server.uri()).arg(&copy), Duration::from_secs(60)).unwrap();
            let disk = load(&copy).unwrap();
            disk.pages().filter(|page| known.contains(page)).collect::<HashSet<_>>().len()
        });
        // 512 draws of 512 find 63 %; some pages are torn, or of fio's first noise.
        let enough = counts.inspect(|count| println!("{count} distinct pages")).find(|count| *count > 100);
        assert!(enough.is_some(), "pages of the corpus on the disk");
    }
}
