//! `uzram upgrade` and `uzram recover`: another process serves a running daemon's devices, with their contents.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::json;
use uzram_serve::control::SurvivalJson;

use crate::client::daemon_client::{Daemon, device_path, understand};
use crate::client::status::outage_text;
use crate::failure::{Context, Failure, Result, print};
use crate::system::runtime_dir::RuntimeArgs;

/// How long the new program may take to serve.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the daemon is asked whether it does.
const PERIOD: Duration = Duration::from_millis(50);

/// Serve a running daemon's devices by another program file, without losing their contents.
///
/// Clients, block devices and swap areas stay; their requests wait for the moment of the change. If the new program
/// cannot serve, the command fails, and the old one goes on.
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

/// Serve devices again after a daemon gave up, because the processes that served died again and again. Prints where
/// their files are.
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

/// The response to `POST /v1/recover`.
#[derive(Deserialize)]
struct Recovered {
    files: Option<PathBuf>,
}

/// `uzram upgrade`
///
/// # Errors
/// As [`Daemon::ask`]; the new program does not serve in time.
pub fn upgrade(args: &UpgradeArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    let failed = |failure: Failure| failure.map_line(|line| format!("cannot upgrade: {line}"));
    let program = args.program.as_deref().map(absolute).transpose()?;
    // The daemon refuses if it has no other process to change to.
    let before = daemon.about()?.survival.unwrap_or_default();
    daemon.ask("POST", "/v1/upgrade", Some(&json!({ "program": program }))).map_err(failed)?;
    let deadline = Instant::now() + UPGRADE_TIMEOUT;
    loop {
        let now = daemon.about()?.survival.unwrap_or_default();
        if has_changed(&before, &now) {
            return print(&upgraded_text(&now));
        }
        if let Some(why) = now.gave_up {
            return Err(failed(Failure::Line(why)));
        }
        if Instant::now() >= deadline {
            return Err(failed(Failure::Line(format!(
                "process {} still serves after {} s",
                now.worker_pid,
                UPGRADE_TIMEOUT.as_secs()
            ))));
        }
        thread::sleep(PERIOD);
    }
}

/// Returns whether another process serves than before.
fn has_changed(before: &SurvivalJson, now: &SurvivalJson) -> bool {
    now.worker_pid != before.worker_pid && now.take_overs > before.take_overs
}

fn upgraded_text(now: &SurvivalJson) -> String {
    let outage = now.last_outage_ms.map(|ms| format!(", outage {}", outage_text(ms))).unwrap_or_default();
    format!("upgraded: worker {}{outage}\n", now.worker_pid)
}

/// Returns the absolute path of a program, as the daemon's current directory is another. JSON has UTF-8 only.
fn absolute(program: &Path) -> Result<String> {
    let shown = program.display();
    let path = std::path::absolute(program).context(|| format!("--program '{shown}'"))?;
    let not_utf8 = |_| Failure::Usage(format!("--program '{shown}': the path is not UTF-8"));
    path.into_os_string().into_string().map_err(not_utf8)
}

/// `uzram recover`
///
/// # Errors
/// As [`Daemon::ask`]; a device does not exist.
pub fn recover(args: &RecoverArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    let answer = daemon
        .ask("POST", "/v1/recover", None)
        .map_err(|failure| failure.map_line(|line| format!("cannot recover: {line}")))?;
    let recovered: Recovered = understand(answer)?;
    if args.names.is_empty() {
        let text = recovered.files.map(|dir| format!("{}\n", dir.display())).unwrap_or_default();
        return print(&text);
    }
    let mut text = String::new();
    for name in &args.names {
        let device = daemon.ask("GET", &device_path(name), None)?;
        // A device without a file is served by NBD.
        let place = device["file"].as_str().or(device["uri"].as_str()).unwrap_or("not served");
        text += &format!("{name} {place}\n");
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn another_worker_that_took_over_is_an_upgrade() {
        let state = |worker_pid, take_overs| SurvivalJson { worker_pid, take_overs, ..Default::default() };
        let before = state(5, 1);
        for (now, changed) in [((5, 1), false), ((6, 1), false), ((5, 2), false), ((6, 2), true)] {
            assert_eq!(has_changed(&before, &state(now.0, now.1)), changed, "{now:?}");
        }
        let now = SurvivalJson { last_outage_ms: Some(2.04), ..state(6, 2) };
        assert_eq!(upgraded_text(&now), "upgraded: worker 6, outage 2.0 ms\n");
        assert_eq!(upgraded_text(&state(6, 2)), "upgraded: worker 6\n");
    }

    #[test]
    fn the_daemon_gets_an_absolute_path() {
        assert_eq!(absolute(Path::new("/usr/bin/uzram")).unwrap(), "/usr/bin/uzram");
        assert!(absolute(Path::new("./uzram")).unwrap().starts_with('/'));
        assert!(matches!(absolute(Path::new("")), Err(Failure::Line(_))));
    }
}
