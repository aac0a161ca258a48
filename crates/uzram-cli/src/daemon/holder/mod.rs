//! The process that a user starts: it holds what a daemon needs, starts the processes that serve, and does
//! nothing else.
//!
//! `docs/internals/take-over.md` describes it and the processes that it forks. It has one thread, reads no
//! byte of a client, and takes no memory while it runs. With `--no-survive` there is no stand-by, the
//! devices' memory is the worker's own, and the daemon ends with it.
//!
//! A dead worker is reaped only after the stand-by serves: until then it looks at the dead one's threads.

mod processes;
mod replace;

use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};

use crate::config::plan::DaemonPlan;
use crate::daemon::exec;
use crate::daemon::held::Held;
use crate::daemon::notify;
use crate::daemon::survive::fd_store::{self, FdStore};
use crate::daemon::survive::link::{
    Answer, End, Kept, KeptBacking, KeptDevice, Link, Order, Request, Served,
};
use crate::daemon::survive::lives::Number as Shared;
use crate::failure::{Context, Failure, Result};
use crate::system::interrupts::{ENDING_SIGNALS, SignalFd, is_ignored};
use crate::system::protect::touch_heap;

pub use replace::{CAN_SUCCEED, succeed};

/// How long a process has to live for the next one to be started at once when it dies; else that waits as
/// long.
const LIVES_AT_LEAST: Duration = Duration::from_secs(1);

/// How often an upgraded holder looks whether its stand-by is ready.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How often the first worker may die before it serves.
const MAX_STARTS: u32 = 3;

/// Runs a daemon until it is told to end; returns the exit status.
pub fn run(plan: DaemonPlan) -> Result<u8> {
    if plan.survives {
        // SAFETY: nothing in this process uses descriptors that it was started with, but for the standard
        // ones.
        let left = unsafe { fd_store::take() };
        if let Some((state, store)) = left.context(|| "what the service manager keeps cannot be used")? {
            return replace::resume(state, store, plan);
        }
    }
    let held = Held::claim(plan)?;
    let signals = catch_signals(&held.plan)?;
    if held.plan.is_protected() {
        touch_heap();
    }
    held.lives.set(Shared::Holder, u64::from(std::process::id()));
    let mut holder = Holder::new(held, signals);
    holder.announces = true;
    holder.starts = 1;
    holder.worker = Some(holder.fork(Role::First)?);
    holder.hold()
}

fn catch_signals(plan: &DaemonPlan) -> Result<SignalFd> {
    let hang_up =
        |signal: &i32| *signal != libc::SIGHUP || plan.reloads_on_hang_up || !is_ignored(libc::SIGHUP);
    let signals = ENDING_SIGNALS.into_iter().filter(hang_up).chain([libc::SIGCHLD]);
    SignalFd::new(signals).context(|| "cannot handle signals")
}

/// A process that serves or waits to serve.
struct Process {
    pid: Pid,
    requests: Link,
    orders: Link,
    attendant: Option<Pid>,
    since: Instant,
    /// It waits until no earlier attendant runs.
    settles: bool,
    /// It has closed its sockets: it is dead.
    is_closed: bool,
}

impl Process {
    fn new(pid: Pid, requests: Link, orders: Link, attendant: Option<Pid>) -> Process {
        let since = Instant::now();
        Process { pid, requests, orders, attendant, since, settles: false, is_closed: false }
    }

    /// Ends it at once, unless it has ended.
    fn kill(&self) {
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
    }
}

struct Holder {
    /// `None` in a fork that took it.
    held: Option<Held>,
    signals: SignalFd,
    worker: Option<Process>,
    standby: Option<Process>,
    /// Processes to reap, and attendants of such.
    dead: Vec<Pid>,
    devices: Vec<Kept>,
    command: Option<exec::Running>,
    /// The status of the command, which has ended.
    command_status: Option<u8>,
    ending: Option<End>,
    starts: u32,
    standby_after: Option<Instant>,
    words: Vec<OsString>,
    /// The program that is to take this one's place.
    next_program: Option<PathBuf>,
    /// This program has taken the place of another, of which a process still serves.
    replaces_worker: bool,
    store: Option<FdStore>,
    /// What is to be stored has changed.
    is_changed: bool,
    /// The service manager waits to hear that this daemon serves.
    announces: bool,
}

enum Role {
    First,
    StandBy,
}

enum Then {
    Answer(Answer),
    /// The answer comes later.
    Wait,
    /// All processes end, and the service manager keeps what they have.
    Leave,
    End(Result<u8>),
}

impl Holder {
    fn new(held: Held, signals: SignalFd) -> Holder {
        let store = FdStore::from_env(None).filter(|_| held.plan.survives);
        Holder {
            held: Some(held),
            signals,
            worker: None,
            standby: None,
            dead: Vec::new(),
            devices: Vec::new(),
            command: None,
            command_status: None,
            ending: None,
            starts: 0,
            standby_after: None,
            words: std::env::args_os().collect(),
            next_program: None,
            replaces_worker: false,
            store,
            is_changed: false,
            announces: false,
        }
    }

    fn held(&self) -> Result<&Held> {
        self.held.as_ref().ok_or_else(|| Failure::line("this process holds nothing"))
    }

    fn hold(mut self) -> Result<u8> {
        loop {
            if let Some(status) = self.wait()? {
                return Ok(status);
            }
            if std::mem::take(&mut self.is_changed) {
                self.store_if_kept();
            }
            if let Some(program) = self.next_program.take() {
                // Comes back only if it fails.
                let error = self.become_program(&program);
                tracing::error!("cannot run {}: {error}; this program goes on", program.display());
            }
        }
    }

    /// Waits for a request or a signal, and handles it. Returns the exit status when the daemon has ended.
    fn wait(&mut self) -> Result<Option<u8>> {
        let both = [&self.worker, &self.standby].into_iter().flatten();
        let open: Vec<_> = both.filter(|process| !process.is_closed).collect();
        let pids: Vec<_> = open.iter().map(|process| process.pid).collect();
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        fds.extend(open.iter().map(|process| PollFd::new(&process.requests, PollFlags::IN)));
        let left = self.standby_after.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.or(self.replaces_worker.then_some(LOOK_EVERY));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, left.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Ok(None),
            polled => polled.context(|| "cannot wait")?,
        };
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if self.replaces_worker {
            self.replace_worker();
        }
        if self.standby_after.is_some_and(|at| at <= Instant::now()) {
            self.start_standby();
        }
        for (pid, _) in pids.into_iter().zip(&is_ready[1..]).filter(|(_, is_ready)| **is_ready) {
            if let Some(status) = self.handle(pid)? {
                return Ok(Some(status));
            }
        }
        // After the requests: the last one of a process says how it ended.
        while let Some(caught) = self.signals.next() {
            match caught.signal {
                libc::SIGCHLD => {
                    if let Some(status) = self.reap()? {
                        return Ok(Some(status));
                    }
                }
                libc::SIGHUP if self.held()?.plan.reloads_on_hang_up => self.order(&Order::Reload),
                signal => {
                    let signal = if signal == libc::SIGINT { Signal::INT } else { Signal::TERM };
                    self.end(signal, caught.from_kernel);
                }
            }
        }
        self.reap_orphans();
        Ok(None)
    }

    /// Passes a request to end on: to the command, or to the worker.
    fn end(&mut self, signal: Signal, from_terminal: bool) {
        if let Some(command) = &mut self.command {
            command.end(signal, from_terminal);
            return;
        }
        if from_terminal && signal == Signal::INT && self.is_served() {
            self.order(&Order::Interrupt);
            return;
        }
        let end = End::Signal(signal.as_raw());
        self.ending = Some(end);
        self.order(&Order::End(end));
    }

    /// Gives the worker an order. If it is dead, the next one gets it when it serves.
    fn order(&self, order: &Order) {
        if let Some(worker) = &self.worker {
            let _ = worker.orders.try_send(order, &[]);
        }
    }

    fn handle(&mut self, pid: Pid) -> Result<Option<u8>> {
        let is_worker = self.worker.as_ref().is_some_and(|worker| worker.pid == pid);
        let process = if is_worker { &mut self.worker } else { &mut self.standby };
        let Some(process) = process.as_mut().filter(|process| process.pid == pid) else { return Ok(None) };
        let (request, descriptors) = match process.requests.receive::<Request>() {
            Ok(Some(received)) => received,
            // SIGCHLD tells of its death.
            Ok(None) => {
                process.is_closed = true;
                return Ok(None);
            }
            Err(error) => {
                tracing::error!(%error, "a request of the process that serves cannot be read");
                return Ok(None);
            }
        };
        match self.carry_out(request, descriptors, is_worker) {
            Then::Answer(answer) => self.answer(pid, &answer),
            Then::Wait => {}
            Then::End(outcome) => {
                self.finish(Some(pid));
                return outcome.map(Some);
            }
            Then::Leave => {
                self.answer(pid, &Ok(()));
                self.leave();
                return Ok(Some(0));
            }
        }
        Ok(None)
    }

    fn answer(&self, pid: Pid, answer: &Answer) {
        let mut both = [&self.worker, &self.standby].into_iter().flatten();
        if let Some(process) = both.find(|process| process.pid == pid) {
            // If it cannot be told, it is dead.
            let _ = process.requests.send(answer, &[]);
        }
    }

    fn carry_out(&mut self, request: Request, descriptors: Vec<OwnedFd>, is_worker: bool) -> Then {
        Then::Answer(match request {
            Request::Added { name, policy } => self.keep(Kept::without_memory(name, policy)),
            Request::Removed { name } => self.forget(name),
            Request::Keep { name, backing } => self.keep_memory(name, backing, descriptors),
            Request::GiveUp { name } => match self.policy(&name) {
                Some(policy) => self.keep(Kept::without_memory(name, policy)),
                None => Ok(()),
            },
            Request::Serving(served) => self.serving(served, is_worker),
            Request::Status(status) => {
                notify::status(&status);
                Ok(())
            }
            Request::Leave => match self.put_into_store() {
                Ok(()) => return Then::Leave,
                refused => refused,
            },
            Request::WillEnd(end) => {
                // The command ends the daemon, if there is one.
                self.ending = if self.command.is_none() { Some(end) } else { self.ending };
                Ok(())
            }
            Request::Settle => return self.settle(is_worker),
            Request::EndCommand => {
                self.command.iter_mut().for_each(|command| command.end(Signal::TERM, false));
                Ok(())
            }
            Request::FailFiles => {
                self.held.as_mut().map_or(Ok(()), Held::fail_files).map_err(Failure::into_line)
            }
            Request::Recover => match self.recover() {
                // The process that asks is dead now. Its client asks the next one.
                Ok(true) => return Then::Wait,
                recovered => recovered.map(drop),
            },
            Request::Upgrade(program) => {
                self.check_program(program).map(|program| self.next_program = Some(program))
            }
            Request::Ended(Err(failure)) if !is_worker && self.is_served() => {
                tracing::error!("no stand-by: {}", failure.message());
                Ok(())
            }
            Request::Ended(ended) => {
                return Then::End(ended.map(|status| self.command_status.unwrap_or(status)));
            }
        })
    }

    fn policy(&self, name: &str) -> Option<uzram_serve::ExportPolicy> {
        self.devices.iter().find(|kept| kept.device.name == name).map(|kept| kept.device.policy)
    }

    /// Keeps a device, and tells the stand-by before the worker goes on.
    fn keep(&mut self, kept: Kept) -> Answer {
        let (order, descriptors) = kept.order();
        self.tell_standby(&order, &descriptors);
        match self.devices.iter_mut().find(|other| other.device.name == kept.device.name) {
            Some(place) => *place = kept,
            None => self.devices.push(kept),
        }
        // Before the worker uses it.
        self.store_if_kept();
        Ok(())
    }

    fn keep_memory(&mut self, name: String, backing: Vec<KeptBacking>, descriptors: Vec<OwnedFd>) -> Answer {
        let policy = self.policy(&name).ok_or_else(|| format!("'{name}' is no device"))?;
        let device = KeptDevice { name, policy, has_memory: true, backing };
        let kept = Kept::received(device, descriptors).map_err(|error| error.to_string())?;
        self.keep(kept)
    }

    fn forget(&mut self, name: String) -> Answer {
        self.devices.retain(|kept| kept.device.name != name);
        self.is_changed = true;
        self.tell_standby(&Order::Forget { name }, &[]);
        Ok(())
    }

    /// Gives the stand-by an order. If it cannot be told, it is ended: the next one knows.
    fn tell_standby(&self, order: &Order, descriptors: &[BorrowedFd<'_>]) {
        if let Some(standby) = &self.standby
            && let Err(error) = standby.orders.try_send(order, descriptors)
        {
            tracing::warn!(%error, "the stand-by does not listen; starting another");
            standby.kill();
        }
    }

    /// A process serves: the first one, or one that has taken over.
    fn serving(&mut self, Served { status, address }: Served, is_worker: bool) -> Answer {
        if !is_worker && let Some(standby) = self.standby.take() {
            let before = self.worker.replace(standby);
            before.into_iter().for_each(|before| self.bury(before));
            self.reap_dead();
        }
        if std::mem::take(&mut self.announces) {
            notify::ready(&status);
            self.is_changed = true;
        }
        let held = self.held().map_err(|_| "this process holds nothing".to_owned())?;
        let is_first = held.lives.get(Shared::Started) == 0;
        held.lives.set(Shared::Started, 1);
        if let Some(command) = held.plan.exec.as_ref().filter(|_| is_first) {
            let started = exec::start(command, &held.plan.runtime_dir, &address);
            let failed = |failure: &Failure| tracing::error!("{}", failure.message());
            self.command = started.inspect_err(failed).ok();
            self.command_status = self.command.is_none().then_some(1);
        }
        // What the process before was told, it may not have done.
        if self.command_status.is_some() {
            self.order(&Order::CommandEnded);
        } else if let Some(end) = self.ending {
            self.order(&Order::End(end));
        }
        if self.held().is_ok_and(|held| held.plan.survives) {
            self.standby_after.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    /// Answers when no earlier attendant runs.
    fn settle(&mut self, is_worker: bool) -> Then {
        self.reap_dead();
        if self.dead.is_empty() {
            return Then::Answer(Ok(()));
        }
        let process = if is_worker { &mut self.worker } else { &mut self.standby };
        process.iter_mut().for_each(|process| process.settles = true);
        Then::Wait
    }

    /// Makes new files in the place of those that failed, and has another process serve them, if that was not
    /// done before.
    fn recover(&mut self) -> std::result::Result<bool, String> {
        let Some(held) = self.held.as_mut() else { return Err("this process holds nothing".to_owned()) };
        if held.lives.get(Shared::GaveUp) == 0 {
            // The process that was asked first ended before it could tell its client.
            let is_done = held.lives.get(Shared::Recovered) != 0;
            let why = "the files have not failed: there is nothing to recover";
            return if is_done { Ok(false) } else { Err(why.to_owned()) };
        }
        held.recover().map_err(Failure::into_line)?;
        held.lives.set(Shared::GaveUp, 0);
        held.lives.set(Shared::Recovered, 1);
        held.lives.set(Shared::Worker, 0);
        held.lives.set(Shared::Replaced, 1);
        // Both have the connection that failed.
        for process in [self.standby.take(), self.worker.take()].into_iter().flatten() {
            process.kill();
            self.bury(process);
        }
        while !self.dead.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
            self.reap_dead();
        }
        self.worker = Some(self.fork(Role::StandBy).map_err(|_| "no process can be started".to_owned())?);
        Ok(true)
    }
}
