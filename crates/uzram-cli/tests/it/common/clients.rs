//! Common NBD clients and file system tools, run in a test's own directory.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use uzram::random::Random;

use super::{Place, has_program, program_path};

/// Returns whether one of these programs is missing, and prints which; the test is then skipped.
pub fn missing(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| !has_program(program));
    if let Some(program) = missing {
        println!("skipped: {program} is not installed");
    }
    missing.is_some()
}

/// Returns a command in the place's directory, killed after two minutes, which is enough for a slow machine.
pub fn client(place: &Place, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120", program]).args(args);
    command.current_dir(place.root()).env("PATH", program_path()).stdin(Stdio::null());
    command
}

/// Runs a client to its end.
pub fn run(place: &Place, program: &str, args: &[&str]) -> Output {
    client(place, program, args).output().unwrap()
}

/// Runs a client that must succeed; returns its output.
pub fn succeed(place: &Place, program: &str, args: &[&str]) -> String {
    let output = run(place, program, args);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {}\n{stdout}{stderr}", output.status);
    stdout
}

/// Runs a client that must fail by itself; returns its complaint.
pub fn complain(place: &Place, program: &str, args: &[&str]) -> String {
    let output = run(place, program, args);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    let by_itself = output.status.code().is_some_and(|code| code != 0 && code < 124);
    assert!(by_itself, "{program} {args:?}: {}\n{stdout}{stderr}", output.status);
    stdout + &stderr
}

/// Converts bytes to text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs qemu-io commands, of which none may fail.
pub fn qemu_io(place: &Place, commands: &[&str]) {
    let uri = place.uri();
    let mut args = vec!["-f", "raw"];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(&uri);
    let said = succeed(place, "qemu-io", &args);
    assert!(!said.contains("failed"), "{said}");
}

/// Returns the arguments of a fio job of one process on the place's device, which writes no files.
pub fn fio<'a>(uri_option: &'a str, rest: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["--name=test", "--ioengine=nbd", uri_option, "--thread", "--verify_state_save=0"];
    args.extend(rest);
    args
}

/// Starts a client with its output, which matters only if it fails, in a file.
pub fn start(place: &Place, output: &str, program: &str, args: &[&str]) -> Child {
    let file = File::create(place.root().join(output)).unwrap();
    let mut command = Command::new(program);
    command.args(args).current_dir(place.root()).env("PATH", program_path());
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap()
}

/// Creates a file of seeded random bytes, which do not compress.
pub fn random_file(place: &Place, name: &str, len_bytes: usize) -> PathBuf {
    let mut random = Random::new(len_bytes as u64);
    let words = std::iter::repeat_with(|| random.next().to_ne_bytes());
    let bytes: Vec<u8> = words.take(len_bytes / 8).flatten().collect();
    let path = place.root().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Returns whether two files have the same contents.
pub fn same(one: &Path, other: &Path) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(other).unwrap()
}

/// Converts a path to an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A qemu-io that keeps the disk at a URI open until dropped.
pub struct Connected {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Connected {
    pub fn new(place: &Place, uri: &str) -> Connected {
        let mut child = client(place, "qemu-io", &["-f", "raw", uri])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut connected = Connected { child, output };
        connected.command("read 0 512", "read");
        connected
    }

    /// Runs a command of qemu-io, and waits for its answer.
    pub fn command(&mut self, command: &str, answer: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, "{command}").unwrap();
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "qemu-io ended at '{command}'");
            assert!(!line.contains("failed"), "{command}: {line}");
            if line.contains(answer) {
                return;
            }
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        // qemu-io ends at the end of its input.
        drop(self.child.stdin.take());
        let _ = self.output.read_to_end(&mut Vec::new());
        let _ = self.child.wait();
    }
}
