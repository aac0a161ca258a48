//! `uzram up --exec`: a shell command that runs within the daemon's lifetime.
//!
//! Signals: with a terminal on standard input the command stays in our process group, like any child of a
//! shell, and the terminal's signals (^C, ^Z) reach it directly. Otherwise it gets its own process group, so
//! that the daemon can forward a signal to all of its processes and to no others.

use std::io::{self, IsTerminal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use uzram::device::Device;
use uzram_serve::control::StatsJson;

use crate::daemon::events::Event;
use crate::failure::{Context, Result};
use crate::system::runtime_dir::RUNTIME_DIR_VARIABLE;
use crate::terminal::live;
use crate::terminal::show;

/// How the command reaches the first device.
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
    child: Child,
    target: Target,
}

/// Starts `command` with `address` in its environment; sends [`Event::CommandEnded`] to `sender` when it has ended.
///
/// # Errors
/// The command cannot be started.
pub fn start(command: &str, address: &Address, sender: &Sender<Event>) -> Result<Running> {
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
    let mut child = shell.spawn().context(|| "cannot run the --exec command with sh".to_owned())?;
    let target = Target { pid: Pid::from_child(&child), own_group };
    if let Err(error) = announce_end(target.pid, sender.clone()) {
        target.send(Signal::KILL);
        // The command is killed, so this does not take long; the first failure is the one to report.
        let _ = child.wait();
        return Err(error).context(|| "cannot wait for the --exec command".to_owned());
    }
    Ok(Running { child, target })
}

impl Running {
    /// Waits for the command's end, forwarding signals to it; then prints the statistics of `device`, named `name`, and
    /// returns the command's status as a shell would: 128 + N if signal N killed it.
    ///
    /// # Errors
    /// The command's status cannot be read.
    pub fn wait(mut self, name: &str, device: &Device, events: &Receiver<Event>) -> Result<u8> {
        pass_signals(&self.target, events);
        let status = self.child.wait().context(|| "cannot wait for the --exec command".to_owned())?;
        live::note(&show::stats_table(name, &StatsJson::from(device.stats())));
        Ok(exit_code(status))
    }
}

/// Forwards requests to end to the command until it has ended. The second request kills it.
fn pass_signals(target: &Target, events: &Receiver<Event>) {
    let mut asked = false;
    while let Ok(event) = events.recv() {
        let signal = match event {
            Event::CommandEnded => return,
            // The command is in the terminal's foreground group, too, and got the signal already.
            Event::Signal { from_terminal: true, .. } if !target.own_group => continue,
            Event::Signal { signal, .. } => signal,
            Event::Shutdown(_) => Signal::TERM,
        };
        tracing::info!(?signal, "passing the signal on to the command");
        target.send(if asked { Signal::KILL } else { signal });
        asked = true;
    }
}

/// The target of signals. The command is reaped only after the last signal, so its pid is not reused.
struct Target {
    pid: Pid,
    own_group: bool,
}

impl Target {
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

/// Sends [`Event::CommandEnded`] when `pid` has ended, without reaping it.
fn announce_end(pid: Pid, sender: Sender<Event>) -> io::Result<()> {
    thread::Builder::new().name("command".to_owned()).spawn(move || {
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
