//! The commands that talk to a running daemon, over HTTP on its control socket.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use uzram::device::Device;
use uzram::machine_memory;
use uzram::units::format_size;
use uzram_serve::control::{AttributeJson, ClientsJson, DeviceJson, DevicesJson};
use uzram_serve::nbd::Client;

use crate::client::attach::{clear, left_by_dead, report_cleared};
use crate::client::daemon_client::{Daemon, attribute_path, device_path, understand};
use crate::config::device_options::DeviceOptions;
use crate::config::plan::ExportArgs;
use crate::config::settings::{attributes_of, parse_name};
use crate::failure::{Context, Failure, Result, print};
use crate::output::{self, report};
use crate::swap::room::warning_of_fixed;
use crate::system::interrupts::Interrupts;
use crate::system::programs;
use crate::system::runtime_dir::{self, RuntimeArgs};
use crate::system::state_dir;
use crate::terminal::live::{self, StatusLine};
use crate::terminal::show;

/// How long a daemon may take to end; it may have gigabytes to free.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// Add a device to a running daemon.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram add zram1 --size 4G --algorithm zstd")]
pub struct AddArgs {
    /// The device's name, as in zram1
    #[arg(value_parser = parse_name)]
    name: String,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    export: ExportArgs,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// A device of a running daemon.
#[derive(clap::Args)]
pub struct DeviceArgs {
    /// The device, as in zram1
    name: String,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Show a device's statistics, or one attribute as the kernel's file would print it; or the figures of a
/// program that runs under `uzram run`.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram stat zram0
          uzram stat 4711
          uzram stat zram0 mm_stat
          uzram stat zram0 --json     all attributes and statistics")]
pub struct StatArgs {
    /// The device, as in zram0, or the process id of a program
    name: String,
    /// An attribute of a device, as in mm_stat
    attribute: Option<String>,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Set attributes of a device in the order given; stops at the first failure.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram set zram0 mem_limit=256M")]
pub struct SetArgs {
    /// The device, as in zram0
    name: String,
    /// What to set
    #[arg(value_name = "ATTRIBUTE=VALUE", required = true, value_parser = parse_setting)]
    settings: Vec<(String, String)>,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Stop the running daemon, and wait until it has ended. The contents of its devices are lost.
///
/// Refused while NBD clients, programs or mounted file systems use a device, or it is swapped to.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram down")]
pub struct DownArgs {
    /// End even if its devices are in use, except by swap: file systems on them are unmounted, and what was
    /// written is lost
    #[arg(long)]
    force: bool,
    /// Leave contents, block devices and swap areas to the service manager, which started the daemon, for its
    /// next start
    #[arg(long, conflicts_with = "force")]
    keep: bool,
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

fn parse_setting(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((attribute, value)) if !attribute.is_empty() => Ok((attribute.to_owned(), value.to_owned())),
        _ => Err("write ATTRIBUTE=VALUE, as in mem_limit=256M".to_owned()),
    }
}

pub fn add(args: &AddArgs) -> Result<()> {
    let settings = args.device.settings(false)?;
    let backing = settings.get("backing_dev");
    backing.map_or(Ok(()), |backing| state_dir::make_for(&backing.value))?;
    let attributes: BTreeMap<_, _> =
        settings.iter().map(|setting| (setting.attribute, &setting.value)).collect();
    let ExportArgs { export, read_only } = args.export;
    let body =
        json!({ "name": args.name, "attributes": attributes, "export": export, "read_only": read_only });
    let answer = Daemon::at(&args.runtime)?.ask("POST", "/v1/devices", Some(&body));
    let device: DeviceJson = understand(answer.context(|| format!("cannot add {}", args.name))?)?;
    let memory = machine_memory::read().ok();
    let warn = |memory| warning_of_fixed(&args.name, device.stats.mem_fixed_bytes, &memory);
    if let Some(warning) = memory.and_then(warn) {
        live::note(&format!("warning: {warning}\n"));
    }
    report(&device, |device| device.uris.iter().map(|uri| format!("{uri}\n")).collect())
}

pub fn remove(args: &DeviceArgs) -> Result<()> {
    let removed = Daemon::at(&args.runtime)?.ask("DELETE", &device_path(&args.name), None);
    removed.context(|| format!("cannot remove {}", args.name)).map(drop)
}

pub fn list(runtime: &RuntimeArgs) -> Result<()> {
    let all = programs::all();
    let answer = match Daemon::at(runtime) {
        Ok(daemon) => match daemon.get_if_running("/v1/devices")? {
            None if all.is_empty() => return Err(daemon.absent()),
            answer => answer,
        },
        Err(failure) if all.is_empty() => return Err(failure),
        Err(_) => None,
    };
    let is_running = answer.is_some();
    let DevicesJson { devices } = answer.map(understand).transpose()?.unwrap_or_default();
    let programs: Vec<_> = all.iter().map(show::program_json).collect();
    report(&json!({ "devices": devices, "programs": programs }), |_| {
        let devices = is_running.then(|| show::device_table(&devices));
        let programs = (!all.is_empty()).then(|| show::program_table(&all));
        devices.into_iter().chain(programs).collect::<Vec<_>>().join("\n")
    })
}

pub fn stat(args: &StatArgs) -> Result<()> {
    let is_number = args.name.bytes().all(|byte| byte.is_ascii_digit());
    let id = args.name.parse().ok().filter(|_| is_number && args.attribute.is_none());
    // A device can have such a name.
    let failure = match device(args) {
        Ok(answer) => return show_device(args, answer),
        Err(failure) => failure,
    };
    match id.map(|id| (id, programs::of(id))) {
        Some((_, Some(program))) => {
            report(&show::program_json(&program), |_| show::program_details(&program))
        }
        Some((id, None)) => Err(failure.map_line(|line| {
            format!(
                "process {id} does not run under `uzram run`, or is another user's; and as a device: {line}"
            )
        })),
        None => Err(failure),
    }
}

fn device(args: &StatArgs) -> Result<Value> {
    let path = match &args.attribute {
        Some(attribute) => attribute_path(&args.name, attribute),
        None => device_path(&args.name),
    };
    Daemon::at(&args.runtime)?.ask("GET", &path, None)
}

fn show_device(args: &StatArgs, answer: Value) -> Result<()> {
    if args.attribute.is_none() {
        return report(&understand::<DeviceJson>(answer)?, show::device_details);
    }
    let AttributeJson { name, value, text } = understand(answer)?;
    if !output::is_json() {
        return print(&(text + "\n"));
    }
    // `block_state` comes as text alone, as long as the disk is large.
    let value = value.unwrap_or_else(|| show::block_states(&text));
    report(&json!({ "name": name, "value": value }), |_| text)
}

pub fn set(args: &SetArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    let works = |attribute: &str| Device::attributes().iter().any(|row| row.name == attribute && row.works());
    let settings: Vec<_> =
        args.settings.iter().flat_map(|(name, value)| attributes_of(name, value)).collect();
    let is_work = settings.iter().any(|(attribute, _)| works(attribute));
    let interrupts = is_work.then(Interrupts::catch).transpose()?;
    for (done, (attribute, value)) in settings.iter().enumerate() {
        let (path, body) = (attribute_path(&args.name, attribute), json!({ "value": value }));
        let answer = match &interrupts {
            Some(interrupts) if interrupts.came() => Err(Failure::line("interrupted")),
            Some(interrupts) if works(attribute) => {
                let mut line = StatusLine::new();
                daemon.ask_for_work(("PUT", &path, &body), interrupts, || {
                    let Some(line) = &mut line else { return };
                    progress_text(&daemon, &args.name, attribute)
                        .into_iter()
                        .for_each(|text| line.draw(text));
                })
            }
            _ => daemon.ask("PUT", &path, Some(&body)),
        };
        answer.map_err(|failure| {
            let applied: Vec<&str> = settings[..done].iter().map(|(name, _)| name.as_str()).collect();
            let names = applied.join(", ");
            let applied = if done > 0 { format!(" (already set: {names})") } else { names };
            failure
                .map_line(|line| format!("cannot set {attribute} to '{}': {line}{applied}", shorten(value)))
        })?;
    }
    Ok(())
}

/// Returns the progress of setting an attribute, from `progress`: name, pages done, all pages or 0.
fn progress_text(daemon: &Daemon, name: &str, attribute: &str) -> Option<String> {
    let text = daemon.attribute(name, "progress").ok()?;
    let numbers = text.lines().find_map(|line| line.strip_prefix(attribute)?.strip_prefix(' '))?;
    let (done, all) = numbers.split_once(' ')?;
    let (done, all): (u64, u64) = (done.parse().ok()?, all.parse().ok()?);
    Some(match (done.saturating_mul(100)).checked_div(all) {
        Some(percent) => format!("{attribute}: {done} of {all} pages, {percent} %"),
        None => format!("{attribute}: {done}"),
    })
}

pub fn reset(args: &DeviceArgs) -> Result<()> {
    let reset = Daemon::at(&args.runtime)?.ask("POST", &format!("{}/reset", device_path(&args.name)), None);
    reset.context(|| format!("cannot reset {}", args.name)).map(drop)
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
        text += &format!(
            "{:>6} {:<12} {:>9} {:>10} {:>10} {:>10}  {:<24} {}\n",
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

fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}

pub fn reload(runtime: &RuntimeArgs) -> Result<()> {
    Daemon::at(runtime)?.ask("POST", "/v1/reload", None).context(|| "cannot reload").map(drop)
}

pub fn down(args: &DownArgs) -> Result<()> {
    let daemon = Daemon::at(&args.runtime)?;
    if args.keep {
        return daemon.ask("POST", "/v1/leave", None).map(drop);
    }
    end(&daemon, args.force)?;
    if args.force && left_by_dead(&daemon.dir)?.is_some() {
        return report_cleared(&clear(&daemon.dir)?);
    }
    Ok(())
}

pub fn end(daemon: &Daemon, force: bool) -> Result<()> {
    let has_answered = daemon.ask_to_end(force)?;
    // The directory may be another user's, whose record cannot be trusted.
    if !has_answered
        && !force
        && let Ok(Some(left)) = left_by_dead(&daemon.dir)
    {
        return Err(Failure::line(format!(
            "the daemon ended before it had answered: {} is left (`uzram detach` clears it)",
            left.describe()
        )));
    }
    let (shown, most_s) = (daemon.dir.display(), END_TIMEOUT.as_secs());
    match runtime_dir::wait_until_free(&daemon.dir, END_TIMEOUT)? {
        true => Ok(()),
        false => Err(Failure::line(format!("the daemon in '{shown}' is still ending after {most_s} s"))),
    }
}

fn shorten(value: &str) -> String {
    const MAX_CHARS: usize = 60;
    match value.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_split_at_the_first_sign() {
        assert_eq!(parse_setting("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
        assert_eq!(parse_setting("a=").unwrap(), ("a".to_owned(), String::new()));
        assert!(parse_setting("a").is_err() && parse_setting("=a").is_err());
    }
}
