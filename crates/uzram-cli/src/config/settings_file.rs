//! The settings of a device as keys of a file of `--config` or `--policy`. In the tables `recompress` and
//! `writeback`, a setting's name is the table's name, `_` and the key.

use std::path::Path;

use uzram::machine_memory::Memory;

use crate::config::settings::{self, DeviceSettings, Form, SettingRow, join_paths};
use crate::config::toml_text::{self, Entry, Source};
use crate::failure::{Context, Result};

pub const POLICY_HELP: &str =
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

/// The tables whose name is a prefix of their settings' names.
pub const GROUPS: [&str; 2] = ["recompress", "writeback"];

/// Where a setting is written, which decides what is allowed.
#[derive(Clone, Copy)]
pub enum Kind<'m> {
    /// A file of `--config`, for a machine with this memory: all settings; sizes may be expressions, paths
    /// relative.
    Config(&'m Memory),
    /// A table `attributes` in such a file: all settings; the attributes parse the values.
    Attributes,
    /// A file of `--policy`: the settings of policies; the attributes parse the values.
    Policy,
}

impl Kind<'_> {
    fn has(self, row: &SettingRow) -> bool {
        !matches!(self, Kind::Policy) || row.is_policy
    }

    pub fn names(self) -> impl Iterator<Item = &'static str> {
        settings::all().filter(move |row| self.has(row)).flat_map(SettingRow::names)
    }
}

/// Adds the setting of a key, or the settings of a table. Messages put `within` before the key, as in
/// `writeback.`.
pub fn read(settings: &mut DeviceSettings, entry: Entry<'_>, within: &str, kind: Kind<'_>) -> Result<()> {
    let is_group = entry.value.is_table() && GROUPS.contains(&entry.key.as_ref());
    let (group, within, keys) = match is_group {
        true => (format!("{}_", entry.key), format!("{within}{}.", entry.key), entry.table()?),
        false => (String::new(), within.to_owned(), vec![entry]),
    };
    for key in keys {
        let found = SettingRow::find(&format!("{group}{}", key.key)).filter(|(row, _)| kind.has(row));
        let Some((row, name)) = found else {
            return Err(key.unknown(kind.names().filter_map(|name| name.strip_prefix(&*group))));
        };
        let text = value(&key, row, kind)?;
        settings.add(row, name, &text, &key.place_of(&format!("{within}{}", key.key)))?;
    }
    Ok(())
}

fn value(entry: &Entry<'_>, row: &SettingRow, kind: Kind<'_>) -> Result<String> {
    if entry.value.is_bool() && row.form != Form::Switch {
        return Err(entry.wrong("write a value other than true or false"));
    }
    let texts = if row.form == Form::Path { entry.texts()? } else { vec![entry.text()?] };
    let text = texts.join(" ");
    let Kind::Config(memory) = kind else { return Ok(text) };
    match row.form {
        Form::Path => Ok(join_paths(&texts)),
        form => form.value(text, || Ok(*memory)).map_err(|error| entry.wrong(error)),
    }
}

/// Reads a file of `--policy`. Messages begin with `option`, the option or key that names it.
pub fn read_policy(option: &str, path: &Path) -> Result<DeviceSettings> {
    let name = format!("{option} {}", path.display());
    let text = toml_text::read(path).context(|| name.clone())?;
    policy(Source { name: &name, text: &text })
}

pub fn policy(source: Source<'_>) -> Result<DeviceSettings> {
    let mut settings = DeviceSettings::default();
    for entry in toml_text::parse(source)? {
        read(&mut settings, entry, "", Kind::Policy)?;
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Setting;
    use crate::failure::Exit;

    fn settings(text: &str) -> Result<DeviceSettings> {
        policy(Source { name: "--policy p.toml", text })
    }

    #[test]
    fn the_example_of_the_help_sets_everything_but_says_where() {
        let (_, example) = POLICY_HELP.split_once("\n\n").unwrap();
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
