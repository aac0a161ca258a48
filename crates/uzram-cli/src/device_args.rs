//! What a device is made of, as options of the commands that make one.

use uzram::base::units::parse_size;
use uzram::lru::LruDesign;
use uzram::stream::Design;
use uzram::zsmalloc::PoolDesign;

/// Options of a new device.
#[derive(clap::Args)]
pub struct DeviceArgs {
    /// The size of the disk, uncompressed: a number and K, M, G or T
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    size: u64,
    /// lz4[:ACCELERATION], lz4hc[:LEVEL], zstd[:LEVEL] or deflate[:LEVEL], and but for deflate
    /// ,dict=PATH, with a dictionary that `uzram train` made [default: the device's]
    #[arg(long, value_name = "NAME")]
    pub algorithm: Option<String>,
    /// By which pages can be compressed again, on `uzram set NAME recompress=...`: written as --algorithm
    #[arg(long, value_name = "NAME")]
    recompress: Option<String>,
    /// The most memory its contents may take; writes beyond it fail [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    mem_limit: Option<u64>,
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
    /// [default: the device's]
    #[arg(long, value_name = "NAME")]
    lru_design: Option<LruDesign>,
    /// Percent of the pool's memory that compaction must free to begin by itself, 0 for never
    /// [default: the device's]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
    compact_threshold: Option<u8>,
}

/// An option that was given, as the attribute it sets.
pub struct Setting {
    /// The option, as the user wrote it.
    pub option: &'static str,
    /// The device's attribute.
    pub attribute: &'static str,
    /// The attribute's new value.
    pub value: String,
}

impl DeviceArgs {
    /// The attributes to set, in this order: `disksize` comes last, because it makes the disk from
    /// the others.
    pub fn settings(&self) -> impl Iterator<Item = Setting> {
        let settings = [
            ("--algorithm", "comp_algorithm", self.algorithm.clone()),
            (
                "--recompress",
                "recomp_algorithm",
                self.recompress.as_ref().map(|algorithm| format!("algo={algorithm}")),
            ),
            ("--chain", "chain_size", self.chain.map(|pages| pages.to_string())),
            ("--streams", "streams", self.streams.map(|design| design.to_string())),
            ("--pool-design", "pool_design", self.pool_design.map(|design| design.to_string())),
            ("--lru-design", "lru_design", self.lru_design.map(|design| design.to_string())),
            (
                "--compact-threshold",
                "compact_threshold",
                self.compact_threshold.map(|percent| percent.to_string()),
            ),
            ("--mem-limit", "mem_limit", self.mem_limit.map(|bytes| bytes.to_string())),
            ("--size", "disksize", Some(self.size.to_string())),
        ];
        settings
            .into_iter()
            .filter_map(|(option, attribute, value)| Some(Setting { option, attribute, value: value? }))
    }
}

/// A name that needs no quoting in a URI, a path or a shell.
pub fn parse_name(text: &str) -> Result<String, String> {
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
    fn names_are_plain() {
        assert!(parse_name("zram-1.a_B").is_ok());
        for name in ["", "..", "-a", "a b", "a/b", "ü", &"x".repeat(65)] {
            assert!(parse_name(name).is_err(), "{name}");
        }
    }
}
