//! `--policy FILE.toml`: a file that says which pages leave memory, when, and where to.
//!
//! Its keys are the names of the settings that the table of settings marks with `is_policy`.

use std::path::Path;

use crate::config::settings::DeviceSettings;
use crate::config::settings_file::{self, Kind};
use crate::config::toml_text::{self, Source};
use crate::failure::{Context, Result};

pub const HELP: &str =
    "A TOML file that says which pages leave memory, when and where to. Options override it. Every \
key is optional:

    backing = \"/var/lib/uzram/cold.img:2G\"    # backing_dev: the whole path
    high = 95                           # policy_high, in percent of mem_limit
    low = 90                            # policy_low
    reclaim = \"pages\"                   # or \"zspages\"

    [recompress]
    algorithm = \"zstd:3\"                # recomp_algorithm
    after = \"10m\"                       # recompress_after
    cpu = 2                             # recompress_cpu, in percent of one CPU

    [writeback]
    after = \"1h\"                        # writeback_after
    budget = \"10G/day\"                  # writeback_budget
    batch_size = 32                     # writeback_batch_size
";

/// Reads the settings of a file. Error messages begin with `option`, the option or key that names the file.
pub fn read(option: &str, path: &Path) -> Result<DeviceSettings> {
    let name = format!("{option} {}", path.display());
    let text = toml_text::read(path).context(|| name.clone())?;
    settings(Source { name: &name, text: &text })
}

pub fn settings(source: Source<'_>) -> Result<DeviceSettings> {
    let mut settings = DeviceSettings::default();
    for entry in toml_text::parse(source)? {
        settings_file::read(&mut settings, entry, "", Kind::Policy)?;
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Setting;
    use crate::failure::Exit;

    fn settings(text: &str) -> Result<DeviceSettings> {
        super::settings(Source { name: "--policy p.toml", text })
    }

    #[test]
    fn the_example_of_the_help_sets_everything_but_says_where() {
        let (_, example) = HELP.split_once("\n\n").unwrap();
        let sets = settings(example).unwrap();
        let attributes: Vec<_> =
            sets.iter().map(|Setting { attribute, value, .. }| (*attribute, value.as_str())).collect();
        let wanted = [
            ("backing_dev", "/var/lib/uzram/cold.img:2G"),
            ("policy_high", "95"),
            ("policy_low", "90"),
            ("reclaim", "pages"),
            ("recomp_algorithm", "algo=zstd:3"),
            ("recompress_after", "10m"),
            ("recompress_cpu", "2"),
            ("writeback_after", "1h"),
            ("writeback_budget", "10G/day"),
            ("writeback_batch_size", "32"),
        ];
        assert_eq!(attributes, wanted);
        assert_eq!(sets[5].origin, "--policy p.toml:8: recompress.after");
        assert!(settings("").unwrap().is_empty());
        assert_eq!(settings("recompress.after = 600\n").unwrap()[0].value, "600");
    }

    #[test]
    fn a_file_that_makes_no_sense_says_where_and_why() {
        for (text, said) in [
            ("high = 90\nhgih = 95\n", "p.toml:2: 'hgih = 95': unknown key `hgih`; did you mean `high`?"),
            ("[writeback]\naftr = 1", "p.toml:2: 'aftr = 1': unknown key `aftr`; did you mean `after`?"),
            ("high = 101", "p.toml:1: high: '101' is no policy_high"),
            ("high = 1\npolicy_high = 2", "p.toml:2: policy_high: --policy p.toml:1: high already sets it"),
            ("size = 3", "p.toml:1: 'size = 3': unknown key"),
            ("\n\nlow 3", "p.toml:3: 'low 3': "),
            ("low = \"", "p.toml:1: 'low = \"': "),
            ("high = 99999999999999999999999", "p.toml:1: "),
        ] {
            let Err(failure) = settings(text) else { panic!("{text}") };
            assert_eq!(failure.exit(), Exit::Usage, "{text}");
            let line = failure.into_line();
            assert!(line.starts_with(&format!("--policy {said}")), "{text}: {line}");
        }
        let long = format!("backing = \"/{}\"\nlow = {{}}", "x".repeat(100_000));
        let Err(failure) = settings(&long) else { panic!() };
        let line = failure.into_line();
        assert!(line.len() < 300, "{line}");
        // About as deep as the largest file allows.
        assert!(settings(&format!("high = {}", "[".repeat(60_000))).is_err());
    }
}
