//! `uzram run`: a program whose memory is compressed when it is cold.
//!
//! It says in the environment what is wanted, and becomes the program (execve(2)): the loader loads the
//! library `libuzram_run.so` into it, which does the rest.

use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use uzram::check_file_size;
use uzram::codec::Algorithm;
use uzram::units::format_size;
use uzram_pager::{LEAST_LIMIT_BYTES, TrapKind};

use crate::config::size_expr;
use crate::failure::{Context, Exit, Failure, Result};
use crate::output;
use crate::system::find_program::find_program;
use crate::system::program_file::{self, Kind};
use crate::terminal::live;

/// The default of a spill file's size, in limits.
const SPILL_LIMITS: u64 = 4;
const SPILL_DIR: &str = "/var/tmp";
const LIBRARY: &str = "libuzram_run.so";

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
    #[arg(long)]
    stats: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn parse_limit(text: &str) -> std::result::Result<u64, String> {
    let bytes = size_expr::of_option(text).map_err(|error| error.to_string())?;
    if bytes < LEAST_LIMIT_BYTES {
        return Err(format!("the least is {}", format_size(LEAST_LIMIT_BYTES)));
    }
    Ok(bytes)
}

pub fn run(args: &RunArgs) -> Result<Infallible> {
    let ours = |failure: Failure| match failure.exit() {
        Exit::Failed | Exit::Usage => failure.with_exit(Exit::RunFailed),
        _ => failure,
    };
    start(args).map_err(ours)
}

fn start(args: &RunArgs) -> Result<Infallible> {
    let (name, rest) = args.command.split_first().ok_or_else(|| Failure::line("which command?"))?;
    let program = find(name)?;
    let mut command = Command::new(&program);
    command.arg0(name).args(rest);
    match program_file::kind(&program).map_err(|error| cannot_run(&program, &error))? {
        Kind::Dynamic => {}
        kind => {
            let why = format!("{} {}: its memory is not managed", program.display(), kind.why());
            if args.hard {
                return Err(Failure::line(format!("{why}, and --hard was given")));
            }
            live::error_line(&why);
            return become_program(command, &program);
        }
    }
    if args.hard && uzram_pager::is_address_space_limited() {
        let why = "a program whose address space or data is limited (ulimit -v, ulimit -d) is not managed";
        return Err(Failure::line(format!("{why}, and --hard was given")));
    }
    TrapKind::Uffd.check().map_err(|error| {
        Failure::line(format!("{error}. In a container: docker run --device /dev/userfaultfd"))
    })?;
    let limit = match args.limit {
        Some(limit) => limit,
        None => uzram::machine_memory::read()?.limit_bytes,
    };
    let library = library()?;
    let mut preload = library.into_os_string();
    if let Some(before) = env::var_os("LD_PRELOAD").filter(|before| !before.is_empty()) {
        preload.push(":");
        preload.push(before);
    }
    command.env("LD_PRELOAD", preload);
    for name in ["PRESSURE", "SPILL", "SPILL_BYTES", "HARD", "ALGORITHM", "STATS", "JSON"] {
        command.env_remove(format!("UZRAM_RUN_{name}"));
    }
    command.env("UZRAM_RUN_LIMIT", limit.to_string());
    command.env("UZRAM_RUN_PID", std::process::id().to_string());
    if let Some(goal) = args.pressure {
        if !(goal > 0.0 && goal <= 100.0) {
            return Err(Failure::usage("--pressure is a percentage above 0, up to 100".to_owned()));
        }
        command.env("UZRAM_RUN_PRESSURE", goal.to_string());
    }
    if let Some(algorithm) = &args.algorithm {
        algorithm.parse::<Algorithm>().usage(|| "--algorithm")?;
        command.env("UZRAM_RUN_ALGORITHM", algorithm);
    }
    if !args.no_spill {
        let spill = args.spill.as_deref().unwrap_or(OsStr::new(SPILL_DIR));
        let (dir, bytes) = split_spill(spill, limit)?;
        let dir = fs::canonicalize(&dir).context(|| format!("--spill: {}", Path::new(&dir).display()))?;
        check_file_size("a spill file", bytes).map_err(|error| {
            Failure::line(format!("{error}; or give a smaller --spill DIR:SIZE, or --no-spill"))
        })?;
        command.env("UZRAM_RUN_SPILL", dir).env("UZRAM_RUN_SPILL_BYTES", bytes.to_string());
    }
    for (name, is_set) in [("HARD", args.hard), ("STATS", args.stats), ("JSON", output::is_json())] {
        if is_set {
            command.env(format!("UZRAM_RUN_{name}"), "1");
        }
    }
    become_program(command, &program)
}

fn become_program(mut command: Command, program: &Path) -> Result<Infallible> {
    let error = command.exec();
    Err(cannot_run(program, &error))
}

fn split_spill(text: &OsStr, limit: u64) -> Result<(OsString, u64)> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = text.as_bytes();
    let colon = bytes.iter().rposition(|byte| *byte == b':');
    match colon.map(|at| (&bytes[..at], std::str::from_utf8(&bytes[at + 1..]))) {
        Some((dir, Ok(size))) => {
            let size = size_expr::of_option(size).usage(|| "--spill DIR:SIZE")?;
            Ok((OsStr::from_bytes(dir).to_owned(), size))
        }
        _ => Ok((text.to_owned(), limit.saturating_mul(SPILL_LIMITS))),
    }
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

/// Finds the library: in this program's directory, or in `lib/uzram` beside that. It must be as hard to
/// change as this program.
pub fn library() -> Result<PathBuf> {
    let program = env::current_exe().context(|| "cannot find this program's file")?;
    let dir = program.parent().unwrap_or(Path::new("/"));
    let places = [dir.join(LIBRARY), dir.join("../lib/uzram").join(LIBRARY)];
    let found = places.iter().find_map(|place| fs::canonicalize(place).ok());
    let failed = |why: String| Err(Failure::line(why));
    let Some(library) = found else {
        return failed(format!(
            "{LIBRARY} is neither beside uzram nor in ../lib/uzram: `cargo build --release` builds both; install them together"
        ));
    };
    let shown = library.display();
    // ld.so splits the list at colons and spaces.
    if library.as_os_str().as_encoded_bytes().iter().any(|byte| matches!(byte, b':' | b' ')) {
        return failed(format!("the loader finds no library in a folder with a colon or a space: {shown}"));
    }
    let meta = fs::metadata(&library).context(|| &shown)?;
    let mine = rustix::process::geteuid().as_raw();
    if (meta.uid() != 0 && meta.uid() != mine) || meta.mode() & 0o002 != 0 {
        return failed(format!("{shown} can be changed by other users: not used"));
    }
    match program_file::flaw(&library).context(|| &shown)? {
        Some(flaw) => failed(format!("{shown} {flaw}; install it again, with uzram")),
        None => Ok(library),
    }
}
