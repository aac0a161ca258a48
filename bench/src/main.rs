//! The program `uzram-bench`, which `uzram bench` runs: its command line.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Parser, Subcommand};
use serde::Serialize;
use uzram::codec::Algorithm;
use uzram::stream::StreamDesign;
use uzram::units::parse_size;
use uzram::{Error, Result};
use uzram_bench::block::{self, Programs, SwapUser};
use uzram_bench::codecs::{self, CodecsOptions};
use uzram_bench::engine::survive::{self, SurviveReport};
use uzram_bench::engine::{self, Against, Pattern, backing};
use uzram_bench::harness::report::text;
use uzram_bench::harness::{Source, command, corpus, to_json};
use uzram_bench::pager::{self, PagerOptions};
use uzram_bench::remote::{self, RemoteOptions};
use uzram_bench::run::{self, RunOptions};
use uzram_bench::swap::{self, SwapOptions};
use uzram_bench::take_over::{self, Amounts, Part, TakeOverOptions, TakeOverReport};
use uzram_bench::targets;
use uzram_bench::workload;

/// Measure a device against the bare codec, the kernel's zram and a device without an LRU, in this process.
///
/// Fills a device with the corpus's pages and runs fio's patterns on pages of 4 KiB. The rounds of
/// all targets are interleaved, so that a noisy machine disturbs each of them alike. `survive` measures memory and
/// daemons that outlive the process.
///
/// A corpus is a file of pages, as `uzram corpus` writes it, or is made here: `text`, `binary`, and `heap`, of this machine's
/// files and of a heap; `mixed`, these three in turn; `processes`, the memory of programs that are started for it.
#[derive(Parser)]
#[command(
    name = "uzram-bench",
    bin_name = "uzram bench",
    version,
    args_conflicts_with_subcommands = true,
    group = clap::ArgGroup::new("tables").args(["targets", "codecs"]),
    after_help = "Example: uzram bench --rw randread,randwrite --jobs 1,2 --against codec --json"
)]
struct Args {
    /// The pages that are stored [default: mixed]; with --codecs there may be several [default: mixed and processes]
    #[arg(long, value_name = "FILE|NAME")]
    corpus: Vec<Source>,
    /// The size of the device [default: the corpus's]; a shorter corpus is repeated
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Access patterns
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "PATTERN,…",
        default_value = "read,randread,write,randwrite,rw,randrw"
    )]
    rw: Vec<Pattern>,
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_values_t = [1, 2], value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: Vec<u16>,
    #[command(flatten)]
    rounds: Rounds,
    /// Compression streams: percpu, or the number of streams on a locked list
    #[arg(long, value_name = "percpu|N", default_value = "percpu")]
    streams: StreamDesign,
    /// Targets to compare with: codec, the compressor alone; kernel, a zram device of this kernel (as root);
    /// no-lru, a device that does not track its cold pages; lz4, a device with that algorithm
    #[arg(long, value_delimiter = ',', value_name = "TARGET,…")]
    against: Vec<Against>,
    /// Measure what the project promises, over NBD too where fio and nbdkit are installed, as root of block
    /// devices and swap too, and print each promise with its figure; of the other options only --seconds,
    /// --repeat, --backing-dir, --full, --json and --markdown count
    #[arg(long)]
    targets: bool,
    /// Measure codecs instead: ratio, room in a pool's size classes and speed of each, with pages of 4 and 16 KiB, on each
    /// corpus, and on each program's part of `processes`; of the other options only --corpus, --seconds (for a round of one
    /// corpus), --repeat, --json and --markdown count
    #[arg(long, conflicts_with = "targets")]
    codecs: bool,
    /// With --targets, the folder for temporary backing files of some hundred MiB
    #[arg(long, value_name = "DIR", default_value = backing::DEFAULT_DIR)]
    backing_dir: PathBuf,
    /// With --targets, measure what takes more memory too, if the machine has it: attaching 16 GiB, some 9 GiB, and
    /// outages with 16 GiB of pool, some 17 GiB
    #[arg(long, requires = "targets")]
    full: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print Markdown: with --targets the release's page of their figures, with --codecs the tables
    #[arg(long, requires = "tables", conflicts_with = "json")]
    markdown: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// How long to measure.
#[derive(clap::Args)]
struct Pace {
    /// Seconds that each pattern runs in each round
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// Rounds; the tables show medians
    #[arg(long, value_name = "R", default_value_t = 5)]
    repeat: usize,
}

impl Pace {
    /// Returns the options of a benchmark of this pace over a corpus.
    fn options(&self, corpus: Option<&Source>) -> Result<engine::Common> {
        let defaults = engine::Common::default();
        Ok(engine::Common {
            corpus: corpus.unwrap_or(&defaults.corpus).clone(),
            duration: command::seconds(self.seconds)?,
            repeat: self.repeat,
            stop: command::stop_flag()?,
            ..defaults
        })
    }
}

/// How long to measure, and with which compression.
#[derive(clap::Args)]
struct Rounds {
    #[command(flatten)]
    pace: Pace,
    /// Compression, as `uzram up` takes it
    #[arg(long, value_name = "NAME", default_value = "lz4")]
    algorithm: Algorithm,
}

impl Rounds {
    /// Returns the options of a benchmark of these rounds over a corpus.
    fn options(&self, corpus: Option<&Source>) -> Result<engine::Common> {
        Ok(engine::Common { algorithm: self.algorithm.clone(), ..self.pace.options(corpus)? })
    }
}

#[derive(Subcommand)]
enum Command {
    Survive(SurviveArgs),
    Pager(PagerArgs),
    Run(RunArgs),
    Swap(SwapArgs),
    Remote(RemoteArgs),
    #[command(hide = true)]
    SwapUser(SwapUserArgs),
    /// Be the program whose memory is measured: the benchmark starts it
    #[command(hide = true, name = pager::user::SUBCOMMAND)]
    MemoryUser {
        job: String,
    },
}

/// Measure memory and daemons that outlive the process: attaching a store, its speed beside private memory, and outages.
///
/// Fills a store, drops it while its memory is held, and attaches it, again and again. Reads and writes random pages of
/// a store of the corpus's size in such memory and of one in private memory, in turn, in more rounds of 20 ms.
///
/// Then runs `uzram up`: kills the process that serves, and upgrades the daemon, while a client uses its block device;
/// reads the memory of its processes; measures NBD and swap beside a daemon with --no-survive. Block devices and swap
/// need root; NBD needs fio and nbdcopy.
#[derive(clap::Args)]
struct SurviveArgs {
    /// What to measure: store, the attach of a store and its speed; outages, kills, upgrades and memory of a daemon; nbd
    /// and swap, beside a daemon with --no-survive
    #[arg(long, value_delimiter = ',', value_name = "PART,…", default_value = "store,outages,nbd,swap")]
    only: Vec<SurvivePart>,
    /// The pages that are stored [default: mixed]
    #[arg(long, value_name = "FILE|NAME")]
    corpus: Option<Source>,
    /// The size of the store that is attached; a shorter corpus is repeated
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    size: u64,
    /// The pool of the daemon whose processes are killed
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    pool: u64,
    /// How often to kill the process that serves
    #[arg(long, value_name = "N", default_value_t = 40)]
    kills: usize,
    /// How often to upgrade the daemon
    #[arg(long, value_name = "N", default_value_t = 20)]
    upgrades: usize,
    /// Attach a store of 16 GiB too, if the machine has the memory, some 9 GiB, and kill processes with 16 GiB of pool,
    /// some 17 GiB
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    rounds: Rounds,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measure the pager: memory that is paged out and unmapped, one fault, a loop over memory that fits, Zipf access.
///
/// Beside the kernel's swap on zram, as root. Pagers trap touches by userfaultfd and by guard pages, as far as this system
/// has them.
#[derive(clap::Args)]
struct PagerArgs {
    /// What to measure: unmap, faults, fitting, zipf
    #[arg(long, value_delimiter = ',', value_name = "PART,…", default_value = "unmap,faults,fitting,zipf")]
    only: Vec<pager::Part>,
    /// The pages that are stored [default: mixed]
    #[arg(long, value_name = "FILE|NAME")]
    corpus: Option<Source>,
    /// The folder for spill files
    #[arg(long, value_name = "DIR", default_value = backing::DEFAULT_DIR)]
    spill_dir: PathBuf,
    #[command(flatten)]
    pace: Pace,
    /// Use a sixteenth of the memory
    #[arg(long)]
    small: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measure `uzram run`: programs in half of the memory that they take, one whose memory fits, and starting.
///
/// Beside the same programs in a cgroup of that size whose swap is on kernel zram, as root, and beside plain mimalloc, where that is
/// installed. Programs that are missing are left out.
#[derive(clap::Args)]
struct RunArgs {
    /// The folder for files of a few GiB, and for spill files
    #[arg(long, value_name = "DIR", default_value = backing::DEFAULT_DIR)]
    dir: PathBuf,
    /// Rounds; programs that take minutes run once
    #[arg(long, value_name = "R", default_value_t = 3)]
    repeat: usize,
    /// Use programs that take about a second each
    #[arg(long)]
    small: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measure swap: programs in a cgroup of half of the memory that they take, with a swap daemon, with one that does not survive,
/// and with kernel zram.
///
/// Needs root, FUSE, loop devices, kernel zram and the memory controller of cgroups, version 1. Programs that are missing are left out.
#[derive(clap::Args)]
struct SwapArgs {
    /// The programs
    #[arg(long, value_delimiter = ',', value_name = "PROGRAM,…", default_values_t = swap::program_names().map(str::to_owned))]
    only: Vec<String>,
    /// The folder for the programs' files
    #[arg(long, value_name = "DIR", default_value = backing::DEFAULT_DIR)]
    dir: PathBuf,
    /// Rounds; the table shows medians
    #[arg(long, value_name = "R", default_value_t = 3)]
    repeat: usize,
    /// Use programs that take about a second each
    #[arg(long)]
    small: bool,
    /// Measure the way of single faults instead, by the kernel's events (tracefs): who ran when
    #[arg(long)]
    trace: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Measure cold pages in a Redis server of its own, beside redis-benchmark
///
/// Needs redis-server, redis-cli and redis-benchmark.
#[derive(clap::Args)]
struct RemoteArgs {
    /// Rounds; the table shows medians
    #[arg(long, value_name = "R", default_value_t = 3)]
    repeat: usize,
    /// Use few pages
    #[arg(long)]
    small: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A part of `uzram bench survive`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SurvivePart {
    Store,
    Daemon(Part),
}

impl FromStr for SurvivePart {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "store" => Ok(SurvivePart::Store),
            "outages" => Ok(SurvivePart::Daemon(Part::Outages)),
            "nbd" => Ok(SurvivePart::Daemon(Part::Nbd)),
            "swap" => Ok(SurvivePart::Daemon(Part::Swap)),
            _ => Err(Error::invalid(format!("unknown part '{text}': write store, outages, nbd or swap"))
                .with_setting("--only")),
        }
    }
}

/// Be the program whose memory a benchmark of swap has moved out: the benchmark starts it.
#[derive(clap::Args)]
struct SwapUserArgs {
    /// The folder of the cgroup to enter
    #[arg(long, value_name = "DIR")]
    cgroup: PathBuf,
    /// A file of pages to fill memory with
    #[arg(long, value_name = "FILE")]
    pages: PathBuf,
    /// How much memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: u64,
    /// A file to which 1 is written before pages are touched in no order, and 0 after that
    #[arg(long, value_name = "FILE")]
    tracing_on: Option<PathBuf>,
}

fn main() -> ExitCode {
    command::main("uzram-bench", |args: &Args| match &args.command {
        Some(Command::Survive(args)) => command::print(&measure_survival(args)?),
        Some(Command::Pager(args)) => command::print(&measure_pager(args)?),
        Some(Command::Run(args)) => command::print(&measure_run(args)?),
        Some(Command::Swap(args)) => command::print(&measure_swap(args)?),
        Some(Command::Remote(args)) => command::print(&measure_remote(args)?),
        Some(Command::SwapUser(args)) => swap_user(args),
        Some(Command::MemoryUser { job }) => pager::user::run(job),
        None => command::print(&measure(args)?),
    })
}

/// Runs what was asked for; returns the text to print.
fn measure(args: &Args) -> Result<String> {
    match (args.targets, args.codecs) {
        (true, _) => run_targets(args),
        (_, true) => run_codecs(args),
        _ => run_bench(args),
    }
}

fn run_codecs(args: &Args) -> Result<String> {
    let defaults = CodecsOptions::default();
    let report = codecs::run(&CodecsOptions {
        corpora: if args.corpus.is_empty() { defaults.corpora.clone() } else { args.corpus.clone() },
        duration: command::seconds(args.rounds.pace.seconds)?,
        repeat: args.rounds.pace.repeat,
        stop: command::stop_flag()?,
        ..defaults
    })?;
    Ok(if args.markdown { report.to_markdown() } else { text(&report, args.json) })
}

fn run_bench(args: &Args) -> Result<String> {
    if args.corpus.len() > 1 {
        return Err(Error::invalid("several corpora are for --codecs: write one").with_setting("--corpus"));
    }
    let report = engine::run(engine::BenchOptions {
        common: args.rounds.options(args.corpus.first())?,
        size_bytes: args.size,
        patterns: args.rw.clone(),
        jobs: args.jobs.iter().copied().map(usize::from).collect(),
        streams: args.streams,
        against: args.against.clone(),
    })?;
    Ok(text(&report, args.json))
}

fn run_targets(args: &Args) -> Result<String> {
    let options = targets::TargetsOptions {
        programs: programs()?,
        duration: command::seconds(args.rounds.pace.seconds)?,
        repeat: args.rounds.pace.repeat,
        survive: survive::SurviveOptions { full: args.full, ..survive::SurviveOptions::default() },
        take_over: Amounts { full: args.full, ..Amounts::default() },
        backing: backing::BackingOptions {
            dir: args.backing_dir.clone(),
            ..backing::BackingOptions::default()
        },
        stop: command::stop_flag()?,
        ..targets::TargetsOptions::default()
    };
    let report = targets::run(&options)?;
    Ok(if args.markdown { report.to_markdown(&options) } else { text(&report, args.json) })
}

/// What `uzram bench survive` measures.
#[derive(Serialize)]
struct Survival {
    #[serde(flatten)]
    store: Option<SurviveReport>,
    /// `None` without a `uzram` program.
    daemon: Option<TakeOverReport>,
}

impl fmt::Display for Survival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(store) = &self.store {
            writeln!(f, "{store}")?;
        }
        match &self.daemon {
            Some(daemon) => write!(f, "{daemon}"),
            None => writeln!(f, "no daemon measured: no uzram program was found"),
        }
    }
}

fn measure_survival(args: &SurviveArgs) -> Result<String> {
    let common = args.rounds.options(args.corpus.as_ref())?;
    let programs = programs()?;
    let store = args.only.contains(&SurvivePart::Store).then(|| {
        survive::run(&survive::SurviveOptions {
            common: common.clone(),
            size_bytes: args.size,
            full: args.full,
            ..survive::SurviveOptions::default()
        })
    });
    let store = store.transpose()?;
    let parts = Part::ALL.into_iter().filter(|part| args.only.contains(&SurvivePart::Daemon(*part)));
    let daemon = programs.map(|programs| {
        take_over::run(&TakeOverOptions {
            common,
            programs,
            parts: parts.collect(),
            amounts: Amounts {
                pool_bytes: args.pool,
                full: args.full,
                kills: args.kills,
                upgrades: args.upgrades,
                ..Amounts::default()
            },
            swap: block::Amounts::default(),
        })
    });
    Ok(text(&Survival { store, daemon: daemon.transpose()? }, args.json))
}

fn measure_pager(args: &PagerArgs) -> Result<String> {
    let common = args.pace.options(args.corpus.as_ref())?;
    let dir = corpus::Saved::of(&common.corpus, &common.stop)?;
    let amounts = pager::Amounts::default();
    let report = pager::run(&PagerOptions {
        program: command::this_program()?,
        corpus: dir.path().to_owned(),
        dir: args.spill_dir.clone(),
        parts: args.only.clone(),
        duration: common.duration,
        repeat: common.repeat,
        amounts: if args.small { amounts.small() } else { amounts },
        stop: common.stop,
    })?;
    Ok(text(&report, args.json))
}

fn measure_run(args: &RunArgs) -> Result<String> {
    let uzram = command::uzram_program().ok_or_else(|| Error::invalid("no uzram program was found"))?;
    if let Some(obstacle) = run::obstacle(&uzram) {
        return Err(Error::new(uzram::ErrorKind::Unsupported, obstacle));
    }
    let report = run::run(&RunOptions {
        uzram,
        dir: args.dir.clone(),
        repeat: args.repeat,
        amounts: if args.small { workload::Amounts::small() } else { workload::Amounts::default() },
        stop: command::stop_flag()?,
    })?;
    Ok(text(&report, args.json))
}

fn measure_swap(args: &SwapArgs) -> Result<String> {
    let no_program = || Error::invalid("no uzram program was found");
    let programs = programs()?.ok_or_else(no_program)?;
    if let Some(obstacle) = swap::obstacle(&programs.uzram)? {
        return Err(Error::new(uzram::ErrorKind::Unsupported, obstacle));
    }
    if args.trace {
        let traced = swap::trace::run(&programs, &command::stop_flag()?)?;
        return Ok(text(&traced, args.json));
    }
    let report = swap::run(&SwapOptions {
        uzram: programs.uzram,
        dir: args.dir.clone(),
        only: args.only.clone(),
        repeat: args.repeat,
        amounts: if args.small { workload::Amounts::small() } else { workload::Amounts::medium() },
        stop: command::stop_flag()?,
    })?;
    Ok(text(&report, args.json))
}

fn measure_remote(args: &RemoteArgs) -> Result<String> {
    if let Some(obstacle) = remote::obstacle() {
        return Err(Error::new(uzram::ErrorKind::Unsupported, obstacle));
    }
    let amounts = if args.small { RemoteOptions::small() } else { RemoteOptions::default() };
    let report = remote::run(&RemoteOptions { repeat: args.repeat, stop: command::stop_flag()?, ..amounts })?;
    Ok(text(&report, args.json))
}

/// Returns the programs that are measured, if there is a `uzram`.
fn programs() -> Result<Option<Programs>> {
    let bench = command::this_program()?;
    Ok(command::uzram_program().map(|uzram| Programs { uzram, bench }))
}

/// Is the program that is swapped out, and prints its times.
fn swap_user(args: &SwapUserArgs) -> Result<()> {
    let user = SwapUser {
        cgroup: args.cgroup.clone(),
        pages: args.pages.clone(),
        size_bytes: args.size,
        tracing_on: args.tracing_on.clone(),
    };
    command::print(&format!("{}\n", to_json(&user.run()?)))
}
