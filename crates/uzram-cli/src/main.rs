//! The `uzram` program: reads the command line and runs one command.
//!
//! `up` is the daemon ([`up`]); `add`, `remove`, `list`, `stat`, `set`, `reset`, `slabinfo`, `clients`, `kick`, `reload`
//! and `down` talk to it over its control socket ([`client`], [`clients`]); `attach` and `detach` make block devices of
//! its files ([`attach`]),
//! `swap` a swap area ([`swap`]); `bench`, `check`, `lab` and `train` need no daemon. A failure of
//! any of them is one line on standard error and a non-zero exit: 2 for a command line that makes no sense,
//! else 1.

mod accounts;
mod attach;
mod attachments;
mod bench;
mod cgroups;
mod check;
mod client;
mod clients;
mod config_file;
mod daemon_client;
mod descriptors;
mod device_args;
mod exec;
mod failure;
mod fresh_counts;
mod interrupts;
mod lab;
mod listen_args;
mod live;
mod notify;
mod plan;
mod policy_file;
mod protect;
mod room;
mod runtime_dir;
mod show;
mod slabinfo;
mod state_dir;
mod swap;
mod toml_text;
mod train;
mod up;

use std::process::ExitCode;

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
    Up(up::Args),
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
    Detach(DetachArgs),
    Swap(swap::Args),
    Reload(ReloadArgs),
    Down(DownArgs),
    Bench(bench::Args),
    #[command(hide = true)]
    BenchSwapUser(bench::SwapUserArgs),
    Check(check::Args),
    Lab(lab::Args),
    Train(train::Args),
}

fn main() -> ExitCode {
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
        Command::Detach(args) => attach::detach(&args).map(|()| 0),
        Command::Swap(args) => swap::run(&args),
        Command::Reload(args) => client::reload(&args).map(|()| 0),
        Command::Down(args) => client::down(&args).map(|()| 0),
        Command::Bench(args) => bench::run(&args).map(|()| 0),
        Command::BenchSwapUser(args) => bench::run_swap_user(&args).map(|()| 0),
        Command::Check(args) => check::run(&args).map(|()| 0),
        Command::Lab(args) => lab::run(&args).map(|()| 0),
        Command::Train(args) => train::run(&args).map(|()| 0),
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(Failure::ReaderLeft) => ExitCode::SUCCESS,
        Err(Failure::Line(line)) => {
            live::error_line(&line);
            ExitCode::FAILURE
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
            ExitCode::from(2)
        }
        _ => {
            live::error_line(&usage_line(&error.to_string()));
            ExitCode::from(2)
        }
    }
}

/// The first paragraph of clap's message in one line; what follows it is usage and advice.
fn usage_line(message: &str) -> String {
    let words: Vec<&str> = message
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .flat_map(str::split_whitespace)
        .collect();
    let line = words.join(" ");
    format!("{} (--help explains)", line.strip_prefix("error: ").unwrap_or(&line))
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
        let message = "error: the following required arguments were not provided:\n  <NAME>\n\nUsage: x\n";
        assert_eq!(
            usage_line(message),
            "the following required arguments were not provided: <NAME> (--help explains)"
        );
    }
}
