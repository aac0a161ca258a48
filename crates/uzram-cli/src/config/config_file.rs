//! `--config FILE.toml`: the devices of a daemon, and what they are used for, in a file.
//!
//! `dist/uzram.toml` is an example with all that can be in one. A table at the top is a device, named as the device.
//! Its keys are the settings of a device ([`settings_file`]), also in a table `attributes` in it, and those that say what
//! the device is used for: [`USE_KEYS`]. The other keys at the top are options of the daemon, by their names: [`TOP_KEYS`].

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use toml::de::DeValue;
use uzram::machine_memory::{self, Memory};
use uzram::units::{format_size, parse_size};
use uzram_serve::fuse::CpuLatencyLimit;
use uzram_serve::nbd::Listen;
use uzram_serve::swap_area::MAX_PRIORITY;

use crate::config::listen_args::{ListenArgs, MAX_CONNECTIONS};
use crate::config::plan::{Attached, DevicePlan, ExportArgs, SwapPlan};
use crate::config::policy_file;
use crate::config::settings::{DeviceSettings, SIZE_WORD, SettingRow, parse_name};
use crate::config::settings_file::{self, GROUPS, Kind};
use crate::config::size_expr;
use crate::config::toml_text::{self, Entry, Source};
use crate::failure::{Context, Failure, Result};
use crate::system::accounts::{parse_group, parse_mode, parse_user};

/// The size of a device that has none in the file.
const DEFAULT_SIZE: &str = "min(ram / 2, 4G)";
/// Keys at the top, besides devices.
const TOP_KEYS: [&str; 11] = [
    "mount",
    "cpu-latency-us",
    "listen",
    "socket-owner",
    "socket-group",
    "socket-mode",
    "tls-cert",
    "tls-key",
    "tls-client-ca",
    "tls-anyone",
    "max-connections",
];
/// Keys of a device, besides its options.
const USE_KEYS: [&str; 9] =
    [POLICY, ATTRIBUTES, ATTACH, EXPORT, READ_ONLY, SWAP, SWAP_PRIORITY, SWAP_DISCARD, HOST_MEMORY_LIMIT];
const POLICY: &str = "policy";
const ATTRIBUTES: &str = "attributes";
const ATTACH: &str = "attach";
const EXPORT: &str = "export";
const READ_ONLY: &str = "read-only";
const SWAP: &str = "swap";
const SWAP_PRIORITY: &str = "swap-priority";
const SWAP_DISCARD: &str = "swap-discard";
const HOST_MEMORY_LIMIT: &str = "host-memory-limit";

/// What a file says.
#[derive(Debug, Default)]
pub struct ConfigFile {
    /// Where the devices' files are to be, an absolute path.
    pub mount: Option<PathBuf>,
    /// How fast CPUs are to wake for requests for them.
    pub cpu_latency: Option<CpuLatencyLimit>,
    /// Where and how to serve NBD.
    pub nbd: ListenArgs,
    /// The devices, in the file's order.
    pub devices: Vec<DevicePlan>,
    /// Of those that are not for a machine with so much memory, a line for the log.
    pub left_out: Vec<String>,
}

/// Reads a file, for the machine that this is.
///
/// # Errors
/// It cannot be read, or makes no sense: which file and line.
pub fn read(path: &Path) -> Result<ConfigFile> {
    let name = path.display().to_string();
    let text = toml_text::read(path).context(|| name.clone())?;
    parse(Source { name: &name, text: &text }, &machine_memory::read()?)
}

/// What a file's text says, for a machine with so much memory.
///
/// # Errors
/// It makes no sense: which line.
pub fn parse(file: Source<'_>, memory: &Memory) -> Result<ConfigFile> {
    let mut config = ConfigFile::default();
    for entry in toml_text::parse(file)? {
        match entry.dashed().as_str() {
            "mount" => config.mount = Some(entry.path()?),
            "cpu-latency-us" => config.cpu_latency = Some(entry.cpu_latency()?),
            "listen" => config.nbd.listen = entry.places()?,
            "socket-owner" => config.nbd.socket_owner = Some(entry.parsed(parse_user)?),
            "socket-group" => config.nbd.socket_group = Some(entry.parsed(parse_group)?),
            "socket-mode" => config.nbd.socket_mode = Some(entry.mode()?),
            "tls-cert" => config.nbd.tls_cert = Some(entry.path()?),
            "tls-key" => config.nbd.tls_key = Some(entry.path()?),
            "tls-client-ca" => config.nbd.tls_client_ca = Some(entry.path()?),
            "tls-anyone" => config.nbd.tls_anyone = Some(entry.boolean()?),
            "max-connections" => config.nbd.max_connections = Some(entry.number(MAX_CONNECTIONS)?),
            _ if entry.value.is_table() => device(entry, memory, &mut config)?,
            _ => {
                let device = "and a table for each device, as in [zram0]";
                return Err(entry.unknown(TOP_KEYS.into_iter().chain([device])));
            }
        }
    }
    if config.devices.is_empty() && config.left_out.is_empty() {
        return Err(Failure::Usage(format!(
            "{}: there is no device in it: write a table for each, as in [zram0]",
            file.name
        )));
    }
    Ok(config)
}

/// Values of keys that are no settings of a device.
impl Entry<'_> {
    fn path(&self) -> Result<PathBuf> {
        let path = self.value.as_str().filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| self.wrong("write a path"))?;
        std::path::absolute(path).map_err(|error| self.wrong(error))
    }

    fn cpu_latency(&self) -> Result<CpuLatencyLimit> {
        self.text()?.parse().map_err(|error| self.wrong(error))
    }

    fn parsed<T>(&self, parse: fn(&str) -> std::result::Result<T, String>) -> Result<T> {
        parse(&self.text()?).map_err(|why| self.wrong(why))
    }

    /// Permissions. A number would be another in another notation.
    fn mode(&self) -> Result<u32> {
        let text =
            self.value.as_str().ok_or_else(|| self.wrong("write permissions as a text, as in \"0660\""))?;
        parse_mode(text).map_err(|why| self.wrong(why))
    }

    /// One place to listen at, or an array of them.
    fn places(&self) -> Result<Vec<Listen>> {
        let place = |value: &DeValue<'_>| {
            let text = value.as_str().ok_or_else(|| self.wrong("write a place or an array of places"))?;
            text.parse().map_err(|error| self.wrong(error))
        };
        match &self.value {
            DeValue::Array(places) => places.iter().map(|value| place(value.get_ref())).collect(),
            value => Ok(vec![place(value)?]),
        }
    }

    /// The most memory of a machine on which the device is made, and how it is written.
    fn most_ram(&self, memory: &Memory) -> Result<(u64, String)> {
        let text = self.text()?;
        let bytes = if text.trim() == "none" { u64::MAX } else { self.size(&text, memory)? };
        Ok((bytes, text))
    }

    /// A whole number within a range.
    fn number<T: TryFrom<i64>>(&self, range: RangeInclusive<i64>) -> Result<T> {
        let number = self.value.as_integer().and(self.text()?.parse::<i64>().ok());
        let number = number.filter(|number| range.contains(number)).and_then(|number| number.try_into().ok());
        number.ok_or_else(|| self.wrong(format!("write a number from {} to {}", range.start(), range.end())))
    }

    /// A size that is no attribute's.
    fn size(&self, text: &str, memory: &Memory) -> Result<u64> {
        match settings_file::size(self, text, memory)? {
            Some(bytes) => Ok(bytes),
            None => parse_size(text).map_err(|error| self.wrong(error)),
        }
    }
}

/// What a device's keys say about swap space.
#[derive(Default)]
struct SwapKeys {
    wanted: Option<bool>,
    priority: Option<u16>,
    discard: Option<bool>,
    /// The last key that says how.
    how: Option<String>,
}

impl SwapKeys {
    /// A priority alone wants it, too.
    fn plan(self) -> Result<Option<SwapPlan>> {
        if self.wanted.unwrap_or(self.priority.is_some()) {
            let discard = self.discard.unwrap_or(true);
            return Ok(Some(SwapPlan { priority: self.priority, discard }));
        }
        match self.how {
            Some(key) => {
                Err(Failure::Usage(format!("{key}: the device is no swap space: write {SWAP} = true")))
            }
            None => Ok(None),
        }
    }
}

/// Adds a device, unless the machine has more memory than it is for.
fn device(entry: Entry<'_>, memory: &Memory, config: &mut ConfigFile) -> Result<()> {
    let name = parse_name(&entry.key).map_err(|why| entry.file.failure(&entry.key_span, why))?;
    let line = entry.file.at(&entry.key_span);
    let kind = Kind::Config(memory);
    let (mut settings, mut policy) = (DeviceSettings::default(), DeviceSettings::default());
    let mut swap = SwapKeys::default();
    let (mut attach, mut most_ram) = (None, None);
    let mut export = ExportArgs::default();
    for key in entry.table()? {
        match key.dashed().as_str() {
            ATTRIBUTES => {
                let within = format!("{ATTRIBUTES}.");
                key.table()?
                    .into_iter()
                    .try_for_each(|key| settings_file::read(&mut settings, key, &within, Kind::Attributes))?;
            }
            POLICY => policy = policy_file::read(&key.place(), &key.path()?)?,
            ATTACH => attach = Some((key.boolean()?, key)),
            EXPORT => export.export = Some(key.boolean()?),
            READ_ONLY => export.read_only = key.boolean()?,
            SWAP => swap.wanted = Some(key.boolean()?),
            SWAP_PRIORITY => {
                swap.priority = Some(key.number(0..=i64::from(MAX_PRIORITY))?);
                swap.how = Some(key.place());
            }
            SWAP_DISCARD => {
                swap.discard = Some(key.boolean()?);
                swap.how = Some(key.place());
            }
            HOST_MEMORY_LIMIT => most_ram = Some(key.most_ram(memory)?),
            _ if SettingRow::find(&key.key).is_some() || GROUPS.contains(&key.key.as_ref()) => {
                settings_file::read(&mut settings, key, "", kind)?;
            }
            _ => return Err(key.unknown(kind.names().chain(USE_KEYS))),
        }
    }
    if settings.get("disksize").is_none() {
        let origin = format!("{line}: {SIZE_WORD}");
        let bytes = size_expr::evaluate(DEFAULT_SIZE, memory).usage(|| origin.clone())?;
        settings.add_size(&bytes.to_string(), &origin)?;
    }
    let attached = match (swap.plan()?, attach) {
        (Some(_), Some((false, key))) => return Err(key.wrong("swap space is a block device")),
        (Some(swap), _) => Attached::Swap(swap),
        (None, Some((true, _))) => Attached::Block,
        (None, _) => Attached::No,
    };
    let settings = settings.complete(policy, "")?;
    match most_ram {
        Some((most_bytes, most)) if memory.ram_bytes > most_bytes => {
            let has = format_size(memory.ram_bytes);
            let why =
                format!("the machine has {has}, more than its {HOST_MEMORY_LIMIT}, {}", most.escape_debug());
            config.left_out.push(format!("no device {name}: {why}"));
        }
        _ => config.devices.push(DevicePlan { name, settings, attached, export }),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
