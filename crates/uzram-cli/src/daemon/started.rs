//! What a daemon prints when it has begun to serve.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use uzram::device::Device;
use uzram::units::format_size;
use uzram_serve::control::{About, FilesJson};

use crate::config::plan::DevicePlan;

/// The first word of the last line that a swap daemon prints when it has begun to serve.
pub const READY: &str = "swap";

/// The facts about a daemon that has begun to serve.
#[derive(Serialize)]
pub struct Started {
    pub exports: Vec<String>,
    pub control_socket: PathBuf,
    pub files: Option<FilesJson>,
    /// What the user should know.
    pub warnings: Vec<String>,
    pub devices: Vec<StartedDevice>,
    pub attached: Vec<AttachedBlock>,
}

#[derive(Serialize)]
pub struct StartedDevice {
    name: String,
    size_bytes: u64,
    algorithm: Option<String>,
    backing: Option<String>,
    /// The most memory of slot table, LRU and streams.
    mem_fixed_bytes: u64,
}

#[derive(Serialize)]
pub struct AttachedBlock {
    pub name: String,
    pub block_device: PathBuf,
    pub is_swap: bool,
}

impl From<(&Arc<Device>, &DevicePlan)> for StartedDevice {
    fn from((device, plan): (&Arc<Device>, &DevicePlan)) -> StartedDevice {
        let stats = device.stats();
        let chosen = plan.settings.get("comp_algorithm");
        let algorithm = chosen.map(|setting| setting.value.clone()).or_else(|| {
            // The kernel's form is a list with the chosen one in brackets.
            let list = device.get("comp_algorithm").ok()?;
            Some(list.split_once('[')?.1.split_once(']')?.0.to_owned())
        });
        StartedDevice {
            name: device.name().to_owned(),
            size_bytes: stats.disksize_bytes,
            algorithm,
            backing: device.backing().map(|backing| backing.to_string()),
            mem_fixed_bytes: stats.mem_fixed_bytes,
        }
    }
}

/// Returns the protection measures that were refused, before other warnings.
pub fn all_warnings(about: &About, warnings: Vec<String>) -> Vec<String> {
    let refused = about.protection.iter().filter_map(|measure| {
        let why = measure.refused.as_ref()?;
        Some(format!("not {}: {why}", measure.what))
    });
    refused.chain(warnings).collect()
}

impl Started {
    pub fn text(&self) -> String {
        let exports = self.exports.iter().map(|uri| fact("export", uri));
        let control = fact("control", self.control_socket.display());
        let files = self.files.iter().map(|files| {
            let place = format!("{}, {} threads", files.dir.display(), files.threads);
            fact("files", place) + &fact("CPU latency", files.cpu_latency())
        });
        let warnings = self.warnings.iter().map(|warning| fact("warning", warning));
        let devices = self.devices.iter().map(StartedDevice::text);
        let attached = self.attached.iter().map(|AttachedBlock { name, block_device, is_swap }| {
            let what = if *is_swap { READY } else { "attached" };
            fact(what, format!("{} ({name})", block_device.display()))
        });
        exports.chain([control]).chain(files).chain(warnings).chain(devices).chain(attached).collect()
    }
}

impl StartedDevice {
    fn text(&self) -> String {
        let buffers = if self.backing.is_some() { ", buffers of the backing device" } else { "" };
        let most = format_size(self.mem_fixed_bytes);
        let fixed = fact("fixed cost", format!("{most} at most: slot table, LRU, streams{buffers}"));
        let algorithm = self.algorithm.iter().map(|algorithm| fact("algorithm", algorithm));
        let backing = self.backing.iter().map(|backing| fact("backing", backing));
        let size = fact("size", format_size(self.size_bytes));
        [size].into_iter().chain(algorithm).chain(backing).chain([fixed]).collect()
    }
}

fn fact(what: &str, value: impl std::fmt::Display) -> String {
    format!("{what:<11} {value}\n")
}
