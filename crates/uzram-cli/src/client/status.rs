//! `uzram status`: the processes of a running daemon, and its health.

use serde::Serialize;
use uzram_serve::control::{About, FilesJson, MeasureJson, SurvivalJson};

use crate::client::daemon_client::Daemon;
use crate::failure::Result;
use crate::output::report;
use crate::system::runtime_dir::RuntimeArgs;
use crate::terminal::show::{protection_rows, rows_text};

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

/// `uzram status`
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

/// Formats the time for which nobody served.
pub fn outage_text(outage_ms: f64) -> String {
    format!("{outage_ms:.1} ms")
}
