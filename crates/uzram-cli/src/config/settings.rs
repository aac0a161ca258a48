//! The settings of a device, in one table: [`SETTINGS`]. The options of `up`, `add` and `swap on`, the files
//! of `--config` and `--policy`, and `uzram set` all use it.
//!
//! A setting has its attribute's name; short words are aliases. In options and files '-' and '_' are the
//! same. The attributes' own parsers check values, so that a wrong one gets the same message wherever it is
//! written.

use std::ops::Deref;

use uzram::ErrorKind;
use uzram::device::{Attribute, Device, NamedBacking};
use uzram::machine_memory::Memory;
use uzram::units::parse_duration_s;

use crate::config::size_expr;
use crate::failure::{Failure, Result};

/// The syntax of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Text that the attribute parses.
    Text,
    /// A size; in options and a file of `--config`, also an expression.
    Size,
    /// A size, optionally followed by `/day`.
    SizePerDay,
    /// 0 or 1; in files, also true and false. An option without a value means 1.
    Switch,
    /// Paths, each optionally followed by a size: an option is given as often, in files they are an array.
    Path,
}

impl Form {
    /// Returns a value of an option or a file of `--config` as its attribute takes it: a size in bytes.
    pub fn value(
        self,
        text: String,
        memory: impl FnOnce() -> uzram::Result<Memory>,
    ) -> uzram::Result<String> {
        let size = match self {
            Form::Size => text.as_str(),
            Form::SizePerDay => text.strip_suffix("/day").unwrap_or(&text),
            Form::Text | Form::Switch | Form::Path => return Ok(text),
        };
        size_expr::read(size, memory).map(|bytes| bytes.to_string())
    }
}

#[derive(Debug)]
pub struct SettingRow {
    pub attribute: &'static str,
    /// Aliases, the recommended one first. [`SettingRow::values`] says what their values mean.
    pub words: &'static [&'static str],
    pub form: Form,
    pub value_name: &'static str,
    /// The option's help text; if empty, that of the attribute.
    help: &'static str,
    /// What the option's help says besides.
    note: &'static str,
    /// Whether a file of `--policy` may set it.
    pub is_policy: bool,
    /// The attribute without which it has no effect.
    pub needs: Option<&'static str>,
}

pub const SIZE_WORD: &str = "size";

const TEXT: SettingRow = SettingRow {
    attribute: "",
    words: &[],
    form: Form::Text,
    value_name: "NAME",
    help: "",
    note: "",
    is_policy: false,
    needs: None,
};
const SIZE: SettingRow = SettingRow { form: Form::Size, value_name: "SIZE", ..TEXT };
const SWITCH: SettingRow = SettingRow { form: Form::Switch, value_name: "0|1", ..TEXT };
const DISKSIZE: SettingRow = SettingRow {
    attribute: "disksize",
    words: &[SIZE_WORD],
    help: "The size of the disk, uncompressed: a number and K, M, G or T, or an expression, as in ram/2 [default: 1G]",
    ..SIZE
};
const POLICY: SettingRow = SettingRow { is_policy: true, ..TEXT };
const RECOMPRESSED: SettingRow = SettingRow { needs: Some("recomp_algorithm"), ..POLICY };
const BACKED: SettingRow = SettingRow { needs: Some("backing_dev"), ..POLICY };
const BACKED_SWITCH: SettingRow = SettingRow { form: Form::Switch, value_name: "0|1", ..BACKED };

/// The value of `recomp_algorithm` for no recompression.
const NO_ALGORITHM: &str = "algo=none";

/// The settings that only measurements need.
#[cfg(feature = "designs")]
static DESIGNS: &[SettingRow] = &[
    SettingRow { attribute: "chain_size", words: &["chain"], value_name: "N", ..TEXT },
    SettingRow { attribute: "streams", value_name: "percpu|N", ..TEXT },
    SettingRow { attribute: "pool_design", ..TEXT },
    SettingRow { attribute: "lru_design", ..TEXT },
    SettingRow { attribute: "lru_pagevec", value_name: "N", ..TEXT },
    SettingRow { attribute: "run_cache_batch", value_name: "N", ..TEXT },
    SettingRow { attribute: "writeback_layout", ..BACKED },
    SettingRow {
        attribute: "compressed_writeback",
        words: &["writeback_compressed"],
        note: "[default: 1]",
        ..BACKED_SWITCH
    },
];
#[cfg(not(feature = "designs"))]
static DESIGNS: &[SettingRow] = &[];

pub static SETTINGS: &[SettingRow] = &[
    SettingRow {
        attribute: "comp_algorithm",
        words: &["algorithm"],
        help: "lz4[:ACCELERATION], lz4hc[:LEVEL], zstd[:LEVEL], deflate[:LEVEL] or memory; all but deflate take \
               ,dict=PATH, a dictionary made by `uzram train` [default: memory for swap, where the CPU has AVX2; else the device's]",
        ..TEXT
    },
    SettingRow {
        attribute: "recomp_algorithm",
        words: &["recompress", "recompress_algorithm"],
        value_name: "algo=NAME",
        help: "The algorithm that recompresses pages, on request or before the limit is reached; priority=1 to 3 may \
               follow. --recompress NAME[:AFTER] is short for --recomp-algorithm algo=NAME --recompress-after AFTER; \
               AFTER needs a unit, as in 10m or 1h (the text after the last ':' is AFTER if it parses as one). \
               --recompress none is for none [default: zstd:3:10m for swap without a backing device, else none]",
        ..POLICY
    },
    SettingRow { attribute: "algorithm_params", value_name: "level=N", ..TEXT },
    SettingRow {
        attribute: "recompress_after",
        value_name: "DURATION",
        note: "[default: 10m for swap, else never]",
        ..RECOMPRESSED
    },
    SettingRow { attribute: "recompress_cpu", value_name: "PERCENT", note: "[default: 2]", ..RECOMPRESSED },
    SettingRow { attribute: "checksum", ..SWITCH },
    SettingRow {
        attribute: "lru_enable",
        note: "[default: 0 for swap without recompression and backing device, else 1]",
        ..SWITCH
    },
    SettingRow { attribute: "compact_threshold", value_name: "PERCENT", ..TEXT },
    SettingRow { attribute: "compact_rate", ..SIZE },
    SettingRow { attribute: "policy_high", words: &["high"], value_name: "PERCENT", ..POLICY },
    SettingRow { attribute: "policy_low", words: &["low"], value_name: "PERCENT", ..POLICY },
    SettingRow { attribute: "reclaim", ..POLICY },
    SettingRow {
        attribute: "mem_limit",
        help: "The most memory for its contents, with metadata and free pages kept for reuse, but without the fixed \
               cost of its tables [default: no limit]. Before the limit is reached the coldest pages leave: \
               recompressed with --recompress, written to the backing device with --backing. A write at the limit \
               waits for that, 20 s at most, or not at all with --reserve; then it fails, and the old contents stay. \
               NBD clients and programs that use the file or block device get ENOSPC; swap gets a write error, and the \
               kernel keeps the page in memory. Pages of zeros or of another repeated word take no memory, so writing \
               them still works, as do discards",
        ..SIZE
    },
    SettingRow {
        attribute: "reserve",
        help: "Free memory to keep ready, so that no read or write waits for memory from the system: for a disk that \
               this machine swaps to [default: 8M for swap, else none]",
        ..SIZE
    },
    SettingRow { attribute: "writeback_after", value_name: "DURATION", note: "[default: never]", ..BACKED },
    SettingRow {
        attribute: "writeback_budget",
        form: Form::SizePerDay,
        value_name: "SIZE/day",
        note: "[default: no limit]",
        ..BACKED
    },
    SettingRow { attribute: "writeback_batch_size", value_name: "N", ..BACKED },
    SettingRow { attribute: "writeback_limit", value_name: "N", ..BACKED },
    SettingRow { attribute: "writeback_limit_enable", ..BACKED_SWITCH },
    SettingRow { attribute: "backing_force", words: &["force"], is_policy: false, ..BACKED_SWITCH },
    SettingRow { attribute: "backing_copies", words: &["copies"], note: "[default: 1]", ..BACKED },
    SettingRow { attribute: "backing_encrypted", words: &["encrypt"], is_policy: false, ..BACKED_SWITCH },
    SettingRow {
        attribute: "backing_dev",
        words: &["backing"],
        form: Form::Path,
        value_name: "PATH[:SIZE]",
        help: "Where cold pages go: a block device, all of it unless SIZE is given, or a file, created with SIZE if it \
               does not exist. The text after the last ':' is SIZE if it parses as one. With --mem-limit, the coldest \
               pages leave before the limit is reached. redis://HOST:PORT[:SIZE] is a server or a cluster, and \
               s3://BUCKET[/PREFIX][:SIZE] a bucket, where this program was built with the feature 'remote'. Given several \
               times, they are used in this order, each when those before it are full or down; \
               servers and new files need a size, except as the last",
        ..POLICY
    },
    DISKSIZE,
];

/// Returns the rows of all settings, in the order in which they are set.
pub fn all() -> impl Iterator<Item = &'static SettingRow> {
    SETTINGS.iter().chain(DESIGNS)
}

impl SettingRow {
    /// Returns the row of a setting by its attribute's name or an alias, and that name as the table has it.
    pub fn find(name: &str) -> Option<(&'static SettingRow, &'static str)> {
        let name = name.replace('-', "_");
        all().find_map(|row| Some((row, row.names().find(|other| *other == name)?)))
    }

    /// Returns the option's help text: the attribute's, without its end, which says when that can be set.
    pub fn help(&self) -> String {
        let attribute = Device::attributes().iter().find(|row| row.name == self.attribute);
        let help = if self.help.is_empty() { attribute.map_or("", |row| row.help) } else { self.help };
        let ends = ["; before initialisation", "; at any time", "; set it before", " (uzram only)"];
        let end = ends.iter().filter_map(|end| help.find(end)).min().unwrap_or(help.len());
        format!("{} {}", &help[..end], self.note).trim_end().to_owned()
    }

    /// Returns the setting's names, the attribute's first.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        [self.attribute].into_iter().chain(self.words.iter().copied())
    }

    /// Returns the attributes and values that `name`, one of [`SettingRow::names`], sets to `text`:
    /// `recompress` may set two, and a plain algorithm becomes `algo=…`.
    pub fn values(&self, name: &str, text: &str) -> Vec<(&'static str, String)> {
        let algorithm = |text: &str| ("recomp_algorithm", format!("algo={text}"));
        match name {
            "recompress" => {
                let (again, after) = split_after(text);
                let after = after.map(|after| ("recompress_after", after.to_owned()));
                [algorithm(again)].into_iter().chain(after).collect()
            }
            "recompress_algorithm" => vec![algorithm(text)],
            _ => vec![(self.attribute, text.to_owned())],
        }
    }
}

/// Returns the attributes and values that `uzram set` sets for a name or alias. The name of a writable
/// attribute always means that attribute; an unknown name is left to the daemon.
pub fn attributes_of(name: &str, text: &str) -> Vec<(String, String)> {
    let is_attribute = Device::attributes().iter().any(|row| row.name == name && row.writable());
    let Some((row, word)) = SettingRow::find(name).filter(|_| !is_attribute) else {
        return vec![(name.to_owned(), text.to_owned())];
    };
    row.values(word, text).into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// An attribute's new value, and its origin.
#[derive(Debug)]
pub struct Setting {
    /// Where the user set it: an option with its value, or a position in a file.
    pub origin: String,
    pub attribute: &'static str,
    pub value: String,
}

/// Returns whether the value of an attribute switches off what that sets.
pub fn switches_off(value: &str) -> bool {
    value.trim() == "none" || value.split_whitespace().any(|word| word == NO_ALGORITHM)
}

/// The settings of a device, with each attribute at most once.
#[derive(Debug, Default)]
pub struct DeviceSettings(Vec<Setting>);

impl DeviceSettings {
    /// Adds the setting `name` of `row` with the value `text`, which was written at `origin`.
    pub fn add(&mut self, row: &SettingRow, name: &str, text: &str, origin: &str) -> Result<()> {
        for (attribute, value) in row.values(name, text) {
            if let Some(other) = self.get(attribute) {
                return Err(Failure::usage(format!("{origin}: {} already sets it", other.origin)));
            }
            let known = Device::attributes().iter().find(|row| row.name == attribute);
            if let Some(Err(error)) = known.map(|row| row.check(&value))
                && error.kind() == ErrorKind::Invalid
            {
                return Err(Failure::of(origin, &error).with_setting(Some(attribute)));
            }
            self.0.push(Setting { origin: origin.to_owned(), attribute, value });
        }
        Ok(())
    }

    pub fn add_size(&mut self, text: &str, origin: &str) -> Result<()> {
        self.add(&DISKSIZE, SIZE_WORD, text, origin)
    }

    pub fn get(&self, attribute: &str) -> Option<&Setting> {
        self.0.iter().find(|setting| setting.attribute == attribute)
    }

    /// Adds the settings of a policy that are not set yet, and sorts all into the order in which they are
    /// applied. Messages put `prefix` before a setting's name. A device that `swaps` recompresses by default.
    pub fn complete(mut self, mut policy: DeviceSettings, prefix: &str, swaps: bool) -> Result<Self> {
        policy.0.retain(|setting| self.get(setting.attribute).is_none());
        self.0.append(&mut policy.0);
        let place = |name: &str| all().position(|row| row.attribute == name);
        self.0.sort_by_key(|setting| (Attribute::turn(setting.attribute), place(setting.attribute)));
        self.refuse_idle(prefix, swaps)?;
        Ok(self)
    }

    /// Returns whether pages are recompressed if the device is used as swap. With a backing device they are
    /// not by default: at the limit, each would be before any is written back, which is too slow for writers.
    pub fn recompresses_swap(&self) -> bool {
        match self.get("recomp_algorithm") {
            Some(setting) => !switches_off(&setting.value),
            None => self.get("backing_dev").is_none(),
        }
    }

    /// Fails if a setting has no effect without another one.
    fn refuse_idle(&self, prefix: &str, swaps: bool) -> Result<()> {
        let is_missing = |needed: &&str| match self.get(needed) {
            Some(setting) => switches_off(&setting.value),
            None => !(swaps && *needed == "recomp_algorithm" && self.recompresses_swap()),
        };
        for Setting { origin, attribute, value } in &self.0 {
            let Some((row, _)) = SettingRow::find(attribute) else { continue };
            // `backing_force=0` needs no backing device.
            let is_off = row.form == Form::Switch && value == "0";
            let Some(needed) = row.needs.filter(|needed| !is_off && is_missing(needed)) else { continue };
            let what = match row.attribute {
                "recompress_after" | "recompress_cpu" => "compress pages again with",
                "backing_force" => "take",
                _ => "write pages to",
            };
            let word = SettingRow::find(needed).and_then(|(row, _)| row.words.first()).unwrap_or(&needed);
            return Err(Failure::usage(format!("{origin}: nothing to {what}: give {prefix}{word}")));
        }
        Ok(())
    }
}

impl Deref for DeviceSettings {
    type Target = [Setting];

    fn deref(&self) -> &[Setting] {
        &self.0
    }
}

/// Splits `ALGORITHM[:AFTER]`: the text after the last colon is a duration if it parses as one and has a
/// unit.
fn split_after(text: &str) -> (&str, Option<&str>) {
    let is_duration = |text: &str| text.ends_with(char::is_alphabetic) && parse_duration_s(text).is_ok();
    match text.rsplit_once(':') {
        Some((algorithm, after)) if is_duration(after) => (algorithm, Some(after)),
        _ => (text, None),
    }
}

/// Returns what names a backing device of these parts: with absolute paths, as the daemon may run in another
/// directory. A `:SIZE` after a path stays as it is.
pub fn join_paths(parts: &[String]) -> String {
    let from_root = |path: &str| {
        if path == "none" || NamedBacking::is_elsewhere(path) {
            return path.to_owned();
        }
        let absolute =
            std::path::absolute(path).ok().and_then(|path| path.into_os_string().into_string().ok());
        // A path that cannot be made absolute is left for the attribute to refuse.
        absolute.unwrap_or_else(|| path.to_owned())
    };
    let all: Vec<_> = parts.iter().flat_map(|text| NamedBacking::split_parts(text)).map(from_root).collect();
    all.join(" ")
}

/// Parses a device name: one that needs no quoting in a URI, a path or a shell.
pub fn parse_name(text: &str) -> std::result::Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let is_name = text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.bytes().all(plain);
    let why = "a name is a letter or digit and up to 63 more, '_', '-' or '.'";
    if is_name && text.len() <= 64 { Ok(text.to_owned()) } else { Err(why.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_attribute_that_a_new_device_can_be_given() {
        // These act on an existing device.
        let others = ["reset", "mem_used_max"];
        for row in Device::attributes().iter().filter(|row| row.writable() && !row.works()) {
            let is_setting = all().any(|setting| setting.attribute == row.name);
            assert_eq!(is_setting, !others.contains(&row.name), "{}", row.name);
        }
        let mut names: Vec<_> = all().flat_map(SettingRow::names).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "each name means one setting");
    }

    #[test]
    fn a_setting_has_its_short_words_and_either_sign() {
        let names = ["size", "mem-limit", "mem_limit", "high"];
        let found = names.map(|name| SettingRow::find(name).map(|(row, _)| row.attribute));
        assert_eq!(found, ["disksize", "mem_limit", "mem_limit", "policy_high"].map(Some));
        let set = |name, text| attributes_of(name, text);
        let own = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        assert_eq!(set("size", "1G"), [own("disksize", "1G")]);
        assert_eq!(set("recompress", "type=idle"), [own("recompress", "type=idle")]);
        assert_eq!(set("backing", "none"), [own("backing_dev", "none")]);
        assert_eq!(set("nonesuch", "1"), [own("nonesuch", "1")]);
    }

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
