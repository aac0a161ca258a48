//! What a device is made of, as options of the commands that make one.

use std::path::PathBuf;

use uzram::device::Attribute;
use uzram::lru::LruDesign;
use uzram::store::WritebackLayout;
use uzram::stream::Design;
use uzram::units::{parse_duration_s, parse_size};
use uzram::zsmalloc::PoolDesign;

use crate::config::policy_file;
use crate::failure::{Failure, Result};

/// The attribute of an option without a value.
const FORCE: &str = "backing_force";

/// Options of a new device. They are the keys of a device in a configuration file, too.
#[derive(clap::Args)]
pub struct DeviceArgs {
    /// The size of the disk, uncompressed: a number and K, M, G or T
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = size_as_typed)]
    size: String,
    /// lz4[:ACCELERATION], lz4hc[:LEVEL], zstd[:LEVEL] or deflate[:LEVEL], and but for deflate
    /// ,dict=PATH, with a dictionary that `uzram train` made [default: the device's]
    #[arg(long, value_name = "NAME")]
    pub algorithm: Option<String>,
    /// By which pages are compressed again, on request or before the limit is met: written as --algorithm. With
    /// AFTER, which has a unit as in 10m or 1h (what follows the last ':' is one if it reads as one), also those
    /// that nobody used for so long
    #[arg(long, value_name = "NAME[:AFTER]")]
    recompress: Option<String>,
    /// Where cold pages go: a block device, all of it unless a SIZE is given, or a file, which is made with that
    /// SIZE if there is none. What follows the last ':' is a size if it reads as one. With --mem-limit, the
    /// coldest pages leave before the limit is met
    #[arg(long, value_name = "PATH[:SIZE]")]
    backing: Option<String>,
    /// Take a backing file or device that holds something else: what it holds is lost
    #[arg(long)]
    force: bool,
    /// Write pages to the backing device that nobody used for so long, as in 90s, 10m or 1h [default: never]
    #[arg(long, value_name = "DURATION")]
    writeback_after: Option<String>,
    /// The most bytes that go to the backing device in a day, as in 10G/day [default: any number]
    #[arg(long, value_name = "SIZE/day")]
    writeback_budget: Option<String>,
    /// How pages lie there: packed, or blocks, each in 4 KiB of its own [default: the device's]
    #[arg(long, value_name = "NAME")]
    writeback_layout: Option<WritebackLayout>,
    /// A TOML file that says which pages leave memory, when and where to. Options come before what it says
    #[arg(long, value_name = "FILE.toml", long_help = policy_file::HELP)]
    policy: Option<PathBuf>,
    /// The most memory its contents may take, with metadata and free pages kept for reuse, beside the tables that are the
    /// fixed cost [default: no limit]. Before it is met the coldest pages leave: compressed again with --recompress, written
    /// to the backing device with --backing. A write that meets it waits for that, 20 s at most, or not at all with
    /// --reserve, and then fails and leaves what was there before. NBD clients and programs that use the file or block
    /// device get ENOSPC; for swap it is a write error, after which the kernel keeps the page in memory. Pages of zeros or of
    /// another repeated word take no memory: they are written all the same, and discards work
    #[arg(long, value_name = "SIZE", value_parser = size_as_typed)]
    mem_limit: Option<String>,
    /// Free memory that is kept ready, so that no read or write waits for the system's: for a disk that this machine
    /// swaps to [default: 8M for swap, else none]
    #[arg(long, value_name = "SIZE", value_parser = size_as_typed)]
    reserve: Option<String>,
    /// The most pages in a zspage, 4 to 16 [default: the device's]
    #[arg(long, value_name = "N")]
    chain: Option<u32>,
    /// Who may compress at once: percpu, or the number of streams on a locked list [default: the device's]
    #[arg(long, value_name = "percpu|N")]
    streams: Option<Design>,
    /// How its pool is locked: pinned, class-indexed, consolidated or split [default: the device's]
    #[arg(long, value_name = "NAME")]
    pool_design: Option<PoolDesign>,
    /// How the lists of its pages by their use are locked: batched, single-lock, or none for no lists
    /// [default: none for swap of which no page leaves, else the device's]
    #[arg(long, value_name = "NAME")]
    lru_design: Option<LruDesign>,
    /// Percent of the pool's memory that compaction must free to begin by itself, 0 for never
    /// [default: the device's]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
    compact_threshold: Option<u8>,
}

/// A value that was given, and the attribute it is for.
#[derive(Debug)]
pub struct Setting {
    /// What the user wrote, or where: an option with its value, or a place in a file.
    pub origin: String,
    /// The device's attribute.
    pub attribute: &'static str,
    /// The attribute's new value.
    pub value: String,
}

/// Where options are written, for messages.
#[derive(Clone, Copy)]
pub enum Origin<'a> {
    /// On a command line.
    CommandLine,
    /// As keys of a file: in which line an option is, as `FILE:LINE`.
    File(&'a dyn Fn(&str) -> String),
}

impl Origin<'_> {
    /// An option such as `--size`, as its writer wrote it.
    fn name(self, option: &str) -> &str {
        match self {
            Origin::CommandLine => option,
            Origin::File(_) => option.trim_start_matches('-'),
        }
    }

    /// The same, and where it is.
    fn place(self, option: &str) -> String {
        let name = self.name(option);
        match self {
            Origin::CommandLine => name.to_owned(),
            Origin::File(line) => format!("{}: {name}", line(name)),
        }
    }
}

impl DeviceArgs {
    /// The attributes to set, in this order.
    ///
    /// # Errors
    /// The file of `--policy` makes no sense, or something is set that would do nothing.
    pub fn settings(&self) -> Result<Vec<Setting>> {
        self.settings_with(Vec::new(), Origin::CommandLine)
    }

    /// The same, and `attributes` that were given by their own names, of options that are written elsewhere.
    ///
    /// # Errors
    /// Further, an attribute is given twice, by its own name and by an option.
    pub fn settings_with(&self, attributes: Vec<Setting>, origin: Origin<'_>) -> Result<Vec<Setting>> {
        let read = |path| policy_file::read(&origin.place("--policy"), path);
        let mut settings = self.policy.as_deref().map_or_else(|| Ok(Vec::new()), read)?;
        let mut given: Vec<Setting> = self.options(origin).collect();
        for attribute in attributes {
            if let Some(option) = given.iter().find(|option| option.attribute == attribute.attribute) {
                return Err(Failure::Usage(format!("{}: {} sets it, too", attribute.origin, option.origin)));
            }
            given.push(attribute);
        }
        settings.retain(|setting| given.iter().all(|option| option.attribute != setting.attribute));
        settings.append(&mut given);
        settings.sort_by_key(|setting| Attribute::turn(setting.attribute));
        refuse_idle_settings(&settings, origin)?;
        Ok(settings)
    }

    /// The attributes that options set.
    fn options<'a>(&self, origin: Origin<'a>) -> impl Iterator<Item = Setting> + use<'a> {
        let (again, after) = self.recompress.as_deref().map(split_after).unzip();
        let settings = [
            ("--algorithm", "comp_algorithm", self.algorithm.clone()),
            ("--recompress", "recomp_algorithm", again.map(|algorithm| format!("algo={algorithm}"))),
            ("--recompress", "recompress_after", after.flatten().map(str::to_owned)),
            ("--chain", "chain_size", self.chain.map(|pages| pages.to_string())),
            ("--streams", "streams", self.streams.map(|design| design.to_string())),
            ("--pool-design", "pool_design", self.pool_design.map(|design| design.to_string())),
            ("--lru-design", "lru_design", self.lru_design.map(|design| design.to_string())),
            (
                "--compact-threshold",
                "compact_threshold",
                self.compact_threshold.map(|percent| percent.to_string()),
            ),
            ("--reserve", "reserve", self.reserve.clone()),
            ("--mem-limit", "mem_limit", self.mem_limit.clone()),
            ("--writeback-after", "writeback_after", self.writeback_after.clone()),
            ("--writeback-budget", "writeback_budget", self.writeback_budget.clone()),
            (
                "--writeback-layout",
                "writeback_layout",
                self.writeback_layout.map(|layout| layout.to_string()),
            ),
            ("--force", FORCE, self.force.then(|| "1".to_owned())),
            ("--backing", "backing_dev", self.backing.as_deref().map(from_root)),
            ("--size", "disksize", Some(self.size.clone())),
        ];
        settings.into_iter().filter_map(move |(option, attribute, value)| {
            let value = value?;
            let place = origin.place(option);
            let origin = match origin {
                Origin::CommandLine if attribute != FORCE => format!("{place} {value}"),
                _ => place,
            };
            Some(Setting { origin, attribute, value })
        })
    }
}

/// A size, in its own words: attributes read them, and messages quote them.
fn size_as_typed(text: &str) -> uzram::Result<String> {
    parse_size(text).map(|_| text.to_owned())
}

/// `ALGORITHM[:AFTER]`: what follows the last colon is a duration if it reads as one and has a unit.
fn split_after(text: &str) -> (&str, Option<&str>) {
    let is_duration = |text: &str| text.ends_with(char::is_alphabetic) && parse_duration_s(text).is_ok();
    match text.rsplit_once(':') {
        Some((algorithm, after)) if is_duration(after) => (algorithm, Some(after)),
        _ => (text, None),
    }
}

/// A path from the root: the daemon may work in another directory. A size that follows it is not in the way.
fn from_root(path: &str) -> String {
    let absolute = if path == "none" { None } else { std::path::absolute(path).ok() };
    // One that cannot be is refused as it stands.
    absolute.and_then(|path| path.into_os_string().into_string().ok()).unwrap_or_else(|| path.to_owned())
}

/// Fails when something is set that does nothing without something else.
fn refuse_idle_settings(settings: &[Setting], written: Origin<'_>) -> Result<()> {
    let has = |attribute: &str| {
        settings.iter().any(|setting| setting.attribute == attribute && setting.value != "none")
    };
    let needs = |setting: &&Setting| match setting.attribute {
        "recompress_after" => !has("recomp_algorithm"),
        "writeback_after"
        | "writeback_budget"
        | "writeback_layout"
        | "writeback_batch_size"
        | "compressed_writeback"
        | FORCE => !has("backing_dev"),
        _ => false,
    };
    let Some(Setting { origin, attribute, .. }) = settings.iter().find(needs) else { return Ok(()) };
    let (what, option) = match *attribute {
        "recompress_after" => ("compress pages again with", "--recompress"),
        FORCE => ("take", "--backing"),
        _ => ("write pages to", "--backing"),
    };
    Err(Failure::Usage(format!("{origin}: nothing to {what}: give {}", written.name(option))))
}

/// A name that needs no quoting in a URI, a path or a shell.
pub fn parse_name(text: &str) -> std::result::Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let begins_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if text.len() <= 64 && begins_well && text.bytes().all(plain) {
        Ok(text.to_owned())
    } else {
        Err("a name is a letter or digit and up to 63 more, '_', '-' or '.'".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_an_algorithm_is_a_duration_only_with_a_unit() {
        for (text, algorithm, after) in [
            ("zstd", "zstd", None),
            ("zstd:3", "zstd:3", None),
            ("zstd:3:1h", "zstd:3", Some("1h")),
            ("lz4hc:90s", "lz4hc", Some("90s")),
            ("zstd:3:600", "zstd:3:600", None),
            ("zstd:3:soon", "zstd:3:soon", None),
            ("zstd:3,dict=/a:1h/b", "zstd:3,dict=/a:1h/b", None),
            ("zstd,dict=/b:10m", "zstd,dict=/b", Some("10m")),
        ] {
            assert_eq!(split_after(text), (algorithm, after), "{text}");
        }
    }

    #[test]
    fn names_are_plain() {
        assert!(parse_name("zram-1.a_B").is_ok());
        for name in ["", "..", "-a", "a b", "a/b", "ü", &"x".repeat(65)] {
            assert!(parse_name(name).is_err(), "{name}");
        }
    }
}
