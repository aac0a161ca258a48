//! `--config FILE.toml`: the devices of a daemon and their uses, in a file.
//!
//! `dist/uzram.toml` is an example with every key. A top-level table is a device of that name, whose keys are
//! settings ([`settings_file`]), also accepted in its table `attributes`, and those for its use:
//! [`USE_KEYS`]. The other top-level keys are options of the daemon: [`TOP_KEYS`].

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use toml::de::DeValue;
use uzram::machine_memory::{self, Memory};
use uzram::units::format_size;
use uzram_serve::fuse::CpuLatencyLimit;
use uzram_serve::nbd::Listen;
use uzram_serve::swap_area::MAX_PRIORITY;

use crate::config::listen_args::{ListenArgs, MAX_CONNECTIONS};
use crate::config::plan::{Attached, DevicePlan, ExportArgs, SwapPlan};
use crate::config::settings::{DeviceSettings, SIZE_WORD, SettingRow, parse_name};
use crate::config::settings_file::{self, GROUPS, Kind};
use crate::config::size_expr;
use crate::config::toml_text::{self, Entry, Source};
use crate::failure::{Context, Failure, Result};
use crate::system::accounts::{parse_group, parse_mode, parse_user};

const DEFAULT_SIZE: &str = "min(ram / 2, 4G)";
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
const USE_KEYS: [&str; 9] = [
    "policy",
    "attributes",
    "attach",
    "export",
    "read-only",
    "swap",
    "swap-priority",
    "swap-discard",
    "host-memory-limit",
];

#[derive(Debug, Default)]
pub struct ConfigFile {
    pub mount: Option<PathBuf>,
    /// The limit on CPU wake-up latency while requests for these files arrive.
    pub cpu_latency: Option<CpuLatencyLimit>,
    /// The settings of the file and of the command line together.
    pub nbd: ListenArgs,
    pub devices: Vec<DevicePlan>,
    /// A log line for each device that `host-memory-limit` excludes on this machine.
    pub left_out: Vec<String>,
}

/// Reads a file; `listen` has the settings of the command line.
pub fn read(path: &Path, listen: ListenArgs) -> Result<ConfigFile> {
    let name = path.display().to_string();
    let text = toml_text::read(path).context(|| name.clone())?;
    parse(Source { name: &name, text: &text }, &machine_memory::read()?, listen)
}

pub fn parse(file: Source<'_>, memory: &Memory, listen: ListenArgs) -> Result<ConfigFile> {
    let mut config = ConfigFile { nbd: listen, ..ConfigFile::default() };
    for entry in toml_text::parse(file)? {
        match entry.dashed().as_str() {
            "mount" => config.mount = Some(entry.path()?),
            "cpu-latency-us" => {
                config.cpu_latency = Some(entry.text()?.parse().map_err(|why| entry.wrong(why))?)
            }
            "listen" => config.nbd.listen.extend(entry.places()?),
            "socket-owner" => entry.once(&mut config.nbd.socket_owner, entry.parsed(parse_user)?)?,
            "socket-group" => entry.once(&mut config.nbd.socket_group, entry.parsed(parse_group)?)?,
            "socket-mode" => entry.once(&mut config.nbd.socket_mode, entry.mode()?)?,
            "tls-cert" => entry.once(&mut config.nbd.tls_cert, entry.path()?)?,
            "tls-key" => entry.once(&mut config.nbd.tls_key, entry.path()?)?,
            "tls-client-ca" => entry.once(&mut config.nbd.tls_client_ca, entry.path()?)?,
            "tls-anyone" => entry.once(&mut config.nbd.tls_anyone, entry.boolean()?)?,
            "max-connections" => {
                entry.once(&mut config.nbd.max_connections, entry.number(MAX_CONNECTIONS)?)?
            }
            _ if entry.value.is_table() => device(entry, memory, &mut config)?,
            _ => {
                let device = "and a table for each device, as in [zram0]";
                return Err(entry.unknown(TOP_KEYS.into_iter().chain([device])));
            }
        }
    }
    if config.devices.is_empty() && config.left_out.is_empty() {
        let why = "it has no device: write a table for each, as in [zram0]";
        return Err(Failure::usage(format!("{}: {why}", file.name)));
    }
    Ok(config)
}

impl Entry<'_> {
    /// Sets what the command line may set, too, but not both.
    fn once<T>(&self, setting: &mut Option<T>, value: T) -> Result<()> {
        let (name, file) = (self.dashed(), self.file.name);
        match setting.replace(value) {
            None => Ok(()),
            Some(_) => {
                Err(Failure::usage(format!("--{name}: {file} sets {name} already: give it in one of them")))
            }
        }
    }

    fn path(&self) -> Result<PathBuf> {
        let path = self.value.as_str().filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| self.wrong("write a path"))?;
        std::path::absolute(path).map_err(|error| self.wrong(error))
    }

    fn parsed<T>(&self, parse: fn(&str) -> std::result::Result<T, String>) -> Result<T> {
        parse(&self.text()?).map_err(|why| self.wrong(why))
    }

    /// Parses permissions, written as a string: TOML would read a number as decimal.
    fn mode(&self) -> Result<u32> {
        let text =
            self.value.as_str().ok_or_else(|| self.wrong("write permissions as a text, as in \"0660\""))?;
        parse_mode(text).map_err(|why| self.wrong(why))
    }

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

    fn most_ram(&self, memory: &Memory) -> Result<(u64, String)> {
        let text = self.text()?;
        let bytes = match text.trim() {
            "none" => Ok(u64::MAX),
            _ => size_expr::read(&text, || Ok(*memory)).map_err(|error| self.wrong(error)),
        };
        Ok((bytes?, text))
    }

    fn number<T: TryFrom<i64>>(&self, range: RangeInclusive<i64>) -> Result<T> {
        let number = self.value.as_integer().and(self.text()?.parse::<i64>().ok());
        let number = number.filter(|number| range.contains(number)).and_then(|number| number.try_into().ok());
        number.ok_or_else(|| self.wrong(format!("write a number from {} to {}", range.start(), range.end())))
    }
}

/// What a device's keys say about swap space.
#[derive(Default)]
struct SwapKeys {
    wanted: Option<bool>,
    priority: Option<u16>,
    discard: Option<bool>,
    /// The position of the last key that needs `swap`.
    how: Option<String>,
}

impl SwapKeys {
    /// Returns the plan, if the device is swap space; a priority alone implies that.
    fn plan(self) -> Result<Option<SwapPlan>> {
        if self.wanted.unwrap_or(self.priority.is_some()) {
            let discard = self.discard.unwrap_or(true);
            return Ok(Some(SwapPlan { priority: self.priority, discard, page_cluster: None }));
        }
        let why = |key| format!("{key}: the device is not swap space: write swap = true");
        self.how.map_or(Ok(None), |key| Err(Failure::usage(why(key))))
    }
}

/// Adds a device, or a line to `left_out` if the machine has more memory than its `host-memory-limit`.
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
            "attributes" => {
                for key in key.table()? {
                    settings_file::read(&mut settings, key, "attributes.", Kind::Attributes)?;
                }
            }
            "policy" => policy = settings_file::read_policy(&key.place(), &key.path()?)?,
            "attach" => attach = Some((key.boolean()?, key)),
            "export" => export.export = Some(key.boolean()?),
            "read-only" => export.read_only = key.boolean()?,
            "swap" => swap.wanted = Some(key.boolean()?),
            "swap-priority" => {
                swap.priority = Some(key.number(0..=i64::from(MAX_PRIORITY))?);
                swap.how = Some(key.place());
            }
            "swap-discard" => {
                swap.discard = Some(key.boolean()?);
                swap.how = Some(key.place());
            }
            "host-memory-limit" => most_ram = Some(key.most_ram(memory)?),
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
    let settings = settings.complete(policy, "", matches!(attached, Attached::Swap(_)))?;
    match most_ram {
        Some((most_bytes, most)) if memory.ram_bytes > most_bytes => {
            let has = format_size(memory.ram_bytes);
            let why =
                format!("the machine has {has}, more than its host-memory-limit, {}", most.escape_debug());
            config.left_out.push(format!("no device {name}: {why}"));
        }
        _ => config.devices.push(DevicePlan { attached, export, ..DevicePlan::new(&name, settings) }),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
