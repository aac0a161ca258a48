//! Another program in the place of this one: in the same process after an upgrade, or in a new one by what
//! the service manager keeps.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use uzram::store::LAYOUT_VERSION;

use super::{Holder, LOOK_EVERY, Process, Role, catch_signals};
use crate::config::plan::DaemonPlan;
use crate::daemon::exec;
use crate::daemon::held::Held;
use crate::daemon::survive::fd_store::FdStore;
use crate::daemon::survive::handover::{self, Number, ProcessState, State};
use crate::daemon::survive::link::{Kept, KeptDevice, Link};
use crate::daemon::survive::lives::Number as Shared;
use crate::failure::{Context, Failure, Result};
use crate::system::interrupts::{SignalFd, unblock_signals_of};

/// How long another program may take to say whether it can take over.
const CHECK_WITHIN: Duration = Duration::from_secs(10);

/// What a program prints that can take over.
pub const CAN_SUCCEED: &str = "uzram can go on";

/// Goes on with what a daemon before has left to the service manager; its processes are dead.
pub(super) fn resume(mut state: State, store: FdStore, plan: DaemonPlan) -> Result<u8> {
    let signals = catch_signals(&plan)?;
    (state.charging, state.protection) = (plan.charging.clone(), Held::protect(&plan));
    state.words = std::env::args_os().collect();
    state.processes = [None, None];
    (state.dead, state.command, state.ending) = (Vec::new(), None, None);
    // SAFETY: the state has its descriptors from `fd_store::take`.
    let mut holder = unsafe { Holder::adopt(state, plan, signals) }?;
    (holder.replaces_worker, holder.store, holder.is_changed, holder.announces) =
        (false, Some(store), true, true);
    let held = holder.held()?;
    held.dir.sign().context(|| "cannot write the lock")?;
    held.lives.set(Shared::Holder, u64::from(std::process::id()));
    held.lives.set(Shared::StandBy, 0);
    holder.worker = Some(holder.fork(Role::StandBy)?);
    holder.hold()
}

/// Goes on in the place of another program, which left its state.
///
/// # Safety
/// As [`State::read`].
pub unsafe fn succeed(state: State, plan: DaemonPlan) -> Result<u8> {
    let signals = catch_signals(&plan)?;
    // SAFETY: the caller's promise.
    let mut holder = unsafe { Holder::adopt(state, plan, signals) }?;
    (holder.replaces_worker, holder.is_changed) = (true, true);
    // The stand-by is of the program before.
    if let Some(standby) = holder.standby.take() {
        standby.kill();
        holder.bury(standby);
    }
    holder.start_standby();
    holder.hold()
}

impl Holder {
    pub(super) fn put_into_store(&mut self) -> std::result::Result<(), String> {
        let state = self.state();
        let store = self.store.as_mut().ok_or("no service manager keeps what this daemon has")?;
        let put = state.and_then(|state| store.put(State { processes: [None, None], ..state }));
        put.map_err(|error| format!("the service manager does not keep what this daemon has: {error}"))
    }

    /// As [`Self::put_into_store`], if there is one; a failure is only logged.
    pub(super) fn store_if_kept(&mut self) {
        if self.store.is_some()
            && let Err(why) = self.put_into_store()
        {
            tracing::error!("{why}; it is lost if all processes die");
        }
    }

    /// Checks that a program can take this one's place; returns its path.
    pub(super) fn check_program(&self, program: Option<PathBuf>) -> std::result::Result<PathBuf, String> {
        if !self.held.as_ref().is_some_and(|held| held.plan.survives) {
            return Err("this daemon has no stand-by, and ends with the process that serves (--no-survive)"
                .to_owned());
        }
        let program = program.map_or_else(own_file, Ok).map_err(|error| error.to_string())?;
        let shown = program.display();
        let mut command = Command::new(&program);
        command.args(["successor", "--check"]).arg(format!("--state-version={}", handover::VERSION));
        command.arg(format!("--layout-version={}", LAYOUT_VERSION)).arg("--").args(&self.words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = unblock_signals_of(&mut command)
            .spawn()
            .map_err(|error| format!("cannot run {shown}: {error}"))?;
        let deadline = Instant::now() + CHECK_WITHIN;
        let is_over = loop {
            match child.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
                Ok(None) => {
                    // Fails only if it has ended.
                    let _ = child.kill();
                    break false;
                }
                _ => break true,
            }
        };
        // Both are short: a pipe holds them.
        let output = child.wait_with_output().map_err(|error| format!("cannot run {shown}: {error}"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        if is_over && output.status.success() && said.trim() == CAN_SUCCEED {
            return Ok(program);
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        let other = || complaint.lines().next().map(str::to_owned).filter(|line| !line.is_empty());
        let why = Failure::printed_in(&complaint).map(Failure::into_line).or_else(other);
        let none = if is_over { "it is no uzram that can" } else { "it does not answer" };
        Err(format!("{shown} cannot take over: {}", why.as_deref().unwrap_or(none)))
    }

    /// Has another program take this one's place. Returns why it cannot.
    pub(super) fn become_program(&mut self, program: &Path) -> io::Error {
        let replace = || -> io::Result<io::Error> {
            let mut state = self.state()?;
            state.leave_open()?;
            let (_file, number) = state.write()?;
            let mut command = Command::new(program);
            Ok(command.arg0("uzram").args(["successor", "--state"]).arg(number.to_string()).exec())
        };
        let error = replace().unwrap_or_else(|error| error);
        self.close_on_exec();
        error
    }

    /// Describes everything for the next program, which gets all descriptors.
    pub(super) fn state(&self) -> io::Result<State> {
        let held = self.held.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let connection = held.connection.as_ref().map(|connection| {
            let (record, fds) = connection.parts();
            (record.clone(), fds.map(Number::of).collect())
        });
        let process = |process: &Process| ProcessState {
            pid: process.pid.as_raw_pid(),
            links: [&process.requests, &process.orders].map(|link| Number::of(link.as_fd())),
            attendant: process.attendant.map(Pid::as_raw_pid),
        };
        let device = |kept: &Kept| {
            let number = |fd: &OwnedFd| Number::of(fd.as_fd());
            (kept.device.clone(), kept.memory.as_ref().map(number), kept.backing.iter().map(number).collect())
        };
        Ok(State {
            version: handover::VERSION,
            layout: LAYOUT_VERSION,
            words: self.words.clone(),
            dir: held.dir.descriptors().map(Number::of),
            nbd: held.nbd.descriptors().map(Number::of).collect(),
            control: Number::of(held.control.as_fd()),
            shared: [Number::of(held.lives.as_fd()), Number::of(held.ledger.as_fd())],
            connection,
            charging: held.plan.charging.clone(),
            protection: held.protection.clone(),
            processes: [&self.worker, &self.standby].map(|one| one.as_ref().map(process)),
            dead: self.dead.iter().map(|pid| pid.as_raw_pid()).collect(),
            devices: self.devices.iter().map(device).collect(),
            command: self.command.as_ref().map(exec::Running::parts),
            command_status: self.command_status,
            ending: self.ending,
            stored: self.store.as_ref().map(|store| store.stored().clone()),
        })
    }

    /// Takes what the program before left.
    ///
    /// # Safety
    /// As [`Number::take`].
    pub(super) unsafe fn adopt(state: State, plan: DaemonPlan, signals: SignalFd) -> Result<Holder> {
        let what = || "cannot take over from the program before";
        // SAFETY: the caller's promise.
        let held = unsafe { Held::adopt(plan, &state) }?;
        // SAFETY: as above.
        let take = |number: Number| unsafe { number.take() }.context(what);
        let process = |process: Option<ProcessState>| -> Result<Option<Process>> {
            let Some(ProcessState { pid, links, attendant }) = process else { return Ok(None) };
            let [requests, orders] = links.map(|number| take(number).map(Link));
            let pid = Pid::from_raw(pid).ok_or_else(|| Failure::line(what()))?;
            Ok(Some(Process::new(pid, requests?, orders?, attendant.and_then(Pid::from_raw))))
        };
        let device = |(device, memory, backing): (KeptDevice, Option<Number>, Vec<Number>)| {
            let backing = backing.into_iter().map(take).collect::<Result<_>>()?;
            Ok(Kept { device, memory: memory.map(take).transpose()?, backing })
        };
        let [worker, standby] = state.processes;
        Ok(Holder {
            worker: process(worker)?,
            standby: process(standby)?,
            dead: state.dead.into_iter().filter_map(Pid::from_raw).collect(),
            devices: state.devices.into_iter().map(device).collect::<Result<_>>()?,
            command: state.command.and_then(exec::Running::from_parts),
            command_status: state.command_status,
            ending: state.ending,
            starts: 1,
            words: state.words,
            store: FdStore::from_env(state.stored),
            ..Holder::new(held, signals)
        })
    }

    /// After an exec that failed: no other program may get what this one has.
    pub(super) fn close_on_exec(&self) {
        // SAFETY: it changes a flag of descriptors, which no other thread uses: there is none.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_close_range,
                libc::STDERR_FILENO + 1,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            )
        };
    }

    /// Ends the process that serves if the stand-by, which is of this program, is ready to take over.
    pub(super) fn replace_worker(&mut self) {
        let (Some(held), Some(worker), Some(standby)) = (&self.held, &self.worker, &self.standby) else {
            return;
        };
        if held.lives.get(Shared::StandByReady) == standby.pid.as_raw_pid() as u64 {
            held.lives.set(Shared::Replaced, 1);
            worker.kill();
            self.replaces_worker = false;
        }
    }
}

/// Returns the path that this program was started from; the file there may be another by now.
fn own_file() -> io::Result<PathBuf> {
    let link = std::fs::read_link("/proc/self/exe")?;
    // As the kernel shows a file that was replaced.
    let path = link.as_os_str().as_bytes();
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    Ok(PathBuf::from(OsStr::from_bytes(path)))
}
