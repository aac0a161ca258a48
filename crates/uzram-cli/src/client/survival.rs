//! The processes of a running daemon: `uzram status` shows them; by `uzram upgrade` and `uzram recover`
//! another one serves the devices, with their contents.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use uzram_serve::control::{About, FilesJson, MeasureJson, SurvivalJson};

use crate::client::daemon_client::{Daemon, device_path, understand};
use crate::failure::{Context, Failure, Result};
use crate::output::report;
use crate::system::runtime_dir::RuntimeArgs;
use crate::terminal::show::{protection_rows, rows_text};

/// How long the new program may take to serve.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the daemon is asked whether it does.
const PERIOD: Duration = Duration::from_millis(50);

/// Serve a running daemon's devices by another program file, without losing their contents.
///
/// Clients, block devices and swap areas stay; their requests wait for the moment of the change. If the new
/// program cannot serve, the command fails, and the old one goes on.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram upgrade
          uzram upgrade --program /usr/local/bin/uzram")]
pub struct UpgradeArgs {
    /// The new program [default: the file from which the daemon was started]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Serve devices again after a daemon gave up, because the processes that served died again and again. Prints
/// where their files are.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram recover
          uzram recover zram0")]
pub struct RecoverArgs {
    /// The devices whose files to print; all are recovered [default: print the directory of all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// The response to `POST /v1/recover`, and the devices that were named.
#[derive(Serialize, Deserialize)]
struct Recovered {
    files: Option<PathBuf>,
    #[serde(default)]
    devices: Vec<RecoveredDevice>,
}

#[derive(Serialize, Deserialize)]
struct RecoveredDevice {
    name: String,
    file: Option<PathBuf>,
    uri: Option<String>,
}

impl Recovered {
    fn text(&self) -> String {
        if self.devices.is_empty() {
            return self.files.iter().map(|dir| format!("{}\n", dir.display())).collect();
        }
        let line = |RecoveredDevice { name, file, uri }: &RecoveredDevice| {
            // A device without a file is served by NBD.
            let place = file.as_ref().map(|file| file.display().to_string()).or_else(|| uri.clone());
            format!("{name} {}\n", place.unwrap_or_else(|| "not served".to_owned()))
        };
        self.devices.iter().map(line).collect()
    }
}

pub fn upgrade(args: &UpgradeArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    let failed = || "cannot upgrade";
    let program = args.program.as_deref().map(absolute).transpose()?;
    // The daemon refuses if it has no other process to change to.
    let before = daemon.about()?.survival.unwrap_or_default();
    daemon.ask("POST", "/v1/upgrade", Some(&json!({ "program": program }))).context(failed)?;
    let deadline = Instant::now() + UPGRADE_TIMEOUT;
    loop {
        let now = daemon.about()?.survival.unwrap_or_default();
        if now.worker_pid != before.worker_pid && now.take_overs > before.take_overs {
            let SurvivalJson { worker_pid, last_outage_ms, .. } = now;
            let outage = last_outage_ms.map(|ms| format!(", outage {}", outage_text(ms)));
            let upgraded = json!({ "worker_pid": worker_pid, "last_outage_ms": last_outage_ms });
            return report(&upgraded, |_| {
                format!("upgraded: worker {worker_pid}{}\n", outage.unwrap_or_default())
            });
        }
        if let Some(why) = now.gave_up {
            return Err(Failure::line(why)).context(failed);
        }
        if Instant::now() >= deadline {
            let (pid, most_s) = (now.worker_pid, UPGRADE_TIMEOUT.as_secs());
            return Err(Failure::line(format!("process {pid} still serves after {most_s} s")))
                .context(failed);
        }
        thread::sleep(PERIOD);
    }
}

/// Returns the absolute path of a program, as the daemon's current directory is another. JSON has UTF-8 only.
fn absolute(program: &Path) -> Result<String> {
    let shown = program.display();
    let path = std::path::absolute(program).context(|| format!("--program '{shown}'"))?;
    let not_utf8 = |_| Failure::usage(format!("--program '{shown}': the path is not UTF-8"));
    path.into_os_string().into_string().map_err(not_utf8)
}

pub fn recover(args: &RecoverArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    let answer = daemon.ask("POST", "/v1/recover", None).context(|| "cannot recover")?;
    let mut recovered: Recovered = understand(answer)?;
    let named = |name: &String| understand(daemon.ask("GET", &device_path(name), None)?);
    recovered.devices = args.names.iter().map(named).collect::<Result<_>>()?;
    report(&recovered, Recovered::text)
}

/// The output of `uzram status --json`; `pid` is the process that holds the daemon.
#[derive(Serialize)]
struct StatusJson {
    pid: u32,
    #[serde(flatten)]
    survival: SurvivalJson,
    files: Option<FilesJson>,
    ends_with_swap: bool,
    protection: Vec<MeasureJson>,
}

pub fn status(runtime: &RuntimeArgs) -> Result<()> {
    let About { pid, files, ends_with_swap, protection, survival, .. } = Daemon::at(runtime)?.about()?;
    let survival = survival.unwrap_or_default();
    report(&StatusJson { pid, survival, files, ends_with_swap, protection }, status_text)
}

fn status_text(status: &StatusJson) -> String {
    let none = || "none".to_owned();
    let standby = match (status.survival.standby_pid, status.survival.standby_ready) {
        (None, _) => none(),
        (Some(pid), true) => pid.to_string(),
        (Some(pid), false) => format!("{pid}, catching up"),
    };
    let files = status.files.as_ref();
    let rows = [
        ("holder", status.survival.holder_pid.to_string()),
        ("worker", status.survival.worker_pid.to_string()),
        ("stand-by", standby),
        ("take-overs", status.survival.take_overs.to_string()),
        ("last outage", status.survival.last_outage_ms.map_or_else(none, outage_text)),
        ("files", files.map_or_else(none, |files| files.dir.display().to_string())),
    ];
    let gave_up = status.survival.gave_up.iter().map(|why| ("gave up", why.clone()));
    rows_text(gave_up.chain(rows).chain(protection_rows(&status.protection)))
}

fn outage_text(outage_ms: f64) -> String {
    format!("{outage_ms:.1} ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_gets_an_absolute_path() {
        assert_eq!(absolute(Path::new("/usr/bin/uzram")).unwrap(), "/usr/bin/uzram");
        assert!(absolute(Path::new("./uzram")).unwrap().starts_with('/'));
        assert!(absolute(Path::new("")).is_err());
    }
}
