//! What the tests of the programs `uzram-bench` and `uzram-lab` share: running one to its end.
#![allow(dead_code)]
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What takes longer than this hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How a program ended, and what it printed.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a program to its end.
pub fn finish(program: &str, args: &[&str]) -> Ended {
    let mut command = Command::new(program);
    collect(start(command.args(args)), PATIENCE)
}

/// Starts a program whose output [`collect`] reads.
pub fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for a program that prints less than a pipe holds.
pub fn collect(mut child: Child, patience: Duration) -> Ended {
    let deadline = Instant::now() + patience;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("still running after {patience:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut ended = Ended { status, stdout: String::new(), stderr: String::new() };
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut ended.stdout).unwrap();
    }
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut ended.stderr).unwrap();
    }
    ended
}

impl Ended {
    /// Its output, from a success.
    pub fn ok(self) -> String {
        assert!(self.status.success(), "{}: {}", self.status, self.stderr);
        self.stdout
    }

    /// Its one line of complaint.
    pub fn complaint(&self, name: &str, code: i32) -> &str {
        assert_eq!(self.status.code(), Some(code), "stdout: {} stderr: {}", self.stdout, self.stderr);
        assert_eq!(self.stderr.lines().count(), 1, "{}", self.stderr);
        assert!(self.stdout.is_empty(), "{}", self.stdout);
        let line = self.stderr.trim_end().strip_prefix(name).expect("begins with the program's name");
        line.strip_prefix(": ").expect("a colon follows the program's name")
    }
}

/// Waits until `done`.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
