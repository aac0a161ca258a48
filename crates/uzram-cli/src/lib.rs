//! The `uzram` program as a library, so that fuzzers can reach its start-up code ([`start`]), and benchmarks
//! the memory of programs ([`process_pages`]). It parses the command line and runs one command.
//!
//! The modules are declared bottom up: each imports only from those before it, in its folder's `mod.rs` as
//! here (`crates/uzram/tests/it/layers.rs` checks it).

mod other_words;
mod failure;
mod output;
mod system;
mod terminal;
mod config;
mod swap;
mod client;
mod daemon;
mod commands;

pub use daemon::start;
pub use failure::{USAGE_STATUS, parse_command_line};
pub use system::{process_pages, process_status, program};

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use client::attach::{self, AttachArgs, DetachArgs};
use client::control::{self, AddArgs, DeviceArgs, DownArgs, KickArgs, SetArgs, StatArgs};
use client::survival::{self, RecoverArgs, UpgradeArgs};
#[cfg(feature = "remote")]
use commands::backing;
use commands::{check, corpus, run, sibling, swap as swap_commands, train};
use daemon::survive::handover::{self, State};
use daemon::{attendant, holder, up};
use failure::{Exit, Failure};
use system::interrupts::catch_size_limit;
use system::runtime_dir::RuntimeArgs;
use terminal::live;

#[derive(Parser)]
#[command(
    name = "uzram",
    version,
    about = "zram in user space: compressed memory without a kernel module",
    after_help = "Example: uzram up --size 1G     then, in another terminal: uzram stat zram0"
)]
struct Cli {
    /// Print JSON, errors too
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Up(Box<up::UpArgs>),
    Run(Box<run::RunArgs>),
    Add(AddArgs),
    /// Remove a device and its contents from a running daemon. Refused while a client has it open.
    #[command(after_help = "Example: uzram remove zram1")]
    Remove(DeviceArgs),
    /// List the devices of a running daemon, and the programs that run under `uzram run`.
    ///
    /// Programs are shown whether a daemon is running or not: those of this user, to root all.
    #[command(after_help = "Example: uzram list --json")]
    List(RuntimeArgs),
    Stat(StatArgs),
    Set(SetArgs),
    /// Free a device's contents and disk. It needs a new disksize before it can be used again.
    #[command(after_help = "Example: uzram reset zram0 && uzram set zram0 disksize=2G")]
    Reset(DeviceArgs),
    /// List the NBD clients of a running daemon: peer, device, connection time, requests and bytes.
    #[command(after_help = "Examples: uzram clients
          uzram clients --json | jq '.clients[] | select(.export == \"zram0\") | .id'")]
    Clients(RuntimeArgs),
    Kick(KickArgs),
    Attach(AttachArgs),
    #[command(hide = true)]
    Attendant(attendant::AttendantArgs),
    #[command(hide = true)]
    Successor(SuccessorArgs),
    Detach(DetachArgs),
    Swap(swap_commands::SwapArgs),
    /// Show the processes of a running daemon: which one serves, which takes over when that dies, and how
    /// often one has.
    #[command(after_help = "Examples: uzram status
          uzram status --json | jq .take_overs")]
    Status(RuntimeArgs),
    /// Make a running daemon reload its TLS files: certificate, key and client CA.
    ///
    /// New connections use the new files; existing connections and the devices' contents are not affected. If
    /// a file is invalid, the command fails, and the old files stay in force.
    #[command(after_help = "Example: uzram reload")]
    Reload(RuntimeArgs),
    Upgrade(UpgradeArgs),
    Recover(RecoverArgs),
    Down(DownArgs),
    /// Benchmark a device against other devices and programs
    ///
    /// Runs the program uzram-bench: `uzram bench --help` lists its options.
    Bench(sibling::SiblingArgs),
    Check(check::CheckArgs),
    Corpus(corpus::CorpusArgs),
    /// Reproduce kernel patch series: measure each one's before against its after
    ///
    /// Runs the program uzram-lab: `uzram lab --help` lists its commands.
    Lab(sibling::SiblingArgs),
    Train(train::TrainArgs),
    #[cfg(feature = "remote")]
    Backing(backing::BackingArgs),
}

/// Go on in the place of a daemon's program, in its process. Started by the daemon.
#[derive(clap::Args)]
struct SuccessorArgs {
    /// Only say whether this program can
    #[arg(long, requires_all = ["state_version", "layout_version"])]
    check: bool,
    #[arg(long, value_name = "N")]
    state_version: Option<u32>,
    #[arg(long, value_name = "N")]
    layout_version: Option<u64>,
    /// The descriptor of what the program before left
    #[arg(long, value_name = "FD", conflicts_with = "check")]
    state: Option<i32>,
    /// The daemon's command line
    #[arg(last = true)]
    words: Vec<std::ffi::OsString>,
}

fn succeed(args: &SuccessorArgs) -> failure::Result<u8> {
    if args.check {
        let is_read = args.state_version == Some(handover::VERSION)
            && args.layout_version == Some(uzram::store::LAYOUT_VERSION);
        if !is_read {
            return Err(Failure::line("it is of a version that does not read the daemon's memory"));
        }
        daemon_plan(&args.words)?.0.check()?;
        return failure::print(&format!("{}\n", holder::CAN_SUCCEED)).map(|()| 0);
    }
    let Some(number) = args.state else { return Err(Failure::line("only a daemon starts this command")) };
    let read = |error: std::io::Error| {
        Failure::line(format!("what the program before left cannot be read: {error}"))
    };
    // SAFETY: a daemon starts this program in its place, and leaves it this descriptor and those named there;
    // this program has opened none of its own. Any other caller harms only itself.
    let state = unsafe { State::read(number) }.map_err(read)?;
    let (plan, log) = daemon_plan(&state.words)?;
    live::start_log(log)?;
    // SAFETY: as above.
    unsafe { holder::succeed(state, plan) }
}

/// Returns the plan of the daemon with this command line, and how much it logs.
fn daemon_plan(words: &[std::ffi::OsString]) -> failure::Result<(config::plan::DaemonPlan, live::LogLevel)> {
    let cli = Cli::try_parse_from(words).map_err(|error| failure::usage_failure(&error))?;
    output::set_json(cli.json);
    match cli.command {
        Command::Up(args) => Ok((args.plan()?, args.log)),
        Command::Swap(args) => Ok((args.plan()?, live::LogLevel::Info)),
        _ => Err(Failure::line("this command line starts no daemon")),
    }
}

/// Runs the command given on this process's command line.
pub fn main() -> ExitCode {
    // Without the handler, such a file ends this process without a word.
    let _ = catch_size_limit();
    #[cfg(feature = "remote")]
    uzram::device::set_opener(Box::new(uzram_remote::RemoteOpener));
    match failure::parse::<Cli>().map_err(not_parsed).and_then(carry_out) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            live::report_failure(&failure);
            failure.exit().into()
        }
    }
}

/// Returns the failure of a command line that cannot be parsed: `run` tells its own failures from its
/// program's.
fn not_parsed(failure: Failure) -> Failure {
    let words = || std::env::args_os().skip(1).take_while(|word| word != "--");
    output::set_json(words().any(|word| word == "--json"));
    match words().find(|word| word != "--json") {
        Some(word) if word == "run" && failure.exit() == Exit::Usage => failure.with_exit(Exit::RunFailed),
        _ => failure,
    }
}

fn carry_out(cli: Cli) -> failure::Result<u8> {
    output::set_json(cli.json);
    match cli.command {
        Command::Up(args) => up::run(&args),
        Command::Run(args) => run::run(&args).map(|never| match never {}),
        Command::Add(args) => control::add(&args).map(|()| 0),
        Command::Remove(args) => control::remove(&args).map(|()| 0),
        Command::List(args) => control::list(&args).map(|()| 0),
        Command::Stat(args) => control::stat(&args).map(|()| 0),
        Command::Set(args) => control::set(&args).map(|()| 0),
        Command::Reset(args) => control::reset(&args).map(|()| 0),
        Command::Clients(args) => control::clients(&args).map(|()| 0),
        Command::Kick(args) => control::kick(&args).map(|()| 0),
        Command::Attach(args) => attach::attach(&args).map(|()| 0),
        Command::Successor(args) => succeed(&args),
        Command::Attendant(args) => attendant::run(&args).map(|()| 0),
        Command::Detach(args) => attach::detach(&args).map(|()| 0),
        Command::Swap(args) => swap_commands::run(&args),
        Command::Status(args) => survival::status(&args).map(|()| 0),
        Command::Reload(args) => control::reload(&args).map(|()| 0),
        Command::Upgrade(args) => survival::upgrade(&args).map(|()| 0),
        Command::Recover(args) => survival::recover(&args).map(|()| 0),
        Command::Down(args) => control::down(&args).map(|()| 0),
        Command::Bench(args) => sibling::run("uzram-bench", &args).map(|never| match never {}),
        Command::Check(args) => check::run(&args).map(|()| 0),
        Command::Corpus(args) => corpus::run(&args).map(|()| 0),
        Command::Lab(args) => sibling::run("uzram-lab", &args).map(|never| match never {}),
        #[cfg(feature = "remote")]
        Command::Backing(args) => backing::run(&args).map(|()| 0),
        Command::Train(args) => train::run(&args).map(|()| 0),
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
            Err(error) => failure::usage_failure(&error).into_line(),
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
