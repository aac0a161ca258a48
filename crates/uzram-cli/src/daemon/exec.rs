//! `uzram up --exec`: a shell command that lives inside the daemon's lifetime.
//!
//! Whose signals are whose: with a terminal on standard input the command stays in our process
//! group, as any child of a shell, and what is typed (^C, ^Z) reaches it without us. Otherwise it gets
//! a group of its own, so that a signal can be passed on to all of its processes and to nobody else's.

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

/// Where the first device can be reached.
pub struct Address {
    /// The device's name.
    pub name: String,
    /// Where the sockets are.
    pub runtime_dir: PathBuf,
    /// The NBD socket.
    pub socket: PathBuf,
    /// The NBD URIs; the first is that of the NBD socket.
    pub uris: Vec<String>,
    /// The block device, if it is one.
    pub block_device: Option<PathBuf>,
}

/// A command that runs.
pub struct Running {
    child: Child,
    target: Target,
}

/// Starts `command`, which finds the daemon at `address`; `sender` is told when it has ended.
///
/// # Errors
/// It cannot be started.
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
    // For the clients of this daemon that it runs, wherever its sockets are.
    shell.env(RUNTIME_DIR_VARIABLE, &address.runtime_dir);
    if own_group {
        shell.process_group(0);
    }
    let mut child = shell.spawn().context(|| "cannot run the --exec command with sh".to_owned())?;
    let target = Target { pid: Pid::from_child(&child), own_group };
    if let Err(error) = announce_end(target.pid, sender.clone()) {
        target.send(Signal::KILL);
        // It is killed: this cannot take long, and the first failure is the one to report.
        let _ = child.wait();
        return Err(error).context(|| "cannot wait for the --exec command".to_owned());
    }
    Ok(Running { child, target })
}

impl Running {
    /// Waits for the command's end, prints the statistics of `device`, whose name this is, and returns the command's
    /// status as a shell would: 128 + N if signal N killed it. Meanwhile it gets the signals that are sent to this process.
    ///
    /// # Errors
    /// The system does not tell how it ended.
    pub fn wait(mut self, name: &str, device: &Device, events: &Receiver<Event>) -> Result<u8> {
        pass_signals(&self.target, events);
        let status = self.child.wait().context(|| "cannot wait for the --exec command".to_owned())?;
        live::note(&show::stats_table(name, &StatsJson::from(device.stats())));
        Ok(exit_code(status))
    }
}

/// Until the command has ended, passes on to it what asks us to end. Asked twice, it is killed.
fn pass_signals(target: &Target, events: &Receiver<Event>) {
    let mut asked = false;
    while let Ok(event) = events.recv() {
        let signal = match event {
            Event::CommandEnded => return,
            // It is in the terminal's foreground group with us, and has the signal already.
            Event::Signal { from_terminal: true, .. } if !target.own_group => continue,
            Event::Signal { signal, .. } => signal,
            Event::Shutdown(_) => Signal::TERM,
        };
        tracing::info!(?signal, "passing the signal on to the command");
        target.send(if asked { Signal::KILL } else { signal });
        asked = true;
    }
}

/// The running command. It is not reaped until we stop sending, so its pid is not another's.
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
        // A failure means that nobody waits any more.
        let _ = sender.send(Event::CommandEnded);
    })?;
    Ok(())
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    // Linux keeps 8 bits of a status, and has 64 signals.
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
