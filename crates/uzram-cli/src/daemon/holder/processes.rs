//! Starting the processes that serve and wait to, and noticing their ends.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

use super::{Holder, LIVES_AT_LEAST, MAX_STARTS, Process, Role};
use crate::daemon::attendant::Attendant;
use crate::daemon::exec;
use crate::daemon::held::Held;
use crate::daemon::standby;
use crate::daemon::survive::home::Home;
use crate::daemon::survive::link::{Answer, Link, Order, Request};
use crate::daemon::survive::lives::{Number as Shared, take_cpus};
use crate::daemon::worker::{self, Start};
use crate::failure::{Context, Failure, Result};
use crate::system::protect::end_before_holder;

/// How long a control client may take to read that a daemon leaves.
const LEAVE_AFTER: Duration = Duration::from_millis(50);

impl Holder {
    /// Starts a stand-by, unless there is one or the daemon ends.
    pub(super) fn start_standby(&mut self) {
        self.standby_after = None;
        if self.standby.is_some() {
            return;
        }
        match self.fork(Role::StandBy) {
            Ok(process) => {
                if let Ok(held) = self.held() {
                    held.lives.set(Shared::StandBy, process.pid.as_raw_pid() as u64);
                }
                self.standby = Some(process);
            }
            Err(failure) => {
                tracing::error!("no stand-by: {}", failure.into_line());
                self.standby_after = Some(Instant::now() + LIVES_AT_LEAST);
            }
        }
    }

    /// Forks a process, which never returns from here.
    pub(super) fn fork(&mut self, role: Role) -> Result<Process> {
        let cannot = || "cannot start a process";
        let (requests, its_requests) = Link::pair().context(cannot)?;
        let (orders, its_orders) = Link::pair().context(cannot)?;
        let attendant = self.held()?.attendant()?;
        let attendant_pid = attendant.as_ref().map(Attendant::pid);
        // SAFETY: this process has one thread, so that no lock is held by another that the fork does not
        // have.
        match unsafe { libc::fork() } {
            -1 => {
                let error = io::Error::last_os_error();
                drop(attendant);
                self.dead.extend(attendant_pid);
                Err(Failure::line(format!("{}: {error}", cannot())))
            }
            0 => {
                // The holder's ends: the other process would not see them close with the holder.
                drop((requests, orders, self.worker.take(), self.standby.take()));
                let outcome = self.work(role, its_requests, its_orders, attendant);
                std::process::exit(i32::from(outcome))
            }
            pid => {
                let pid = Pid::from_raw(pid).ok_or_else(|| Failure::line(cannot()))?;
                Ok(Process::new(pid, requests, orders, attendant_pid))
            }
        }
    }

    fn work(&mut self, role: Role, requests: Link, orders: Link, attendant: Option<Attendant>) -> u8 {
        let Some(mut held) = self.held.take() else { return 1 };
        end_with_parent(held.lives.get(Shared::Holder));
        die_of_panics();
        let orders = Arc::new(orders);
        let (lives, keeps) = (Arc::clone(&held.lives), held.plan.survives);
        let home = Arc::new(Home::new(requests, Arc::clone(&orders), lives, keeps));
        let outcome = match role {
            Role::First => first(&held, &home, attendant),
            Role::StandBy => {
                standby::run(&mut held, &home, &orders, attendant, std::mem::take(&mut self.devices))
            }
        };
        let status = *outcome.as_ref().unwrap_or(&1);
        let _ = home.ask(&Request::Ended(outcome), &[]);
        // The holder's: sockets, mount and lock end with it.
        std::mem::forget(held);
        status
    }

    /// Notes that a process is dead, and so is its attendant when that is done.
    pub(super) fn bury(&mut self, process: Process) {
        take_cpus(process.pid.as_raw_nonzero().get().unsigned_abs());
        self.dead.push(process.pid);
        self.dead.extend(process.attendant);
    }

    pub(super) fn reap_dead(&mut self) {
        self.dead.retain(|pid| matches!(rustix::process::waitpid(Some(*pid), WaitOptions::NOHANG), Ok(None)));
        if !self.dead.is_empty() {
            return;
        }
        for process in [&mut self.worker, &mut self.standby].into_iter().flatten() {
            if std::mem::take(&mut process.settles) {
                let _ = process.requests.send(&Answer::Ok(()), &[]);
            }
        }
    }

    /// Reaps processes that others left to this one: to PID 1 of a container, or to a subreaper.
    pub(super) fn reap_orphans(&self) {
        // One of its own hides those behind it, until it is reaped.
        while let Some(pid) = ended_child().filter(|pid| !self.is_own(*pid)) {
            let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }

    /// Returns whether this process has started that one and waits for it.
    fn is_own(&self, pid: Pid) -> bool {
        let processes = [&self.worker, &self.standby].into_iter().flatten();
        let mut own = processes.flat_map(|process| [Some(process.pid), process.attendant]).flatten();
        let command = self.command.as_ref().map(exec::Running::pid);
        own.any(|other| other == pid) || command == Some(pid) || self.dead.contains(&pid)
    }

    pub(super) fn is_served(&self) -> bool {
        self.worker.as_ref().is_some_and(|worker| !is_dead(worker.pid))
    }

    /// Handles the end of processes. Returns the exit status when the daemon can no longer serve.
    pub(super) fn reap(&mut self) -> Result<Option<u8>> {
        self.reap_dead();
        if let Some(status) = self.command.as_mut().and_then(exec::Running::ended) {
            self.command = None;
            self.command_status = Some(status);
            self.order(&Order::CommandEnded);
        }
        if let Some(standby) = self.standby.take_if(|standby| is_dead(standby.pid)) {
            let lived = standby.since.elapsed();
            tracing::warn!(process = standby.pid.as_raw_pid(), "the stand-by has died; starting another");
            self.held()?.lives.set(Shared::StandBy, 0);
            self.bury(standby);
            self.reap_dead();
            let wait = LIVES_AT_LEAST.saturating_sub(lived);
            self.standby_after = Some(Instant::now() + wait);
        }
        let Some(worker) = self.worker.as_ref().filter(|worker| is_dead(worker.pid)) else { return Ok(None) };
        if self.standby.is_some() {
            // It takes over by itself, and looks at the dead one until then.
            return Ok(None);
        }
        let (pid, held) = (worker.pid, self.held()?);
        let why = if !held.plan.survives {
            "the process that serves died, and with it all contents (--no-survive)".to_owned()
        } else if held.lives.get(Shared::Started) == 0 && self.starts >= MAX_STARTS {
            format!("the process that serves died {MAX_STARTS} times at the start")
        } else {
            String::new()
        };
        if !why.is_empty() {
            self.finish(Some(pid));
            return Err(Failure::line(why));
        }
        if self.standby_after.is_some() {
            // The next one is to be started soon.
            return Ok(None);
        }
        let lived = worker.since.elapsed();
        self.worker.take().into_iter().for_each(|worker| self.bury(worker));
        self.reap_dead();
        self.held()?.lives.set(Shared::Worker, 0);
        std::thread::sleep(LIVES_AT_LEAST.saturating_sub(lived));
        self.starts += 1;
        self.worker = Some(self.fork(Role::StandBy)?);
        Ok(None)
    }

    /// Ends all processes where they are. The service manager has all that they need to go on.
    pub(super) fn leave(&mut self) {
        if let Some(held) = &self.held {
            held.lives.set(Shared::Replaced, 1);
        }
        // Its client reads the answer meanwhile.
        std::thread::sleep(LEAVE_AFTER);
        self.finish(None);
        if let Some(held) = &self.held {
            // Whoever has this number at the next start is another process.
            held.lives.set(Shared::Worker, 0);
        }
        std::mem::forget((self.held.take(), self.store.take()));
    }

    /// Ends all processes: first those that would serve in the place of `ending`, which ends by itself.
    pub(super) fn finish(&mut self, ending: Option<Pid>) {
        let mut all: Vec<_> = [self.standby.take(), self.worker.take()].into_iter().flatten().collect();
        all.sort_by_key(|process| Some(process.pid) == ending);
        for process in all {
            if Some(process.pid) == ending {
                let _ = process.requests.send(&Answer::Ok(()), &[]);
            } else {
                process.kill();
            }
            let _ = rustix::process::waitpid(Some(process.pid), WaitOptions::empty());
        }
    }
}

/// Returns a child that has ended, without reaping it; `None` if there is none.
fn ended_child() -> Option<Pid> {
    let options = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
    loop {
        // SAFETY: all fields are integers and pointers that are not followed: zeros are valid.
        let mut ended: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the call only writes to `ended`, which is valid for that.
        match unsafe { libc::waitid(libc::P_ALL, 0, &raw mut ended, options) } {
            // SAFETY: the call has filled in the fields of a child, or left them 0.
            0 => return Pid::from_raw(unsafe { ended.si_pid() }),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}

/// Returns whether a child has ended, without reaping it.
fn is_dead(pid: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(Some(_)))
}

/// Has the kernel kill this process when the holder dies: nothing would take over from it, and it could not
/// give free what the holder has.
fn end_with_parent(holder: u64) {
    // Fails only for an invalid signal.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // It may have died before.
    if rustix::process::getppid().is_none_or(|parent| parent.as_raw_pid() as u64 != holder) {
        std::process::exit(1);
    }
}

/// Has a panic of this thread end the process at once, so that another one takes over. To unwind would let go
/// of what it serves: unmount, and detach.
fn die_of_panics() {
    let own = std::thread::current().id();
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        if std::thread::current().id() == own {
            std::process::abort();
        }
    }));
}

fn first(held: &Held, home: &Arc<Home>, attendant: Option<Attendant>) -> Result<u8> {
    // Locks are not inherited.
    Held::protect(&held.plan);
    if held.plan.survives {
        end_before_holder();
    }
    held.lives.take_seat().context(|| "cannot begin to serve")?;
    held.lives.set(Shared::Worker, u64::from(std::process::id()));
    held.ledger.begin_life();
    let start = Start {
        home: Arc::clone(home),
        attendant,
        devices: Vec::new(),
        has_started: false,
        protection: held.protection.clone(),
        is_confined: false,
        on_files_served: Box::new(|| ()),
    };
    worker::serve(held, start)
}
