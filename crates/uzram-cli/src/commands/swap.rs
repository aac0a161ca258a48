//! `uzram swap on`, `off` and `status`: a swap area in compressed memory.
//!
//! The daemon runs in the background, protected from waiting for memory that only it can free
//! ([`crate::system::protect`]). At its end swapoff brings all pages back, then the loop device is freed, the
//! files are unmounted, and last the contents are freed.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Serialize;
use uzram::device::DeviceStats;
use uzram::units::format_size;
use uzram_serve::control::{FilesJson, MeasureJson};
use uzram_serve::record::AttachedDevice;
use uzram_serve::swap_area::{ActiveArea, MAX_PRIORITY};

use crate::client::attach::{attached, clear, left_by_dead, refuse_unrecorded, report_cleared, require_root};
use crate::client::control::end;
use crate::client::daemon_client::{Daemon, device_path, understand};
use crate::config::device_options::DeviceOptions;
use crate::config::plan::{Attached, DaemonPlan, DevicePlan, FilesArgs, SurviveArgs, SwapPlan};
use crate::config::settings::parse_name;
use crate::daemon::started::READY;
use crate::daemon::up;
use crate::failure::{Context, Exit, Failure, Result, print};
use crate::output::{self, report};
use crate::swap::page_cluster;
use crate::swap::switch_off::switch_off;
use crate::system::descriptors::leave_caller;
use crate::system::interrupts::Interrupts;
use crate::system::runtime_dir::{RuntimeArgs, RuntimeDir};
use crate::terminal::live::{self, LogLevel};
use crate::terminal::show::{protection_rows, ratio, rows_text};

/// The log file of a background daemon, in its runtime directory.
const LOG_FILE: &str = "uzram.log";

/// Swap to compressed memory.
#[derive(clap::Args)]
pub struct SwapArgs {
    #[command(subcommand)]
    command: SwapCommand,
}

#[derive(clap::Subcommand)]
enum SwapCommand {
    On(Box<OnArgs>),
    /// Switch the swap area off: swapped-out pages come back to memory, and the daemon ends.
    #[command(after_help = "Example: uzram swap off")]
    Off(RuntimeArgs),
    /// Show the swap areas, the memory that they take, and how the daemon is protected.
    #[command(after_help = "Examples: uzram swap status
          uzram swap status --json | jq '.areas[] | {path, used_bytes, failed: .stats.failed_writes}'")]
    Status(RuntimeArgs),
}

/// Start a daemon in the background and swap to it; the swap area is active when this returns.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram swap on --size 4G --algorithm lz4")]
struct OnArgs {
    /// The device's name
    #[arg(long, value_name = "NAME", default_value = "zram0", value_parser = parse_name)]
    name: String,
    /// Priority of the swap area; the kernel uses areas of higher priority first
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(..=i64::from(MAX_PRIORITY)))]
    priority: u16,
    /// Do not discard freed swap slots. Their pages then stay stored until the slots are reused, but freed
    /// slots are reused before never-used ones
    #[arg(long)]
    no_discard: bool,
    /// Set the machine's vm.page-cluster as long as swap is on: the kernel reads up to 2^N pages at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=i64::from(page_cluster::MAX)))]
    page_cluster: Option<u8>,
    /// Stay in the foreground until told to end, with the log on standard error
    #[arg(long)]
    foreground: bool,
    /// Be the daemon that this command starts in the background
    #[arg(long, hide = true)]
    detached: bool,
    #[command(flatten)]
    files: FilesArgs,
    #[command(flatten)]
    survive: SurviveArgs,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

impl OnArgs {
    fn plan(&self, dir: PathBuf) -> Result<DaemonPlan> {
        let swap = SwapPlan {
            priority: Some(self.priority),
            discard: !self.no_discard,
            page_cluster: self.page_cluster,
        };
        let device = DevicePlan::new(&self.name, self.device.settings(true)?);
        let device = DevicePlan { attached: Attached::Swap(swap), ..device };
        let files = self.files.options(None);
        let plan = DaemonPlan { ends_with_swap: true, files, ..DaemonPlan::new(dir, vec![device])? };
        Ok(self.survive.applied_to(plan))
    }
}

impl SwapArgs {
    pub fn plan(&self) -> Result<DaemonPlan> {
        match &self.command {
            SwapCommand::On(args) => args.plan(args.runtime.path()?),
            _ => Err(Failure::line("this command starts no daemon")),
        }
    }
}

pub fn run(args: &SwapArgs) -> Result<u8> {
    match &args.command {
        SwapCommand::On(args) => on(args),
        SwapCommand::Off(args) => off(args).map(|()| 0),
        SwapCommand::Status(args) => status(args).map(|()| 0),
    }
}

fn on(args: &OnArgs) -> Result<u8> {
    if args.detached {
        leave_caller();
    }
    require_root()?;
    let dir = args.runtime.path()?;
    if let Some(left) = left_by_dead(&dir)? {
        return Err(Failure::line(format!(
            "a daemon in '{}' died and left {}: `uzram swap off` clears it",
            dir.display(),
            left.describe()
        )));
    }
    let serves = args.foreground || args.detached;
    if serves {
        live::start_log(LogLevel::Info)?;
    }
    let plan = args.plan(dir.clone())?;
    if args.detached {
        // All paths are absolute. Do not keep the caller's directory busy.
        std::env::set_current_dir("/").context(|| "cannot go to '/'")?;
    }
    if serves {
        return up::serve(plan);
    }
    // Report errors of the plan here rather than in the log.
    plan.check()?;
    let log_path = dir.join(LOG_FILE);
    RuntimeDir::make(&dir)?;
    // Keep the log of a running daemon; the new one will fail because of it.
    let runs = Daemon::in_dir(dir)?.about().is_ok();
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&log_path);
    let log = log.context(|| format!("cannot write '{}'", log_path.display()))?;
    if !runs {
        log.set_len(0).context(|| format!("cannot clear '{}'", log_path.display()))?;
    }
    let mut daemon = own_program()?;
    daemon.args(std::env::args_os().skip(1)).arg("--detached");
    daemon.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = daemon.spawn().context(|| "cannot start the daemon")?;
    let Some(stdout) = child.stdout.take() else { return Err(Failure::line("the daemon has no output")) };
    let facts = facts(BufReader::new(stdout)).context(|| "cannot read the daemon's output")?;
    if let Some(facts) = facts {
        return print(&facts).map(|()| 0);
    }
    // The daemon has ended; its last log line says why.
    let _ = child.wait();
    let log = fs::read_to_string(&log_path).unwrap_or_default();
    Err(Failure::printed_in(&log).unwrap_or_else(|| Failure::line("the daemon ended")))
}

/// Returns what a daemon prints when it serves; `None` if it ends before.
fn facts(mut stdout: impl BufRead) -> io::Result<Option<String>> {
    // JSON ends where its indentation does.
    let last = if output::is_json() { "}" } else { READY };
    let (mut facts, mut begun) = (String::new(), 0);
    while stdout.read_line(&mut facts)? > 0 {
        let line = &facts[begun..];
        if line.starts_with(last) && line.split_ascii_whitespace().next() == Some(last) {
            return Ok(Some(facts));
        }
        begun = facts.len();
    }
    Ok(None)
}

/// Returns a command that runs this program, even if its file has been removed or replaced.
fn own_program() -> Result<Command> {
    let path = std::env::current_exe().context(|| "cannot find this program's file")?;
    let path = if path.exists() { path } else { "/proc/self/exe".into() };
    Ok(Command::new(path))
}

/// The output of `uzram swap status --json`.
#[derive(Serialize)]
struct StatusJson {
    areas: Vec<AreaJson>,
    protection: Vec<MeasureJson>,
    files: Option<FilesJson>,
}

#[derive(Serialize)]
struct AreaJson {
    name: String,
    path: PathBuf,
    priority: i32,
    size_bytes: u64,
    used_bytes: u64,
    /// The statistics of the daemon's device, as in `uzram stat --json`.
    stats: DeviceStats,
}

fn off(runtime: &RuntimeArgs) -> Result<()> {
    require_root()?;
    let daemon = Daemon::at(runtime)?;
    let shown = daemon.dir.display();
    let about = match daemon.about_if_running() {
        Ok(Some(about)) => about,
        Ok(None) => {
            let why = format!("there is no swap to switch off: no daemon is running in '{shown}'");
            return off_without_daemon(&daemon.dir, Failure::line(why).with_exit(Exit::NoDaemon));
        }
        Err(failure) => return off_without_daemon(&daemon.dir, failure),
    };
    let areas = areas(&daemon)?;
    if areas.is_empty() && !about.ends_with_swap {
        return Err(Failure::line(format!(
            "there is no swap to switch off: the daemon in '{shown}' has no active swap area (`uzram down` ends it)"
        )));
    }
    // An orderly end on ^C: pages that came back stay in memory, and the area stays on.
    let interrupts = Interrupts::catch()?;
    let stays = "interrupted: the remaining swap areas stay on, and the daemon keeps running";
    let go_on = || if interrupts.came() { Err(Failure::line(stays)) } else { Ok(()) };
    for (AttachedDevice { name, attachment }, _) in areas {
        go_on()?;
        switch_off(attachment, stats(&name, &daemon)?.kept_bytes())?;
        attachment.detach().context(|| format!("cannot detach {name}"))?;
    }
    page_cluster::restore(&daemon.dir)?;
    go_on()?;
    drop(interrupts);
    if about.ends_with_swap {
        end(&daemon, false)?;
        // The daemon ended without errors, so its log is not needed.
        let _ = fs::remove_file(daemon.dir.join(LOG_FILE));
    }
    Ok(())
}

/// Cleans up after a dead daemon, or fails with `failure` if it left nothing.
fn off_without_daemon(dir: &std::path::Path, failure: Failure) -> Result<()> {
    match left_by_dead(dir)? {
        Some(_) => report_cleared(&clear(dir)?),
        None => {
            page_cluster::restore(dir)?;
            refuse_unrecorded(dir)?;
            Err(failure)
        }
    }
}

fn areas(daemon: &Daemon) -> Result<Vec<(AttachedDevice, ActiveArea)>> {
    let mut areas = Vec::new();
    for device in attached(daemon)? {
        let area = device.attachment.swap_area().context(|| "cannot read /proc/swaps")?;
        areas.extend(area.map(|area| (device, area)));
    }
    Ok(areas)
}

fn stats(name: &str, daemon: &Daemon) -> Result<DeviceStats> {
    let answer = daemon.ask("GET", &device_path(name), None)?;
    understand(answer["stats"].clone())
}

fn status(runtime: &RuntimeArgs) -> Result<()> {
    let daemon = Daemon::at(runtime)?;
    let shown = daemon.dir.display();
    let about = match daemon.about_if_running() {
        Ok(Some(about)) => about,
        absent => {
            let line = if let Some(left) = left_by_dead(&daemon.dir)? {
                format!(
                    "the daemon in '{shown}' is dead: what was swapped out is lost ({} is left, `uzram swap off` clears \
                     it)",
                    left.describe()
                )
            } else {
                absent?;
                format!("there is no swap: no daemon is running in '{shown}' (`uzram swap on` starts one)")
            };
            return Err(Failure::line(line).with_exit(Exit::NoDaemon));
        }
    };
    let area_json = |(device, area): (AttachedDevice, ActiveArea)| {
        let ActiveArea { path, size_bytes, used_bytes, priority } = area;
        let stats = stats(&device.name, &daemon)?;
        Ok(AreaJson { name: device.name, path, priority, size_bytes, used_bytes, stats })
    };
    let status = StatusJson {
        areas: areas(&daemon)?.into_iter().map(area_json).collect::<Result<_>>()?,
        protection: about.protection,
        files: about.files,
    };
    report(&status, status_text)
}

fn status_text(status: &StatusJson) -> String {
    if status.areas.is_empty() {
        return "no active swap area\n".to_owned();
    }
    let cpu_latency = status.files.iter().map(|files| ("CPU latency", files.cpu_latency()));
    let areas: String = status.areas.iter().map(area_text).collect();
    areas + &rows_text(cpu_latency.chain(protection_rows(&status.protection)))
}

fn area_text(area: &AreaJson) -> String {
    let stats = &area.stats;
    let ratio = ratio(stats.orig_data_bytes, stats.memory_bytes());
    let [free, reserve] = [stats.reserve_free_bytes, stats.reserve_bytes].map(format_size);
    let rows = [
        ("device", format!("{}, {}, priority {}", area.name, area.path.display(), area.priority)),
        ("size", format_size(area.size_bytes)),
        ("swapped out", format_size(area.used_bytes)),
        ("stored", format_size(stats.orig_data_bytes)),
        ("memory", format!("{} (ratio {ratio})", format_size(stats.memory_bytes()))),
        ("reserve", format!("{free} free of {reserve}, drained {} times", stats.reserve_drained)),
        ("refused at mem_limit", format!("{} writes", stats.limit_refused)),
        ("failed writes, reads", format!("{}, {}", stats.failed_writes, stats.failed_reads)),
    ];
    rows_text(rows.into_iter())
}
