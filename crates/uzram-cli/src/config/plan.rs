//! What a daemon is to serve, and how.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uzram::device::{Attribute, Device};
use uzram_serve::fuse::CpuLatencyLimit;
use uzram_serve::{Export, ExportPolicy, fuse, nbd};

use crate::config::settings::{DeviceSettings, Setting};
use crate::failure::{Context, Failure, Result};
use crate::system::runtime_dir::{NBD_SOCKET, socket_path};
use crate::system::state_dir;

/// Memory that a device which is swapped to keeps ready, if nothing else is said.
const SWAP_RESERVE: &str = "8M";
/// Settings for which a device must know which of its pages are cold.
const NEEDS_LRU: [&str; 3] = ["backing_dev", "recomp_algorithm", "recompress_after"];

/// Where a device's files are, in the runtime directory, unless it is said otherwise.
const MOUNT_DIR: &str = "mnt";

/// The longest read or write of a swap area that comes in one request: a cluster of 32 pages, which is the most that the
/// kernel reclaims or reads ahead at once. What the block layer merges beyond that comes in several; buffers for it would be
/// locked in memory.
const SWAP_IO_BYTES: u32 = 128 << 10;

/// How devices are served as files.
#[derive(clap::Args)]
pub struct FilesArgs {
    /// Within how many microseconds idle CPUs are to wake while requests for files and block devices follow each other
    /// closely, `none` for no matter when; at 0 they poll. Waking CPUs takes longer than the requests, in virtual
    /// machines above all; it needs /dev/cpu_dma_latency [default: 0]
    #[arg(long, value_name = "US")]
    cpu_latency_us: Option<CpuLatencyLimit>,
}

impl FilesArgs {
    /// What they say; if nothing, what `otherwise` does.
    pub fn options(&self, otherwise: Option<CpuLatencyLimit>) -> fuse::MountOptions {
        let cpu_latency = self.cpu_latency_us.or(otherwise).unwrap_or_default();
        fuse::MountOptions { cpu_latency, ..fuse::MountOptions::default() }
    }
}

/// A daemon.
pub struct DaemonPlan {
    /// Where its sockets are.
    pub runtime_dir: PathBuf,
    /// The devices that it has from the start.
    pub devices: Vec<DevicePlan>,
    /// Of those that it could have had but has not, a line for the log.
    pub left_out: Vec<String>,
    /// Where and how it serves NBD.
    pub nbd: nbd::ServerConfig,
    /// Where it shows its devices as files, if that was said.
    pub mount: Option<PathBuf>,
    /// How it serves them.
    pub files: fuse::MountOptions,
    /// A shell command that it runs, and then ends.
    pub exec: Option<String>,
    /// Whether `swap off` ends it.
    pub ends_with_swap: bool,
    /// Whether SIGHUP has it read the files of TLS again, rather than end.
    pub reloads_on_hang_up: bool,
    /// Measure how long `list_lock`s are held.
    pub slab_timing: bool,
}

/// A device.
#[derive(Debug)]
pub struct DevicePlan {
    /// Its name.
    pub name: String,
    /// The attributes to set, in this order.
    pub settings: DeviceSettings,
    /// What it becomes.
    pub attached: Attached,
    /// Whether NBD clients may reach it, and how, as its user says.
    pub export: ExportArgs,
}

/// Who may reach a device over NBD.
#[derive(clap::Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportArgs {
    /// Whether NBD clients may reach the device: true at any time, but for reading only while it is a block device or its
    /// file is open for writing; false never [default: while it is neither]
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    pub export: Option<bool>,
    /// NBD clients may only read it
    #[arg(long)]
    pub read_only: bool,
}

/// What a device becomes, beside an export and a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// Nothing.
    No,
    /// A block device.
    Block,
    /// A block device that is swapped to.
    Swap(SwapPlan),
}

/// A swap area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapPlan {
    /// Its priority; without one, the kernel chooses.
    pub priority: Option<u16>,
    /// Whether the device is told what is freed.
    pub discard: bool,
}

impl DaemonPlan {
    /// A daemon in `runtime_dir` with these devices, and the defaults of everything else.
    ///
    /// # Errors
    /// The directory's path is too long for a socket.
    pub fn new(runtime_dir: PathBuf, devices: Vec<DevicePlan>) -> Result<DaemonPlan> {
        let nbd = nbd::ServerConfig::new(socket_path(&runtime_dir, NBD_SOCKET)?);
        Ok(DaemonPlan {
            runtime_dir,
            devices,
            left_out: Vec::new(),
            nbd,
            mount: None,
            files: fuse::MountOptions::default(),
            exec: None,
            ends_with_swap: false,
            reloads_on_hang_up: false,
            slab_timing: false,
        })
    }

    /// How it serves files: to a swap area, in requests as long as swap makes them.
    pub fn mount_options(&self) -> fuse::MountOptions {
        if self.devices.iter().any(DevicePlan::is_swap) {
            fuse::MountOptions { max_io_bytes: SWAP_IO_BYTES, ..self.files }
        } else {
            self.files
        }
    }

    /// Where it shows its devices as files, if it does: where it was told to, and where it must because a device is
    /// attached.
    pub fn mount_dir(&self) -> Option<PathBuf> {
        let attaches = self.devices.iter().any(|device| device.attached != Attached::No);
        self.mount.clone().or_else(|| attaches.then(|| self.runtime_dir.join(MOUNT_DIR)))
    }

    /// Makes sure that it makes sense, as far as can be said without doing anything of it.
    ///
    /// # Errors
    /// The first thing that makes none.
    pub fn check(&self) -> Result<()> {
        self.nbd.check().map_err(|error| Failure::Usage(format!("cannot serve NBD: {error}")))?;
        self.devices.iter().try_for_each(DevicePlan::check)
    }

    /// Whether something of it is swapped to.
    pub fn swaps(&self) -> bool {
        self.devices.iter().any(DevicePlan::is_swap)
    }
}

impl DevicePlan {
    /// A device that becomes nothing else.
    pub fn new(name: &str, settings: DeviceSettings) -> Self {
        DevicePlan { name: name.to_owned(), settings, attached: Attached::No, export: ExportArgs::default() }
    }

    /// Who may reach it over NBD: one that becomes a block device is one from the start, so that nobody comes before.
    pub fn export_policy(&self) -> ExportPolicy {
        let ExportArgs { export, read_only } = self.export;
        match (self.attached, export) {
            (Attached::No, _) => ExportPolicy { export: export.into(), read_only },
            (_, Some(true)) => ExportPolicy { export: Export::Always, read_only: true },
            _ => ExportPolicy { export: Export::Never, read_only: true },
        }
    }

    /// Makes sure that its settings make sense, as far as they alone say: nothing is made of them, and its backing file
    /// is not looked for.
    ///
    /// # Errors
    /// They make none; a dictionary cannot be read.
    pub fn check(&self) -> Result<()> {
        let device = self.device()?;
        // That one, and those whose turn is later, make something.
        let first_maker = Attribute::turn("backing_dev");
        let early = self.settings.iter().filter(|setting| Attribute::turn(setting.attribute) < first_maker);
        for Setting { origin, attribute, value } in early {
            device.set(attribute, value).map_err(|error| Failure::of(origin, &error))?;
        }
        let Some(disksize) = self.settings.get("disksize") else { return Ok(()) };
        let backing = self.settings.get("backing_dev").map(|setting| setting.value.as_str());
        device
            .check(&disksize.value, backing)
            .map_err(|error| Failure::of(self.blame(&error, disksize), &error))
    }

    /// Makes the device.
    ///
    /// # Errors
    /// It cannot be made so, or not here and now.
    pub fn make(&self) -> Result<Arc<Device>> {
        let device = self.device()?;
        for setting in self.settings.iter() {
            let Setting { origin, attribute, value } = setting;
            if *attribute == "backing_dev" {
                state_dir::make_for(value)
                    .map_err(|failure| failure.map_line(|why| format!("{origin}: {why}")))?;
            }
            device.set(attribute, value).map_err(|error| {
                let origin = self.blame(&error, setting);
                Failure::Line(format!("{origin}: {error}"))
            })?;
        }
        Ok(device)
    }

    /// A device that has no size yet, nor anything that was set for it.
    fn device(&self) -> Result<Arc<Device>> {
        let device = Device::new(&self.name).usage(|| format!("--name {}", self.name))?;
        for (attribute, value) in self.defaults() {
            device.set(attribute, value)?;
        }
        Ok(device)
    }

    /// Where that is written which an error names when `setting` is set: with the size, which makes the disk of all others,
    /// it may be one of these.
    fn blame<'a>(&'a self, error: &uzram::Error, setting: &'a Setting) -> &'a str {
        let is_named = |other: &&Setting| error.setting() == Some(other.attribute);
        let named = self.settings.iter().find(is_named).filter(|_| setting.attribute == "disksize");
        &named.unwrap_or(setting).origin
    }

    /// Whether it is swapped to.
    pub fn is_swap(&self) -> bool {
        matches!(self.attached, Attached::Swap(_))
    }

    /// Attributes that are not the device's defaults because of what it becomes, and nothing else sets.
    pub fn defaults(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let is_set = |attribute: &str| self.settings.get(attribute).is_some();
        let swaps = self.is_swap();
        let reserve = (swaps && !is_set("reserve")).then_some(("reserve", SWAP_RESERVE));
        // It would take memory that is never given back, and tell nobody anything.
        let is_idle = !is_set("lru_design") && !NEEDS_LRU.into_iter().any(is_set);
        let lru = (swaps && is_idle).then_some(("lru_design", "none"));
        reserve.into_iter().chain(lru)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::SettingRow;

    #[test]
    fn a_swap_device_has_a_reserve_and_no_lists_without_use() {
        let defaults = |attached, set: &[&'static str]| {
            let mut settings = DeviceSettings::default();
            for (row, name) in set.iter().filter_map(|attribute| SettingRow::find(attribute)) {
                let value =
                    ["8M", "none"].into_iter().find(|value| settings.add(row, name, value, "").is_ok());
                assert!(value.is_some(), "{name}");
            }
            let plan = DevicePlan { attached, ..DevicePlan::new("a", settings) };
            plan.defaults().map(|(attribute, _)| attribute).collect::<Vec<_>>()
        };
        let swap = Attached::Swap(SwapPlan { priority: None, discard: true });
        assert_eq!(defaults(swap, &[]), ["reserve", "lru_design"]);
        assert_eq!(defaults(swap, &["reserve", "lru_design"]), [""; 0]);
        assert_eq!(defaults(swap, &["backing_dev"]), ["reserve"]);
        assert_eq!(defaults(Attached::Block, &[]), [""; 0]);
    }

    #[test]
    fn requests_are_as_long_as_what_makes_them() {
        let swap = Attached::Swap(SwapPlan { priority: None, discard: true });
        for (attached, max_io_bytes) in [(swap, SWAP_IO_BYTES), (Attached::Block, fuse::MAX_IO_BYTES as u32)]
        {
            let device = DevicePlan { attached, ..DevicePlan::new("a", DeviceSettings::default()) };
            let plan = DaemonPlan::new(PathBuf::from("/run/x"), vec![device]).expect("a short path");
            assert_eq!(plan.mount_options(), fuse::MountOptions { max_io_bytes, ..plan.files });
        }
    }
}
