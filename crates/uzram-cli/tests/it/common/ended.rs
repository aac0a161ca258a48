//! Runs programs to their end, with a time limit, and collects their output. The tests of `uzram-bench` and
//! `uzram-lab` use this file, too.

use std::borrow::BorrowMut;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A time limit that no step reaches, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How long a program that is asked to end may clean up.
const TO_END: Duration = Duration::from_secs(30);

pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

pub fn finish(mut command: impl BorrowMut<Command>) -> Ended {
    collect(start(command.borrow_mut()))
}

pub fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn collect(child: Child) -> Ended {
    collect_within(child, PATIENCE)
}

/// Collects what is written until all who hold the pipes have ended: at most [`PATIENCE`] after the program.
pub fn collect_within(mut child: Child, patience: Duration) -> Ended {
    let (stdout, stderr) = (child.stdout.take().map(reader), child.stderr.take().map(reader));
    let status = wait(&mut child, patience);
    let text = |reader: Option<Receiver<String>>| {
        let text = reader.map(|reader| reader.recv_timeout(PATIENCE));
        text.map_or(String::new(), |text| text.expect("its output is closed soon after its end"))
    };
    Ended { status, stdout: text(stdout), stderr: text(stderr) }
}

/// Reads a pipe to its end while the program runs, as it may hold less than the program writes.
fn reader(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (all, receiver) = sync_channel(1);
    thread::spawn(move || {
        let _ = all.send(std::io::read_to_string(pipe).unwrap());
    });
    receiver
}

/// Waits for the end of a program, for at most `patience`. One that runs still is asked to end, so that it
/// leaves nothing behind, and killed if it does not, with the processes that it started.
pub fn wait(child: &mut Child, patience: Duration) -> ExitStatus {
    if let Some(status) = ended_by(child, Instant::now() + patience) {
        return status;
    }
    let below = descendants(child.id());
    kill_process(Pid::from_child(child), Signal::TERM).unwrap();
    if ended_by(child, Instant::now() + TO_END).is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // Most have ended with it.
    for pid in below.into_iter().filter_map(|pid| Pid::from_raw(pid as i32)) {
        let _ = kill_process(pid, Signal::KILL);
    }
    panic!("still running after {patience:?}");
}

/// Returns the descendants of a process: proc_pid_task_children(5).
fn descendants(of: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let children: Vec<u32> = children
        .flat_map(|text| text.split(' ').filter_map(|child| child.parse().ok()).collect::<Vec<_>>())
        .collect();
    children.into_iter().flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}

fn ended_by(child: &mut Child, deadline: Instant) -> Option<ExitStatus> {
    loop {
        let status = child.try_wait().unwrap();
        if status.is_some() || Instant::now() > deadline {
            return status;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}{}", self.status, self.stdout, self.stderr)
    }
}

impl Ended {
    pub fn ok(self) -> String {
        assert!(self.status.success(), "{self}");
        self.stdout
    }

    /// Checks that it failed with `code`; returns its one line of complaint besides its log.
    pub fn complaint_of(&self, program: &str, code: i32, is_log: fn(&str) -> bool) -> &str {
        assert_eq!(self.status.code(), Some(code), "stdout: {} stderr: {}", self.stdout, self.stderr);
        let lines: Vec<&str> = self.stderr.lines().filter(|line| !is_log(line)).collect();
        assert_eq!(lines.len(), 1, "{self}");
        assert!(self.stdout.is_empty(), "{}", self.stdout);
        let line = lines[0].strip_prefix(program).expect("begins with the program's name");
        line.strip_prefix(": ").expect("a colon follows the program's name")
    }
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
