//! How a command fails: a one-line message and the program's exit status.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use rustix::process::{Resource, getrlimit};

use crate::other_words;

/// Prefix of a failure's line on standard error.
pub const PREFIX: &str = "uzram: ";

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The command failed; a one-line message, without the program's name.
    Line(String),
    /// The command line, or a configuration file that it names, is invalid; a one-line message. Nothing was tried.
    Usage(String),
    /// The reader of our output closed the pipe (`uzram list | head -1`): there is nothing to report.
    ReaderLeft,
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// Returns the line that would be printed.
    pub fn into_line(self) -> String {
        match self {
            Failure::Line(line) | Failure::Usage(line) => line,
            Failure::ReaderLeft => String::new(),
        }
    }

    /// Creates a failure with the message `line`.
    pub fn line(line: impl Into<String>) -> Self {
        Failure::Line(line.into())
    }

    /// Returns the failure that another process of this program reported: the last line with [`PREFIX`] in its output.
    pub fn printed_in(text: &str) -> Option<Self> {
        text.lines().rev().find_map(|line| line.strip_prefix(PREFIX)).map(Failure::line)
    }

    /// Turns this failure into a usage failure: the request was invalid.
    #[must_use]
    pub fn in_usage(self) -> Self {
        match self {
            Failure::Line(line) => Failure::Usage(line),
            other => other,
        }
    }

    /// Wraps an error of the engine about `what`; an invalid value is a usage failure.
    pub fn of(what: &str, error: &uzram::Error) -> Self {
        let failure = Failure::Line(format!("{what}: {error}"));
        if error.kind() == uzram::ErrorKind::Invalid { failure.in_usage() } else { failure }
    }

    /// Rewrites the message, if there is one.
    pub fn map_line(self, rewrite: impl FnOnce(String) -> String) -> Self {
        match self {
            Failure::Line(line) => Failure::Line(rewrite(line)),
            Failure::Usage(line) => Failure::Usage(rewrite(line)),
            Failure::ReaderLeft => Failure::ReaderLeft,
        }
    }
}

impl From<uzram::Error> for Failure {
    /// For errors whose message needs no context.
    fn from(error: uzram::Error) -> Self {
        Failure::Line(error.to_string())
    }
}

/// Adds to an error what was being done.
pub trait Context<T> {
    /// Turns an error into the line "`what`: error".
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;

    /// Like [`Context::context`], but for an invalid command line.
    fn usage(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Failure::Line(format!("{}: {error}", what())))
    }

    fn usage(self, what: impl FnOnce() -> String) -> Result<T> {
        self.context(what).map_err(Failure::in_usage)
    }
}

/// Adds to a message about a file that got too long (EFBIG) which limit that was.
pub fn with_size_limit(line: String) -> String {
    let is_limited = getrlimit(Resource::Fsize).current.is_some();
    let is_too_long = line.contains(&format!("(os error {})", libc::EFBIG));
    match is_limited && is_too_long {
        true => line + ": raise RLIMIT_FSIZE (`ulimit -f unlimited`)",
        false => line,
    }
}

/// Prints a command's result.
///
/// # Errors
/// Standard output is closed or full.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::ReaderLeft),
        Err(error) => Err(Failure::Line(format!("cannot write the output: {error}"))),
    }
}

/// The exit status for an invalid command line, or an invalid file that it names.
pub const USAGE_STATUS: u8 = 2;

/// Parses this process's command line. Otherwise prints the help that was asked for, or calls `complain` with a line
/// about the error, and returns the exit status as `Err`.
pub fn parse_command_line<C: clap::Parser>(complain: impl FnOnce(&str)) -> std::result::Result<C, ExitCode> {
    let error = match C::try_parse() {
        Ok(command) => return Ok(command),
        Err(error) => error,
    };
    Err(match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A closed pipe is no failure.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(USAGE_STATUS)
        }
        _ => {
            complain(&format!("{} (--help explains)", usage_line(&error)));
            ExitCode::from(USAGE_STATUS)
        }
    })
}

/// Returns the first paragraph of clap's message as one line, and its suggestion. What follows it is usage and advice.
pub fn usage_line(error: &clap::Error) -> String {
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
