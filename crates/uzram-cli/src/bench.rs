//! `uzram bench`: the command line of the benchmark; the benchmark itself belongs to the lab.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use uzram::codec::Algorithm;
use uzram::stream::StreamDesign;
use uzram::units::parse_size;
use uzram_lab::bench::{self, Against, Pattern, Source, backing};
use uzram_lab::block_bench::SwapUser;
use uzram_lab::targets;

use crate::failure::{Context, Failure, Result, print};

/// Measure a device against the bare codec, the kernel's zram and a device without an LRU, in this process.
///
/// Fills a device with the corpus's pages and runs fio's patterns on pages of 4 KiB. The rounds of
/// all targets are interleaved, so that a noisy machine disturbs each of them alike.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram bench --rw randread,randwrite --jobs 1,2 --against codec --json")]
pub struct Args {
    /// A file whose pages are stored [default: a mixture of this machine's files and of a live heap]
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
    /// Seconds that each pattern runs for in each round
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// Rounds; the table shows medians
    #[arg(long, value_name = "R", default_value_t = 5)]
    repeat: usize,
    /// Compression, as `uzram up` takes it
    #[arg(long, value_name = "NAME", default_value = "lz4")]
    algorithm: Algorithm,
    /// Who may compress at once: percpu, or the number of streams on a locked list
    #[arg(long, value_name = "percpu|N", default_value = "percpu")]
    streams: StreamDesign,
    /// What else to run: codec, the compressor alone; kernel, a zram device of this kernel (as root);
    /// no-lru, a device that does not keep track of its cold pages
    #[arg(long, value_delimiter = ',', value_name = "TARGET,…")]
    against: Vec<Against>,
    /// Measure what the project promises, over NBD too where fio and nbdkit are installed, as root of block
    /// devices and swap too, and print each promise with its figure; of the other options only --seconds,
    /// --repeat, --backing-dir and --json count
    #[arg(long)]
    targets: bool,
    /// With --targets, the folder for files of pages that leave memory; they take some hundred MiB, and go
    #[arg(long, value_name = "DIR", default_value = backing::DEFAULT_DIR)]
    backing_dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark and prints its table.
///
/// # Errors
/// An option out of range, a corpus that cannot be read, a signal.
pub fn run(args: &Args) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .context(|| "cannot handle signals".to_owned())?;
    }
    let duration = Duration::try_from_secs_f64(args.seconds).usage(|| "--seconds".to_owned())?;
    let text =
        if args.targets { run_targets(args, duration, stop)? } else { run_bench(args, duration, stop)? };
    print(&text)
}

fn run_bench(args: &Args, duration: Duration, stop: Arc<AtomicBool>) -> Result<String> {
    let defaults = bench::Options::default();
    let report = bench::run(bench::Options {
        corpus: args.corpus.clone().map_or(defaults.corpus, Source::File),
        size_bytes: args.size,
        patterns: args.rw.clone(),
        jobs: args.jobs.iter().copied().map(usize::from).collect(),
        duration,
        repeat: args.repeat,
        algorithm: args.algorithm.clone(),
        streams: args.streams,
        against: args.against.clone(),
        stop,
        ..bench::Options::default()
    })
    .map_err(|error| Failure::of("bench", &error))?;
    Ok(if args.json { format!("{}\n", report.to_json()) } else { report.to_string() })
}

fn run_targets(args: &Args, duration: Duration, stop: Arc<AtomicBool>) -> Result<String> {
    let program = std::env::current_exe().context(|| "cannot find this program".to_owned())?;
    let options = targets::Options {
        program: Some(program),
        duration,
        repeat: args.repeat,
        backing: backing::Options { dir: args.backing_dir.clone(), ..backing::Options::default() },
        stop,
        ..targets::Options::default()
    };
    let report = targets::run(&options).map_err(|error| Failure::of("bench", &error))?;
    Ok(if args.json { format!("{}\n", report.to_json()) } else { report.to_string() })
}

/// Be the program whose memory a benchmark of swap has moved out: it is the benchmark that starts it.
#[derive(clap::Args)]
pub struct SwapUserArgs {
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

/// Is that program, and prints its times.
///
/// # Errors
/// The cgroup is not as it should be, the pages cannot be read, or they are not what they were.
pub fn run_swap_user(args: &SwapUserArgs) -> Result<()> {
    let user = SwapUser { cgroup: args.cgroup.clone(), pages: args.pages.clone(), size_bytes: args.size };
    let times = user.run()?;
    let json = serde_json::to_string(&times).context(|| "cannot print the times".to_owned())?;
    print(&format!("{json}\n"))
}
