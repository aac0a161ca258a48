//! The program `uzram-bench`, which `uzram bench` runs: its command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use uzram::codec::Algorithm;
use uzram::units::parse_size;
use uzram::{Error, Result};
use uzram_bench::engine::device::{self, Against, Bench};
use uzram_bench::engine::{Comparison, Pattern, survive};
use uzram_bench::harness::corpus::Kind;
use uzram_bench::harness::options::{DEFAULT_DIR, FEW_PAGES};
use uzram_bench::harness::report::text;
use uzram_bench::harness::{Options, Report, Source, command, process};
use uzram_bench::{codecs, pager, remote, run, swap, take_over, targets, user};

/// Measure a device against the bare codec, the kernel's zram and a device without an LRU, in this process.
///
/// Fills a device with the corpus's pages and runs fio's patterns on pages of 4 KiB. The rounds of all
/// targets are interleaved, so that a noisy machine disturbs each of them alike. The commands measure other
/// things.
///
/// A corpus is a file of pages, as `uzram corpus` writes it, or is made here: `text`, `binary`, and `heap`,
/// of this machine's files and of a heap; `mixed`, these three in turn; `processes`, the memory of programs
/// that are started for it.
#[derive(Parser)]
#[command(
    name = "uzram-bench",
    bin_name = "uzram bench",
    version,
    group = clap::ArgGroup::new("tables").args(["targets", "codecs"]),
    after_help = "Example: uzram bench --rw randread,randwrite --jobs 1,2 --against codec --json"
)]
struct Args {
    #[command(flatten)]
    shared: Shared,
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
    /// Targets to compare with
    #[arg(long, value_delimiter = ',', value_name = "TARGET,…")]
    against: Vec<Against>,
    /// Measure what the project promises, over NBD too where fio and nbdkit are installed, as root of block
    /// devices and swap too, and print each promise with its figure
    #[arg(long)]
    targets: bool,
    /// Measure codecs instead: ratio and speed of each, on each corpus, and on each program's part of
    /// `processes`
    #[arg(long, conflicts_with = "targets")]
    codecs: bool,
    /// Print Markdown: with --targets the release's page of their figures, with --codecs the tables
    #[arg(long, requires = "tables", conflicts_with = "json")]
    markdown: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What all benchmarks have in common.
#[derive(clap::Args)]
struct Shared {
    /// The pages that are stored [default: mixed]; with --codecs there may be several [default: mixed and
    /// processes]
    #[arg(long, value_name = "FILE|NAME", global = true)]
    corpus: Vec<Source>,
    /// Seconds that each measurement lasts in each round
    #[arg(long, value_name = "S", default_value_t = 1.0, global = true)]
    seconds: f64,
    /// Rounds; the tables show medians [default: 3 or 5]
    #[arg(long, value_name = "R", global = true)]
    repeat: Option<usize>,
    /// Compression, as `uzram up` takes it; with --codecs one more codec
    #[arg(long, value_name = "NAME", default_value = "lz4", global = true)]
    algorithm: Algorithm,
    /// The parts to measure, as far as the benchmark has any [default: all]
    #[arg(long, value_delimiter = ',', value_name = "PART,…", global = true)]
    only: Vec<String>,
    /// The folder for temporary files of some hundred MiB, some GiB for `run`
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR, global = true)]
    dir: PathBuf,
    /// Measure little, for a trial
    #[arg(long, global = true)]
    small: bool,
    /// Measure what takes more memory too, if the machine has it: attaching 16 GiB, some 9 GiB, and
    /// outages with 16 GiB of pool, some 17 GiB
    #[arg(long, global = true)]
    full: bool,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Measure memory and daemons that outlive the process: attaching a store, its speed beside private
    /// memory, and outages
    ///
    /// Parts: store, the attach of a store and its speed; outages, kills, upgrades and memory of a daemon
    /// while a client uses its block device; nbd and swap, beside a daemon with --no-survive. Block devices
    /// and swap need root; NBD needs fio and nbdcopy.
    Survive,
    /// Measure the pager: memory that is paged out and unmapped, one fault, a loop over memory that fits,
    /// Zipf access
    ///
    /// Parts: unmap, faults, fitting, zipf. Beside the kernel's swap on zram, as root. Touches are
    /// messages, and signals, as far as this system allows them.
    Pager,
    /// Measure `uzram run`: programs in half of the memory that they take, one whose memory fits, one that
    /// takes much at once, and starting
    ///
    /// Beside the same programs in a cgroup of that size whose swap is on kernel zram, as root, and without a
    /// limit. Programs that are missing are left out.
    Run,
    /// Measure swap: programs in a cgroup of half of the memory that they take, with a swap daemon, with one
    /// that does not survive, and with kernel zram
    ///
    /// Parts: redis, g++, python, node, jvm. Needs root, FUSE, loop devices, kernel zram and the memory
    /// controller of cgroups, version 1. Programs that are missing are left out.
    Swap,
    /// Measure cold pages in a Redis server of its own, beside redis-benchmark
    ///
    /// Needs redis-server, redis-cli and redis-benchmark.
    Remote,
    /// Be the program whose memory is measured: the benchmark starts it
    #[command(hide = true, name = user::SUBCOMMAND)]
    MemoryUser { job: String },
}

fn main() -> ExitCode {
    command::main("uzram-bench", |args: &Args| {
        let benchmark = match &args.command {
            None => return command::print(&measure(args)?),
            Some(Command::MemoryUser { job }) => return user::run(job),
            Some(Command::Survive) => survive,
            Some(Command::Pager) => pager::run,
            Some(Command::Run) => run::run,
            Some(Command::Swap) => swap::run,
            Some(Command::Remote) => remote::run,
        };
        command::print(&text(&benchmark(&options(args)?)?, args.shared.json))
    })
}

fn options(args: &Args) -> Result<Options> {
    let shared = &args.shared;
    if shared.corpus.len() > 1 && !args.codecs {
        return Err(Error::invalid("several corpora are for --codecs: write one").with_setting("--corpus"));
    }
    let few = shared.small.then_some(Source::Built(Kind::Mixed, FEW_PAGES));
    let defaults = Options::default();
    Ok(Options {
        corpus: shared.corpus.first().cloned().or(few).unwrap_or(defaults.corpus),
        duration: command::seconds(shared.seconds)?,
        repeat: shared.repeat,
        algorithm: shared.algorithm.clone(),
        only: shared.only.clone(),
        dir: shared.dir.clone(),
        small: shared.small,
        full: shared.full,
        uzram: command::uzram_program(),
        bench: command::this_program()?,
        stop: process::stop_flag()?,
    })
}

/// Runs what was asked for without a command; returns the text to print.
fn measure(args: &Args) -> Result<String> {
    let (options, json) = (options(args)?, args.shared.json);
    if args.targets {
        let report = targets::measure(&options)?;
        return Ok(if args.markdown { report.to_markdown(&options) } else { text(&report, json) });
    }
    if args.codecs {
        let corpora = &args.shared.corpus;
        let corpora = if corpora.is_empty() { codecs::default_corpora() } else { corpora.clone() };
        let mut algorithms = codecs::default_algorithms()?;
        if !algorithms.contains(&options.algorithm) {
            algorithms.push(options.algorithm.clone());
        }
        let report = codecs::run(&options, &corpora, &algorithms)?;
        return Ok(if args.markdown { report.to_markdown() } else { text(&report, json) });
    }
    let jobs: Vec<usize> = args.jobs.iter().copied().map(usize::from).collect();
    let comparison = Comparison { options: &options, table: "4 KiB pages", patterns: &args.rw, jobs: &jobs };
    Ok(text(
        &device::run(&Bench { comparison, size_bytes: args.size, against: &args.against, memory: true })?,
        json,
    ))
}

/// Measures memory and daemons that outlive the process.
fn survive(options: &Options) -> Result<Report> {
    let parts = [&["store"][..], &take_over::PARTS].concat();
    options.check(&parts)?;
    let mut report = if options.has("store") { survive::run(options)? } else { Report::default() };
    if take_over::PARTS.iter().any(|part| options.has(part)) {
        report.part("daemons", take_over::run(options))?;
    }
    Ok(report)
}
