//! A process that runs `uzram attach` and `uzram detach` for a daemon which itself can run nothing any more.
//!
//! The daemon starts it, this program with a hidden command, before it gives up anything ([`confine`](crate::daemon::confine)): so
//! it has what that takes, and nothing else of the daemon's, neither memory nor files. It waits for requests on a socket,
//! and ends when the daemon does. It attaches and detaches devices of that one daemon, and does nothing else.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::net::sockopt::socket_peercred;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uzram_serve::loop_device::LoopAttachment;

use crate::client::attach::attachment_text;
use crate::config::plan::SwapPlan;
use crate::failure::{Context, Failure, Result};
use crate::system::descriptors::leave_caller;
use crate::system::runtime_dir::RuntimeArgs;

/// The command that it is.
const COMMAND: &str = "attendant";
/// As tools show it. Not `uzram`: who ends all of these by name must not end this first.
const NAME: &std::ffi::CStr = c"attendant";
/// This program, whatever has become of its file: another version of it might understand other words.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// The longest request or answer.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// Be the process that attaches and detaches for a daemon, which is at the other end of standard input: it is the daemon
/// that starts it.
#[derive(clap::Args)]
pub struct AttendantArgs {
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// What it is asked to do.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// `uzram attach`, and a swap area on it if one is described.
    Attach {
        /// The device.
        name: String,
        /// Its swap area.
        swap: Option<SwapPlan>,
    },
    /// `uzram detach`
    Detach {
        /// The device.
        name: String,
        /// What it was attached as.
        attachment: LoopAttachment,
        /// The daemon keeps so many bytes in memory of the swap area on it, which is to be switched off first.
        swap_off: Option<u64>,
    },
}

impl Request {
    /// The command line, for the daemon in `runtime_dir`.
    fn words(&self, runtime_dir: &Path) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        let name = match self {
            Request::Attach { name, swap } => {
                words.push("attach".into());
                if let Some(SwapPlan { priority, discard }) = swap {
                    let priority = priority.map(|priority| format!("={priority}")).unwrap_or_default();
                    words.push(format!("--swap{priority}").into());
                    words.extend((!discard).then(|| "--no-discard".into()));
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
        // What follows is no option, whatever it begins with.
        words.extend(["--".into(), name.into()]);
        words
    }

    /// What people call it.
    fn shown(&self) -> String {
        match self {
            Request::Attach { name, .. } => format!("`uzram attach {name}`"),
            Request::Detach { name, .. } => format!("`uzram detach {name}`"),
        }
    }
}

/// What the command printed, or why it failed.
type Answer = std::result::Result<String, String>;

/// The process, as its daemon sees it. It ends when this is dropped.
pub struct Attendant {
    stream: UnixStream,
}

impl Attendant {
    /// Starts it for the daemon in `runtime_dir`, and waits until it is there.
    ///
    /// # Errors
    /// The system starts no process.
    pub fn start(runtime_dir: &Path) -> io::Result<Attendant> {
        let (mut stream, its) = UnixStream::pair()?;
        let mut command = same_program();
        command.arg(COMMAND).arg("--runtime-dir").arg(runtime_dir).env_clear();
        command.stdin(OwnedFd::from(its)).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn()?;
        // Its end of the socket, which that has, would never be closed.
        drop(command);
        match receive::<Answer>(&mut stream)? {
            Ok(_) => Ok(Attendant { stream }),
            Err(why) => Err(io::Error::other(why)),
        }
    }

    /// Has it do something, and returns what the command prints.
    ///
    /// # Errors
    /// What the command says; it could not be run.
    pub fn run(&mut self, request: &Request) -> Result<String> {
        match send(&mut self.stream, request).and_then(|()| receive::<Answer>(&mut self.stream)) {
            Ok(answer) => answer.map_err(Failure::Line),
            Err(error) => Err(Failure::Line(format!(
                "cannot run {}: the process that the daemon has for it is gone ({error}): run it by hand",
                request.shown()
            ))),
        }
    }
}

/// `uzram attendant`: does what it is asked for until nobody asks any more. Whoever starts it has no more of it than of the
/// commands that it runs.
///
/// # Errors
/// No daemon is at the other end of standard input.
pub fn run(args: &AttendantArgs) -> Result<()> {
    let uid = rustix::process::geteuid();
    if !socket_peercred(io::stdin()).is_ok_and(|peer| peer.uid == uid) {
        return Err(Failure::line("daemons start this command by themselves, for what they attach"));
    }
    let runtime_dir = args.runtime.path()?;
    serve(&runtime_dir).context(|| "cannot wait for requests".to_owned())
}

fn serve(runtime_dir: &Path) -> io::Result<()> {
    // What is typed at the terminal, or sent to all of a group, is for the daemon.
    leave_caller();
    let _ = rustix::thread::set_name(NAME);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGQUIT, libc::SIGHUP] {
        // SAFETY: a handler that does nothing. It is not there any more in what is run, as one that is ignored were.
        unsafe { signal_hook::low_level::register(signal, || {}) }?;
    }
    let mut stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let null = OwnedFd::from(std::fs::File::open("/dev/null")?);
    rustix::stdio::dup2_stdin(null)?;
    // It is there.
    send(&mut stream, &Answer::Ok(String::new()))?;
    while let Some(request) = receive_if_any::<Request>(&mut stream)? {
        send(&mut stream, &carry_out(runtime_dir, &request))?;
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
        Some(Failure::Line(why)) => Err(why),
        _ => Err(format!("{} ended with {}", request.shown(), output.status)),
    }
}

fn same_program() -> Command {
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("uzram");
    command
}

/// A message is its length, and JSON.
fn send(stream: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let len = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= MAX_MESSAGE_BYTES);
    let len = len.ok_or_else(|| io::Error::other("a message is too long"))?;
    stream.write_all(&[&len.to_le_bytes()[..], &bytes].concat())
}

fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<T> {
    receive_if_any(stream)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// `None` if the other side has left.
fn receive_if_any<T: DeserializeOwned>(stream: &mut UnixStream) -> io::Result<Option<T>> {
    let mut len = [0; 4];
    match stream.read_exact(&mut len) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_MESSAGE_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
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
        let swap = SwapPlan { priority: Some(7), discard: false };
        let text = words(&attach("--runtime-dir=/tmp", Some(swap)));
        assert_eq!(text, "attach --swap=7 --no-discard --runtime-dir /run/x -- --runtime-dir=/tmp");
        let swap = SwapPlan { priority: None, discard: true };
        assert_eq!(words(&attach("a", Some(swap))), "attach --swap --runtime-dir /run/x -- a");
        let attachment = LoopAttachment { number: 3, diskseq: 4 };
        let detach = |swap_off| Request::Detach { name: "a".to_owned(), attachment, swap_off };
        let rest = "--runtime-dir /run/x -- a";
        assert_eq!(words(&detach(None)), format!("detach --attachment 3:4 {rest}"));
        assert_eq!(words(&detach(Some(9))), format!("detach --attachment 3:4 --swap-off=9 {rest}"));
    }

    #[test]
    fn messages_arrive_whole_or_fail() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        send(&mut here, &attach("a", None)).unwrap();
        assert_eq!(receive::<Request>(&mut there).unwrap(), attach("a", None));
        // Nothing of it is sent.
        assert!(send(&mut here, &"x".repeat(MAX_MESSAGE_BYTES)).is_err());
        send(&mut here, &Answer::Err("why".to_owned())).unwrap();
        assert_eq!(receive::<Answer>(&mut there).unwrap(), Err("why".to_owned()));
        here.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(receive::<String>(&mut there).is_err());
        drop(here);
        assert_eq!(receive_if_any::<String>(&mut there).unwrap(), None);
    }
}
