//! The settings of a device as keys of a file of `--config` or `--policy`. In the tables `recompress` and
//! `writeback`, a setting's name is the table's name, `_` and the key.

use uzram::machine_memory::Memory;

use crate::config::settings::{self, DeviceSettings, Form, SettingRow, join_paths};
use crate::config::toml_text::Entry;
use crate::failure::Result;

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
    let key = entry.key.clone().into_owned();
    if !entry.value.is_table() || !GROUPS.contains(&key.as_str()) {
        return read_one(settings, entry, within, "", kind);
    }
    let (group, within) = (format!("{key}_"), format!("{within}{key}."));
    entry.table()?.into_iter().try_for_each(|key| read_one(settings, key, &within, &group, kind))
}

/// Adds the setting of a key in a group.
fn read_one(
    settings: &mut DeviceSettings,
    entry: Entry<'_>,
    within: &str,
    group: &str,
    kind: Kind<'_>,
) -> Result<()> {
    let shown = format!("{within}{}", entry.key);
    let found = SettingRow::find(&format!("{group}{}", entry.key)).filter(|(row, _)| kind.has(row));
    let Some((row, name)) = found else {
        let known = kind.names().filter_map(|name| name.strip_prefix(group));
        return Err(entry.unknown(known));
    };
    let text = value(&entry, row, kind)?;
    settings.add(row, name, &text, &entry.place_of(&shown))
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
