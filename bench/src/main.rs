//! The program `uzram-bench`, which `uzram bench` runs: its command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use uzram::Result;
use uzram::codec::Algorithm;
use uzram::stream::StreamDesign;
use uzram::units::parse_size;
use uzram_bench::block::{Programs, SwapUser};
use uzram_bench::engine::{self, Against, Pattern, backing, survive};
use uzram_bench::harness::report::text;
use uzram_bench::harness::{Source, command, to_json};
use uzram_bench::targets;

/// Measure a device against the bare codec, the kernel's zram and a device without an LRU, in this process.
///
/// Fills a device with the corpus's pages and runs fio's patterns on pages of 4 KiB. The rounds of
/// all targets are interleaved, so that a noisy machine disturbs each of them alike. `survive` measures memory that
/// outlives the process.
#[derive(Parser)]
#[command(
    name = "uzram-bench",
    bin_name = "uzram bench",
    version,
    args_conflicts_with_subcommands = true,
    after_help = "Example: uzram bench --rw randread,randwrite --jobs 1,2 --against codec --json"
)]
struct Args {
    /// A file whose pages are stored [default: a mix of this machine's files and of a live heap]
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
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
    /// no-lru, a device that does not track its cold pages
    #[arg(long, value_delimiter = ',', value_name = "TARGET,…")]
    against: Vec<Against>,
    /// Measure what the project promises, over NBD too where fio and nbdkit are installed, as root of block
    /// devices and swap too, and print each promise with its figure; of the other options only --seconds,
    /// --repeat, --backing-dir, --full, --json and --markdown count
    #[arg(long)]
    targets: bool,
    /// With --targets, the folder for temporary backing files of some hundred MiB
    #[arg(long, value_name = "DIR", default_value = backing::DEFAULT_DIR)]
    backing_dir: PathBuf,
    /// With --targets, measure what takes more memory too, if the machine has it: attaching 16 GiB, some 9 GiB
    #[arg(long, requires = "targets")]
    full: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// With --targets, print the release's page of their figures, in Markdown
    #[arg(long, requires = "targets", conflicts_with = "json")]
    markdown: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// How long to measure, and with which compression.
#[derive(clap::Args)]
struct Rounds {
    /// Seconds that each pattern runs in each round
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// Rounds; the tables show medians
    #[arg(long, value_name = "R", default_value_t = 5)]
    repeat: usize,
    /// Compression, as `uzram up` takes it
    #[arg(long, value_name = "NAME", default_value = "lz4")]
    algorithm: Algorithm,
}

impl Rounds {
    /// Returns the options of a benchmark of these rounds over a corpus.
    fn options(&self, corpus: Option<&PathBuf>) -> Result<engine::Common> {
        let defaults = engine::Common::default();
        Ok(engine::Common {
            corpus: corpus.cloned().map_or(defaults.corpus.clone(), Source::File),
            duration: command::seconds(self.seconds)?,
            repeat: self.repeat,
            algorithm: self.algorithm.clone(),
            stop: command::stop_flag()?,
            ..defaults
        })
    }
}

#[derive(Subcommand)]
enum Command {
    Survive(SurviveArgs),
    #[command(hide = true)]
    SwapUser(SwapUserArgs),
}

/// Measure memory that outlives the process: attaching a store, and its speed beside private memory.
///
/// Fills a store, drops it while its memory is held, and attaches it, again and again. Reads and writes random pages of
/// a store of the corpus's size in such memory and of one in private memory, in turn, in more rounds of 20 ms.
#[derive(clap::Args)]
struct SurviveArgs {
    /// A file whose pages are stored [default: a mix of this machine's files and of a live heap]
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// The size of the store that is attached; a shorter corpus is repeated
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    size: u64,
    /// Attach a store of 16 GiB too, if the machine has the memory, some 9 GiB
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    rounds: Rounds,
    /// Print JSON
    #[arg(long)]
    json: bool,
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
}

fn main() -> ExitCode {
    command::main("uzram-bench", |args: &Args| match &args.command {
        Some(Command::Survive(args)) => command::print(&measure_survival(args)?),
        Some(Command::SwapUser(args)) => swap_user(args),
        None => command::print(&measure(args)?),
    })
}

/// Runs the benchmark, or all targets; returns the text to print.
fn measure(args: &Args) -> Result<String> {
    if args.targets { run_targets(args) } else { run_bench(args) }
}

fn run_bench(args: &Args) -> Result<String> {
    let report = engine::run(engine::BenchOptions {
        common: args.rounds.options(args.corpus.as_ref())?,
        size_bytes: args.size,
        patterns: args.rw.clone(),
        jobs: args.jobs.iter().copied().map(usize::from).collect(),
        streams: args.streams,
        against: args.against.clone(),
    })?;
    Ok(text(&report, args.json))
}

fn run_targets(args: &Args) -> Result<String> {
    let bench = command::this_program()?;
    let options = targets::TargetsOptions {
        programs: command::uzram_program().map(|uzram| Programs { uzram, bench }),
        duration: command::seconds(args.rounds.seconds)?,
        repeat: args.rounds.repeat,
        survive: survive::SurviveOptions { full: args.full, ..survive::SurviveOptions::default() },
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

fn measure_survival(args: &SurviveArgs) -> Result<String> {
    let report = survive::run(&survive::SurviveOptions {
        common: args.rounds.options(args.corpus.as_ref())?,
        size_bytes: args.size,
        full: args.full,
        ..survive::SurviveOptions::default()
    })?;
    Ok(text(&report, args.json))
}

/// Is the program that is swapped out, and prints its times.
fn swap_user(args: &SwapUserArgs) -> Result<()> {
    let user = SwapUser { cgroup: args.cgroup.clone(), pages: args.pages.clone(), size_bytes: args.size };
    command::print(&format!("{}\n", to_json(&user.run()?)))
}
