//! The options of the commands that create a device: one for each name of a setting in [`settings::all`].

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgGroup, ArgMatches, Args, Command, FromArgMatches};
use uzram::machine_memory;

use crate::config::settings::{self, DeviceSettings, Form, SIZE_WORD, SettingRow, join_paths};
use crate::config::settings_file::{POLICY_HELP, read_policy};
use crate::failure::{Context, Failure, Result};

const GROUP: &str = "DeviceOptions";
const POLICY: &str = "policy";
const DEFAULT_SIZE: &str = "1G";

/// An option: a row of the table, one of its names, and that name as a long option.
struct Name {
    row: &'static SettingRow,
    name: &'static str,
    long: String,
}

static NAMES: LazyLock<Vec<Name>> = LazyLock::new(|| {
    let names = |row: &'static SettingRow| {
        row.names().map(move |name| Name { row, name, long: name.replace('_', "-") })
    };
    settings::all().flat_map(names).collect()
});

#[derive(Default)]
pub struct DeviceOptions {
    /// The name that was used, and the value; of paths, one or more.
    given: Vec<(&'static Name, Vec<String>)>,
    policy: Option<PathBuf>,
}

impl DeviceOptions {
    /// Returns the settings of a device that `swaps` or not, checked as far as possible without one.
    pub fn settings(&self, swaps: bool) -> Result<DeviceSettings> {
        let mut settings = DeviceSettings::default();
        for (Name { row, name, long }, texts) in &self.given {
            // Values that begin with '-' are taken, for the attribute to refuse a negative one.
            if let Some(option) = texts.iter().find(|text| text.starts_with("--")) {
                return Err(Failure::usage(format!("--{long}: its value is missing before {option}")));
            }
            let text = texts.join(" ");
            let (text, origin) = match row.form {
                Form::Path => {
                    let shown = texts.iter().map(|text| format!("--{long} {}", without_login(text)));
                    (join_paths(texts), shown.collect::<Vec<_>>().join(" "))
                }
                Form::Switch if text == "1" => (text, format!("--{long}")),
                form => {
                    let origin = format!("--{long} {text}");
                    let value = form.value(text, machine_memory::read).usage(|| origin.clone());
                    (value.map_err(|failure| failure.with_setting(Some(row.attribute)))?, origin)
                }
            };
            settings.add(row, name, &text, &origin)?;
        }
        if settings.get("disksize").is_none() {
            settings.add_size(DEFAULT_SIZE, &format!("--{SIZE_WORD} {DEFAULT_SIZE}"))?;
        }
        let read = |path: &PathBuf| read_policy("--policy", path);
        settings.complete(self.policy.as_ref().map(read).transpose()?.unwrap_or_default(), "--", swaps)
    }

    pub fn first(&self) -> Option<String> {
        let given = self.given.first().map(|(name, _)| format!("--{}", name.long));
        given.or_else(|| self.policy.as_ref().map(|_| format!("--{POLICY}")))
    }
}

impl Args for DeviceOptions {
    fn group_id() -> Option<clap::Id> {
        Some(clap::Id::from(GROUP))
    }

    fn augment_args(command: Command) -> Command {
        let policy = Arg::new(POLICY)
            .long("policy")
            .value_name("FILE.toml")
            .value_parser(ValueParser::path_buf())
            .help("A TOML file that says which pages leave memory, when and where to. Options override it")
            .long_help(POLICY_HELP);
        let ids = NAMES.iter().map(|name| name.name).chain([POLICY]);
        let group = ArgGroup::new(GROUP).multiple(true).args(ids);
        command.args(NAMES.iter().map(option)).arg(policy).group(group)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Returns an address as messages show it: without user and password, which are refused but may be there.
fn without_login(text: &str) -> String {
    let parts = text.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?.1)));
    parts.map_or_else(|| text.to_owned(), |(scheme, rest)| format!("{scheme}://…@{rest}"))
}

fn option(Name { row, name, long }: &'static Name) -> Arg {
    let arg = Arg::new(*name).long(long.as_str()).value_name(row.value_name);
    let arg = match row.form {
        Form::Path => arg.action(ArgAction::Append),
        Form::Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("1"),
        _ => arg.allow_hyphen_values(true),
    };
    if *name != row.attribute {
        return arg.hide(true);
    }
    let short = row.words.first().map(|word| format!(" [short: --{}]", word.replace('_', "-")));
    arg.help(row.help() + &short.unwrap_or_default())
}

impl FromArgMatches for DeviceOptions {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        let given = |name: &'static Name| {
            let values = matches.get_many::<String>(name.name)?;
            Some((name, values.cloned().collect()))
        };
        let policy = matches.get_one::<PathBuf>(POLICY).cloned();
        Ok(DeviceOptions { given: NAMES.iter().filter_map(given).collect(), policy })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> std::result::Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
