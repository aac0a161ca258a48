//! A daemon's plan: which devices to serve, and how.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uzram::codec::Kind;
use uzram::device::{Attribute, Device, Keeper, NamedBacking};
use uzram_serve::fuse::CpuLatencyLimit;
use uzram_serve::{Export, ExportPolicy, fuse, nbd};

use crate::config::settings::{DeviceSettings, Setting, switches_off};
use crate::failure::{Context, Failure, Result};
use crate::system::path_inside::is_inside;
use crate::system::runtime_dir::{NBD_SOCKET, socket_path};
use crate::system::state_dir;

/// The default `reserve` of a device used for swap.
pub const SWAP_RESERVE_BYTES: u64 = 8 << 20;
/// How pages of a device used for swap are recompressed, and when.
const SWAP_RECOMPRESSION: [(&str, &str); 2] =
    [("recomp_algorithm", "algo=zstd:3"), ("recompress_after", "10m")];
/// Settings that need an LRU, as pages are written back or recompressed when memory is short.
const NEEDS_LRU: [&str; 2] = ["backing_dev", "recomp_algorithm"];

/// The default mount point of the devices' files, in the runtime directory.
const MOUNT_DIR: &str = "mnt";

/// The longest request to a swap area: a cluster of 32 pages, the most that the kernel reclaims or reads
/// ahead at once. The block layer splits larger merged requests; buffers for them would be locked in memory.
const SWAP_IO_BYTES: u32 = 128 << 10;

/// Why no process takes over where memory is charged in advance.
const TAKES_OVER: &str = "a process that takes over would charge memory, and wait for pages that only it can write out. The \
                          daemon's memory cgroup is of version 1 and has a limit: give it CAP_SYS_RESOURCE";

const GIVE_UP_AFTER: Duration = Duration::from_secs(10);

/// How devices are served as files.
#[derive(clap::Args)]
pub struct FilesArgs {
    /// Limit the wake-up latency of idle CPUs to so many microseconds while requests for files and block
    /// devices follow each other closely; at 0 CPUs poll, `none` sets no limit. Waking a CPU takes longer
    /// than a request, above all in a virtual machine. Needs /dev/cpu_dma_latency [default: 0]
    #[arg(long, value_name = "US")]
    cpu_latency_us: Option<CpuLatencyLimit>,
}

impl FilesArgs {
    /// Returns the mount options; `otherwise` applies if the option was not given.
    pub fn options(&self, otherwise: Option<CpuLatencyLimit>) -> fuse::MountOptions {
        let cpu_latency = self.cpu_latency_us.or(otherwise).unwrap_or_default();
        fuse::MountOptions { cpu_latency, resend: may_resend(), ..fuse::MountOptions::default() }
    }
}

/// Returns whether the kernel may be asked to send requests again: not in tests of what is done on older
/// kernels, which set `UZRAM_NO_RESEND`, in debug builds.
fn may_resend() -> bool {
    !cfg!(debug_assertions) || std::env::var_os("UZRAM_NO_RESEND").is_none()
}

/// Whether a daemon outlives the process that serves.
#[derive(clap::Args)]
pub struct SurviveArgs {
    /// Have no process ready to take over when the one that serves dies: contents are lost then, and programs
    /// that swap to them die, too
    #[arg(long)]
    no_survive: bool,
    /// How long requests for files and block devices wait before they fail, if the processes that serve die
    /// of them again and again
    #[arg(long, value_name = "SECONDS", default_value_t = GIVE_UP_AFTER.as_secs(), conflicts_with = "no_survive")]
    give_up_after: u64,
}

impl SurviveArgs {
    #[must_use]
    pub fn applied_to(&self, plan: DaemonPlan) -> DaemonPlan {
        let give_up_after = Duration::from_secs(self.give_up_after);
        DaemonPlan { survives: !self.no_survive, give_up_after, ..plan }
    }
}

pub struct DaemonPlan {
    pub runtime_dir: PathBuf,
    pub devices: Vec<DevicePlan>,
    /// A log line for each device that is not for this machine.
    pub left_out: Vec<String>,
    pub nbd: nbd::ServerConfig,
    pub mount: Option<PathBuf>,
    pub files: fuse::MountOptions,
    /// A shell command to run; the daemon ends with it.
    pub exec: Option<String>,
    /// Whether `swap off` ends the daemon.
    pub ends_with_swap: bool,
    /// Whether SIGHUP reloads the TLS files instead of ending the daemon.
    pub reloads_on_hang_up: bool,
    /// Whether contents and service outlive the process that serves.
    pub survives: bool,
    /// How long requests for files wait before they fail, when all that serve them die.
    pub give_up_after: Duration,
    pub charging: Charging,
}

/// When the memory of a daemon that shows files is charged to its memory cgroup (`daemon::memory_cgroup`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Charging {
    /// When it is used.
    #[default]
    AsUsed,
    /// Before files are served.
    InAdvance,
    /// When it is used, though it should be charged in advance. The reason why it is not.
    Unsafe(String),
}

#[derive(Debug)]
pub struct DevicePlan {
    pub name: String,
    pub settings: DeviceSettings,
    pub attached: Attached,
    pub export: ExportArgs,
    /// What is charged in advance for its contents, if anything is: its reserve, unless that is set.
    pub advance_bytes: Option<u64>,
}

/// NBD access to a device.
#[derive(clap::Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportArgs {
    /// Whether NBD clients may open the device: true for always, but read-only while it is a block device or
    /// its file is open for writing; false for never [default: only while it is neither]
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    pub export: Option<bool>,
    /// Export the device read-only over NBD
    #[arg(long)]
    pub read_only: bool,
}

/// What a device becomes, besides an export and a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    No,
    Block,
    Swap(SwapPlan),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapPlan {
    /// Its priority; if `None`, the kernel chooses.
    pub priority: Option<u16>,
    /// Whether the kernel discards freed swap slots.
    pub discard: bool,
    /// The machine's `vm.page-cluster` as long as it is on; if `None`, that stays as it is.
    pub page_cluster: Option<u8>,
}

impl DaemonPlan {
    /// Creates the plan of a daemon in `runtime_dir` with these devices and defaults for everything else.
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
            survives: true,
            give_up_after: GIVE_UP_AFTER,
            charging: Charging::default(),
        })
    }

    /// Returns how the daemon serves files; with a swap area, requests are limited to [`SWAP_IO_BYTES`].
    pub fn mount_options(&self) -> fuse::MountOptions {
        let max_io_bytes = if self.swaps() { SWAP_IO_BYTES } else { self.files.max_io_bytes };
        let refuses_shared_mappings = self.attach_refused().is_some();
        let starts_no_threads = self.charging == Charging::InAdvance;
        fuse::MountOptions { max_io_bytes, refuses_shared_mappings, starts_no_threads, ..self.files }
    }

    /// Returns the mount point, if the daemon mounts its files: by default if a device is to be attached.
    pub fn mount_dir(&self) -> Option<PathBuf> {
        let attaches = self.devices.iter().any(|device| device.attached != Attached::No);
        self.mount.clone().or_else(|| attaches.then(|| self.runtime_dir.join(MOUNT_DIR)))
    }

    /// Validates the plan, as far as possible without carrying it out.
    pub fn check(&self) -> Result<()> {
        self.nbd.check().usage(|| "cannot serve NBD")?;
        self.devices.iter().try_for_each(|device| {
            device.check()?;
            self.mount_dir().map_or(Ok(()), |dir| device.check_beside(&dir))
        })
    }

    /// Returns why no device but planned swap areas may become a block device, if none may.
    pub fn attach_refused(&self) -> Option<String> {
        match &self.charging {
            Charging::Unsafe(why) => Some(why.clone()),
            Charging::InAdvance if self.survives => {
                Some(format!("{TAKES_OVER}; or start it with --no-survive"))
            }
            _ => None,
        }
    }

    /// Returns why a device cannot outlive the process that serves, if one cannot.
    pub fn mortal(&self) -> Option<String> {
        // The pages of swap areas are written out a few at a time, and those of file systems all at once.
        if self.charging == Charging::InAdvance && !self.devices.iter().all(DevicePlan::is_swap) {
            return Some(TAKES_OVER.to_owned());
        }
        self.devices.iter().find_map(|device| {
            let why = device.checked_device().ok()?.can_survive().err()?;
            Some(format!("{}: {why}", device.name))
        })
    }

    pub fn swaps(&self) -> bool {
        self.devices.iter().any(DevicePlan::is_swap)
    }

    /// Returns whether threads that serve must not wait for memory.
    pub fn is_protected(&self) -> bool {
        self.swaps() || self.charging == Charging::InAdvance
    }
}

impl DevicePlan {
    pub fn new(name: &str, settings: DeviceSettings) -> Self {
        let (attached, export) = (Attached::No, ExportArgs::default());
        DevicePlan { name: name.to_owned(), settings, attached, export, advance_bytes: None }
    }

    /// A device to be attached is restricted from the start, so that no NBD client opens it first.
    pub fn export_policy(&self) -> ExportPolicy {
        let ExportArgs { export, read_only } = self.export;
        match (self.attached, export) {
            (Attached::No, _) => ExportPolicy { export: export.into(), read_only },
            (_, Some(true)) => ExportPolicy { export: Export::Always, read_only: true },
            _ => ExportPolicy { export: Export::Never, read_only: true },
        }
    }

    /// Validates the settings by themselves: creates no disk, and does not look for the backing file.
    pub fn check(&self) -> Result<()> {
        let device = self.checked_device()?;
        let Some(disksize) = self.settings.get("disksize") else { return Ok(()) };
        let backing = self.settings.get("backing_dev");
        let is_elsewhere = |backing: &&Setting| NamedBacking::is_elsewhere(&backing.value);
        if let Some(setting) = backing.filter(|_| self.is_swap()).filter(is_elsewhere) {
            let why = "a swap area cannot use a store on other machines: to reach it takes memory, which only the swap \
                       area can free then. Use a file or a block device";
            return Err(Failure::usage(format!("{}: {why}", setting.origin)));
        }
        let checked = device.check(&disksize.value, backing.map(|setting| setting.value.as_str()));
        checked.map_err(|error| Failure::of(self.blame(&error, disksize), &error))
    }

    /// Checks that no backing file lies where the devices' files are mounted: they would hide it, and to open
    /// it would wait for this daemon.
    fn check_beside(&self, mount_dir: &Path) -> Result<()> {
        let Some(Setting { origin, value, .. }) = self.settings.get("backing_dev") else { return Ok(()) };
        match NamedBacking::paths(value).find(|path| is_inside(path, mount_dir)) {
            None => Ok(()),
            Some(path) => Err(Failure::usage(format!(
                "{origin}: '{}' lies in '{}', where the devices' files are mounted; choose another place",
                path.display(),
                mount_dir.display()
            ))),
        }
    }

    /// Creates a device with those settings that have no side effects, and no size.
    fn checked_device(&self) -> Result<Arc<Device>> {
        let device = self.device()?;
        // Setting `backing_dev`, and attributes with a later turn, has side effects.
        let first_maker = Attribute::turn("backing_dev");
        let early = self.settings.iter().filter(|setting| Attribute::turn(setting.attribute) < first_maker);
        for Setting { origin, attribute, value } in early {
            let failed = |error: uzram::Error| Failure::of(origin, &error).with_setting(Some(*attribute));
            device.set(attribute, value).map_err(failed)?;
        }
        Ok(device)
    }

    /// Creates the device. With a keeper, its contents outlive this process.
    pub fn make(&self, keeper: Option<Arc<dyn Keeper>>) -> Result<Arc<Device>> {
        let device = self.device()?;
        keeper.map(|keeper| device.set_keeper(keeper)).transpose()?;
        for setting in self.settings.iter() {
            let Setting { origin, attribute, value } = setting;
            if *attribute == "backing_dev" {
                NamedBacking::split_parts(value).try_for_each(state_dir::make_for).context(|| origin)?;
            }
            device.set(attribute, value).map_err(|error| {
                let failure = Failure::line(format!("{}: {error}", self.blame(&error, setting)));
                failure.with_setting(error.setting().or(Some(*attribute)))
            })?;
        }
        Ok(device)
    }

    /// Creates a device without a size, with this plan's defaults and none of its settings.
    fn device(&self) -> Result<Arc<Device>> {
        let device = Device::new(&self.name).usage(|| format!("--name {}", self.name))?;
        for (attribute, value) in self.defaults() {
            device.set(attribute, &value)?;
        }
        Ok(device)
    }

    /// Returns the origin of the setting to blame when setting `setting` failed. Setting the size creates the
    /// disk from all other settings, so its error may name one of them.
    fn blame<'a>(&'a self, error: &uzram::Error, setting: &'a Setting) -> &'a str {
        let is_named = |other: &&Setting| error.setting() == Some(other.attribute);
        let named = self.settings.iter().find(is_named).filter(|_| setting.attribute == "disksize");
        &named.unwrap_or(setting).origin
    }

    pub fn is_swap(&self) -> bool {
        self.swap().is_some()
    }

    pub fn swap(&self) -> Option<SwapPlan> {
        if let Attached::Swap(swap) = self.attached { Some(swap) } else { None }
    }

    /// Returns attributes whose defaults differ because of the device's use, unless they are set.
    pub fn defaults(&self) -> impl Iterator<Item = (&'static str, Cow<'static, str>)> {
        let is_set = |attribute: &str| self.settings.get(attribute).is_some();
        let swaps = self.is_swap();
        let reserve_bytes = self.advance_bytes.or(swaps.then_some(SWAP_RESERVE_BYTES));
        let bytes = reserve_bytes.map(|bytes| Cow::from(bytes.to_string()));
        let limit = bytes.clone().filter(|_| !swaps).map(|bytes| ("mem_limit", bytes));
        let reserve = bytes.map(|bytes| ("reserve", bytes));
        // An LRU that nothing uses would only take memory.
        let is_idle = reserve_bytes.is_some() && !NEEDS_LRU.into_iter().any(is_set);
        let lru = is_idle.then_some(("lru_enable", "0".into()));
        let recompresses = swaps && self.advance_bytes.is_none() && self.settings.recompresses_swap();
        let recompression = SWAP_RECOMPRESSION.into_iter().filter(move |_| recompresses);
        let recompression = recompression.map(|(name, value)| (name, value.into()));
        // What is swapped out is programs' memory.
        let algorithm = swaps.then(|| ("comp_algorithm", Kind::for_memory().name().into()));
        let all = algorithm.into_iter().chain(limit).chain(reserve).chain(lru).chain(recompression);
        all.filter(move |(name, _)| !is_set(name))
    }

    /// Returns the setting that asks for writeback or recompression, if one does.
    pub fn reclaims_by(&self) -> Option<&Setting> {
        // Those of a swap area without an algorithm are for the one that it has by default.
        let asks = |setting: &&Setting| {
            ["recompress_after", "recompress_cpu"].contains(&setting.attribute)
                || is_reclaim(setting.attribute, &setting.value)
        };
        self.settings.iter().find(asks)
    }
}

/// Returns whether with this value of an attribute pages are written back or recompressed.
pub fn is_reclaim(attribute: &str, value: &str) -> bool {
    NEEDS_LRU.contains(&attribute) && !switches_off(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::SettingRow;

    const SWAP: Attached = Attached::Swap(SwapPlan { priority: None, discard: true, page_cluster: None });

    fn plan(attached: Attached, advance_bytes: Option<u64>) -> DaemonPlan {
        let device =
            DevicePlan { attached, advance_bytes, ..DevicePlan::new("a", DeviceSettings::default()) };
        DaemonPlan::new(PathBuf::from("/run/x"), vec![device]).expect("a short path")
    }

    fn defaults(device: &DevicePlan) -> Vec<(&'static str, Cow<'static, str>)> {
        device.defaults().collect()
    }

    #[test]
    fn a_swap_device_has_a_reserve_and_no_lists_without_use() {
        let names = |attached, advance_bytes, set: &[&'static str]| {
            let mut device = plan(attached, advance_bytes).devices.remove(0);
            for (row, name) in set.iter().filter_map(|attribute| SettingRow::find(attribute)) {
                let mut values = ["8M", "none", "0"].into_iter();
                let value = values.find(|value| device.settings.add(row, name, value, "").is_ok());
                assert!(value.is_some(), "{name}");
            }
            defaults(&device).into_iter().map(|(attribute, _)| attribute).collect::<Vec<_>>()
        };
        let recompression = ["recomp_algorithm", "recompress_after"];
        let and = |defaults: &[&'static str]| [defaults, &recompression].concat();
        assert_eq!(names(SWAP, None, &[]), and(&["comp_algorithm", "reserve", "lru_enable"]));
        assert_eq!(names(SWAP, None, &["reserve", "lru_enable"]), and(&["comp_algorithm"]));
        assert_eq!(names(SWAP, None, &["backing_dev"]), ["comp_algorithm", "reserve"]);
        assert_eq!(names(Attached::Block, None, &[]), [""; 0]);
        let in_advance = names(SWAP, Some(SWAP_RESERVE_BYTES), &[]);
        assert_eq!(in_advance, ["comp_algorithm", "reserve", "lru_enable"], "nothing is compressed again");
    }

    #[test]
    fn a_device_charged_in_advance_has_a_reserve_of_all_of_its_memory() {
        let plan = plan(Attached::Block, Some(8 << 20));
        let wanted = [("mem_limit", "8388608"), ("reserve", "8388608"), ("lru_enable", "0")];
        assert_eq!(defaults(&plan.devices[0]), wanted.map(|(name, value)| (name, value.into())));
        assert!(plan.mortal().is_none() && !plan.is_protected());
        let plan = DaemonPlan { charging: Charging::InAdvance, ..plan };
        assert!(plan.mortal().is_some_and(|why| why.contains("version 1")) && plan.is_protected());
        assert!(plan.attach_refused().is_some_and(|why| why.contains("--no-survive")));
        let plan = DaemonPlan { survives: false, ..plan };
        assert!(plan.mount_options().starts_no_threads && !plan.mount_options().refuses_shared_mappings);
        let plan = DaemonPlan { charging: Charging::Unsafe("why".to_owned()), ..plan };
        assert!(plan.mount_options().refuses_shared_mappings && !plan.is_protected());
        assert_eq!(plan.attach_refused().as_deref(), Some("why"));
    }

    #[test]
    fn requests_are_as_long_as_what_makes_them() {
        for (attached, max_io_bytes) in [(SWAP, SWAP_IO_BYTES), (Attached::Block, fuse::MAX_IO_BYTES as u32)]
        {
            let plan = plan(attached, None);
            assert_eq!(plan.mount_options(), fuse::MountOptions { max_io_bytes, ..plan.files });
        }
    }
}
