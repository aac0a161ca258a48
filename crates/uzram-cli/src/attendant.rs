//! A process that runs `uzram attach` and `uzram detach` for a daemon which itself can run nothing any more.
//!
//! It is the daemon's copy from before it gave up anything ([`confine`](crate::confine)), and before it held anyone's
//! data: it waits for requests on a socket, and is gone when the daemon is. Nothing from outside reaches it but through
//! the daemon, and it does nothing but those two.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::failure::{Context, Failure, Result};
use crate::runtime_dir::RUNTIME_DIR_VARIABLE;
use crate::swap::own_program;

/// What it runs.
const COMMANDS: [&str; 2] = ["attach", "detach"];
/// The longest request or answer.
const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// As tools show it. Not `uzram`: who ends all of these by name must not end this first.
const NAME: &std::ffi::CStr = c"attendant";

/// The process. It ends when this is dropped.
pub struct Attendant {
    stream: UnixStream,
}

/// How a command ended.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    succeeded: bool,
    /// Its status, in words.
    status: String,
    stdout: String,
    stderr: String,
}

impl Attendant {
    /// Starts it. This process has one thread so far.
    ///
    /// # Errors
    /// The system starts no process.
    pub fn start() -> io::Result<Attendant> {
        let (stream, its) = UnixStream::pair()?;
        // SAFETY: there is one thread, so the copy holds no lock of another's; it never returns to what this one is in.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                drop(stream);
                let served = std::panic::catch_unwind(|| attend(its));
                let status = i32::from(!matches!(served, Ok(Ok(()))));
                // SAFETY: ends this process, and runs nothing of its copy's.
                unsafe { libc::_exit(status) }
            }
            _ => Ok(Attendant { stream }),
        }
    }

    /// Runs a command of this program for the daemon in `runtime_dir`, and answers what it prints.
    ///
    /// # Errors
    /// What the command says; it could not be run.
    pub fn run(&mut self, runtime_dir: &Path, args: &[String]) -> Result<String> {
        let command = || format!("`uzram {}`", args.join(" "));
        let asked =
            send(&mut self.stream, &(runtime_dir.as_os_str(), args)).and_then(|()| receive(&mut self.stream));
        let answer: Answer = match asked {
            Ok(answer) => answer,
            Err(error) => {
                return Err(Failure::Line(format!(
                    "cannot run {}: the process that the daemon has for it is gone ({error}): run it by hand",
                    command()
                )));
            }
        };
        if answer.succeeded {
            return Ok(answer.stdout);
        }
        let ended = || Failure::Line(format!("{} ended with {}", command(), answer.status));
        Err(Failure::printed_in(&answer.stderr).unwrap_or_else(ended))
    }
}

/// Runs what is asked for until nobody asks any more.
fn attend(mut stream: UnixStream) -> io::Result<()> {
    // What is typed at the terminal, or sent to all of a group, is for the daemon.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(NAME);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGQUIT, libc::SIGHUP] {
        // SAFETY: a handler that does nothing. It is not there any more in what is run, as one that is ignored were.
        unsafe { signal_hook::low_level::register(signal, || {}) }?;
    }
    let null = OwnedFd::from(std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?);
    rustix::stdio::dup2_stdin(null.as_fd())?;
    rustix::stdio::dup2_stdout(null.as_fd())?;
    rustix::stdio::dup2_stderr(null.as_fd())?;
    while let Some((runtime_dir, args)) = receive_if_any::<(OsString, Vec<String>)>(&mut stream)? {
        send(&mut stream, &answer(&runtime_dir, &args))?;
    }
    Ok(())
}

fn answer(runtime_dir: &OsString, args: &[String]) -> Answer {
    let failed = |why: String| Answer {
        succeeded: false,
        status: why.clone(),
        stdout: String::new(),
        stderr: format!("{}{why}\n", crate::failure::PREFIX),
    };
    if !args.first().is_some_and(|command| COMMANDS.contains(&command.as_str())) {
        return failed("only block devices are attached and detached".to_owned());
    }
    let output = own_program().and_then(|mut program| {
        program.args(args).env(RUNTIME_DIR_VARIABLE, runtime_dir).stdin(Stdio::null()).process_group(0);
        program.output().context(|| format!("cannot run `uzram {}`", args.join(" ")))
    });
    match output {
        Ok(output) => Answer {
            succeeded: output.status.success(),
            status: output.status.to_string(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        },
        Err(Failure::Line(why) | Failure::Usage(why)) => failed(why),
        Err(Failure::ReaderLeft) => failed("nobody reads".to_owned()),
    }
}

/// A message is its length, and JSON.
fn send(stream: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
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

    #[test]
    fn it_runs_nothing_else() {
        let answer = answer(&OsString::from("/nowhere"), &["up".to_owned()]);
        assert!(!answer.succeeded && answer.stderr.contains("only block devices"), "{answer:?}");
    }

    #[test]
    fn messages_arrive_whole_or_fail() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        send(&mut here, &(Path::new("/run/x").as_os_str(), ["detach"])).unwrap();
        let request: (OsString, Vec<String>) = receive(&mut there).unwrap();
        assert_eq!(request, (OsString::from("/run/x"), vec!["detach".to_owned()]));
        here.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(receive::<String>(&mut there).is_err());
        drop(here);
        assert_eq!(receive_if_any::<String>(&mut there).unwrap(), None);
    }
}
