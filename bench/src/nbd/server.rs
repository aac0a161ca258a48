//! Servers as child processes: starts them, and waits until they listen.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;
use uzram::Result;
use uzram_serve::percent;

use crate::harness::process::{self, Process, runtime_dir};

const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A server on a Unix socket in its own folder. Dropping it ends the process.
pub struct Server {
    uri: String,
    _process: Process,
    /// After the process: it may still use its socket while it ends.
    _dir: TempDir,
}

impl Server {
    /// Starts a uzram server with more options.
    pub fn uzram(program: &Path, algorithm: &str, size_bytes: u64, options: &[&str]) -> Result<Server> {
        let dir = runtime_dir()?;
        let mut command = Command::new(program);
        command.arg("up").arg("--runtime-dir").arg(dir.path()).args(["--algorithm", algorithm]);
        command.arg("--size").arg(format!("{size_bytes}B")).args(options);
        Server::start(&mut command, dir)
    }

    /// Starts nbdkit's memory plugin with one of its allocators.
    pub fn nbdkit(allocator: &str, size_bytes: u64) -> Result<Server> {
        let dir = runtime_dir()?;
        let mut command = process::command("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(dir.path().join("nbd.sock"));
        command.args(["memory", &size_bytes.to_string(), &format!("allocator={allocator}")]);
        Server::start(&mut command, dir)
    }

    fn start(command: &mut Command, dir: TempDir) -> Result<Server> {
        let socket = dir.path().join("nbd.sock");
        let mut process = Process::start(command)?;
        process.wait_until("listened", START_TIMEOUT, |_| UnixStream::connect(&socket).ok())?;
        let uri = format!("nbd+unix:///?socket={}", percent::encode(socket.as_os_str().as_bytes()));
        Ok(Server { uri, _process: process, _dir: dir })
    }

    /// Returns the URI that a client connects to.
    pub fn uri(&self) -> &str {
        &self.uri
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_start_says_why() {
        let error = Server::uzram(Path::new("/bin/false"), "lz4", 1 << 20, &[]).err().unwrap().to_string();
        assert!(error.contains("/bin/false ended before it listened"), "{error}");
    }
}
