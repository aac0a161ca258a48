//! Runs the `uzram` program in the test's own runtime directory, with time limits.

pub mod block;
pub mod clients;
mod ended;
mod library;
pub mod nbd;
pub mod run;

pub use ended::*;

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use serde_json::Value;
use tempfile::TempDir;

/// A temporary directory, and the runtime directory in it.
pub struct Place {
    root: TempDir,
    /// The user of all commands, if it is another one.
    user: Option<u32>,
}

impl Place {
    pub fn new() -> Place {
        Place { root: tempfile::tempdir().unwrap(), user: None }
    }

    /// Makes a place whose commands are those of a user without rights, if this process is root's.
    pub fn without_rights() -> Place {
        Place::of_user(65534)
    }

    /// Makes a place whose commands are those of a user, if this process is root's.
    pub fn of_user(user: u32) -> Place {
        let root = tempfile::tempdir().unwrap();
        std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o777)).unwrap();
        Place { root, user: rustix::process::geteuid().is_root().then_some(user) }
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn dir(&self) -> PathBuf {
        self.root.path().join("run")
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// Returns the command `uzram args` with this place's runtime directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = bare_command(args);
        command.env("UZRAM_RUNTIME_DIR", self.dir());
        self.user.iter().for_each(|user| _ = command.uid(*user).gid(*user));
        command
    }

    pub fn run(&self, args: &[&str]) -> Ended {
        finish(self.command(args))
    }

    /// Ends the daemon regularly. It may notice only a moment later that its clients have left.
    pub fn down(&self) {
        wait_until("it may end", || self.run(&["down"]).status.success());
    }

    /// Ends the daemon, which succeeds; returns its log.
    pub fn end(&self, daemon: Daemon) -> String {
        self.down();
        let (status, said) = daemon.ended();
        assert!(status.success(), "{said}");
        said
    }

    /// Makes a place where these programs are there; otherwise the test is skipped.
    pub fn needing(programs: &[&str]) -> Option<Place> {
        (!clients::missing(programs)).then(Place::new)
    }

    /// Returns what a command prints as JSON.
    pub fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run(&[args, &["--json"]].concat()).ok()).unwrap()
    }

    /// Returns the daemon here, even one that this test did not start itself.
    pub fn daemon_id(&self) -> Pid {
        daemon_in(&self.dir())
    }

    /// Returns the process that serves of a daemon here.
    pub fn worker_id(&self) -> Pid {
        self.process("worker_pid").unwrap()
    }

    /// Returns a process of a daemon here, by its name in `uzram status`.
    pub fn process(&self, name: &str) -> Option<Pid> {
        Pid::from_raw(self.json(&["status"])[name].as_i64()? as i32)
    }

    /// Returns the URI of the device of a daemon here.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///zram0?socket={}", self.socket("nbd.sock").display())
    }

    /// Returns a numeric attribute of that device.
    pub fn number(&self, attribute: &str) -> u64 {
        self.run(&["stat", "zram0", attribute]).ok().trim().parse().unwrap()
    }

    /// Returns a statistic of that device.
    pub fn statistic(&self, name: &str) -> u64 {
        self.json(&["stat", "zram0"])["stats"][name].as_u64().unwrap()
    }

    /// Starts a program with standard error in a file, and does not wait for it.
    pub fn start(&self, args: &[&str]) -> Started {
        let log = self.root().join("stderr");
        let file = std::fs::File::create(&log).unwrap();
        let child =
            self.command(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).spawn().unwrap();
        Started { child, log }
    }

    /// Starts a daemon with a disk of 16 MiB and waits until it serves.
    pub fn up(&self, args: &[&str]) -> Daemon {
        self.up_sized("16M", args)
    }

    /// Starts a daemon and waits until it serves.
    pub fn up_sized(&self, size: &str, args: &[&str]) -> Daemon {
        Daemon::start(self.command(&[&["up", "--size", size], args].concat()))
    }

    /// Waits until the daemon has a process that can take over: it has started wholly by then.
    pub fn wait_for_standby(&self) {
        wait_until("a stand-by is ready", || {
            let status = self.run(&["status", "--json"]).stdout;
            status.contains(r#""standby_ready": true"#) && !status.contains(r#""standby_pid": null"#)
        });
    }

    pub fn take_overs(&self) -> u64 {
        self.json(&["status"])["take_overs"].as_u64().unwrap()
    }

    /// Kills the process that serves, and waits until another does.
    pub fn kill_worker(&self) {
        let before = self.take_overs();
        kill_process(self.worker_id(), Signal::KILL).unwrap();
        wait_until("another process serves", || self.take_overs() > before);
    }

    /// The same when a stand-by is ready.
    pub fn take_over(&self) {
        self.wait_for_standby();
        self.kill_worker();
    }

    /// Starts a daemon with a configuration file, and waits until it has printed the facts about all its
    /// devices.
    pub fn up_config(&self, text: &str, args: &[&str]) -> Daemon {
        let path = self.root.path().join("uzram.toml");
        std::fs::write(&path, text).unwrap();
        let mut daemon =
            Daemon::start(self.command(&[&["up", "--config", path.to_str().unwrap()], args].concat()));
        wait_until("it answers", || self.run(&["status"]).status.success());
        let wanted = self.json(&["list"])["devices"].as_array().unwrap().len();
        while daemon.facts.matches("fixed cost").count() < wanted {
            assert!(daemon.stdout.read_line(&mut daemon.facts).unwrap() > 0, "{}", daemon.facts);
        }
        daemon
    }
}

impl Drop for Place {
    /// Ends the background daemon of a failed test.
    fn drop(&mut self) {
        let lock = std::fs::read_to_string(self.dir().join("uzram.lock"));
        let Some(id) = lock.ok().and_then(|lock| Pid::from_raw(lock.trim().parse().ok()?)) else { return };
        let exe = PathBuf::from(format!("/proc/{}/exe", id.as_raw_nonzero()));
        let is_ours =
            || std::fs::read_link(&exe).is_ok_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_uzram")));
        if std::thread::panicking() && is_ours() && kill_process(id, Signal::TERM).is_ok() {
            let deadline = Instant::now() + PATIENCE;
            while is_ours() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

impl Daemon {
    /// Waits until it serves.
    pub fn start(mut command: Command) -> Daemon {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut facts = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        while !facts.contains("fixed cost") {
            if stdout.read_line(&mut facts).unwrap() == 0 {
                let mut stderr = String::new();
                child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
                child.wait().unwrap();
                panic!("the daemon did not start: {stderr}");
            }
        }
        Daemon { child, facts, stdout }
    }
}

/// Returns the daemon that holds the lock of a runtime directory.
pub fn daemon_in(dir: &Path) -> Pid {
    let lock = std::fs::read_to_string(dir.join("uzram.lock")).unwrap();
    Pid::from_raw(lock.trim().parse().unwrap()).unwrap()
}

/// Returns a field of the status of a process or thread, proc_pid_status(5).
pub fn status_field_if_any(status: &str, name: &str) -> Option<String> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

/// As [`status_field_if_any`]; the status has it.
pub fn status_field(status: &str, name: &str) -> String {
    status_field_if_any(status, name).unwrap_or_else(|| panic!("no {name} in {status}"))
}

/// Returns the command `uzram args` with no runtime directory in its environment.
pub fn bare_command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uzram"));
    command.args(args).env_remove("UZRAM_RUNTIME_DIR").env_remove("XDG_RUNTIME_DIR");
    command
}

/// Limits the length of files that a command may write.
pub fn with_file_size(mut command: Command, bytes: u64) -> Command {
    let limit = move || {
        let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
        setrlimit(Resource::Fsize, limit).map_err(std::io::Error::from)
    };
    // SAFETY: the call is async-signal-safe.
    unsafe { command.pre_exec(limit) };
    command
}

impl Ended {
    /// Checks that it failed with `code`; returns its one line of complaint.
    pub fn complaint(&self, code: i32) -> &str {
        self.complaint_of("uzram", code, |line| line.contains(" INFO "))
    }
}

/// A program that was started; killed when dropped.
pub struct Started {
    child: Child,
    log: PathBuf,
}

impl Started {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns its standard error so far.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end.
    pub fn ended(mut self) -> (ExitStatus, String) {
        (wait(&mut self.child, PATIENCE), self.said())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running daemon; killed when dropped.
pub struct Daemon {
    child: Child,
    pub facts: String,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Daemon {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns its resident memory.
    pub fn resident_bytes(&self) -> u64 {
        self.memory_bytes("VmRSS")
    }

    pub fn anonymous_bytes(&self) -> u64 {
        self.memory_bytes("RssAnon")
    }

    /// Of the process that serves; of the only one, if it starts no others.
    fn memory_bytes(&self, field: &str) -> u64 {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.id())).unwrap();
        let ids = children.split_whitespace().map(str::to_owned).chain([self.id().to_string()]);
        let bytes = ids.filter_map(|id| {
            // A process may have ended meanwhile.
            let status = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
            let kib = status_field_if_any(&status, field)?;
            Some(kib.strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10)
        });
        bytes.max().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Has it end by a signal, with success.
    pub fn terminate(self) {
        self.signal(Signal::TERM);
        assert!(self.ended().0.success());
    }

    /// Waits for its end.
    pub fn ended(mut self) -> (ExitStatus, String) {
        let status = wait(&mut self.child, PATIENCE);
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (status, stderr)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns whether this user is not root, and says so; the test is then skipped.
pub fn not_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: this user is not root");
    }
    !is_root
}

/// Connects, with time-outs.
pub fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends `bytes` and returns the whole response.
pub fn ask(socket: &Path, bytes: &[u8]) -> String {
    let mut stream = connect(socket);
    // A server that refuses early may close before all is written.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut piece) {
        answer.extend_from_slice(&piece[..count]);
    }
    String::from_utf8(answer).unwrap()
}

/// Returns whether a program is in root's `PATH`: file system tools may be only in /sbin.
pub fn has_program(name: &str) -> bool {
    std::env::split_paths(&program_path()).any(|dir| dir.join(name).is_file())
}

/// `uzram args` on a terminal; ended when dropped.
pub struct Terminal {
    child: Child,
    shown: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Terminal {
    pub fn start(place: &Place, args: &str) -> Terminal {
        let mut script = Command::new("timeout");
        // A terminal discards pending output on ^C, unless noflsh is set.
        let line = format!("stty cols 60 noflsh; exec '{}' {args}", env!("CARGO_BIN_EXE_uzram"));
        let mut child = script
            .args(["60", "script", "-qefc", &line, "/dev/null"])
            .env("UZRAM_RUNTIME_DIR", place.dir())
            .env("SHELL", "/bin/sh")
            .env("PATH", program_path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (shown, mut stdout) = (Arc::<Mutex<String>>::default(), child.stdout.take().unwrap());
        let all = Arc::clone(&shown);
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 1024];
            while let Ok(count @ 1..) = stdout.read(&mut piece) {
                *all.lock().unwrap() += &String::from_utf8_lossy(&piece[..count]);
            }
        });
        Terminal { child, shown, reader: Some(reader) }
    }

    /// Returns what it has shown so far, as one line.
    pub fn shown(&self) -> String {
        self.shown.lock().unwrap().replace("\r\n", " ")
    }

    pub fn press_interrupt(&mut self) {
        // Fails if it has ended already.
        let _ = self.child.stdin.as_mut().unwrap().write_all(b"\x03");
    }

    /// Waits for its end; returns its status, and all that it showed.
    pub fn ended(mut self) -> (Option<i32>, String) {
        self.reader.take().unwrap().join().unwrap();
        (self.child.wait().unwrap().code(), self.shown.lock().unwrap().clone())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It passes SIGTERM on; it fails only if it has ended already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

/// Runs `uzram args` on a terminal, presses ^C once it has shown `ready`, and returns what it showed.
pub fn in_a_terminal(place: &Place, args: &str, ready: &str) -> (Option<i32>, String) {
    let mut terminal = Terminal::start(place, args);
    wait_until(ready, || terminal.shown().contains(ready) || terminal.child.try_wait().unwrap().is_some());
    terminal.press_interrupt();
    terminal.ended()
}

/// Returns `PATH`, with the directories of root's programs.
pub fn program_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}
