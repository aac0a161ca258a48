//! `uzram clients` and `uzram kick`: the NBD clients of a running daemon.

use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uzram::units::format_size;
use uzram_serve::control::{ClientJson, ClientsJson};

use crate::client::daemon_client::{Daemon, understand};
use crate::failure::{Failure, Result};
use crate::output::report;
use crate::system::runtime_dir::RuntimeArgs;

/// List the NBD clients of a running daemon: peer, device, connection time, requests and bytes.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram clients
          uzram clients --json | jq '.clients[] | select(.export == \"zram0\") | .id'")]
pub struct ClientsArgs {
    #[command(flatten)]
    runtime: RuntimeArgs,
}

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

/// `uzram clients`
pub fn clients(args: &ClientsArgs) -> Result<()> {
    let clients: ClientsJson = understand(Daemon::at(&args.runtime)?.ask("GET", "/v1/clients", None)?)?;
    report(&clients, |clients| table(&clients.clients, SystemTime::now()))
}

/// `uzram kick`; tries all clients, and returns the first failure.
pub fn kick(args: &KickArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    let kick = |id: &u64| match daemon.ask("DELETE", &format!("/v1/clients/{id}"), None) {
        Ok(_) => None,
        Err(failure) => Some(failure.map_line(|line| format!("cannot kick {id}: {line}"))),
    };
    let failures: Vec<Failure> = args.ids.iter().filter_map(kick).collect();
    failures.into_iter().next().map_or(Ok(()), Err)
}

/// Formats one line for each client.
fn table(clients: &[ClientJson], now: SystemTime) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_a_line() {
        let client = ClientJson {
            id: 7,
            listener: "tcp:127.0.0.1:10809".to_owned(),
            peer: "127.0.0.1:4711".to_owned(),
            pid: None,
            uid: None,
            export: Some("zram0".to_owned()),
            connected_at_s: 1000,
            requests: 12,
            read_bytes: 8192,
            written_bytes: 0,
        };
        let silent = ClientJson { export: None, peer: "pid 1, uid 0".to_owned(), ..client.clone() };
        let text = table(&[client, silent], UNIX_EPOCH + Duration::from_secs(1000 + 3 * 3600 + 120));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[1][..5], ["7", "zram0", "3h2m", "12", "8"]);
        assert_eq!(lines[2][1], "-");
    }

    #[test]
    fn a_duration_has_two_units_at_most() {
        let told = [0, 59, 60, 3599, 3600, 86399, 86400, 90_000].map(duration);
        assert_eq!(told, ["0s", "59s", "1m0s", "59m59s", "1h0m", "23h59m", "1d0h", "1d1h"]);
    }
}
