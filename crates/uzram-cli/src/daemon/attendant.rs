//! A process that runs `uzram attach` and `uzram detach` for a daemon that can no longer run programs itself.
//!
//! The daemon starts it before it gives up privileges ([`confine`](crate::daemon::confine)): it has the
//! privileges for its work, but no memory or files of the daemon. It waits for requests on a socket, and ends
//! when the daemon does.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::net::sockopt::socket_peercred;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use uzram_serve::loop_device::LoopAttachment;

use crate::client::attach::attachment_text;
use crate::config::plan::SwapPlan;
use crate::daemon::survive::link::Link;
use crate::failure::{Context, Failure, Result};
use crate::system::descriptors::leave_caller;
use crate::system::interrupts::{ENDING_SIGNALS, unblock_signals_of};
use crate::system::runtime_dir::RuntimeArgs;

/// The hidden command.
const COMMAND: &str = "attendant";
/// The process's name. Not `uzram`: killing all `uzram` processes by name must not kill this one before the
/// daemon.
const NAME: &std::ffi::CStr = c"attendant";
/// This very program, even if its file was replaced: another version may have other options.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Attach and detach devices for the daemon at the other end of standard input. Started by the daemon.
#[derive(clap::Args)]
pub struct AttendantArgs {
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// A request to the attendant.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// `uzram attach`, with a swap area if `swap` is given.
    Attach { name: String, swap: Option<SwapPlan> },
    /// `uzram detach`
    Detach {
        name: String,
        attachment: LoopAttachment,
        /// Switch the swap area on it off first; the daemon keeps this many bytes of its contents in memory.
        swap_off: Option<u64>,
    },
}

impl Request {
    /// Returns the command line, for the daemon in `runtime_dir`.
    fn words(&self, runtime_dir: &Path) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        let name = match self {
            Request::Attach { name, swap } => {
                words.push("attach".into());
                if let Some(SwapPlan { priority, discard, page_cluster }) = swap {
                    let priority = priority.map(|priority| format!("={priority}")).unwrap_or_default();
                    words.push(format!("--swap{priority}").into());
                    words.extend((!discard).then(|| "--no-discard".into()));
                    words.extend(page_cluster.map(|pages| format!("--page-cluster={pages}").into()));
                }
                name
            }
            Request::Detach { name, attachment, swap_off } => {
                words.extend(["detach".into(), "--attachment".into(), attachment_text(*attachment).into()]);
                words.extend(swap_off.map(|kept_bytes| format!("--swap-off={kept_bytes}").into()));
                name
            }
        };
        words.extend(["--runtime-dir".into(), runtime_dir.into()]);
        // A name may begin with '-'.
        words.extend(["--".into(), name.into()]);
        words
    }

    fn shown(&self) -> String {
        match self {
            Request::Attach { name, .. } => format!("`uzram attach {name}`"),
            Request::Detach { name, .. } => format!("`uzram detach {name}`"),
        }
    }
}

/// The command's output, or why it failed.
type Answer = std::result::Result<String, String>;

/// The daemon's handle of the process, which ends when this is dropped.
pub struct Attendant {
    link: Link,
    pid: Pid,
}

impl Attendant {
    /// Starts the process for the daemon in `runtime_dir`, and waits until it is ready.
    pub fn start(runtime_dir: &Path) -> io::Result<Attendant> {
        let (link, its) = Link::pair()?;
        let mut command = same_program();
        command.arg(COMMAND).arg("--runtime-dir").arg(runtime_dir).env_clear();
        command.stdin(OwnedFd::from(its)).stdout(Stdio::null()).stderr(Stdio::null());
        let pid = Pid::from_child(&unblock_signals_of(&mut command).spawn()?);
        // `command` holds the attendant's end of the socket, which must not stay open here.
        drop(command);
        match link.receive::<Answer>()?.ok_or(io::ErrorKind::UnexpectedEof)? {
            (Ok(_), _) => Ok(Attendant { link, pid }),
            (Err(why), _) => Err(io::Error::other(why)),
        }
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Has the process carry out a request, and returns the command's output.
    pub fn run(&mut self, request: &Request) -> Result<String> {
        let by_hand = |why: &str| {
            let what = request.shown();
            Failure::line(format!("cannot run {what}: {why}: run it by hand"))
        };
        match self.link.ask::<Answer>(request, &[]) {
            Ok(Some(answer)) => answer.map_err(Failure::line),
            Ok(None) => Err(by_hand("the daemon's attendant process has ended")),
            Err(error) => Err(by_hand(&format!("the daemon's attendant process does not listen ({error})"))),
        }
    }
}

/// `uzram attendant`: carries out requests until the daemon closes the socket. It gives its caller no more
/// power than the commands that it runs.
pub fn run(args: &AttendantArgs) -> Result<()> {
    let uid = rustix::process::geteuid();
    if !socket_peercred(io::stdin()).is_ok_and(|peer| peer.uid == uid) {
        return Err(Failure::line("only a daemon starts this command"));
    }
    let runtime_dir = args.runtime.path()?;
    serve(&runtime_dir).context(|| "cannot wait for requests")
}

fn serve(runtime_dir: &Path) -> io::Result<()> {
    // Signals from the terminal, or to the process group, are for the daemon.
    leave_caller();
    let _ = rustix::thread::set_name(NAME);
    for signal in ENDING_SIGNALS {
        // SAFETY: the handler does nothing. Unlike SIG_IGN, it is not inherited by the programs that this
        // process runs.
        unsafe { signal_hook::low_level::register(signal, || {}) }?;
    }
    let link = Link::from_fd(io::stdin().as_fd().try_clone_to_owned()?);
    let null = OwnedFd::from(std::fs::File::open("/dev/null")?);
    rustix::stdio::dup2_stdin(null)?;
    // Tells the daemon that this process is ready.
    link.send(&Answer::Ok(String::new()), &[])?;
    while let Some((request, _)) = link.receive::<Request>()? {
        link.send(&carry_out(runtime_dir, &request), &[])?;
    }
    Ok(())
}

fn carry_out(runtime_dir: &Path, request: &Request) -> Answer {
    let mut command = same_program();
    command.args(request.words(runtime_dir)).stdin(Stdio::null()).process_group(0);
    let output = command.output().map_err(|error| format!("cannot run {}: {error}", request.shown()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    match Failure::printed_in(&String::from_utf8_lossy(&output.stderr)) {
        Some(failure) => Err(failure.into_line()),
        None => Err(format!("{} ended with {}", request.shown(), output.status)),
    }
}

fn same_program() -> Command {
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("uzram");
    command
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn attach(name: &str, swap: Option<SwapPlan>) -> Request {
        Request::Attach { name: name.to_owned(), swap }
    }

    #[test]
    fn a_request_names_no_option_and_no_directory() {
        let words = |request: &Request| {
            let words = request.words(Path::new("/run/x")).into_iter();
            words.map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
        };
        let swap = SwapPlan { priority: Some(7), discard: false, page_cluster: Some(0) };
        let text = words(&attach("--runtime-dir=/tmp", Some(swap)));
        assert_eq!(
            text,
            "attach --swap=7 --no-discard --page-cluster=0 --runtime-dir /run/x -- --runtime-dir=/tmp"
        );
        let swap = SwapPlan { priority: None, discard: true, page_cluster: None };
        assert_eq!(words(&attach("a", Some(swap))), "attach --swap --runtime-dir /run/x -- a");
        let attachment = LoopAttachment { number: 3, diskseq: 4 };
        let detach = |swap_off| Request::Detach { name: "a".to_owned(), attachment, swap_off };
        let rest = "--runtime-dir /run/x -- a";
        assert_eq!(words(&detach(None)), format!("detach --attachment 3:4 {rest}"));
        assert_eq!(words(&detach(Some(9))), format!("detach --attachment 3:4 --swap-off=9 {rest}"));
    }
}
