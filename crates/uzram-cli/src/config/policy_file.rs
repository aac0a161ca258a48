//! `--policy FILE.toml`: which pages leave memory, when, and where to, in a file.
//!
//! The file names attributes by keys of its own; their values go to the attributes as text, which check them. So
//! there is one parser for each value, wherever it comes from.

use std::path::Path;

use serde::Deserialize;
use toml::Spanned;

use crate::config::settings::Setting;
use crate::config::toml_text::{self, Source, Text};
use crate::failure::{Context, Result};

/// What `--help` says.
pub const HELP: &str =
    "A TOML file that says which pages leave memory, when and where to. Options come before what \
it says. All of it may be left out:

    backing = \"/var/lib/uzram/cold.img:2G\"    # backing_dev: the whole path
    high = 95                           # policy_high, in percent of mem_limit
    low = 90                            # policy_low
    reclaim = \"pages\"                   # or \"zspages\"

    [recompress]
    algorithm = \"zstd:3\"                # recomp_algorithm
    after = \"10m\"                       # recompress_after

    [writeback]
    after = \"1h\"                        # writeback_after
    budget = \"10G/day\"                  # writeback_budget
    layout = \"packed\"                   # writeback_layout
    compressed = true                   # compressed_writeback
    batch_size = 32                     # writeback_batch_size
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    backing: Option<Spanned<Text>>,
    high: Option<Spanned<Text>>,
    low: Option<Spanned<Text>>,
    reclaim: Option<Spanned<Text>>,
    #[serde(default)]
    recompress: Recompress,
    #[serde(default)]
    writeback: Writeback,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recompress {
    algorithm: Option<Spanned<Text>>,
    after: Option<Spanned<Text>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Writeback {
    after: Option<Spanned<Text>>,
    budget: Option<Spanned<Text>>,
    layout: Option<Spanned<Text>>,
    compressed: Option<Spanned<Text>>,
    batch_size: Option<Spanned<Text>>,
}

/// The attributes that a file sets; `option` is what names the file, for messages.
///
/// # Errors
/// It cannot be read, or makes no sense: which file, line and key. Values are left to the attributes.
pub fn read(option: &str, path: &Path) -> Result<Vec<Setting>> {
    let name = format!("{option} {}", path.display());
    let text = toml_text::read(path).context(|| name.clone())?;
    settings(Source { name: &name, text: &text })
}

/// What its text says.
///
/// # Errors
/// It makes no sense.
pub fn settings(source: Source<'_>) -> Result<Vec<Setting>> {
    let file: PolicyFile = toml::from_str(source.text).map_err(|error| source.parser_failure(&error))?;
    let PolicyFile { backing, high, low, reclaim, recompress, writeback } = file;
    let Recompress { algorithm, after: recompress_after } = recompress;
    let Writeback { after, budget, layout, compressed, batch_size } = writeback;
    let values = [
        ("backing", "backing_dev", backing),
        ("high", "policy_high", high),
        ("low", "policy_low", low),
        ("reclaim", "reclaim", reclaim),
        ("recompress.algorithm", "recomp_algorithm", algorithm),
        ("recompress.after", "recompress_after", recompress_after),
        ("writeback.after", "writeback_after", after),
        ("writeback.budget", "writeback_budget", budget),
        ("writeback.layout", "writeback_layout", layout),
        ("writeback.compressed", "compressed_writeback", compressed),
        ("writeback.batch_size", "writeback_batch_size", batch_size),
    ];
    let setting = |(key, attribute, value): (&str, &'static str, Option<Spanned<Text>>)| {
        let value = value?;
        let origin = format!("{}: {key}", source.at(&value.span()));
        let Text(value) = value.into_inner();
        let value = if attribute == "recomp_algorithm" { format!("algo={value}") } else { value };
        Some(Setting { origin, attribute, value })
    };
    Ok(values.into_iter().filter_map(setting).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::failure::Failure;

    fn settings(text: &str) -> Result<Vec<Setting>> {
        super::settings(Source { name: "--policy p.toml", text })
    }

    fn shown(text: &str) -> Vec<(String, &'static str, String)> {
        let settings = settings(text).unwrap();
        settings.into_iter().map(|Setting { origin, attribute, value }| (origin, attribute, value)).collect()
    }

    #[test]
    fn the_example_of_the_help_sets_everything_but_says_where() {
        let (_, example) = HELP.split_once("\n\n").unwrap();
        let settings = shown(example);
        let attributes: Vec<_> =
            settings.iter().map(|(_, attribute, value)| (*attribute, value.as_str())).collect();
        let wanted = [
            ("backing_dev", "/var/lib/uzram/cold.img:2G"),
            ("policy_high", "95"),
            ("policy_low", "90"),
            ("reclaim", "pages"),
            ("recomp_algorithm", "algo=zstd:3"),
            ("recompress_after", "10m"),
            ("writeback_after", "1h"),
            ("writeback_budget", "10G/day"),
            ("writeback_layout", "packed"),
            ("compressed_writeback", "1"),
            ("writeback_batch_size", "32"),
        ];
        assert_eq!(attributes, wanted);
        assert_eq!(settings[5].0, "--policy p.toml:8: recompress.after");
        assert_eq!(shown(""), []);
        assert_eq!(shown("recompress.after = 600\n")[0].2, "600");
    }

    #[test]
    fn a_file_that_makes_no_sense_says_where_and_why() {
        for (text, place, why) in [
            ("high = 90\nhgih = 95\n", "p.toml:2: 'hgih = 95': ", "unknown field `hgih`, expected one of"),
            ("[writeback]\nafter = 1.5\n", "p.toml:2: 'after = 1.5': ", "a string, a whole number"),
            ("high = [1]", "p.toml:1: 'high = [1]': ", "invalid type"),
            ("writeback = 3", "p.toml:1: 'writeback = 3': ", "invalid type"),
            ("\n\nlow 3", "p.toml:3: 'low 3': ", ""),
            ("low = 1\nlow = 2", "p.toml:2: 'low = 2': ", "duplicate"),
            ("low = \"", "p.toml:1: 'low = \"': ", ""),
            ("high = 99999999999999999999999", "p.toml:1: ", ""),
        ] {
            let Err(Failure::Usage(line)) = settings(text) else { panic!("{text}") };
            let rest = line.strip_prefix("--policy ").unwrap();
            assert!(rest.starts_with(place) && rest.contains(why), "{text}: {line}");
        }
        let long = format!("high = \"{}\"\nlow = {{}}", "x".repeat(100_000));
        let Err(Failure::Usage(line)) = settings(&long) else { panic!() };
        assert!(line.len() < 300, "{line}");
        // As deep as a file can be.
        assert!(settings(&format!("high = {}", "[".repeat(60_000))).is_err());
    }
}
