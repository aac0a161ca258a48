//! A daemon with a block device whose processes are killed and exchanged. It ends when it is dropped.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::Value;
use uzram::{Error, ErrorKind, Result};

use crate::block::PATIENCE;
use crate::block::disk::Attached;
use crate::harness::go_on;
use crate::harness::process::run_to_end;

const PERIOD: Duration = Duration::from_millis(50);
/// How long to leave a daemon alone after a kill: to ask it starts a program, which takes time of a CPU.
const LEFT_ALONE: Duration = Duration::from_millis(200);

pub(super) struct Daemon<'a> {
    pub(super) disk: Attached,
    pub(super) stop: &'a AtomicBool,
}

/// Its processes, of `uzram status --json`.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Processes {
    pub(super) holder_pid: Option<i32>,
    pub(super) worker_pid: i32,
    pub(super) standby_pid: Option<i32>,
    standby_ready: bool,
    take_overs: u64,
}

impl Daemon<'_> {
    pub(super) fn pool_bytes(&self) -> Result<u64> {
        let stat = self.ask(&["stat", "zram0", "--json"])?;
        stat["stats"]["mem_used_bytes"]
            .as_u64()
            .ok_or_else(|| Error::new(ErrorKind::Io, "the daemon does not say how much memory its pool has"))
    }

    /// Waits until a process can take over at once.
    pub(super) fn wait_until_ready(&self) -> Result<Processes> {
        let is_ready = |processes: &Processes| processes.standby_ready && processes.standby_pid.is_some();
        self.wait_until("no stand-by is ready", is_ready)
    }

    /// Kills the process that serves, and waits until another does.
    pub(super) fn kill_worker(&self, before: &Processes) -> Result<()> {
        let killed = Pid::from_raw(before.worker_pid).ok_or(rustix::io::Errno::SRCH);
        killed.and_then(|pid| kill_process(pid, Signal::KILL)).map_err(|error| {
            let what = format!("cannot kill process {}: {error}", before.worker_pid);
            Error::new(ErrorKind::Io, what)
        })?;
        thread::sleep(LEFT_ALONE);
        self.wait_until("no process took over", |now| now.take_overs > before.take_overs).map(drop)
    }

    pub(super) fn upgrade(&self) -> Result<()> {
        run_to_end(&mut self.disk.command(&["upgrade"]), PATIENCE).map(drop)
    }

    fn wait_until(&self, not_yet: &str, is_so: impl Fn(&Processes) -> bool) -> Result<Processes> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            go_on(self.stop)?;
            // A process that dies does not answer.
            let found = self.ask(&["status", "--json"]).and_then(|status| {
                serde_json::from_value(status).map_err(|error| Error::new(ErrorKind::Io, error.to_string()))
            });
            match found {
                Ok(processes) if is_so(&processes) => return Ok(processes),
                Err(error) if Instant::now() > deadline => return Err(error),
                Ok(processes) if Instant::now() > deadline => {
                    return Err(Error::new(ErrorKind::Io, format!("{not_yet}: {processes:?}")));
                }
                _ => thread::sleep(PERIOD),
            }
        }
    }

    fn ask(&self, command: &[&str]) -> Result<Value> {
        let printed = run_to_end(&mut self.disk.command(command), PATIENCE)?;
        serde_json::from_str(&printed)
            .map_err(|error| Error::new(ErrorKind::Io, format!("uzram {}: {error}", command.join(" "))))
    }
}
