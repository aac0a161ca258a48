//! How a command fails: with one line for people, and the status that the program exits with.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// What begins the line of a failure on standard error.
pub const PREFIX: &str = "uzram: ";

/// Why a command did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// It could not be done: one line for people, without the program's name.
    Line(String),
    /// The command line, or a file with settings that it names, makes no sense: such a line. Nothing was tried.
    Usage(String),
    /// Whoever read our output has gone (`uzram list | head -1`): nobody is left to tell.
    ReaderLeft,
}

/// What a command comes to.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure that reads `line`.
    pub fn line(line: impl Into<String>) -> Self {
        Failure::Line(line.into())
    }

    /// How another process of this program ended, by the last such line of what it printed.
    pub fn printed_in(text: &str) -> Option<Self> {
        text.lines().rev().find_map(|line| line.strip_prefix(PREFIX)).map(Failure::line)
    }

    /// The same failure, found in what was asked for rather than in doing it.
    #[must_use]
    pub fn in_usage(self) -> Self {
        match self {
            Failure::Line(line) => Failure::Usage(line),
            other => other,
        }
    }

    /// What the engine says of `what`: a value that it cannot accept was asked for.
    pub fn of(what: &str, error: &uzram::Error) -> Self {
        let failure = Failure::Line(format!("{what}: {error}"));
        if error.kind() == uzram::ErrorKind::Invalid { failure.in_usage() } else { failure }
    }

    /// Rewrites the line, if it is one.
    pub fn map_line(self, rewrite: impl FnOnce(String) -> String) -> Self {
        match self {
            Failure::Line(line) => Failure::Line(rewrite(line)),
            Failure::Usage(line) => Failure::Usage(rewrite(line)),
            Failure::ReaderLeft => Failure::ReaderLeft,
        }
    }
}

impl From<uzram::Error> for Failure {
    /// One that says enough by itself.
    fn from(error: uzram::Error) -> Self {
        Failure::Line(error.to_string())
    }
}

/// Says what was being done when something failed.
pub trait Context<T> {
    /// Turns an error into the line "`what`: error".
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;

    /// The same of a command line that makes no sense.
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

/// The status of a command line, or a file that it names, that makes no sense.
pub const USAGE_STATUS: u8 = 2;

/// Parses this process's command line. Otherwise prints help where it was asked for, or has `complain` print a line about
/// what makes no sense, and returns the status.
pub fn parse_command_line<C: clap::Parser>(complain: impl FnOnce(&str)) -> std::result::Result<C, ExitCode> {
    let error = match C::try_parse() {
        Ok(command) => return Ok(command),
        Err(error) => error,
    };
    Err(match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader who left has seen enough.
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

/// The first paragraph of clap's message in one line, and what was probably meant; what follows it is usage and advice.
pub fn usage_line(error: &clap::Error) -> String {
    let message = error.to_string();
    let words: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .flat_map(str::split_whitespace)
        .collect();
    let line = words.join(" ");
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    let suggested =
        [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    let meant = suggested.into_iter().find_map(|kind| match error.get(kind)? {
        ContextValue::String(name) => Some(name),
        ContextValue::Strings(names) => names.first(),
        _ => None,
    });
    match meant {
        Some(name) => format!("{line}; did you mean `{name}`?"),
        None => line.to_owned(),
    }
}
