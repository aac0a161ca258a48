//! The first part of a daemon's start, without side effects: plans and checks a file or a command line as
//! `uzram up` does. Creates no files or sockets; reads the files that are named, except backing files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use uzram::machine_memory::Memory;

use crate::config::config_file;
use crate::config::plan::DaemonPlan;
use crate::config::settings::{DeviceSettings, Setting};
use crate::config::settings_file;
use crate::config::toml_text::Source;
use crate::daemon::up::UpArgs;
use crate::failure::{Failure, Result};

/// A runtime directory that is not accessed.
const ANY_DIR: &str = "/run/uzram";

/// Returns the plan of `uzram up --config`. Fails if the file cannot be read or is invalid.
pub(crate) fn plan_file(path: &Path) -> Result<DaemonPlan> {
    let mut word = OsString::from("--config=");
    word.push(path);
    let args = UpArgs::from_words([word])?;
    checked(&args, Some(config_file::read(path, args.listen.clone())?))
}

fn checked(args: &UpArgs, config: Option<config_file::ConfigFile>) -> Result<DaemonPlan> {
    let plan = args.plan_with(config, PathBuf::from(ANY_DIR))?;
    plan.check()?;
    Ok(plan)
}

/// Attributes, and the values to set them to, in this order.
pub type Values = Vec<(&'static str, String)>;

/// Summary of a daemon's plan, for fuzzers.
#[derive(Debug)]
pub struct Planned {
    /// The daemon's devices: the name of each, and what is set.
    pub devices: Vec<(String, Values)>,
    /// The number of devices of the file that are not for this machine.
    pub left_out: usize,
    /// The most NBD clients served at once.
    pub max_connections: usize,
}

/// Plans `uzram up` with these options; `config` is the text of the file that they name with `--config`, if
/// any. Fails with the message that `uzram up` would print.
pub fn plan(words: &[String], config: &str, memory: &Memory) -> std::result::Result<Planned, String> {
    plan_text(words, config, memory).map_err(Failure::into_line)
}

/// Returns what a file of `--policy` with this text sets. Fails with the message of `uzram up`.
pub fn policy(text: &str) -> std::result::Result<Values, String> {
    let settings = settings_file::policy(Source { name: "policy.toml", text });
    settings.map(|settings| values(&settings)).map_err(Failure::into_line)
}

fn plan_text(words: &[String], config: &str, memory: &Memory) -> Result<Planned> {
    let args = UpArgs::from_words(words.iter().map(OsString::from))?;
    let parse = |path: &Path| {
        let name = path.display().to_string();
        config_file::parse(Source { name: &name, text: config }, memory, args.listen.clone())
    };
    let plan = checked(&args, args.config.as_deref().map(parse).transpose()?)?;
    let devices = plan.devices.into_iter().map(|device| (device.name, values(&device.settings))).collect();
    Ok(Planned { devices, left_out: plan.left_out.len(), max_connections: plan.nbd.max_connections })
}

fn values(settings: &DeviceSettings) -> Values {
    settings.iter().map(|Setting { attribute, value, .. }| (*attribute, value.clone())).collect()
}
