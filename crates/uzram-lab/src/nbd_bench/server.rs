//! Servers as child processes: started, waited for, and ended with whoever holds them.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use uzram::{Error, ErrorKind, Result};

const START_TIMEOUT: Duration = Duration::from_secs(20);
const END_TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);
/// How much of what a program said last goes into an error.
const LAST_WORDS_BYTES: u64 = 1024;

/// A server on a Unix socket in a folder of its own. Dropping it ends the process.
pub(super) struct Server {
    uri: String,
    _process: Process,
    /// After the process: it may still use its socket while it ends.
    _dir: TempDir,
}

impl Server {
    /// A uzram server.
    pub(super) fn uzram(program: &Path, algorithm: &str, size_bytes: u64) -> Result<Server> {
        let dir = temporary_dir()?;
        let mut command = Command::new(program);
        command.arg("up").arg("--runtime-dir").arg(dir.path()).args(["--algorithm", algorithm]);
        command.arg("--size").arg(size_bytes.to_string());
        Server::start(&mut command, dir)
    }

    /// nbdkit's memory plugin with one of its allocators.
    pub(super) fn nbdkit(allocator: &str, size_bytes: u64) -> Result<Server> {
        let dir = temporary_dir()?;
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(dir.path().join("nbd.sock"));
        command.args(["memory", &size_bytes.to_string(), &format!("allocator={allocator}")]);
        Server::start(&mut command, dir)
    }

    fn start(command: &mut Command, dir: TempDir) -> Result<Server> {
        let socket = dir.path().join("nbd.sock");
        let mut process = Process::start(command)?;
        let deadline = Instant::now() + START_TIMEOUT;
        while UnixStream::connect(&socket).is_err() {
            if process.has_ended()? {
                return Err(process.failure("ended before it listened"));
            }
            if Instant::now() > deadline {
                return Err(process.failure("does not listen after 20 s"));
            }
            thread::sleep(POLL);
        }
        let uri = format!("nbd+unix:///?socket={}", percent_encoded(socket.as_os_str()));
        Ok(Server { uri, _process: process, _dir: dir })
    }

    /// What a client connects to.
    pub(super) fn uri(&self) -> &str {
        &self.uri
    }
}

/// Runs a program to its end, which must be a success within `timeout`.
pub(crate) fn run_to_end(command: &mut Command, timeout: Duration) -> Result<()> {
    let mut process = Process::start(command)?;
    let deadline = Instant::now() + timeout;
    while !process.has_ended()? {
        if Instant::now() > deadline {
            return Err(process.failure("did not end in time"));
        }
        thread::sleep(POLL);
    }
    match process.child.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(process.failure(&format!("failed ({status})"))),
        Err(error) => Err(process.failure(&format!("cannot be waited for ({error})"))),
    }
}

/// A child process; dropping it ends it.
struct Process {
    name: String,
    child: Child,
    /// Where its standard error goes.
    said: File,
}

impl Process {
    fn start(command: &mut Command) -> Result<Process> {
        let name = command.get_program().to_string_lossy().into_owned();
        let failed =
            |error: std::io::Error| Error::new(ErrorKind::Io, format!("cannot start {name}: {error}"));
        let said = tempfile::tempfile().map_err(failed)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said.try_clone().map_err(failed)?);
        let child = command.spawn().map_err(failed)?;
        Ok(Process { name, child, said })
    }

    fn has_ended(&mut self) -> Result<bool> {
        match self.child.try_wait() {
            Ok(status) => Ok(status.is_some()),
            Err(error) => Err(Error::new(ErrorKind::Io, format!("cannot wait for {}: {error}", self.name))),
        }
    }

    /// An error with the end of what the program said.
    fn failure(&mut self, what: &str) -> Error {
        let mut words = Vec::new();
        let len = self.said.seek(SeekFrom::End(0)).unwrap_or(0);
        if self.said.seek(SeekFrom::Start(len.saturating_sub(LAST_WORDS_BYTES))).is_ok() {
            // What cannot be read is not worth a second error.
            let _ = (&self.said).take(LAST_WORDS_BYTES).read_to_end(&mut words);
        }
        let words = String::from_utf8_lossy(&words);
        Error::new(ErrorKind::Io, format!("{} {what}: {}", self.name, words.trim()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // The child has not been waited for, so its number is still its own.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let deadline = Instant::now() + END_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(POLL);
        }
    }
}

fn temporary_dir() -> Result<TempDir> {
    // A runtime directory must be its owner's alone.
    tempfile::Builder::new()
        .permissions(std::fs::Permissions::from_mode(0o700))
        .tempdir()
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot make a temporary folder: {error}")))
}

/// A path as it stands in the query of a URI.
fn percent_encoded(path: &OsStr) -> String {
    path.as_bytes().iter().fold(String::new(), |mut out, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                out.push(char::from(*byte))
            }
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(out, "%{byte:02X}");
            }
        }
        out
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_path_is_encoded_for_a_uri() {
        assert_eq!(percent_encoded(OsStr::new("/tmp/a b+c/n.sock")), "/tmp/a%20b%2Bc/n.sock");
    }

    #[test]
    fn a_program_that_fails_is_quoted() {
        let error = run_to_end(Command::new("sh").args(["-c", "echo no luck >&2; exit 3"]), START_TIMEOUT);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("no luck") && error.contains('3'), "{error}");
        let error = run_to_end(&mut Command::new("/nonexistent/program"), START_TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("cannot start /nonexistent/program"), "{error}");
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let start = Instant::now();
        let error = run_to_end(Command::new("sleep").arg("60"), Duration::from_millis(30)).unwrap_err();
        assert!(error.to_string().contains("in time") && start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_server_that_does_not_start_says_why() {
        let error = Server::uzram(Path::new("/bin/false"), "lz4", 1 << 20).err().unwrap().to_string();
        assert!(error.contains("/bin/false ended before it listened"), "{error}");
    }
}
