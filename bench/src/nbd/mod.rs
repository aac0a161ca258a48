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
mod server;

use std::path::Path;
use std::time::Duration;

use uzram::Result;
use uzram::units::pages_to_bytes;

use crate::engine::ROUNDS;
use crate::harness::corpus::{Corpus, Saved};
use crate::harness::process::{self, require, run_to_end};
use crate::harness::report::jobs_text;
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report};
pub use fio::Fio;
pub use server::Server;

/// The comparisons: a pattern, uzram's algorithm, and nbdkit's allocator. Reads come first: they need the
/// disks as they were filled.
const COMPARISONS: [(&str, &str, &str); 3] =
    [("randread", "lz4", "malloc"), ("randwrite", "lz4", "malloc"), ("randwrite", "zstd", "zstd")];
/// The shortest duration that fio can measure.
const MIN_DURATION: Duration = Duration::from_millis(100);

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
        for jobs in [1, 2] {
            let [uzram, nbdkit] = compare(options, rw, jobs, &corpus, &servers)?;
            let row = format!("{rw}, {}, {algorithm} / {allocator}", jobs_text(jobs));
            report.compared("NBD", &row, ["uzram MB/s", "nbdkit MB/s"], [&uzram, &nbdkit]);
        }
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

/// Measures two servers in turn; returns 10^6 bytes a second of each round.
pub(crate) fn compare(
    options: &Options,
    rw: &'static str,
    jobs: usize,
    corpus: &Corpus,
    servers: &[Server; 2],
) -> Result<[Vec<f64>; 2]> {
    let duration = options.duration.max(MIN_DURATION);
    in_turn(options.rounds(ROUNDS), &options.stop, |round, which| {
        Fio { rw, jobs, duration, seed: round as u64 + 1 }.run(servers[which].uri(), corpus)
    })
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
            let fio = Fio { rw: "randwrite", jobs: 2, duration, seed };
            assert!(fio.run(server.uri(), &corpus).unwrap() > 0.0);
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
