//! The `uzram` program, as a library, so that its start can be tested ([`start`]): reads the command line and runs one command.
//!
//! `up` is the daemon (`up`); `add`, `remove`, `list`, `stat`, `set`, `reset`, `slabinfo`, `clients`, `kick`, `reload`
//! and `down` talk to it over its control socket (`client`, `clients`); `attach` and `detach` make block devices of
//! its files (`attach`),
//! `swap` a swap area (`swap`); `check` and `train` need no daemon; `bench` and `lab`
//! are programs of their own (`sibling`). A failure of
//! any of them is one line on standard error and a status.
//!
//! The statuses: 0, it was done; 1, it was not, or a daemon refused it; 2, the command line or a file with settings makes
//! no sense, and nothing was tried (`Failure::Usage`). `up --exec` has its command's, 128 + N if signal N ended it.

mod accounts;
mod attach;
mod attachments;
mod attendant;
mod cgroups;
mod check;
mod client;
mod clients;
mod config_file;
mod confine;
mod daemon_client;
mod descriptors;
mod device_args;
mod exec;
mod failure;
mod fresh_counts;
mod interrupts;
mod listen_args;
mod live;
mod notify;
mod plan;
mod policy_file;
mod protect;
mod room;
mod runtime_dir;
mod show;
mod sibling;
mod slabinfo;
pub mod start;
mod state_dir;
mod swap;
mod toml_text;
mod train;
mod up;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};
use clap::{Parser, Subcommand};

use attach::{AttachArgs, DetachArgs};
use client::{
    AddArgs, DownArgs, ListArgs, ReloadArgs, RemoveArgs, ResetArgs, SetArgs, SlabinfoArgs, StatArgs,
};
use failure::Failure;

#[derive(Parser)]
#[command(
    name = "uzram",
    version,
    about = "zram in user space: compressed memory without a kernel module",
    after_help = "Example: uzram up --size 1G     then, in another terminal: uzram stat zram0"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Up(Box<up::Args>),
    Add(AddArgs),
    Remove(RemoveArgs),
    List(ListArgs),
    Stat(StatArgs),
    Set(SetArgs),
    Reset(ResetArgs),
    Slabinfo(SlabinfoArgs),
    Clients(clients::ClientsArgs),
    Kick(clients::KickArgs),
    Attach(AttachArgs),
    #[command(hide = true)]
    Attendant(attendant::Args),
    Detach(DetachArgs),
    Swap(swap::Args),
    Reload(ReloadArgs),
    Down(DownArgs),
    /// Measure a device beside what it is compared with
    ///
    /// Runs the program uzram-bench: `uzram bench --help` lists its options.
    Bench(sibling::Args),
    Check(check::Args),
    /// Repeat kernel patch series: their before against their after
    ///
    /// Runs the program uzram-lab: `uzram lab --help` lists its commands.
    Lab(sibling::Args),
    Train(train::Args),
}

/// The status for what makes no sense.
const USAGE_STATUS: u8 = 2;

/// Runs the command that this process's command line says.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let outcome = match cli.command {
        Command::Up(args) => up::run(&args),
        Command::Add(args) => client::add(&args).map(|()| 0),
        Command::Remove(args) => client::remove(&args).map(|()| 0),
        Command::List(args) => client::list(&args).map(|()| 0),
        Command::Stat(args) => client::stat(&args).map(|()| 0),
        Command::Set(args) => client::set(&args).map(|()| 0),
        Command::Reset(args) => client::reset(&args).map(|()| 0),
        Command::Slabinfo(args) => client::slabinfo(&args).map(|()| 0),
        Command::Clients(args) => clients::clients(&args).map(|()| 0),
        Command::Kick(args) => clients::kick(&args).map(|()| 0),
        Command::Attach(args) => attach::attach(&args).map(|()| 0),
        Command::Attendant(args) => attendant::run(&args).map(|()| 0),
        Command::Detach(args) => attach::detach(&args).map(|()| 0),
        Command::Swap(args) => swap::run(&args),
        Command::Reload(args) => client::reload(&args).map(|()| 0),
        Command::Down(args) => client::down(&args).map(|()| 0),
        Command::Bench(args) => sibling::run("uzram-bench", &args).map(|never| match never {}),
        Command::Check(args) => check::run(&args).map(|()| 0),
        Command::Lab(args) => sibling::run("uzram-lab", &args).map(|never| match never {}),
        Command::Train(args) => train::run(&args).map(|()| 0),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(Failure::ReaderLeft) => ExitCode::SUCCESS,
        Err(Failure::Line(line)) => {
            live::error_line(&line);
            ExitCode::FAILURE
        }
        Err(Failure::Usage(line)) => {
            live::error_line(&line);
            ExitCode::from(USAGE_STATUS)
        }
    }
}

/// Prints help where it was asked for, or one line about a command line that makes no sense.
fn usage(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind as Kind;
    match error.kind() {
        Kind::DisplayHelp | Kind::DisplayVersion => {
            // A reader who left has seen enough.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        Kind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(USAGE_STATUS)
        }
        _ => {
            live::error_line(&format!("{} (--help explains)", usage_line(error)));
            ExitCode::from(USAGE_STATUS)
        }
    }
}

/// The first paragraph of clap's message in one line, and what was probably meant; what follows it is usage and advice.
fn usage_line(error: &clap::Error) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_usage_error_is_one_line() {
        let line = |args: &[&str]| match Cli::try_parse_from(args) {
            Ok(_) => panic!("{args:?}"),
            Err(error) => usage_line(&error),
        };
        for (args, wanted) in [
            (&["uzram", "stat"][..], "the following required arguments were not provided: <NAME>"),
            (&["uzram", "stauts"], "unrecognized subcommand 'stauts'; did you mean `stat`?"),
            (&["uzram", "swap", "of"], "unrecognized subcommand 'of'; did you mean `off`?"),
            (&["uzram", "up", "--szie", "1G"], "unexpected argument '--szie' found; did you mean `--size`?"),
            (&["uzram", "up", "--quick"], "unexpected argument '--quick' found"),
        ] {
            assert_eq!(line(args), wanted);
        }
        assert!(line(&["uzram", "up", "--log", "eror"]).ends_with("; did you mean `error`?"));
    }
}
