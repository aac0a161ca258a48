//! `uzram status`: the processes of a running daemon, and its health.

use serde::Serialize;
use uzram_serve::control::{About, FilesJson, MeasureJson};

use crate::client::daemon_client::Daemon;
use crate::failure::Result;
use crate::output::report;
use crate::system::runtime_dir::RuntimeArgs;
use crate::terminal::show::{protection_rows, rows_text};

/// Show the processes of a running daemon: which one serves, which takes over when that dies, and how often
/// one has.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram status
          uzram status --json | jq .take_overs")]
pub struct StatusArgs {
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// The output of `uzram status --json`.
#[derive(Debug, PartialEq, Serialize)]
struct StatusJson {
    /// The process that answers.
    pid: u32,
    /// The process that holds the descriptors and starts the others.
    holder_pid: u32,
    /// The process that serves.
    worker_pid: u32,
    /// The process that takes over when the worker dies; null if there is none.
    standby_pid: Option<u32>,
    /// Whether it can take over at once.
    standby_ready: bool,
    /// How often a stand-by has taken over.
    take_overs: u64,
    /// How long nobody served at the last take-over, in milliseconds.
    last_outage_ms: Option<f64>,
    /// Why the daemon has stopped replacing workers; null as long as it has not.
    gave_up: Option<String>,
    /// The mount of the devices' files; null if there is none.
    files: Option<FilesJson>,
    /// Whether the daemon was started for a swap area, and ends with it.
    ends_with_swap: bool,
    /// The daemon's protection measures, and why one was refused.
    protection: Vec<MeasureJson>,
}

impl From<About> for StatusJson {
    fn from(about: About) -> StatusJson {
        let About { pid, files, ends_with_swap, protection, survival, .. } = about;
        // What this daemon does not tell is 0.
        let survival = survival.unwrap_or_default();
        StatusJson {
            pid,
            holder_pid: survival.holder_pid,
            worker_pid: survival.worker_pid,
            standby_pid: survival.standby_pid,
            standby_ready: survival.standby_ready,
            take_overs: survival.take_overs,
            last_outage_ms: survival.last_outage_ms,
            gave_up: survival.gave_up,
            files,
            ends_with_swap,
            protection,
        }
    }
}

/// `uzram status`
pub fn status(args: &StatusArgs) -> Result<()> {
    report(&StatusJson::from(Daemon::at(&args.runtime)?.about()?), status_text)
}

fn status_text(status: &StatusJson) -> String {
    let none = || "none".to_owned();
    let standby = match (status.standby_pid, status.standby_ready) {
        (None, _) => none(),
        (Some(pid), true) => pid.to_string(),
        (Some(pid), false) => format!("{pid}, catching up"),
    };
    let files = status.files.as_ref();
    let rows = [
        ("holder", status.holder_pid.to_string()),
        ("worker", status.worker_pid.to_string()),
        ("stand-by", standby),
        ("take-overs", status.take_overs.to_string()),
        ("last outage", status.last_outage_ms.map_or_else(none, outage_text)),
        ("files", files.map_or_else(none, |files| files.dir.display().to_string())),
    ];
    let gave_up = status.gave_up.iter().map(|why| ("gave up", why.clone()));
    rows_text(gave_up.chain(rows).chain(protection_rows(&status.protection)))
}

/// Formats the time for which nobody served.
pub fn outage_text(outage_ms: f64) -> String {
    format!("{outage_ms:.1} ms")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;
    use uzram_serve::control::SurvivalJson;

    use super::*;

    fn about(survival: Option<SurvivalJson>) -> About {
        let refused = MeasureJson { what: "memory locked".to_owned(), refused: Some("EPERM".to_owned()) };
        About { pid: 7, protection: vec![refused], survival, ..About::default() }
    }

    fn rows(about: About) -> Vec<String> {
        let text = status_text(&about.into());
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn a_daemon_with_survival_shows_its_processes() {
        let survival = SurvivalJson {
            holder_pid: 5,
            worker_pid: 7,
            standby_pid: Some(9),
            standby_ready: true,
            take_overs: 2,
            last_outage_ms: Some(3.25),
            gave_up: None,
        };
        let rows_of = |change: fn(&mut SurvivalJson)| {
            let mut survival = survival.clone();
            change(&mut survival);
            rows(about(Some(survival)))
        };
        assert_eq!(
            rows_of(|_| {})[..5],
            ["holder 5", "worker 7", "stand-by 9", "take-overs 2", "last outage 3.2 ms"]
        );
        assert_eq!(rows_of(|survival| survival.standby_ready = false)[2], "stand-by 9, catching up");
        assert_eq!(rows_of(|survival| survival.standby_pid = None)[2], "stand-by none");
        assert_eq!(rows_of(|survival| survival.gave_up = Some("no".to_owned()))[0], "gave up no");
        let json = json!(StatusJson::from(about(Some(survival))));
        assert_eq!((&json["holder_pid"], &json["last_outage_ms"]), (&5.into(), &3.25.into()));
    }
}
