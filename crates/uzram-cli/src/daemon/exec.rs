//! `uzram up --exec`: a shell command that runs within the daemon's lifetime.
//!
//! Signals: with a terminal on standard input the command stays in our process group, like any child of a
//! shell, and the terminal's signals (^C, ^Z) reach it directly. Otherwise it gets its own process group, so
//! that the daemon can forward a signal to all of its processes and to no others.

use std::io::{self, IsTerminal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, waitpid};
use serde::{Deserialize, Serialize};
use serde_json::json;
use uzram::device::Device;
use uzram_serve::control::StatsJson;

use crate::daemon::events::Event;
use crate::failure::{Context, Result};
use crate::output;
use crate::system::children::ended_child;
use crate::system::interrupts::unblock_signals_of;
use crate::system::protect::unprotect_child;
use crate::system::runtime_dir::RUNTIME_DIR_VARIABLE;
use crate::terminal::live;
use crate::terminal::show;

/// How the command reaches the first device.
#[derive(Debug, Serialize, Deserialize)]
pub struct Address {
    /// The device's name.
    pub name: String,
    /// The directory of the sockets.
    pub runtime_dir: PathBuf,
    /// The NBD socket.
    pub socket: PathBuf,
    /// The NBD URIs; the first is that of the NBD socket.
    pub uris: Vec<String>,
    /// The block device, if the device is attached.
    pub block_device: Option<PathBuf>,
}

/// A running command.
pub struct Running {
    target: Target,
}

/// Starts `command` with `address` in its environment; sends [`Event::CommandEnded`] to `sender` when it has ended.
///
/// # Errors
/// The command cannot be started.
pub fn start(command: &str, address: &Address, sender: &Sender<Event>) -> Result<Running> {
    let running = spawn(command, address)?;
    if let Err(error) = announce_end(running.target.pid, sender.clone()) {
        running.target.send(Signal::KILL);
        // The command is killed, so this does not take long; the first failure is the one to report.
        let _ = waitpid(Some(running.target.pid), WaitOptions::empty());
        return Err(error).context(|| "cannot wait for the --exec command".to_owned());
    }
    Ok(running)
}

/// Starts `command` with `address` in its environment. The caller hears of its end by SIGCHLD, and asks
/// [`Running::ended`].
///
/// # Errors
/// The command cannot be started.
pub fn spawn(command: &str, address: &Address) -> Result<Running> {
    let own_group = !io::stdin().is_terminal();
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command);
    if let Some(uri) = address.uris.first() {
        shell.env("uri", uri);
    }
    shell.env("uris", address.uris.join(" ")).env("socket", &address.socket).env("name", &address.name);
    if let Some(device) = &address.block_device {
        shell.env("device", device);
    }
    // So that `uzram` commands that it runs find this daemon.
    shell.env(RUNTIME_DIR_VARIABLE, &address.runtime_dir);
    if own_group {
        shell.process_group(0);
    }
    let child = unprotect_child(unblock_signals_of(&mut shell))
        .spawn()
        .context(|| "cannot run the --exec command with sh".to_owned())?;
    let target = Target { pid: Pid::from_child(&child), own_group, asked: false };
    Ok(Running { target })
}

impl Running {
    /// Waits for the command's end, forwarding signals to it; then prints the statistics of `device`, named `name`, and
    /// returns the command's status as a shell would: 128 + N if signal N killed it.
    ///
    /// # Errors
    /// The command's status cannot be read.
    pub fn wait(mut self, name: &str, device: &Device, events: &Receiver<Event>) -> Result<u8> {
        pass_signals(&mut self.target, events);
        let ended = waitpid(Some(self.target.pid), WaitOptions::empty());
        let ended = ended.context(|| "cannot wait for the --exec command".to_owned())?;
        live::note(&summary(name, device)?);
        Ok(ended.map_or(1, |(_, status)| exit_code(ExitStatus::from_raw(status.as_raw()))))
    }

    /// Returns the command's process.
    pub fn pid(&self) -> Pid {
        self.target.pid
    }

    /// Returns the command's status, as [`Running::wait`] does, if it has ended.
    pub fn ended(&mut self) -> Option<u8> {
        match waitpid(Some(self.target.pid), WaitOptions::NOHANG) {
            Ok(None) | Err(Errno::INTR) => None,
            Ok(Some((_, status))) => Some(exit_code(ExitStatus::from_raw(status.as_raw()))),
            // Nobody else reaps it; its status is lost.
            Err(_) => Some(1),
        }
    }

    /// Returns what [`Running::from_parts`] takes: the process, whether it has a process group of its own, and whether it
    /// was told to end.
    pub fn parts(&self) -> (i32, bool, bool) {
        (self.target.pid.as_raw_pid(), self.target.own_group, self.target.asked)
    }

    /// Takes a command that another program started in this process; `None` for an invalid process ID.
    pub fn from_parts((pid, own_group, asked): (i32, bool, bool)) -> Option<Running> {
        Some(Running { target: Target { pid: Pid::from_raw(pid)?, own_group, asked } })
    }

    /// Passes a signal on that asks for the end. The second one kills the command.
    pub fn end(&mut self, signal: Signal, from_terminal: bool) {
        // A command in the terminal's foreground group got the terminal's signal already.
        if self.target.own_group || !from_terminal {
            self.target.end(signal);
        }
    }
}

/// Forwards requests to end to the command until it has ended. The second request kills it.
fn pass_signals(target: &mut Target, events: &Receiver<Event>) {
    while let Ok(event) = events.recv() {
        let signal = match event {
            Event::CommandEnded => return,
            // The command is in the terminal's foreground group, too, and got the signal already.
            Event::Signal { from_terminal: true, .. } if !target.own_group => continue,
            Event::Signal { signal, .. } => signal,
            Event::Shutdown(_) => Signal::TERM,
        };
        target.end(signal);
    }
}

/// The target of signals. The command is reaped only after the last signal, so its pid is not reused.
struct Target {
    pid: Pid,
    own_group: bool,
    /// It was asked to end.
    asked: bool,
}

impl Target {
    fn end(&mut self, signal: Signal) {
        tracing::info!(?signal, "passing the signal on to the command");
        self.send(if self.asked { Signal::KILL } else { signal });
        self.asked = true;
    }

    fn send(&self, signal: Signal) {
        let sent = if self.own_group {
            rustix::process::kill_process_group(self.pid, signal)
        } else {
            rustix::process::kill_process(self.pid, signal)
        };
        if let Err(error) = sent {
            tracing::warn!(%error, ?signal, "cannot signal the command");
        }
    }
}

/// Returns the statistics that are printed when the command has ended.
///
/// # Errors
/// None in practice.
pub fn summary(name: &str, device: &Device) -> Result<String> {
    let stats = StatsJson::from(device.stats());
    output::rendered(&json!({ "name": name, "stats": stats }), |_| show::stats_table(name, &stats))
}

/// Sends [`Event::CommandEnded`] when `pid` has ended, without reaping it. As PID 1, reaps orphans meanwhile: nothing else
/// starts processes while the command runs, but the attendant, whose status nobody asks for.
fn announce_end(pid: Pid, sender: Sender<Event>) -> io::Result<()> {
    thread::Builder::new().name("command".to_owned()).spawn(move || {
        if std::process::id() == 1 {
            while let Some(orphan) = ended_child(true).filter(|ended| *ended != pid) {
                let _ = waitpid(Some(orphan), WaitOptions::NOHANG);
            }
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while matches!(rustix::process::waitid(WaitId::Pid(pid), options), Err(Errno::INTR)) {}
        // An error means that the receiver is gone.
        let _ = sender.send(Event::CommandEnded);
    })?;
    Ok(())
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    // A status has 8 bits, and signals go up to 64.
    u8::try_from(code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_command_counts_as_a_shell_counts() {
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(exit_code(ExitStatus::from_raw(15)), 143);
        assert_eq!(exit_code(ExitStatus::from_raw(0)), 0);
    }
}
