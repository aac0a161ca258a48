//! `uzram clients` and `uzram kick`: the NBD clients of a running daemon.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uzram::units::format_size;
use uzram_serve::control::ClientsJson;
use uzram_serve::nbd::Client;

use crate::client::daemon_client::{Daemon, understand};
use crate::failure::{Context, Result};
use crate::output::report;
use crate::system::runtime_dir::RuntimeArgs;

/// Disconnect NBD clients. Replies in flight may be lost, so a client cannot know whether its last writes
/// were stored. It can reconnect.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram kick 7")]
pub struct KickArgs {
    /// The numbers of clients, as `uzram clients` shows them
    #[arg(value_name = "ID", required = true, value_parser = parse_id)]
    ids: Vec<u64>,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

fn parse_id(text: &str) -> std::result::Result<u64, &'static str> {
    text.parse().map_err(|_| "a client is named by its number: `uzram clients` lists them")
}

pub fn clients(runtime: &RuntimeArgs) -> Result<()> {
    let clients: ClientsJson = understand(Daemon::at(runtime)?.ask("GET", "/v1/clients", None)?)?;
    report(&clients, |clients| table(&clients.clients, SystemTime::now()))
}

/// `uzram kick`; tries all clients, and returns the first failure.
pub fn kick(args: &KickArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    let kick = |id: &u64| {
        let kicked = daemon.ask("DELETE", &format!("/v1/clients/{id}"), None);
        kicked.context(|| format!("cannot kick {id}")).map(drop)
    };
    args.ids.iter().map(kick).fold(Ok(()), Result::and)
}

fn table(clients: &[Client], now: SystemTime) -> String {
    let mut text = format!(
        "{:>6} {:<12} {:>9} {:>10} {:>10} {:>10}  {:<24} LISTENER\n",
        "ID", "EXPORT", "CONNECTED", "REQUESTS", "READ", "WRITTEN", "PEER"
    );
    for client in clients {
        let since = UNIX_EPOCH + Duration::from_secs(client.connected_at_s);
        let connected = now.duration_since(since).unwrap_or_default();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:>6} {:<12} {:>9} {:>10} {:>10} {:>10}  {:<24} {}",
            client.id,
            client.export.as_deref().unwrap_or("-"),
            duration(connected.as_secs()),
            client.requests,
            format_size(client.read_bytes),
            format_size(client.written_bytes),
            client.peer,
            client.listener,
        );
    }
    text
}

/// Formats a duration in its two largest units.
fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}
