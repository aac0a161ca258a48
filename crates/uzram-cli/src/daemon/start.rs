//! A daemon's start, up to where it begins to do something: what a file or a command line comes to, checked as `uzram up`
//! checks it. No file is made, and no socket; files that are named are read, but for backing files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use uzram::machine_memory::Memory;

use crate::config::config_file;
use crate::config::plan::{Attached, DaemonPlan};
use crate::config::policy_file;
use crate::config::settings::{DeviceSettings, Setting};
use crate::config::toml_text::Source;
use crate::daemon::up::UpArgs;
use crate::failure::{Failure, Result};

/// A runtime directory that is not looked at.
const ANY_DIR: &str = "/run/uzram";

/// What `uzram up --config` would serve.
///
/// # Errors
/// What is wrong with the file.
pub(crate) fn plan_file(path: &Path) -> Result<DaemonPlan> {
    let mut word = OsString::from("--config=");
    word.push(path);
    let args = UpArgs::from_words([word])?;
    checked(&args, Some(config_file::read(path)?))
}

fn checked(args: &UpArgs, config: Option<config_file::ConfigFile>) -> Result<DaemonPlan> {
    let plan = args.plan_with(config, PathBuf::from(ANY_DIR))?;
    plan.check()?;
    Ok(plan)
}

/// What a daemon would be told, by those who test what is made of any text.
#[derive(Debug)]
pub struct Planned {
    /// Its devices.
    pub devices: Vec<PlannedDevice>,
    /// The devices of the file that are for other machines.
    pub left_out: usize,
    /// How many NBD clients it would serve at once.
    pub max_connections: usize,
}

/// A device that it would make.
#[derive(Debug)]
pub struct PlannedDevice {
    /// Its name.
    pub name: String,
    /// The attributes that would be set, in this order.
    pub settings: Vec<(&'static str, String)>,
    /// Whether it would be swapped to.
    pub is_swap: bool,
}

/// What `uzram up` with these options comes to; where they name a file with `--config`, `config` is its text.
///
/// # Errors
/// What is wrong, as it is told.
pub fn plan(words: &[String], config: &str, memory: &Memory) -> std::result::Result<Planned, String> {
    plan_text(words, config, memory).map_err(told)
}

/// What a file of `--policy` with this text sets.
///
/// # Errors
/// What is wrong, as it is told.
pub fn policy(text: &str) -> std::result::Result<Vec<(&'static str, String)>, String> {
    policy_file::settings(Source { name: "policy.toml", text })
        .map(|settings| values(&settings))
        .map_err(told)
}

fn plan_text(words: &[String], config: &str, memory: &Memory) -> Result<Planned> {
    let args = UpArgs::from_words(words.iter().map(OsString::from))?;
    let parse = |path: &Path| {
        let name = path.display().to_string();
        config_file::parse(Source { name: &name, text: config }, memory)
    };
    let plan = checked(&args, args.config().map(parse).transpose()?)?;
    let devices = plan.devices.into_iter().map(|device| PlannedDevice {
        is_swap: matches!(device.attached, Attached::Swap(_)),
        settings: values(&device.settings),
        name: device.name,
    });
    let devices = devices.collect();
    Ok(Planned { devices, left_out: plan.left_out.len(), max_connections: plan.nbd.max_connections })
}

fn values(settings: &DeviceSettings) -> Vec<(&'static str, String)> {
    settings.iter().map(|Setting { attribute, value, .. }| (*attribute, value.clone())).collect()
}

fn told(failure: Failure) -> String {
    match failure {
        Failure::Line(line) | Failure::Usage(line) => line,
        Failure::ReaderLeft => String::new(),
    }
}
