//! `uzram up --exec`: a shell command that runs within the daemon's lifetime.
//!
//! With a terminal on standard input the command stays in our process group, and the terminal's signals (^C,
//! ^Z) reach it directly. Otherwise it gets its own, so that the daemon can forward a signal to all of its
//! processes and to no others.

use std::io::{self, IsTerminal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, waitpid};
use serde::{Deserialize, Serialize};

use crate::failure::{Context, Result};
use crate::system::interrupts::unblock_signals_of;
use crate::system::protect::unprotect_child;
use crate::system::runtime_dir::{NBD_SOCKET, RUNTIME_DIR_VARIABLE, socket_path};

/// How the command reaches the first device.
#[derive(Debug, Serialize, Deserialize)]
pub struct Address {
    pub name: String,
    /// The NBD URIs; the first is that of the NBD socket.
    pub uris: Vec<String>,
    pub block_device: Option<PathBuf>,
}

/// A running command. It is reaped only after the last signal, so its process ID is not reused.
pub struct Running {
    pid: Pid,
    own_group: bool,
    asked: bool,
}

/// Starts `command` of the daemon in `runtime_dir` with `address` in its environment. The caller hears of its
/// end by SIGCHLD, and asks [`Running::ended`].
pub fn start(command: &str, runtime_dir: &Path, address: &Address) -> Result<Running> {
    let own_group = !io::stdin().is_terminal();
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command);
    shell.envs(address.uris.first().map(|uri| ("uri", uri)));
    shell.envs(address.block_device.as_ref().map(|device| ("device", device)));
    shell.env("uris", address.uris.join(" ")).env("name", &address.name);
    shell.env("socket", socket_path(runtime_dir, NBD_SOCKET)?);
    // So that `uzram` commands that it runs find this daemon.
    shell.env(RUNTIME_DIR_VARIABLE, runtime_dir);
    if own_group {
        shell.process_group(0);
    }
    let child = unprotect_child(unblock_signals_of(&mut shell)).spawn();
    let child = child.context(|| "cannot run the --exec command with sh")?;
    Ok(Running { pid: Pid::from_child(&child), own_group, asked: false })
}

impl Running {
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the command's status as a shell would, 128 + N if signal N killed it, if it has ended.
    pub fn ended(&mut self) -> Option<u8> {
        match waitpid(Some(self.pid), WaitOptions::NOHANG) {
            Ok(None) | Err(Errno::INTR) => None,
            Ok(Some((_, status))) => Some(exit_code(ExitStatus::from_raw(status.as_raw()))),
            // Nobody else reaps it; its status is lost.
            Err(_) => Some(1),
        }
    }

    /// Returns the process, whether it has a process group of its own, and whether it was told to end.
    pub fn parts(&self) -> (i32, bool, bool) {
        (self.pid.as_raw_pid(), self.own_group, self.asked)
    }

    /// Takes a command that another program started in this process; `None` for an invalid process ID.
    pub fn from_parts((pid, own_group, asked): (i32, bool, bool)) -> Option<Running> {
        Some(Running { pid: Pid::from_raw(pid)?, own_group, asked })
    }

    /// Passes a signal on that asks for the end. The second one kills the command.
    pub fn end(&mut self, signal: Signal, from_terminal: bool) {
        if from_terminal && !self.own_group {
            // It is in the terminal's foreground group, and got the terminal's signal already.
            return;
        }
        tracing::info!(?signal, "passing the signal on to the command");
        let signal = if self.asked { Signal::KILL } else { signal };
        self.asked = true;
        let send = if self.own_group { kill_process_group } else { kill_process };
        if let Err(error) = send(self.pid, signal) {
            tracing::warn!(%error, ?signal, "cannot signal the command");
        }
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    // A status has 8 bits, and signals go up to 64.
    u8::try_from(code).unwrap_or(1)
}
