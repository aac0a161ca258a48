//! A program that runs only to be looked at, and all processes that it starts.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, waitid,
};

/// The time that a program has to end when it is asked to.
const END_TIMEOUT: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(10);

/// A program in a process group of its own. Dropping this ends the group and all that the program started.
///
/// The program is not waited for before that, so that no other process or group can have its number.
pub struct Program(Child);

impl Program {
    /// Starts it, without input; fails if it cannot be started. It is killed if the calling thread ends
    /// before this is dropped.
    pub fn start(command: &mut Command) -> io::Result<Program> {
        let die_with_us = || set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from);
        // SAFETY: between fork and exec it makes one system call, and allocates nothing.
        unsafe { command.pre_exec(die_with_us) };
        Ok(Program(command.process_group(0).stdin(Stdio::null()).spawn()?))
    }

    /// Returns how the program ended, if it has: "with status 1", say. What it started may still run. Fails
    /// if it cannot be waited for.
    pub fn ended(&self) -> io::Result<Option<String>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(Pid::from_child(&self.0)), options)?;
        Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("with status {code}"),
            (None, Some(signal)) => format!("by signal {signal}"),
            (None, None) => "somehow".to_owned(),
        }))
    }

    /// Returns the program's process and those that it started, directly or not, unless their parents have
    /// ended.
    pub fn pids(&self) -> Vec<u32> {
        let parents = parents();
        let mut pids = vec![self.0.id()];
        let mut next = 0;
        while let Some(&parent) = pids.get(next) {
            let children = parents.iter().filter(|(pid, of)| *of == parent && !pids.contains(pid));
            let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
            pids.extend(children);
            next += 1;
        }
        pids
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Opened first: when the program has ended, they have another parent.
        let started: Vec<OwnedFd> = self.pids()[1..].iter().filter_map(|pid| open(*pid)).collect();
        let group = Pid::from_child(&self.0);
        // It fails only if all have ended; so do those below.
        let _ = kill_process_group(group, Signal::TERM);
        let deadline = Instant::now() + END_TIMEOUT;
        while matches!(self.ended(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        let _ = kill_process_group(group, Signal::KILL);
        for process in started {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

fn open(pid: u32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(pid.try_into().ok()?)?, PidfdFlags::empty()).ok()
}

/// Returns the number of each process, and that of its parent, proc_pid_stat(5).
fn parents() -> Vec<(u32, u32)> {
    let parent = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        // A process may have ended meanwhile.
        let stat = fs::read(entry.path().join("stat")).ok()?;
        // The name before it, in parentheses, may be of any characters.
        let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
        let fields = str::from_utf8(&stat[after_name..]).ok()?;
        Some((pid, fields.split_ascii_whitespace().nth(1)?.parse().ok()?))
    };
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(parent).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < deadline, "never: {what}");
            thread::sleep(POLL);
        }
    }

    #[test]
    fn all_that_a_program_starts_ends_with_it() {
        // One in its group, one in a session of its own, and one that ignores SIGTERM.
        let script = "sleep 1000 & setsid sleep 1001 & trap '' TERM; sh -c 'sleep 1002; :' & wait";
        let program = Program::start(Command::new("sh").args(["-c", script])).unwrap();
        wait_until("all run", || program.pids().len() == 5);
        let pids = program.pids();
        assert_eq!(program.ended().unwrap(), None);
        drop(program);
        let is_there = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(')').is_some_and(|(_, fields)| !fields.trim_start().starts_with('Z'))
        };
        wait_until("all have ended", || !pids.iter().any(is_there));
    }
}
