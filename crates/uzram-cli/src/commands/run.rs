//! `uzram run`: a program whose memory is compressed when it is cold.
//!
//! It says in the environment what is wanted, and becomes the program (execve(2)): the loader loads a small
//! library into it, which starts the pager's process. Both files are in this program
//! ([`run_files`]).

use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;
use rustix::fs::{Mode, OFlags};
use uzram::check_file_size;
use uzram::codec::Algorithm;
use uzram::units::format_size;
use uzram_pager::{LEAST_LIMIT_BYTES, Trap};

use crate::config::size_expr;
use crate::failure::{Context, Exit, Failure, Result};
use crate::output;
use crate::system::find_program::find_program;
use crate::system::program_file;
use crate::system::run_files::{self, RunFiles};
use crate::terminal::live;

/// The default of a spill file's size, in limits.
const SPILL_LIMITS: u64 = 4;
const SPILL_DIR: &str = "/var/tmp";

/// Run a program in less memory: what it does not use is compressed.
///
/// Memory of the program beyond the limit is compressed, and what does not fit in memory even so goes to a
/// file without a name. The limit is for each process: programs that it starts have the same one, each for
/// itself. It bounds what the program allocates and maps, private and anonymous; not its code, its stacks,
/// and files that it maps.
///
/// It works for dynamically linked programs. Others run as if without it, and a line says so.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram run --limit 512M -- python3 train.py
          uzram run --limit 2G --spill /mnt/scratch:20G -- redis-server
          uzram run --limit 1G --no-spill --hard -- ./a.out")]
pub struct RunArgs {
    /// The most memory, compressed memory included
    #[arg(long, value_name = "SIZE", value_parser = parse_limit, required_unless_present = "pressure")]
    limit: Option<u64>,
    /// Find a lower limit: the least with which the program waits for memory for less than this share of the
    /// time, as in 0.1
    #[arg(long, value_name = "PERCENT")]
    pressure: Option<f64>,
    /// Where to put what does not fit: a folder, and the most bytes; by default /var/tmp and four times the
    /// limit
    #[arg(long, value_name = "DIR[:SIZE]", conflicts_with = "no_spill")]
    spill: Option<OsString>,
    /// Put nothing into a file. What does not fit stays in memory, beyond the limit
    #[arg(long)]
    no_spill: bool,
    /// End the program rather than exceed the limit
    #[arg(long)]
    hard: bool,
    /// How pages are compressed: `uzram bench --codecs` compares the algorithms
    #[arg(long, value_name = "ALGORITHM")]
    algorithm: Option<String>,
    /// Print all figures when a process ends, each one that the program starts included
    #[arg(long, value_name = "FORM", num_args = 0..=1, require_equals = true, default_missing_value = "text")]
    stats: Option<Stats>,
    /// Print nothing when the program ends
    #[arg(long, conflicts_with = "stats")]
    quiet: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// How figures are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stats {
    Text,
    Json,
}

fn parse_limit(text: &str) -> std::result::Result<u64, String> {
    let bytes = size_expr::of_option(text).map_err(|error| error.to_string())?;
    if bytes < LEAST_LIMIT_BYTES {
        return Err(format!("the least is {}", format_size(LEAST_LIMIT_BYTES)));
    }
    Ok(bytes)
}

pub fn run(args: &RunArgs) -> Result<Infallible> {
    start(args).map_err(|failure| match failure.exit() {
        Exit::Failed | Exit::Usage => failure.with_exit(Exit::RunFailed),
        _ => failure,
    })
}

fn start(args: &RunArgs) -> Result<Infallible> {
    let (name, rest) = args.command.split_first().ok_or_else(|| Failure::line("which command?"))?;
    let program = find(name)?;
    let mut command = Command::new(&program);
    command.arg0(name).args(rest);
    // Kept until this process has become the program.
    let _files = match obstacle(&program)?.map(|why| format!("{why}: its memory is not managed")) {
        None => Some(manage(&mut command, args)?),
        Some(why) if args.hard => return Err(Failure::line(format!("{why}, and --hard was given"))),
        Some(why) => {
            live::error_line(&why);
            None
        }
    };
    let error = command.exec();
    Err(cannot_run(&program, &error))
}

/// Returns why the memory of a program cannot be managed, if it cannot.
fn obstacle(program: &Path) -> Result<Option<String>> {
    let why = program_file::obstacle(program).map_err(|error| cannot_run(program, &error))?;
    if let Some(why) = why {
        return Ok(Some(format!("{} {why}", program.display())));
    }
    let in_container = "in a container: docker run --device /dev/userfaultfd";
    Ok(Trap::Message.check().err().map(|error| format!("{error} ({in_container})")))
}

/// Tells the library in a command's environment what is wanted.
fn manage(command: &mut Command, args: &RunArgs) -> Result<RunFiles> {
    let limit = match args.limit {
        Some(limit) => limit,
        None => uzram::machine_memory::read()?.limit_bytes,
    };
    for name in ["PRESSURE", "SPILL", "SPILL_BYTES", "HARD", "ALGORITHM", "STATS", "JSON", "QUIET"] {
        command.env_remove(format!("UZRAM_RUN_{name}"));
    }
    command.env("UZRAM_RUN_LIMIT", limit.to_string());
    command.env("UZRAM_RUN_PID", std::process::id().to_string());
    command.env("UZRAM_RUN_PROCESSES", "0000000000,0000000000");
    if let Some(goal) = args.pressure {
        if !(goal > 0.0 && goal <= 100.0) {
            return Err(Failure::usage("--pressure is a percentage above 0, up to 100"));
        }
        command.env("UZRAM_RUN_PRESSURE", goal.to_string());
    }
    if let Some(algorithm) = &args.algorithm {
        algorithm.parse::<Algorithm>().usage(|| "--algorithm")?;
        command.env("UZRAM_RUN_ALGORITHM", algorithm);
    }
    if !args.no_spill {
        let (dir, bytes) = spill(args.spill.as_deref().unwrap_or(OsStr::new(SPILL_DIR)), limit)?;
        command.env("UZRAM_RUN_SPILL", dir).env("UZRAM_RUN_SPILL_BYTES", bytes.to_string());
    }
    let is_json = output::is_json() || args.stats == Some(Stats::Json);
    let flags =
        [("HARD", args.hard), ("STATS", args.stats.is_some()), ("JSON", is_json), ("QUIET", args.quiet)];
    for (name, _) in flags.into_iter().filter(|(_, is_set)| *is_set) {
        command.env(format!("UZRAM_RUN_{name}"), "1");
    }
    let files = run_files::lay_out()?;
    command.env("LD_PRELOAD", preload(env::var_os("LD_PRELOAD"), &files.library));
    command.env("UZRAM_RUN_IMAGE", &files.image);
    Ok(files)
}

/// Returns the list of libraries to load first: the user's own, then ours. One of an outer `uzram run` goes.
fn preload(own: Option<OsString>, library: &Path) -> OsString {
    let own = own.unwrap_or_default();
    let names = own.as_bytes().split(|byte| matches!(byte, b':' | b' '));
    let is_kept = |name: &&[u8]| !name.is_empty() && !run_files::is_library(OsStr::from_bytes(name));
    let kept = names.filter(is_kept).chain([library.as_os_str().as_bytes()]);
    OsString::from_vec(kept.collect::<Vec<_>>().join(&b':'))
}

/// Returns the folder of a spill file, in which files can be made, and the most bytes.
fn spill(text: &OsStr, limit: u64) -> Result<(PathBuf, u64)> {
    let bytes = text.as_bytes();
    let colon = bytes.iter().rposition(|byte| *byte == b':');
    let (dir, size) = match colon.map(|at| (&bytes[..at], str::from_utf8(&bytes[at + 1..]))) {
        Some((dir, Ok(size))) => (dir, size_expr::of_option(size).usage(|| "--spill DIR:SIZE")?),
        _ => (bytes, limit.saturating_mul(SPILL_LIMITS)),
    };
    let dir = Path::new(OsStr::from_bytes(dir));
    let usable = fs::canonicalize(dir).and_then(|path| {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        // The pager may make none with a name.
        drop(rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?);
        Ok(path)
    });
    let usable = usable.map_err(|error| {
        let what = format!("no spill file can be in {}: {error}", dir.display());
        Failure::line(format!("{what}; give another --spill DIR, or --no-spill"))
    })?;
    check_file_size("a spill file", size).map_err(|error| {
        Failure::line(format!("{error}; or give a smaller --spill DIR:SIZE, or --no-spill"))
    })?;
    Ok((usable, size))
}

fn find(name: &OsStr) -> Result<PathBuf> {
    find_program(name).map_err(|(place, error)| match error.kind() {
        ErrorKind::NotFound => {
            let line = format!("there is no program {}", place.display());
            Failure::line(line).with_exit(Exit::NotFound)
        }
        _ => cannot_run(&place, &error),
    })
}

/// Returns the failure of a program that cannot be run; the status is that of env(1).
fn cannot_run(program: &Path, error: &io::Error) -> Failure {
    let exit = if error.kind() == ErrorKind::NotFound { Exit::NotFound } else { Exit::NotExecutable };
    Failure::line(format!("cannot run {}: {error}", program.display())).with_exit(exit)
}
