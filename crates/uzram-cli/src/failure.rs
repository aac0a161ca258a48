//! How a command fails: a one-line message, the setting to change, and the program's exit status.

use std::any::Any;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::other_words;

/// Prefix of a failure's line on standard error.
pub const PREFIX: &str = "uzram: ";

/// The exit statuses, which docs/control.md explains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Exit {
    /// Done; also if the reader of our output closed the pipe (`uzram list | head -1`).
    Done = 0,
    /// The command failed, or a daemon refused it.
    #[default]
    Failed = 1,
    /// The command line, or a configuration file that it names, is invalid; nothing was tried.
    Usage = 2,
    /// The command needs a daemon, and none is running.
    NoDaemon = 3,
    /// `uzram run` failed before it had become the program, as env(1) does.
    RunFailed = 125,
    /// `uzram run`: the program cannot be executed.
    NotExecutable = 126,
    /// `uzram run`: there is no such program.
    NotFound = 127,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Why a command failed.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// A one-line message, without the program's name; empty if nothing is to be reported.
    line: String,
    setting: Option<String>,
    exit: Exit,
}

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn line(line: impl Into<String>) -> Self {
        Failure { line: line.into(), setting: None, exit: Exit::Failed }
    }

    /// Creates a failure with the message `line`, of an invalid command line or configuration file.
    pub fn usage(line: impl Into<String>) -> Self {
        Failure::line(line).with_exit(Exit::Usage)
    }

    fn silent(exit: Exit) -> Self {
        Failure::line("").with_exit(exit)
    }

    pub fn into_line(self) -> String {
        self.line
    }

    pub fn message(&self) -> &str {
        &self.line
    }

    pub const fn exit(&self) -> Exit {
        self.exit
    }

    pub fn is_reported(&self) -> bool {
        !self.line.is_empty()
    }

    pub fn to_json(&self) -> Value {
        json!({ "error": self.line, "setting": self.setting })
    }

    /// Returns the failure that another process of this program reported: the last line with [`PREFIX`] in
    /// its output, or in JSON.
    pub fn printed_in(text: &str) -> Option<Self> {
        text.lines().rev().find_map(|line| match line.strip_prefix(PREFIX) {
            Some(line) => Some(Failure::line(line)),
            None => {
                let json: Value = serde_json::from_str(line).ok()?;
                Some(Failure::line(json["error"].as_str()?).with_setting(json["setting"].as_str()))
            }
        })
    }

    #[must_use]
    pub fn with_exit(self, exit: Exit) -> Self {
        Failure { exit, ..self }
    }

    #[must_use]
    pub fn in_usage(self) -> Self {
        if self.exit == Exit::Failed { self.with_exit(Exit::Usage) } else { self }
    }

    /// Names the setting to change, unless one is named already.
    #[must_use]
    pub fn with_setting(self, setting: Option<impl Into<String>>) -> Self {
        Failure { setting: self.setting.or(setting.map(Into::into)), ..self }
    }

    /// Wraps an error of the engine about `what`; an invalid value is a usage failure.
    pub fn of(what: &str, error: &uzram::Error) -> Self {
        let failure = Failure::line(format!("{what}: {error}")).with_setting(error.setting());
        if error.kind() == uzram::ErrorKind::Invalid { failure.in_usage() } else { failure }
    }

    /// Rewrites the message, if there is one.
    #[must_use]
    pub fn map_line(self, rewrite: impl FnOnce(String) -> String) -> Self {
        if self.is_reported() { Failure { line: rewrite(self.line), ..self } } else { self }
    }
}

impl From<uzram::Error> for Failure {
    /// For errors whose message needs no context.
    fn from(error: uzram::Error) -> Self {
        Failure::line(error.to_string()).with_setting(error.setting())
    }
}

/// Adds to an error what was being done.
pub trait Context<T>: Sized {
    /// Turns an error into the line "`what`: error".
    fn context<S: Display>(self, what: impl FnOnce() -> S) -> Result<T>;

    /// Like [`Context::context`], but for an invalid command line.
    fn usage<S: Display>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.context(what).map_err(Failure::in_usage)
    }
}

impl<T> Context<T> for Result<T> {
    fn context<S: Display>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|failure| failure.map_line(|line| format!("{}: {line}", what())))
    }
}

impl<T, E: Display + 'static> Context<T> for std::result::Result<T, E> {
    fn context<S: Display>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|error| {
            let any = &error as &dyn Any;
            let setting = any.downcast_ref::<uzram::Error>().and_then(uzram::Error::setting);
            let hint = any.downcast_ref().map_or("", size_limit_hint);
            Failure::line(format!("{}: {error}{hint}", what())).with_setting(setting)
        })
    }
}

/// Returns what to set if a file got longer than RLIMIT_FSIZE allows.
fn size_limit_hint(error: &io::Error) -> &'static str {
    let is_too_long = error.raw_os_error() == Some(libc::EFBIG);
    match is_too_long && getrlimit(Resource::Fsize).current.is_some() {
        true => ": raise RLIMIT_FSIZE (`ulimit -f unlimited`)",
        false => "",
    }
}

pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::silent(Exit::Done)),
        Err(error) => Err(error).context(|| "cannot write the output"),
    }
}

/// The exit status for an invalid command line, or an invalid file that it names.
pub const USAGE_STATUS: u8 = Exit::Usage as u8;

pub fn parse<C: clap::Parser>() -> Result<C> {
    C::try_parse().map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A closed pipe is no failure.
            let _ = error.print();
            Failure::silent(Exit::Done)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Failure::silent(Exit::Usage)
        }
        _ => usage_failure(&error).map_line(|line| format!("{line} (--help explains)")),
    })
}

/// As `parse`, for other programs: calls `complain` with a line about the error, and returns the exit status
/// as `Err`.
pub fn parse_command_line<C: clap::Parser>(complain: impl FnOnce(&str)) -> std::result::Result<C, ExitCode> {
    parse().map_err(|failure| {
        if failure.is_reported() {
            complain(&failure.line);
        }
        failure.exit.into()
    })
}

pub fn usage_failure(error: &clap::Error) -> Failure {
    let argument = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, _) => None,
        (_, Some(ContextValue::String(argument))) => argument.strip_prefix("--"),
        _ => None,
    };
    let setting = argument.and_then(|argument| argument.split([' ', '=']).next());
    Failure::usage(usage_line(error)).with_setting(setting)
}

/// Returns the first paragraph of clap's message as one line, and its suggestion. What follows it is usage
/// and advice.
fn usage_line(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::InvalidUtf8
        && let Some(which) = not_utf8(std::env::args_os())
    {
        return which;
    }
    let message = error.to_string();
    let words: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .flat_map(str::split_whitespace)
        .collect();
    let line = words.join(" ");
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    let line = line.replace(": invalid digit found in string", ": write a whole number");
    let unknown = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let command = unknown(ContextKind::InvalidSubcommand).and_then(other_words::of_command);
    let is_unknown = error.kind() == ErrorKind::UnknownArgument;
    let option = unknown(ContextKind::InvalidArg).filter(|_| is_unknown).and_then(other_words::of_option);
    if let Some(answer) = command.or(option) {
        return format!("{line}; {answer}");
    }
    let suggested =
        [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    let meant = suggested.into_iter().find_map(|kind| match error.get(kind)? {
        ContextValue::String(name) => Some(name),
        ContextValue::Strings(names) => names.first(),
        _ => None,
    });
    match meant {
        Some(name) => format!("{line}; did you mean `{name}`?"),
        None => line,
    }
}

/// Returns which of these words is not UTF-8, with the option before it: clap does not tell.
fn not_utf8(words: impl Iterator<Item = OsString>) -> Option<String> {
    let mut option = String::new();
    for word in words {
        match word.to_str() {
            Some(text) if text.starts_with("--") => option = format!("{text} "),
            Some(_) => option.clear(),
            None => {
                let word = word.to_string_lossy();
                return Some(format!(
                    "{option}{word}: it is not UTF-8, as all settings are: choose another name"
                ));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_lists_the_exit_statuses() {
        let page = include_str!("../../../docs/control.md");
        let listed =
            page.lines().filter_map(|line| line.strip_prefix("| ")?.split(' ').next()?.parse::<u8>().ok());
        use Exit::*;
        let all = [Done, Failed, Usage, NoDaemon, RunFailed, NotExecutable, NotFound];
        assert_eq!(listed.collect::<Vec<_>>(), all.map(|exit| exit as u8));
    }

    #[test]
    fn a_failure_is_read_as_it_was_printed() {
        let failure = Failure::line("no \"room\"").with_setting(Some("mem_limit"));
        let json = failure.to_json().to_string();
        assert_eq!(Failure::printed_in(&format!("a line\n{json}\n")), Some(failure));
        let text = Failure::printed_in("uzram: first\nuzram: last\n{}\n");
        assert_eq!(text, Some(Failure::line("last")));
        assert_eq!(Failure::printed_in("INFO uzram: serving\n1\n"), None);
    }
}
