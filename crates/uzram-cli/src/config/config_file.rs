//! `--config FILE.toml`: the devices of a daemon, and what they are used for, in a file.
//!
//! `dist/uzram.toml` is an example with all that can be in one. A table at the top is a device, named as the device.
//! Its keys are the options of `uzram up` that make a device, by their names and with their meaning: they are read by
//! the very parser of the command line. Those that take a SIZE also take an expression, such as `min(ram / 2, 4G)`
//! ([`uzram::size_expr`]). The table `attributes` in it sets the device's attributes by their own names. A few
//! keys more say what the device is used for: [`USE_KEYS`]. The other keys at the top are options of the daemon, by their
//! names: [`TOP_KEYS`].

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt::Display;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args, FromArgMatches};
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use uzram::device::Device;
use uzram::machine_memory;
use uzram::named::hint;
use uzram::size_expr::{self, Memory};
use uzram::units::{format_size, parse_size};
use uzram_serve::fuse::CpuLatencyLimit;
use uzram_serve::nbd::Listen;
use uzram_serve::swap_area::MAX_PRIORITY;

use crate::config::listen_args::{ListenArgs, MAX_CONNECTIONS};
use crate::config::plan::{Attached, DevicePlan, ExportArgs, SwapPlan};
use crate::config::settings::{DeviceArgs, Origin, Setting, parse_name};
use crate::config::toml_text::{self, Source, Text};
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
const USE_KEYS: [&str; 8] =
    [ATTRIBUTES, ATTACH, EXPORT, READ_ONLY, SWAP, SWAP_PRIORITY, SWAP_DISCARD, HOST_MEMORY_LIMIT];
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
    let table = DeTable::parse(file.text).map_err(|error| file.parser_failure(&error))?;
    let mut config = ConfigFile::default();
    for entry in entries(file, table.into_inner()) {
        match entry.key.as_ref() {
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

/// A key and its value.
struct Entry<'a> {
    file: Source<'a>,
    key: Cow<'a, str>,
    key_span: Range<usize>,
    value: DeValue<'a>,
    value_span: Range<usize>,
}

/// What a table has, in the file's order.
fn entries<'a>(file: Source<'a>, table: DeTable<'a>) -> Vec<Entry<'a>> {
    let mut entries: Vec<_> = table
        .into_iter()
        .map(|(key, value)| Entry {
            file,
            key_span: key.span(),
            key: key.into_inner(),
            value_span: value.span(),
            value: value.into_inner(),
        })
        .collect();
    entries.sort_by_key(|entry| entry.key_span.start);
    entries
}

impl<'a> Entry<'a> {
    fn unknown<'n>(&self, known: impl Iterator<Item = &'n str>) -> Failure {
        let known: Vec<_> = known.collect();
        self.file.failure(&self.key_span, format!("unknown key `{}`; {}", self.key, hint(&self.key, &known)))
    }

    /// File, line and key.
    fn place(&self) -> String {
        format!("{}: {}", self.file.at(&self.key_span), self.key)
    }

    fn wrong(&self, why: impl Display) -> Failure {
        Failure::Usage(format!("{}: {why}", self.place()))
    }

    /// The value as attributes take it.
    fn text(&self) -> Result<String> {
        let value = Spanned::new(self.value_span.clone(), self.value.clone());
        let text = Text::deserialize(ValueDeserializer::from(value));
        text.map(|Text(text)| text).map_err(|error| self.wrong(error.message()))
    }

    fn boolean(&self) -> Result<bool> {
        self.value.as_bool().ok_or_else(|| self.wrong("write true or false"))
    }

    fn table(self) -> Result<Vec<Entry<'a>>> {
        match self.value {
            DeValue::Table(table) => Ok(entries(self.file, table)),
            _ => Err(self.wrong("it is a table")),
        }
    }

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

    /// A size, plain or an expression. Plain ones are what they are on a command line, but have a unit, unless they are
    /// 0: what copies zram-generator's configuration means MiB.
    fn size(&self, text: &str, memory: &Memory) -> Result<u64> {
        match parse_size(text) {
            Ok(bytes) if bytes == 0 || !text.trim_end().ends_with(|c: char| c.is_ascii_digit()) => Ok(bytes),
            _ => size_expr::evaluate(text, memory).map_err(|error| self.wrong(error)),
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

    /// The attribute that the key names, and its value, which the device will check.
    fn attribute(&self) -> Result<Setting> {
        let rows = Device::attributes();
        let name = self.key.as_ref();
        let Some(row) = rows.iter().find(|row| row.name == name) else {
            return Err(self.unknown(rows.iter().filter(|row| row.writable()).map(|row| row.name)));
        };
        if !row.writable() {
            return Err(self.wrong("it can only be read"));
        }
        let origin = format!("{}: {ATTRIBUTES}.{name}", self.file.at(&self.key_span));
        Ok(Setting { origin, attribute: row.name, value: self.text()? })
    }
}

/// The options of a device that a file has, as words of a command line.
struct Options<'m> {
    parser: clap::Command,
    memory: &'m Memory,
    words: Vec<String>,
    /// In which line each is.
    lines: BTreeMap<String, String>,
}

impl<'m> Options<'m> {
    fn new(memory: &'m Memory) -> Self {
        let command = clap::Command::new("device").no_binary_name(true).disable_help_flag(true);
        Options {
            parser: DeviceArgs::augment_args(command),
            memory,
            words: Vec::new(),
            lines: BTreeMap::new(),
        }
    }

    fn has(&self, option: &str) -> bool {
        self.lines.contains_key(option)
    }

    /// Adds an option, if the value makes sense.
    fn add(&mut self, entry: &Entry<'_>) -> Result<()> {
        let name = entry.key.as_ref();
        let Some(argument) = self.parser.get_arguments().find(|argument| argument.get_long() == Some(name))
        else {
            let options = self.parser.get_arguments().filter_map(clap::Arg::get_long);
            return Err(entry.unknown(options.chain(USE_KEYS)));
        };
        let value_name = argument.get_value_names().and_then(|names| names.first()).map(|name| name.as_str());
        let word = match argument.get_action() {
            ArgAction::SetTrue => entry.boolean()?.then(|| format!("--{name}")),
            _ if entry.value.is_bool() => return Err(entry.wrong("it is neither true nor false")),
            _ if value_name == Some("SIZE") => {
                let bytes = entry.size(&entry.text()?, self.memory)?;
                Some(format!("--{name}={bytes}"))
            }
            _ if value_name == Some("SIZE/day") => {
                let text = entry.text()?;
                let size = text.strip_suffix("/day").unwrap_or(&text);
                // What is no size is for the attribute to refuse.
                if parse_size(size).is_ok() {
                    entry.size(size, self.memory)?;
                }
                Some(format!("--{name}={text}"))
            }
            _ => Some(format!("--{name}={}", entry.text()?)),
        };
        self.lines.insert(name.to_owned(), entry.file.at(&entry.key_span));
        if let Some(word) = word {
            // By itself, so that what is wrong with it is known to be so.
            self.parser.clone().try_get_matches_from([&word]).map_err(|error| entry.wrong(why(&error)))?;
            self.words.push(word);
        }
        Ok(())
    }

    /// What the device is made of.
    fn settings(self, attributes: Vec<Setting>, device: &Entry<'_>) -> Result<Vec<Setting>> {
        let args = self
            .parser
            .try_get_matches_from(self.words)
            .and_then(|matches| DeviceArgs::from_arg_matches(&matches))
            .map_err(|error| device.wrong(why(&error)))?;
        let device_line = device.file.at(&device.key_span);
        let line = |option: &str| self.lines.get(option).unwrap_or(&device_line).clone();
        args.settings_with(attributes, Origin::File(&line))
    }
}

/// What is wrong with a value, without the words of a command line where that can be.
fn why(error: &clap::Error) -> String {
    error.source().map_or_else(|| crate::failure::usage_line(error), ToString::to_string)
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
fn device(mut entry: Entry<'_>, memory: &Memory, config: &mut ConfigFile) -> Result<()> {
    let name = parse_name(&entry.key).map_err(|why| entry.file.failure(&entry.key_span, why))?;
    let table = match std::mem::replace(&mut entry.value, DeValue::Boolean(true)) {
        DeValue::Table(table) => table,
        _ => return Err(entry.wrong("a device is a table")),
    };
    let mut options = Options::new(memory);
    let mut swap = SwapKeys::default();
    let (mut attach, mut most_ram, mut attributes) = (None, None, Vec::new());
    let mut export = ExportArgs::default();
    for key in entries(entry.file, table) {
        match key.key.as_ref() {
            ATTRIBUTES => {
                attributes = key.table()?.iter().map(Entry::attribute).collect::<Result<_>>()?;
            }
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
            _ => options.add(&key)?,
        }
    }
    if !options.has("size") {
        let (key, value) = (Cow::Borrowed("size"), DeValue::String(Cow::Borrowed(DEFAULT_SIZE)));
        let span = entry.key_span.clone();
        options.add(&Entry { file: entry.file, key, key_span: span.clone(), value, value_span: span })?;
    }
    let attached = match (swap.plan()?, attach) {
        (Some(_), Some((false, key))) => return Err(key.wrong("swap space is a block device")),
        (Some(swap), _) => Attached::Swap(swap),
        (None, Some((true, _))) => Attached::Block,
        (None, _) => Attached::No,
    };
    let settings = options.settings(attributes, &entry)?;
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
