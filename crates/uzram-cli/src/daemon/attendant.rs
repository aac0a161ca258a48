//! A process that attaches and detaches for a daemon, as `uzram attach` and `uzram detach` do.
//!
//! The daemon starts it before it gives up privileges ([`confine`](crate::daemon::confine)): it has the
//! privileges for its work, but no memory or files of the daemon. It waits for requests on a socket, and ends
//! when the daemon does.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, WaitOptions};
use serde::{Deserialize, Serialize};
use uzram_serve::loop_device::LoopAttachment;

use crate::client::attach::{attach_device, detach_device};
use crate::client::daemon_client::Daemon;
use crate::config::plan::SwapPlan;
use crate::config::settings::parse_name;
use crate::daemon::survive::link::Link;
use crate::failure::{Context, Failure, Result};
use crate::system::descriptors::leave_caller;
use crate::system::interrupts::{ENDING_SIGNALS, unblock_signals_of};
use crate::system::runtime_dir::RuntimeArgs;

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

#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// To attach a device, and swap to it if there is a plan.
    Attach { name: String, swap: Option<SwapPlan> },
    Detach {
        name: String,
        attachment: LoopAttachment,
        /// Switch the swap area on it off first; the daemon keeps this many bytes of its contents in memory.
        swap_off: Option<u64>,
    },
}

impl Request {
    fn shown(&self) -> String {
        match self {
            Request::Attach { name, .. } => format!("`uzram attach {name}`"),
            Request::Detach { name, .. } => format!("`uzram detach {name}`"),
        }
    }
}

/// The block device of one that was attached, or why it failed.
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
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("uzram").arg(COMMAND).arg("--runtime-dir").arg(runtime_dir).env_clear();
        command.stdin(its.0).stdout(Stdio::null()).stderr(Stdio::null());
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

    /// Has the process carry out a request; returns the block device of one that was attached.
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
/// power than the commands do.
pub fn run(args: &AttendantArgs) -> Result<()> {
    let uid = rustix::process::geteuid();
    if !socket_peercred(io::stdin()).is_ok_and(|peer| peer.uid == uid) {
        return Err(Failure::line("only a daemon starts this command"));
    }
    serve(&Daemon::at(&args.runtime)?).context(|| "cannot wait for requests")
}

fn serve(daemon: &Daemon) -> io::Result<()> {
    // Signals from the terminal, or to the process group, are for the daemon.
    leave_caller();
    let _ = rustix::thread::set_name(NAME);
    for signal in ENDING_SIGNALS {
        // SAFETY: the handler does nothing.
        unsafe { signal_hook::low_level::register(signal, || {}) }?;
    }
    let link = Link(io::stdin().as_fd().try_clone_to_owned()?);
    let null = OwnedFd::from(std::fs::File::open("/dev/null")?);
    rustix::stdio::dup2_stdin(null)?;
    // Tells the daemon that this process is ready.
    link.send(&Answer::Ok(String::new()), &[])?;
    while let Some((request, _)) = link.receive::<Request>()? {
        let shown = request.shown();
        let cannot = |error: io::Error| Answer::Err(format!("cannot run {shown}: {error}"));
        link.send(&carry_out_apart(&link, daemon, request).unwrap_or_else(cannot), &[])?;
    }
    Ok(())
}

/// Carries out a request in a process of its own, because the OOM killer ends the process that runs swapoff
/// first: this one must outlive it. `link` leads to the daemon. Errors: there is no such process, or it has
/// ended without an answer.
fn carry_out_apart(link: &Link, daemon: &Daemon, request: Request) -> io::Result<Answer> {
    let (of_child, its) = Link::pair()?;
    // SAFETY: this process has one thread, so that no lock is held by another that the fork does not have.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: this process ends below without using the link again; the daemon sees it close when
            // its attendant dies. The signals end this process as they end any other.
            unsafe {
                libc::close(link.as_fd().as_raw_fd());
                ENDING_SIGNALS.iter().for_each(|signal| _ = libc::signal(*signal, libc::SIG_DFL));
            }
            let told = its.send(&carry_out(daemon, request), &[]);
            std::process::exit(i32::from(told.is_err()))
        }
        pid => {
            drop(its);
            let answer = of_child.receive();
            let wait = || rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::empty());
            let ended = rustix::io::retry_on_intr(wait);
            if let Some((answer, _)) = answer? {
                return Ok(answer);
            }
            let how = ended?.map(|(_, status)| ExitStatus::from_raw(status.as_raw()).to_string());
            Err(io::Error::other(format!("its process ended with {}", how.unwrap_or_default())))
        }
    }
}

fn carry_out(daemon: &Daemon, request: Request) -> Answer {
    // The name becomes a path below the daemon's files, and the daemon may be an attacker's by now.
    let (Request::Attach { name, .. } | Request::Detach { name, .. }) = &request;
    parse_name(name)?;
    let done = match request {
        Request::Attach { name, swap } => {
            attach_device(daemon, &name, swap).map(|path| path.display().to_string())
        }
        Request::Detach { name, attachment, swap_off } => {
            detach_device(&daemon.dir, &name, attachment, swap_off).map(|()| String::new())
        }
    };
    done.map_err(Failure::into_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_a_device_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::in_dir(dir.path().to_owned()).unwrap();
        let attachment = LoopAttachment { number: 3, diskseq: 4 };
        for name in ["../x", "a/b", "..", "-x", "", "a b"] {
            for request in [
                Request::Attach { name: name.to_owned(), swap: None },
                Request::Detach { name: name.to_owned(), attachment, swap_off: Some(9) },
            ] {
                let refused = carry_out(&daemon, request).unwrap_err();
                assert!(refused.starts_with("a name is a letter or digit"), "{name}: {refused}");
            }
        }
    }
}
