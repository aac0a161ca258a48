//! `uzram corpus`: writes the memory of running programs to a file of pages, for `uzram train`, `uzram bench
//! --corpus` and programs of your own. [`process_pages`] says which pages.
//!
//! The file may hold passwords and keys. So it is created for its owner alone, by no path that another user
//! could redirect, before anything is read; and removed if the command fails or is interrupted.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde_json::json;
use uzram::trusted_path::{Place, Refused};
use uzram::units::{PAGE_SIZE, format_size, pages_to_bytes};

use crate::config::size_expr;
use crate::failure::{Context, Failure, Result};
use crate::output::report;
use crate::system::interrupts::{ENDING_SIGNALS, is_ignored};
use crate::system::process_pages::{self, Taken};
use crate::system::program::Program;
use crate::terminal::live;

/// The most bytes of pages, which are all in memory before they are written.
const MAX_BYTES: u64 = 16 << 30;
/// How often it is checked whether a command still runs.
const POLL: Duration = Duration::from_millis(20);

/// Write the memory of running programs to a file of pages
///
/// Takes the resident pages that the kernel would swap out: heaps, stacks and what else is private, in pages
/// of 4 KiB. Same-filled pages are left out, because no codec sees them. If there are more than --size, runs
/// of 16 neighbouring pages are taken, evenly spread. The programs are not stopped.
///
/// The file contains secrets that the programs have in memory. Its mode is 0600; an existing file is not
/// overwritten. Reading another user's programs takes root; reading one's own, where kernel.yama.ptrace_scope
/// is not 0, too, unless COMMAND starts them.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram corpus -o pages $(pidof firefox)
          uzram corpus --after 30 -o pages -- make -j4
          uzram train pages -o pages.dict; uzram bench --codecs --corpus pages")]
#[command(override_usage = "uzram corpus [OPTIONS] -o <FILE> <PID>…
       uzram corpus [OPTIONS] -o <FILE> -- <COMMAND>…")]
#[command(group(clap::ArgGroup::new("programs").args(["pids", "command"]).required(true)))]
pub struct CorpusArgs {
    /// Processes
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pids: Vec<u32>,
    /// The most memory to take, 4K to 16G
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_corpus_size)]
    size: u64,
    /// Seconds after which COMMAND's memory is taken and COMMAND is ended [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    after: Option<Duration>,
    /// The file to create
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// A program to start; its memory and that of the processes that it starts is taken. What it prints goes
    /// to standard error, and it has no input
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn parse_corpus_size(text: &str) -> std::result::Result<u64, String> {
    size_expr::of_option_within(text, PAGE_SIZE as u64..=MAX_BYTES, "4K to 16G")
}

fn parse_seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    // Instants are not added up to more than they can hold.
    seconds.filter(|time| *time <= Duration::from_hours(24)).ok_or("write seconds, up to 86400".to_owned())
}

pub fn run(args: &CorpusArgs) -> Result<()> {
    if args.after.is_some() && args.command.is_empty() {
        return Err(Failure::usage("--after is for a COMMAND, which this starts".to_owned()));
    }
    let stop = stop_flag()?;
    let output = Output::create(&args.output)?;
    let taken = live::while_showing(
        || Some("reading memory".to_owned()),
        || match args.command.as_slice() {
            [] => {
                let pids: BTreeSet<u32> = args.pids.iter().copied().collect();
                take(args, &Vec::from_iter(pids), &[], &stop)
            }
            [program, arguments @ ..] => {
                let after = args.after.unwrap_or(Duration::from_secs(5));
                let program = started(program, arguments, after, &stop)?;
                let pids = program.pids();
                take(args, &pids[..1], &pids[1..], &stop)
            }
        },
    )?;
    output.write(&taken, &stop)?;
    let (pages, path) = (taken.pages.len() as u64, &args.output);
    let written = json!({
        "pages": pages,
        "written_bytes": pages_to_bytes(pages),
        // A path need not be UTF-8, which JSON is.
        "path": path.to_string_lossy(),
        "resident_pages": taken.resident,
        "same_filled_pages": taken.same_filled,
        "unreadable_pages": taken.unreadable,
        "beyond_size_pages": taken.unread(),
    });
    report(&written, |_| {
        format!(
            "pages     {pages} of {} resident; left out: {} same-filled, {} unreadable, {} beyond --size\n\
             written   {}, {} (may contain secrets)\n",
            taken.resident,
            taken.same_filled,
            taken.unreadable,
            taken.unread(),
            format_size(pages_to_bytes(pages)),
            path.display(),
        )
    })
}

fn started(
    program: &OsString,
    arguments: &[OsString],
    after: Duration,
    stop: &AtomicBool,
) -> Result<Program> {
    let name = Path::new(program).display();
    let mut command = Command::new(program);
    command.args(arguments).stdout(io::stderr());
    let program = Program::start(&mut command).context(|| format!("cannot start {name}"))?;
    let start = Instant::now();
    loop {
        check(stop)?;
        if let Some(how) = program.ended().context(|| format!("cannot wait for {name}"))? {
            return Err(Failure::line(format!(
                "{name} ended {how} after {:.1} s, before its memory was taken: give --after less than that, now {} s",
                start.elapsed().as_secs_f64(),
                after.as_secs_f64()
            )));
        }
        let Some(left) = after.checked_sub(start.elapsed()) else { return Ok(program) };
        thread::sleep(left.min(POLL));
    }
}

fn take(args: &CorpusArgs, pids: &[u32], others: &[u32], stop: &AtomicBool) -> Result<Taken> {
    let max_pages = usize::try_from(args.size / PAGE_SIZE as u64).unwrap_or(usize::MAX);
    let taken = process_pages::take(pids, others, max_pages, stop)?;
    check(stop)?;
    match (taken.pages.is_empty(), taken.resident) {
        (false, _) => Ok(taken),
        (true, 0) => Err(Failure::line("nothing is resident: all memory is swapped out, shared or of files")),
        (true, resident) => Err(Failure::line(format!(
            "nothing to write: of {resident} resident pages, {} are same-filled and {} cannot be read",
            taken.same_filled, taken.unreadable
        ))),
    }
}

/// Returns a flag that the signals set by which a process is asked to end, unless they are ignored.
fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in ENDING_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal)) {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context(|| "cannot handle signals")?;
    }
    Ok(stop)
}

fn check(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(Failure::line("interrupted")) } else { Ok(()) }
}

/// The file that is written; removed when it is dropped incomplete.
struct Output {
    path: PathBuf,
    place: Place,
    file: File,
    is_complete: bool,
}

impl Output {
    /// Creates the file, which must not exist, for this user alone.
    fn create(path: &Path) -> Result<Output> {
        let cannot = || format!("cannot write {}", path.display());
        let place = match Place::resolve(path) {
            // Where the last name is a link, there is something already, wherever it leads.
            Err(Refused::Link { link, .. }) if link == path => return Err(exists(path)),
            place => place.context(cannot)?,
        };
        let file: OwnedFd =
            match place.open(OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR) {
                Err(Errno::EXIST | Errno::LOOP) => return Err(exists(path)),
                file => file.context(cannot)?,
            };
        Ok(Output { path: path.to_owned(), place, file: file.into(), is_complete: false })
    }

    fn write(mut self, taken: &Taken, stop: &AtomicBool) -> Result<()> {
        let cannot = || format!("cannot write {}", self.path.display());
        for pages in taken.pages.chunks(256) {
            check(stop)?;
            self.file.write_all(pages.as_flattened()).context(cannot)?;
        }
        // Some file systems report a full disk only here.
        self.file.sync_all().context(cannot)?;
        self.is_complete = true;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.is_complete {
            // If it fails, there is another error to report.
            let _ = self.place.remove_file();
        }
    }
}

fn exists(path: &Path) -> Failure {
    Failure::line(format!("{} exists: remove it or write another", path.display()))
}
