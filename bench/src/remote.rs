//! Cold pages in a Redis server, beside redis-benchmark on the same server: extents that are written, pages that are read
//! back in no order, and in order. Then the same in a file, encrypted and not: what encryption costs.
//!
//! Needs `redis-server`, `redis-cli` and `redis-benchmark`. The server is started here, and ends with the benchmark.

use std::fmt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::Serialize;
use uzram::backing::{Backing, FileBacking, FileOptions, Tiers};
use uzram::device::Opener;
use uzram::store::{BackingOptions, PageNo, StoreBuilder, Writeback, WritebackLayout};
use uzram::units::{PAGE_SIZE, same_word};
use uzram::{Error, ErrorKind, Result};
use uzram_remote::{
    Address, Credentials, Identity, Limits, Objects, RedisStore, RemoteBacking, RemoteOpener,
};

use crate::harness::corpus::{self, Corpus, Kind, read_back};
use crate::harness::process::{Process, is_missing, run_to_end};
use crate::harness::report::{Table, figure_cell};
use crate::harness::rounds::in_turn;
use crate::harness::stats::{median, median_ratio, quantile};

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

/// How to measure.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Pages of the corpus `mixed` that are written back.
    pub pages: usize,
    /// Of these, how many are read in no order.
    pub reads: usize,
    /// How many rounds.
    pub repeat: usize,
    /// Ends the benchmark when it is set.
    pub stop: Arc<AtomicBool>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        RemoteOptions { pages: 32_768, reads: 8192, repeat: 3, stop: Arc::default() }
    }
}

impl RemoteOptions {
    /// Returns amounts that take about a second.
    pub fn small() -> Self {
        RemoteOptions { pages: 2048, reads: 200, repeat: 1, ..RemoteOptions::default() }
    }
}

/// The results; medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct RemoteReport {
    /// 10^6 bytes of extents that were written in a second.
    pub out_mb_per_s: f64,
    /// 10^6 bytes of values of the same size that redis-benchmark's SET wrote in a second.
    pub set_mb_per_s: f64,
    /// The ratio of these.
    pub out_ratio: f64,
    /// The same of values that all get keys of their own.
    pub set_new_mb_per_s: f64,
    /// Extents that were written, divided by that.
    pub out_new_ratio: f64,
    /// Times of reads of pages in no order, µs: the median, and the 99th percentile.
    pub read_us: [f64; 2],
    /// Those of redis-benchmark's GET of values as long as a page's object, by one client.
    pub get_us: [f64; 2],
    /// The ratios of these.
    pub read_ratios: [f64; 2],
    /// Pages that were read in a second, in no order and in order.
    pub pages_per_s: [f64; 2],
    /// In order, divided by in no order.
    pub order_ratio: f64,
    /// 10^6 bytes of extents that were written to a file in a second: encrypted, and not.
    pub file_mb_per_s: [f64; 2],
    /// Pages that were read from there in a second, in no order.
    pub file_pages_per_s: [f64; 2],
    /// The ratios of these.
    pub file_ratios: [f64; 2],
}

/// Returns why it cannot be measured here, if it cannot.
pub fn obstacle() -> Option<String> {
    let missing =
        ["redis-server", "redis-cli", "redis-benchmark"].into_iter().find(|name| is_missing(name))?;
    Some(format!("{missing} is missing"))
}

/// Measures.
///
/// # Errors
/// The server does not start, a page is lost, or a program fails; `Busy` once it is to stop.
pub fn run(options: &RemoteOptions) -> Result<RemoteReport> {
    let server = Server::start()?;
    let corpus = corpus::build(Kind::Mixed, options.pages)?;
    let (mut ours, mut theirs, mut files) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
    let _: [_; 4] = in_turn(options.repeat, &options.stop, |round, which| {
        let measure = |backing| measure(backing, &corpus, options, round as u64);
        match which {
            0 => ours.push(measure(server.backing(options)?)?),
            1 => theirs.push(server.benchmark(object_bytes(&ours))?),
            _ => files[which - 2].push(measure(in_file(&server.dir, options, which == 2)?)?),
        }
        Ok(())
    })?;
    let each = |of: fn(&Ours) -> f64| ours.iter().map(of).collect::<Vec<_>>();
    let other = |of: fn(&Theirs) -> f64| theirs.iter().map(of).collect::<Vec<_>>();
    let (out, set) = (each(|round| round.out_mb_per_s), other(|round| round.set_mb_per_s));
    let set_new = other(|round| round.set_new_mb_per_s);
    let (p50, p99) = (each(|round| round.read_us[0]), each(|round| round.read_us[1]));
    let (get_p50, get_p99) = (other(|round| round.get_us[0]), other(|round| round.get_us[1]));
    let (single, ordered) = (each(|round| round.pages_per_s[0]), each(|round| round.pages_per_s[1]));
    let of_files =
        |of: fn(&Ours) -> f64| files.each_ref().map(|rounds| rounds.iter().map(of).collect::<Vec<_>>());
    let (file_out, file_in) = (of_files(|round| round.out_mb_per_s), of_files(|round| round.pages_per_s[0]));
    let ratio = |[encrypted, plain]: &[Vec<f64>; 2]| median_ratio(encrypted, plain);
    Ok(RemoteReport {
        out_mb_per_s: median(&out),
        set_mb_per_s: median(&set),
        out_ratio: median_ratio(&out, &set),
        set_new_mb_per_s: median(&set_new),
        out_new_ratio: median_ratio(&out, &set_new),
        read_us: [median(&p50), median(&p99)],
        get_us: [median(&get_p50), median(&get_p99)],
        read_ratios: [median_ratio(&p50, &get_p50), median_ratio(&p99, &get_p99)],
        pages_per_s: [median(&single), median(&ordered)],
        order_ratio: median_ratio(&ordered, &single),
        file_mb_per_s: file_out.each_ref().map(|rounds| median(rounds)),
        file_pages_per_s: file_in.each_ref().map(|rounds| median(rounds)),
        file_ratios: [ratio(&file_out), ratio(&file_in)],
    })
}

/// Returns the length of a page's object in the last round.
fn object_bytes(rounds: &[Ours]) -> usize {
    rounds.last().map_or(PAGE_SIZE / 2, |round| round.object_bytes)
}

/// A round of uzram's.
struct Ours {
    out_mb_per_s: f64,
    read_us: [f64; 2],
    pages_per_s: [f64; 2],
    object_bytes: usize,
}

/// A round of redis-benchmark's.
struct Theirs {
    set_mb_per_s: f64,
    set_new_mb_per_s: f64,
    get_us: [f64; 2],
}

/// Returns the bytes that a backing is to have.
fn size_bytes(options: &RemoteOptions) -> u64 {
    (2 * (options.pages * PAGE_SIZE) as u64).next_multiple_of(8 << 20)
}

/// Returns a file as a backing.
fn in_file(dir: &tempfile::TempDir, options: &RemoteOptions, encrypts: bool) -> Result<Arc<dyn Backing>> {
    let options = FileOptions {
        size_bytes: Some(size_bytes(options)),
        ..FileOptions::new(dir.path().join("cold.img"))
    };
    let file: Arc<dyn Backing> = Arc::new(FileBacking::open(&options)?);
    if !encrypts {
        return Ok(file);
    }
    let (seal, _) = RemoteOpener.seal(None)?;
    Ok(Arc::new(Tiers::new(vec![file], Some(seal))?))
}

fn measure(backing: Arc<dyn Backing>, corpus: &Corpus, options: &RemoteOptions, seed: u64) -> Result<Ours> {
    let backing = BackingOptions { backing, layout: WritebackLayout::Packed, compressed: true };
    let store = StoreBuilder::new("remote", options.pages as u64).backing(backing).build()?;
    let page = |number: usize| PageNo(number as u32);
    // Pages of one word stay in memory.
    let numbers: Vec<usize> =
        (0..options.pages).filter(|number| same_word(corpus.page(*number)).is_none()).collect();
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
    order.truncate(options.reads);
    let single_us = order.iter().map(|number| read(*number, &mut out)).collect::<Result<Vec<_>>>()?;
    // Those that were read are in memory again.
    store.write_back(&Writeback::default())?;
    let ordered_us = numbers.iter().map(|number| read(*number, &mut out)).collect::<Result<Vec<_>>>()?;
    let per_s = |us: &[f64]| us.len() as f64 / us.iter().sum::<f64>() * 1e6;
    store.erase_backing();
    Ok(Ours {
        out_mb_per_s: stats.written_bytes as f64 / out_s / 1e6,
        read_us: [quantile(&single_us, 0.5), quantile(&single_us, 0.99)],
        pages_per_s: [per_s(&single_us), per_s(&ordered_us)],
        object_bytes: (stats.object_bytes / left.max(1)) as usize,
    })
}

/// The server.
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
        let mut command = Command::new("redis-server");
        command.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        let process = Process::start(command.arg("--dir").arg(dir.path()))?;
        let server = Server { port, _process: process, dir };
        let until = Instant::now() + WITHIN;
        loop {
            let mut ping = Command::new("redis-cli");
            let answer = run_to_end(ping.args(["-p", &port.to_string(), "ping"]), WITHIN);
            match answer {
                Ok(answer) if answer.contains("PONG") => return Ok(server),
                Err(error) if Instant::now() > until => return Err(error),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Returns a backing there.
    fn backing(&self, options: &RemoteOptions) -> Result<Arc<dyn Backing>> {
        let address = Address::parse(&format!("redis://127.0.0.1:{}", self.port))?;
        let connect = || RedisStore::connect(address, Credentials::default(), 1);
        let size_bytes = Some(size_bytes(options));
        let backing = RemoteBacking::open(&Identity::new()?, size_bytes, Limits::default(), connect)?;
        Ok(Arc::new(backing))
    }

    /// Runs redis-benchmark: SET of extents, to one key and to new ones, then GET of values of `get_bytes`.
    fn benchmark(&self, get_bytes: usize) -> Result<Theirs> {
        let extent_bytes = <RedisStore as Objects>::OBJECT_BYTES;
        let [clients, pipeline] = [SET_CLIENTS, SET_PIPELINE].map(|number| number.to_string());
        let set = |sets: usize, keys: &[&str]| {
            let sets = sets.to_string();
            let args = ["-t", "set", "-c", &clients, "-P", &pipeline, "-n", &sets];
            let [per_s, _, _] = self.run(&[&args[..], keys, &["-d"]].concat(), extent_bytes, "SET")?;
            Ok::<f64, Error>(per_s * extent_bytes as f64 / 1e6)
        };
        let set_mb_per_s = set(SETS, &[])?;
        let set_new_mb_per_s = set(NEW_SETS, &["-r", "1000000000"])?;
        let mut flush = Command::new("redis-cli");
        run_to_end(flush.args(["-p", &self.port.to_string(), "flushall"]), WITHIN)?;
        let gets = GETS.to_string();
        let get = ["-t", "set,get", "-c", "1", "-n", &gets, "-d"];
        let [_, p50_ms, p99_ms] = self.run(&get, get_bytes, "GET")?;
        Ok(Theirs { set_mb_per_s, set_new_mb_per_s, get_us: [p50_ms * 1e3, p99_ms * 1e3] })
    }

    /// Returns commands a second, and the median and the 99th percentile of their times in ms.
    fn run(&self, args: &[&str], value_bytes: usize, command: &str) -> Result<[f64; 3]> {
        let mut program = Command::new("redis-benchmark");
        program.args(["-p", &self.port.to_string(), "--csv"]).args(args).arg(value_bytes.to_string());
        let printed = run_to_end(&mut program, WITHIN)?;
        figures(&printed, command).ok_or_else(|| {
            Error::new(ErrorKind::Io, format!("redis-benchmark printed no figures of {command}: {printed}"))
        })
    }
}

/// Returns the figures of a command in what redis-benchmark prints: columns with quotation marks, of which the first line
/// has the names.
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

impl fmt::Display for RemoteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["<cold pages in Redis", "uzram", "redis-benchmark", "ratio"]);
        let mut row = |what: &str, ours: f64, theirs: f64, ratio: f64, decimals| {
            table.row([
                what.to_owned(),
                figure_cell(Some(ours), decimals),
                figure_cell(Some(theirs), decimals),
                figure_cell(Some(ratio), 2),
            ]);
        };
        row("extents out / SET, MB/s", self.out_mb_per_s, self.set_mb_per_s, self.out_ratio, 0);
        row(
            "extents out / SET of new keys, MB/s",
            self.out_mb_per_s,
            self.set_new_mb_per_s,
            self.out_new_ratio,
            0,
        );
        row("a page in / GET, p50 µs", self.read_us[0], self.get_us[0], self.read_ratios[0], 0);
        row("a page in / GET, p99 µs", self.read_us[1], self.get_us[1], self.read_ratios[1], 0);
        writeln!(f, "{table}")?;
        let [single, ordered] = self.pages_per_s;
        writeln!(
            f,
            "pages a second: {single:.0} in no order, {ordered:.0} in order, {:.2}",
            self.order_ratio
        )?;
        let ([out, plain_out], [read, plain_read]) = (self.file_mb_per_s, self.file_pages_per_s);
        let [out_ratio, read_ratio] = self.file_ratios;
        writeln!(
            f,
            "a file, encrypted / not: extents out {out:.0} / {plain_out:.0} MB/s, {out_ratio:.2}; pages a second {read:.0} / \
             {plain_read:.0}, {read_ratio:.2}"
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

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

    #[test]
    fn a_small_run_has_all_figures() {
        if let Some(obstacle) = obstacle() {
            println!("skipped: {obstacle}");
            return;
        }
        let report = run(&RemoteOptions::small()).unwrap();
        let figures = [
            report.out_ratio,
            report.out_new_ratio,
            report.read_ratios[0],
            report.read_ratios[1],
            report.order_ratio,
            report.file_ratios[0],
            report.file_ratios[1],
        ];
        assert!(figures.iter().all(|figure| figure.is_finite() && *figure > 0.0), "{report:?}");
        assert!(report.to_string().contains("extents out / SET"), "{report}");
    }
}
