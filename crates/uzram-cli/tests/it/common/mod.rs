//! Runs the `uzram` program in the test's own runtime directory, with time limits.

mod block;
mod clients;
mod ended;
mod map;
mod nbd;
mod run;

pub use std::fs::{self, File, OpenOptions};
pub use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
pub use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
pub use std::os::unix::process::{CommandExt, ExitStatusExt};
pub use std::path::{Path, PathBuf};
pub use std::process::{Child, Command, Stdio};
pub use std::thread;
pub use std::time::{Duration, Instant};

pub use rustix::process::{Pid, Signal, kill_process};
pub use serde_json::Value;
pub use uzram::random::Random;
pub use uzram_cli::process_status::status_field as status_field_if_any;

pub use block::*;
pub use clients::*;
pub use ended::*;
pub use map::*;
pub use nbd::*;
pub use run::*;

use std::borrow::BorrowMut;
use std::ffi::OsString;
use std::io::read_to_string;
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::process::{ChildStdout, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::process::{Resource, Rlimit, setrlimit};
use tempfile::TempDir;

pub const UZRAM: &str = env!("CARGO_BIN_EXE_uzram");
pub const NOBODY: u32 = 65534;
pub const MIB: u64 = 1 << 20;
/// Commands that ask a daemon.
pub const ASKING: [&str; 15] = [
    "add more",
    "remove zram0",
    "list",
    "stat zram0",
    "set zram0 mem_limit=1G",
    "reset zram0",
    "clients",
    "kick 1",
    "status",
    "upgrade",
    "upgrade --program /bin/true",
    "recover",
    "recover zram0",
    "reload",
    "down",
];

/// Arguments of a command: a text in which spaces separate them, or a list.
pub trait Words {
    fn words(&self) -> Vec<&str>;
}

impl Words for str {
    fn words(&self) -> Vec<&str> {
        self.split_whitespace().collect()
    }
}

impl Words for String {
    fn words(&self) -> Vec<&str> {
        self.as_str().words()
    }
}

impl<S: AsRef<str>> Words for [S] {
    fn words(&self) -> Vec<&str> {
        self.iter().map(AsRef::as_ref).collect()
    }
}

impl<S: AsRef<str>, const N: usize> Words for [S; N] {
    fn words(&self) -> Vec<&str> {
        self.as_slice().words()
    }
}

impl<S: AsRef<str>> Words for Vec<S> {
    fn words(&self) -> Vec<&str> {
        self.as_slice().words()
    }
}

/// A temporary directory, and the runtime directory in it.
pub struct Place {
    root: TempDir,
    user: Option<u32>,
}

impl Place {
    pub fn new() -> Place {
        Place { root: tempfile::tempdir().unwrap(), user: None }
    }

    /// Makes a place whose commands are those of a user without rights, if this process is root's.
    pub fn without_rights() -> Place {
        Place::of_user(NOBODY)
    }

    /// Makes a place whose commands are those of a user, if this process is root's.
    pub fn of_user(user: u32) -> Place {
        let mut place = Place::new();
        place.user = is_root().then_some(user);
        set_mode(place.root(), 0o777);
        place
    }

    pub fn if_root() -> Option<Place> {
        (!not_root()).then(Place::new)
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn dir(&self) -> PathBuf {
        self.root().join("run")
    }

    /// Returns the path of a file in this place's directory; what follows its name, as `:4M`, stays.
    pub fn path(&self, name: &str) -> String {
        arg(&self.root().join(name)).to_owned()
    }

    /// Writes a file in this place's directory; returns its path.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        fs::write(self.root().join(name), contents).unwrap();
        self.path(name)
    }

    pub fn copy_of_program(&self) -> PathBuf {
        let to = self.root().join("uzram");
        fs::hard_link(UZRAM, &to).or_else(|_| fs::copy(UZRAM, &to).map(drop)).unwrap();
        to
    }

    /// Returns the options for TLS with the files of an authority in this place's directory.
    pub fn tls_options(&self, client_ca: bool) -> String {
        let [cert, key, ca] =
            ["server-cert.pem", "server-key.pem", "ca-cert.pem"].map(|name| self.path(name));
        let ca = if client_ca { format!("--tls-client-ca {ca}") } else { String::new() };
        format!("--tls-cert {cert} --tls-key {key} {ca}")
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// Returns the command `uzram args` with this place's runtime directory.
    pub fn command(&self, args: &(impl Words + ?Sized)) -> Command {
        let mut command = bare_command(args);
        command.env("UZRAM_RUNTIME_DIR", self.dir());
        self.user.iter().for_each(|user| _ = command.uid(*user).gid(*user));
        command
    }

    /// Returns the same command, which a shell executes after `script`.
    pub fn command_after(&self, script: &str, args: &(impl Words + ?Sized)) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{script} && exec \"$0\" \"$@\""), UZRAM]).args(args.words());
        command.env("UZRAM_RUNTIME_DIR", self.dir());
        command
    }

    pub fn run(&self, args: &(impl Words + ?Sized)) -> Ended {
        finish(self.command(args))
    }

    /// Runs commands that must fail, in which DIR is this place's directory: each with its exit status and
    /// what its one line of complaint says. Usage errors make no runtime directory. Reports all at once.
    pub fn refuses(&self, rows: &[(&str, i32, &[&str])]) {
        let mut wrong = String::new();
        for (args, code, said) in rows {
            let had_dir = self.dir().exists();
            let ended = self.run(&args.replace("DIR", arg(self.root())));
            let lines: Vec<_> = ended.stderr.lines().filter(|line| !line.contains(" INFO ")).collect();
            let has_all = |line: &str| said.iter().all(|said| line.contains(said));
            let is_wanted = matches!(lines[..], [line] if line.starts_with("uzram: ") && has_all(line));
            let is_tried = *code == 2 && self.dir().exists() != had_dir;
            if ended.status.code() != Some(*code) || !is_wanted || !ended.stdout.is_empty() || is_tried {
                wrong += &format!("{args:?}: {code} and {said:?} wanted, {ended}\n");
            }
        }
        assert!(wrong.is_empty(), "{wrong}");
    }

    /// Ends the daemon regularly. It may notice only a moment later that its clients have left.
    pub fn down(&self) {
        wait_until("it may end", || self.run(&["down"]).status.success());
    }

    pub fn end(&self, daemon: Daemon) -> String {
        self.down();
        daemon.succeeds()
    }

    pub fn needing(programs: &(impl Words + ?Sized)) -> Option<Place> {
        (!clients::missing(programs)).then(Place::new)
    }

    pub fn json(&self, args: &(impl Words + ?Sized)) -> Value {
        serde_json::from_str(&self.run(&[&["--json"], &args.words()[..]].concat()).ok()).unwrap()
    }

    /// Returns the daemon here, even one that this test did not start itself.
    pub fn daemon_id(&self) -> Pid {
        daemon_in(&self.dir())
    }

    pub fn worker_id(&self) -> Pid {
        self.process("worker_pid").unwrap()
    }

    /// Returns a process of a daemon here, by its name in `uzram status`.
    pub fn process(&self, name: &str) -> Option<Pid> {
        Pid::from_raw(self.told("daemon")["survival"][name].as_i64()? as i32)
    }

    /// Returns the answer of the daemon here to a GET request. To start a command for what tests ask again
    /// and again would take most of their time.
    fn told(&self, path: &str) -> Value {
        let mut answer = Value::Null;
        wait_until("the daemon answers", || {
            answer = self.told_now(path).unwrap_or_default();
            !answer.is_null()
        });
        answer
    }

    /// Returns the same; `None` if nobody answers, or the process that does dies meanwhile.
    fn told_now(&self, path: &str) -> Option<Value> {
        let mut stream = UnixStream::connect(self.socket("control.sock")).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET /v1/{path} HTTP/1.1\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
        serde_json::from_str(body).ok()
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///zram0?socket={}", self.socket("nbd.sock").display())
    }

    pub fn get(&self, attribute: &str) -> String {
        let text = &self.told(&format!("devices/zram0/attributes/{attribute}"))["text"];
        text.as_str().unwrap().trim().to_owned()
    }

    pub fn number(&self, attribute: &str) -> u64 {
        self.get(attribute).parse().unwrap()
    }

    /// Sets attributes of that device: `NAME=VALUE` each.
    pub fn set(&self, settings: &(impl Words + ?Sized)) {
        assert_eq!(self.run(&[&["set", "zram0"], &settings.words()[..]].concat()).ok(), "");
    }

    pub fn statistic(&self, name: &str) -> u64 {
        self.told("devices/zram0")["stats"][name].as_u64().unwrap()
    }

    pub fn assert_zero(&self, names: &str) {
        let stats = &self.told("devices/zram0")["stats"];
        names.words().iter().for_each(|name| assert_eq!(stats[name], 0, "{name} in {stats}"));
    }

    /// Starts a program with standard error in a file, and does not wait for it.
    pub fn start(&self, args: &(impl Words + ?Sized)) -> Daemon {
        let log = self.root().join("stderr");
        let mut command = self.command(args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        Daemon { child: Killed(command.spawn().unwrap()), facts: String::new(), stdout: None, log: Some(log) }
    }

    /// Starts a daemon with a disk of 16 MiB and waits until it serves.
    pub fn up(&self, args: &(impl Words + ?Sized)) -> Daemon {
        self.up_sized("16M", args)
    }

    pub fn up_sized(&self, size: &str, args: &(impl Words + ?Sized)) -> Daemon {
        Daemon::start(self.command(&[&["up", "--size", size], &args.words()[..]].concat()))
    }

    /// Waits until the daemon has a process that can take over: it has started wholly by then.
    pub fn wait_for_standby(&self) {
        wait_until("a stand-by is ready", || {
            let daemon = self.told_now("daemon").unwrap_or_default();
            daemon["survival"]["standby_ready"] == true && !daemon["survival"]["standby_pid"].is_null()
        });
    }

    pub fn take_overs(&self) -> u64 {
        self.told("daemon")["survival"]["take_overs"].as_u64().unwrap()
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

    /// Starts a daemon with a configuration file, and waits until it has printed what it serves.
    pub fn up_config(&self, text: &str, args: &(impl Words + ?Sized)) -> Daemon {
        let config = self.write("uzram.toml", text);
        let up = [&["up", "--config", &config], &args.words()[..]].concat();
        let mut daemon = Daemon::start(self.command(&up));
        let wanted = self.told("devices")["devices"].as_array().unwrap().len();
        while daemon.facts.matches("fixed cost").count() < wanted {
            let read = daemon.stdout.as_mut().unwrap().read_line(&mut daemon.facts).unwrap();
            assert!(read > 0, "{}", daemon.facts);
        }
        daemon
    }
}

impl Drop for Place {
    /// Ends the background daemon of a failed test.
    fn drop(&mut self) {
        let lock = fs::read_to_string(self.dir().join("uzram.lock"));
        let Some(id) = lock.ok().and_then(|lock| Pid::from_raw(lock.trim().parse().ok()?)) else { return };
        let exe = PathBuf::from(format!("/proc/{}/exe", id.as_raw_nonzero()));
        let is_ours = || fs::read_link(&exe).is_ok_and(|exe| exe == Path::new(UZRAM));
        if thread::panicking() && is_ours() && kill_process(id, Signal::TERM).is_ok() {
            let deadline = Instant::now() + PATIENCE;
            while is_ours() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

impl Daemon {
    pub fn start(mut command: impl BorrowMut<Command>) -> Daemon {
        let mut child = Killed(start(command.borrow_mut()));
        let mut facts = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        while !facts.contains("fixed cost") {
            if stdout.read_line(&mut facts).unwrap() == 0 {
                panic!("the daemon did not start: {}", read_to_string(child.stderr.take().unwrap()).unwrap());
            }
        }
        Daemon { child, facts, stdout: Some(stdout), log: None }
    }
}

pub fn daemon_in(dir: &Path) -> Pid {
    let lock = fs::read_to_string(dir.join("uzram.lock")).unwrap();
    Pid::from_raw(lock.trim().parse().unwrap()).unwrap()
}

/// Returns the status of a process's thread, by the beginning of its name.
pub fn thread_status(process: Pid, name: &str) -> String {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.as_raw_pid())).unwrap();
    let mut statuses = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    statuses.find(|status| status.starts_with(&format!("Name:\t{name}"))).unwrap()
}

pub fn status_field<'a>(status: &'a str, name: &str) -> &'a str {
    status_field_if_any(status, name).unwrap_or_else(|| panic!("no {name} in {status}"))
}

/// Returns the command `uzram args` with no runtime directory in its environment.
pub fn bare_command(args: &(impl Words + ?Sized)) -> Command {
    let mut command = Command::new(UZRAM);
    command.args(args.words()).env_remove("UZRAM_RUNTIME_DIR").env_remove("XDG_RUNTIME_DIR");
    command
}

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
    pub fn complaint(&self, code: i32) -> &str {
        self.complaint_of("uzram", code, |line| line.contains(" INFO "))
    }

    /// The same, and that this line begins with `words`.
    pub fn begins(&self, code: i32, words: &str) {
        assert!(self.complaint(code).starts_with(words), "'{words}' does not begin: {self}");
    }

    /// The same, and that this line has `words`.
    pub fn says(&self, code: i32, words: &str) -> &Ended {
        assert!(self.complaint(code).contains(words), "no '{words}' in: {self}");
        self
    }

    /// Checks that it succeeded, and that its output has all of these words; returns the output.
    pub fn shows(self, words: &[impl AsRef<str>]) -> String {
        let said = self.ok();
        words.words().iter().for_each(|words| assert!(said.contains(words), "no '{words}' in: {said}"));
        said
    }
}

/// A process; killed when dropped.
pub struct Killed(pub Child);

impl Deref for Killed {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Killed {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.kill();
        let _ = self.wait();
    }
}

/// A running daemon, or another command; killed when dropped.
pub struct Daemon {
    child: Killed,
    pub facts: String,
    stdout: Option<BufReader<ChildStdout>>,
    /// The file of standard error, if it is no pipe.
    log: Option<PathBuf>,
}

impl Daemon {
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns what a command of [`Place::start`] has said so far.
    pub fn said(&self) -> String {
        fs::read_to_string(self.log.as_ref().unwrap()).unwrap()
    }

    pub fn resident_bytes(&self) -> u64 {
        self.memory_bytes("VmRSS")
    }

    pub fn anonymous_bytes(&self) -> u64 {
        self.memory_bytes("RssAnon")
    }

    /// Of the process that serves; of the only one, if it starts no others.
    fn memory_bytes(&self, field: &str) -> u64 {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.id())).unwrap();
        let ids = children.split_whitespace().map(str::to_owned).chain([self.id().to_string()]);
        let bytes = ids.filter_map(|id| {
            // A process may have ended meanwhile.
            let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
            let kib = status_field_if_any(&status, field)?;
            Some(kib.strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10)
        });
        bytes.max().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.process(), signal).unwrap();
    }

    pub fn terminate(self) -> String {
        self.signal(Signal::TERM);
        self.succeeds()
    }

    pub fn kill(self) {
        self.signal(Signal::KILL);
        assert!(!self.ended().0.success());
    }

    /// Waits for its end, which must be a success; returns what it has said.
    pub fn succeeds(self) -> String {
        let (status, said) = self.ended();
        assert!(status.success(), "{status}: {said}");
        said
    }

    pub fn ended(mut self) -> (ExitStatus, String) {
        let status = wait(&mut self.child, PATIENCE);
        let stderr = self.child.stderr.take();
        (status, stderr.map_or_else(|| self.said(), |stderr| read_to_string(stderr).unwrap()))
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns whether this user is not root, and says so; the test is then skipped.
pub fn not_root() -> bool {
    if !is_root() {
        println!("skipped: this user is not root");
    }
    !is_root()
}

/// Runs `act` in a thread as another user, if this user is root; its argument says whether that worked.
pub fn as_nobody<T: Send>(act: impl FnOnce(bool) -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let keep = libc::uid_t::MAX;
            // SAFETY: the call takes only numbers. Unlike glibc's function, the system call applies only to
            // this thread, which ends with `act`.
            let answer = unsafe { libc::syscall(libc::SYS_setresuid, keep, NOBODY, keep) };
            act(answer == 0)
        });
        thread.join().unwrap()
    })
}

pub fn kill(process: Pid) {
    kill_process(process, Signal::KILL).unwrap();
}

/// Returns whether a process has not ended. It holds its memory and files until its last thread has.
pub fn is_running(process: Pid) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", process.as_raw_pid())).map_or(0, Iterator::count);
    let stat = of_process(process, "stat");
    !stat.is_empty() && (!stat.contains(") Z ") || threads > 1)
}

/// Returns a file of a process, proc(5); empty if that has ended.
pub fn of_process(process: Pid, file: &str) -> String {
    fs::read_to_string(format!("/proc/{}/{file}", process.as_raw_pid())).unwrap_or_default()
}

pub fn set_mode(path: &(impl AsRef<Path> + ?Sized), mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns whether bytes have a part; fast in unoptimised code, too.
pub fn contains(bytes: &[u8], part: &[u8]) -> bool {
    // SAFETY: both are readable.
    let found = unsafe { libc::memmem(bytes.as_ptr().cast(), bytes.len(), part.as_ptr().cast(), part.len()) };
    !found.is_null()
}

pub fn is_zero(bytes: &[u8]) -> bool {
    bytes == vec![0; bytes.len()]
}

pub fn open(path: impl AsRef<Path>) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Returns a shell script in a mount namespace of its own.
pub fn isolated(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]).env("PATH", program_path());
    command
}

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
        let line = format!("stty cols 60 noflsh; exec '{}' {args}", UZRAM);
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
        let reader = thread::spawn(move || {
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
