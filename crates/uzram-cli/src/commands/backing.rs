//! `uzram backing`: what devices have left in stores on other machines.

use serde::Serialize;
use serde_json::json;
use uzram_remote::{Swept, sweep};

use crate::failure::Result;
use crate::output::report;

/// Look after stores on other machines
#[derive(clap::Args)]
#[command(after_help = "Example: uzram backing sweep --dry-run redis://cache:6379")]
pub struct BackingArgs {
    #[command(subcommand)]
    command: BackingCommand,
}

#[derive(clap::Subcommand)]
enum BackingCommand {
    Sweep(SweepArgs),
}

/// Remove what devices have left that are no more
///
/// A device renews its lease, every few seconds or each minute, as long as its daemon is there. If that ends
/// without `uzram down`, because the machine died, say, its objects stay, and nobody can read them. They are
/// removed once its lease is over, ten minutes later. The login is that of the environment, as for `uzram up
/// --backing`.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram backing sweep redis://cache:6379")]
struct SweepArgs {
    /// The server, any node of the cluster, or s3://BUCKET[/PREFIX]
    address: String,
    /// Only say what would be removed
    #[arg(long)]
    dry_run: bool,
}

pub fn run(args: &BackingArgs) -> Result<()> {
    let BackingCommand::Sweep(SweepArgs { address, dry_run }) = &args.command;
    let found = sweep(address, *dry_run)?;
    let devices = found.into_iter().map(|(device, Swept { objects, is_leased })| {
        let state = match (is_leased, dry_run) {
            (true, _) => "in use",
            (false, true) => "left behind",
            (false, false) => "removed",
        };
        DeviceJson { device: device.to_string(), objects, state }
    });
    let devices: Vec<_> = devices.collect();
    report(&json!({ "devices": devices }), |_| {
        let mut text = format!("{:<34} {:>8}\n", "DEVICE", "OBJECTS");
        for DeviceJson { device, objects, state } in &devices {
            text += &format!("{device:<34} {objects:>8}  {state}\n");
        }
        text
    })
}

#[derive(Serialize)]
struct DeviceJson {
    device: String,
    objects: u64,
    state: &'static str,
}
