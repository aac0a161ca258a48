//! Cold pages in a Redis server, beside redis-benchmark on the same server: extents that are written, pages
//! that are read back in no order, and in order. Then the same in a file, encrypted and not: what encryption
//! costs.
//!
//! Needs `redis-server`, `redis-cli` and `redis-benchmark`. The server is started here, and ends with the
//! benchmark.

use std::sync::Arc;
use std::time::{Duration, Instant};

use uzram::backing::{Backing, FileBacking, FileOptions, Tiers};
use uzram::device::Opener;
use uzram::store::{BackingOptions, PageNo, StoreBuilder, Writeback};
use uzram::units::{PAGE_SIZE, same_word};
use uzram::{Error, ErrorKind, Result};
use uzram_remote::{
    Address, Credentials, Identity, Limits, ObjectStore, RedisStore, RemoteBacking, RemoteOpener,
};

use crate::harness::corpus::{self, Corpus, Kind, read_back};
use crate::harness::process::{self, Process, require, run_to_end};
use crate::harness::report::{FigureOf, each};
use crate::harness::rounds::in_turn;
use crate::harness::stats::quantile;
use crate::harness::{Options, Report};

/// How long the server may take to get ready, and redis-benchmark to end.
const WITHIN: Duration = Duration::from_secs(60);
/// Connections of redis-benchmark's SET, and commands that each has under way.
const SET_CLIENTS: usize = 4;
const SET_PIPELINE: usize = 4;
/// Commands of redis-benchmark.
const SETS: usize = 2048;
/// Of these, each to a key of its own, as extents are: their memory is new to the server.
const NEW_SETS: usize = 512;
const GETS: usize = 20_000;
const ROUNDS: usize = 3;
/// What is compared with redis-benchmark.
const ROWS: [&str; 4] = [
    "extents out / SET, MB/s",
    "extents out / SET of new keys, MB/s",
    "a page in / GET, p50 µs",
    "a page in / GET, p99 µs",
];

/// Measures.
pub fn run(options: &Options) -> Result<Report> {
    const TABLE: &str = "cold pages";
    const SIDES: [&str; 2] = ["uzram", "redis-benchmark"];
    const FILES: [&str; 2] = ["encrypted", "not encrypted"];
    options.check(&[])?;
    require(&["redis-server", "redis-cli", "redis-benchmark"])?;
    let server = Server::start()?;
    let (pages, reads) = options.amount((32_768, 8192), (2048, 200));
    let corpus = corpus::build(Kind::Mixed, pages)?;
    let (mut ours, mut theirs, mut files) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
    let _: [_; 4] = in_turn(options.rounds(ROUNDS), &options.stop, |round, which| {
        let measure = |backing| measure(backing, &corpus, reads, round as u64);
        match which {
            0 => ours.push(measure(server.backing(pages)?)?),
            1 => {
                theirs.push(server.benchmark(ours.last().map_or(PAGE_SIZE / 2, |round| round.object_bytes))?)
            }
            _ => files[which - 2].push(measure(in_file(&server.dir, pages, which == 2)?)?),
        }
        Ok(())
    })?;
    let mut report = Report::default();
    for (at, row) in ROWS.into_iter().enumerate() {
        let [ours, theirs] =
            [each(&ours, |round: &Round| round.rows[at]), each(&theirs, |rows: &[f64; 4]| rows[at])];
        report.compared(TABLE, row, SIDES, [&ours, &theirs]);
    }
    let [single, ordered] = [0, 1].map(|which| each(&ours, |round| round.pages_per_s[which]));
    report.compared("pages in", "pages/s", ["in order", "in no order"], [&ordered, &single]);
    let figures: [FigureOf<Round>; 2] =
        [("extents out, MB/s", |round| round.rows[0]), ("pages in, pages/s", |round| round.pages_per_s[0])];
    for (row, figure) in figures {
        let [encrypted, plain] = files.each_ref().map(|rounds| each(rounds, figure));
        report.compared("in a file", row, FILES, [&encrypted, &plain]);
    }
    Ok(report)
}

/// A round of uzram's.
struct Round {
    /// Those of [`ROWS`].
    rows: [f64; 4],
    /// In no order, and in order.
    pages_per_s: [f64; 2],
    object_bytes: usize,
}

/// Returns the bytes that a backing is to have for so many pages.
fn size_bytes(pages: usize) -> u64 {
    (2 * (pages * PAGE_SIZE) as u64).next_multiple_of(8 << 20)
}

fn in_file(dir: &tempfile::TempDir, pages: usize, encrypts: bool) -> Result<Arc<Tiers>> {
    let path = dir.path().join("cold.img");
    let options = FileOptions { size_bytes: Some(size_bytes(pages)), ..FileOptions::new(path) };
    let file = Backing::Blocks(Arc::new(FileBacking::open(&options)?));
    if !encrypts {
        return Ok(file.into());
    }
    let (seal, _) = RemoteOpener.seal(None)?;
    Ok(Arc::new(Tiers::new(vec![file], Some(seal))?))
}

/// Writes the corpus back, and reads so many pages in no order, then all in order.
fn measure(backing: Arc<Tiers>, corpus: &Corpus, reads: usize, seed: u64) -> Result<Round> {
    let backing = BackingOptions::packed(backing);
    let store = StoreBuilder::new("remote", corpus.page_count() as u64).backing(backing).build()?;
    let page = |number: usize| PageNo(number as u32);
    // Pages of one word stay in memory.
    let numbers: Vec<usize> =
        (0..corpus.page_count()).filter(|number| same_word(corpus.page(*number)).is_none()).collect();
    for number in &numbers {
        store.write(page(*number), corpus.page(*number))?;
    }
    let started = Instant::now();
    let left = store.write_back(&Writeback::default())?;
    let out_s = started.elapsed().as_secs_f64();
    let stats = store.backing_stats();
    let read = |number: usize, out: &mut [u8; PAGE_SIZE]| -> Result<f64> {
        let started = Instant::now();
        store.read(page(number), out)?;
        let us = started.elapsed().as_secs_f64() * 1e6;
        read_back(&out[..], corpus.page(number), || format!("page {number}"))?;
        Ok(us)
    };
    let mut out = [0; PAGE_SIZE];
    let mut order = numbers.clone();
    fastrand::Rng::with_seed(seed).shuffle(&mut order);
    order.truncate(reads);
    let single_us = order.iter().map(|number| read(*number, &mut out)).collect::<Result<Vec<_>>>()?;
    // Those that were read are in memory again.
    store.write_back(&Writeback::default())?;
    let ordered_us = numbers.iter().map(|number| read(*number, &mut out)).collect::<Result<Vec<_>>>()?;
    let per_s = |us: &[f64]| us.len() as f64 / us.iter().sum::<f64>() * 1e6;
    store.erase_backing();
    let out_mb_per_s = stats.written_bytes as f64 / out_s / 1e6;
    Ok(Round {
        rows: [out_mb_per_s, out_mb_per_s, quantile(&single_us, 0.5), quantile(&single_us, 0.99)],
        pages_per_s: [per_s(&single_us), per_s(&ordered_us)],
        object_bytes: (stats.object_bytes / left.max(1)) as usize,
    })
}

struct Server {
    port: u16,
    _process: Process,
    dir: tempfile::TempDir,
}

impl Server {
    fn start() -> Result<Server> {
        let failed = |error: std::io::Error| Error::new(ErrorKind::Io, format!("no server: {error}"));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        drop(listener);
        let dir = tempfile::tempdir().map_err(failed)?;
        let mut command = process::command("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1"]);
        command.args(["--save", "", "--appendonly", "no"]);
        let mut process = Process::start(command.arg("--dir").arg(dir.path()))?;
        process.wait_until("served", WITHIN, |_| {
            let mut ping = process::command("redis-cli");
            let answer = run_to_end(ping.args(["-p", &port.to_string(), "ping"]), WITHIN);
            answer.ok().filter(|answer| answer.contains("PONG"))
        })?;
        Ok(Server { port, _process: process, dir })
    }

    fn backing(&self, pages: usize) -> Result<Arc<Tiers>> {
        let address = Address::parse(&format!("redis://127.0.0.1:{}", self.port))?;
        let connect = || RedisStore::connect(address, Credentials::default(), 1);
        let size_bytes = Some(size_bytes(pages));
        let backing = RemoteBacking::open(&Identity::new()?, size_bytes, Limits::default(), connect)?;
        Arc::new(backing).tiers()
    }

    /// Runs redis-benchmark: SET of extents, to one key and to new ones, then GET of values of `get_bytes`;
    /// returns its side of [`ROWS`].
    fn benchmark(&self, get_bytes: usize) -> Result<[f64; 4]> {
        let extent_bytes = <RedisStore as ObjectStore>::OBJECT_BYTES;
        let [clients, pipeline] = [SET_CLIENTS, SET_PIPELINE].map(|number| number.to_string());
        let set = |sets: usize, keys: &[&str]| {
            let sets = sets.to_string();
            let args = ["-t", "set", "-c", &clients, "-P", &pipeline, "-n", &sets];
            let [per_s, _, _] = self.run(&[&args[..], keys, &["-d"]].concat(), extent_bytes, "SET")?;
            Ok::<f64, Error>(per_s * extent_bytes as f64 / 1e6)
        };
        let set_mb_per_s = set(SETS, &[])?;
        let set_new_mb_per_s = set(NEW_SETS, &["-r", "1000000000"])?;
        let mut flush = process::command("redis-cli");
        run_to_end(flush.args(["-p", &self.port.to_string(), "flushall"]), WITHIN)?;
        let gets = GETS.to_string();
        let get = ["-t", "set,get", "-c", "1", "-n", &gets, "-d"];
        let [_, p50_ms, p99_ms] = self.run(&get, get_bytes, "GET")?;
        Ok([set_mb_per_s, set_new_mb_per_s, p50_ms * 1e3, p99_ms * 1e3])
    }

    /// Returns commands a second, and the median and the 99th percentile of their times in ms.
    fn run(&self, args: &[&str], value_bytes: usize, command: &str) -> Result<[f64; 3]> {
        let mut program = process::command("redis-benchmark");
        program.args(["-p", &self.port.to_string(), "--csv"]).args(args).arg(value_bytes.to_string());
        let printed = run_to_end(&mut program, WITHIN)?;
        figures(&printed, command).ok_or_else(|| {
            Error::new(ErrorKind::Io, format!("redis-benchmark printed no figures of {command}: {printed}"))
        })
    }
}

/// Returns the figures of a command in what redis-benchmark prints: columns with quotation marks, of which
/// the first line has the names.
fn figures(printed: &str, command: &str) -> Option<[f64; 3]> {
    let cells = |line: &str| -> Vec<String> {
        line.split(',').map(|cell| cell.trim().trim_matches('"').to_owned()).collect()
    };
    let mut lines = printed.lines().map(cells);
    let names = lines.find(|line| line.first().is_some_and(|cell| cell == "test"))?;
    let row = lines.find(|line| line.first().is_some_and(|cell| cell == command))?;
    let figure = |name: &str| row.get(names.iter().position(|cell| cell == name)?)?.parse().ok();
    Some([figure("rps")?, figure("p50_latency_ms")?, figure("p99_latency_ms")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redis_benchmarks_figures_are_found_by_their_names() {
        let printed = "\"test\",\"rps\",\"avg_latency_ms\",\"p50_latency_ms\",\"p99_latency_ms\"\n\
                       \"SET\",\"100.50\",\"1\",\"2.5\",\"7\"\n\"GET\",\"200\",\"1\",\"0.031\",\"0.1\"\n";
        assert_eq!(figures(printed, "SET"), Some([100.5, 2.5, 7.0]));
        assert_eq!(figures(printed, "GET"), Some([200.0, 0.031, 0.1]));
        assert_eq!(figures(printed, "INCR"), None);
        assert_eq!(figures("", "SET"), None);
    }
}
