//! Other programs as child processes, which end when their handle is dropped.

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::{SIGINT, SIGTERM};
use tempfile::TempDir;
use uzram::{Error, ErrorKind, Result};

use super::unsupported;

const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a flag that SIGINT and SIGTERM set.
pub fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::default();
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot handle signals: {error}")))?;
    }
    Ok(stop)
}

/// The interval at which conditions are polled.
pub const POLL: Duration = Duration::from_millis(5);
/// How much of the end of a program's error output goes into an error.
const LAST_WORDS_BYTES: u64 = 1024;
/// Folders of administrators' programs, which are not in every user's path.
const ADMIN_DIRS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// `Unsupported` names a program that is missing.
pub fn require(names: &[&str]) -> Result<()> {
    let missing = names.iter().find(|name| find(name).is_none());
    missing.map_or(Ok(()), |name| Err(unsupported(format!("the program {name} is missing"))))
}

/// Returns the path of a program that can be executed, in `PATH` or among those for administrators.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(ADMIN_DIRS.map(PathBuf::from));
    let can_be_executed = |program: &PathBuf| program.is_file() && access(program, Access::EXEC_OK).is_ok();
    dirs.map(|dir| dir.join(name)).find(can_be_executed)
}

/// Returns a command for the program that [`find`] finds; starting it fails if there is none.
pub(crate) fn command(name: &str) -> Command {
    Command::new(find(name).unwrap_or_else(|| name.into()))
}

/// Runs a program until it exits, which must be successfully and within `timeout`; returns its output.
pub fn run_to_end(command: &mut Command, timeout: Duration) -> Result<String> {
    run(command, timeout, || false)
}

/// As [`run_to_end`], but the program ends, and all that it has started, when `stops` returns true.
pub(crate) fn run(command: &mut Command, timeout: Duration, stops: impl Fn() -> bool) -> Result<String> {
    let mut process = Process::start(command)?;
    process.finish(timeout, stops, POLL, |_| ())?;
    Ok(process.printed())
}

/// Returns a process and all that descend from it, as far as they have not ended.
pub(crate) fn family(process: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    let children = children.unwrap_or_default();
    let descendants = children.split_ascii_whitespace().filter_map(|word| word.parse().ok()).flat_map(family);
    std::iter::once(process).chain(descendants).collect()
}

/// A child process; dropping it terminates it.
pub struct Process {
    name: String,
    child: Child,
    /// Where its standard output goes.
    printed: File,
    /// Where its standard error goes.
    said: File,
}

impl Process {
    /// Starts it in its own process group.
    pub fn start(command: &mut Command) -> Result<Process> {
        let name = command.get_program().to_string_lossy().into_owned();
        let failed =
            |error: std::io::Error| Error::new(ErrorKind::Io, format!("cannot start {name}: {error}"));
        let printed = tempfile::tempfile().map_err(failed)?;
        let said = tempfile::tempfile().map_err(failed)?;
        // Signals from the terminal must reach only this process, which terminates the child in due time: a
        // daemon must not be interrupted by them.
        command.process_group(0).stdin(Stdio::null());
        command.stdout(printed.try_clone().map_err(failed)?).stderr(said.try_clone().map_err(failed)?);
        let child = command.spawn().map_err(failed)?;
        Ok(Process { name, child, printed, said })
    }

    /// Returns whether it has exited.
    pub fn has_ended(&mut self) -> Result<bool> {
        match self.child.try_wait() {
            Ok(status) => Ok(status.is_some()),
            Err(error) => Err(Error::new(ErrorKind::Io, format!("cannot wait for {}: {error}", self.name))),
        }
    }

    /// Waits for its end, which must be a success, and looks at it now and then.
    pub(crate) fn finish(
        &mut self,
        timeout: Duration,
        stops: impl Fn() -> bool,
        every: Duration,
        mut look: impl FnMut(&Process),
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while !self.has_ended()? {
            let error = match (stops(), Instant::now() > deadline) {
                (true, _) => Error::new(ErrorKind::Busy, "interrupted"),
                (_, true) => self.failure("did not end in time"),
                _ => {
                    look(self);
                    thread::sleep(every);
                    continue;
                }
            };
            // It was not waited for, so that the group is its own.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::TERM);
            return Err(error);
        }
        let status = self.child.wait();
        let status = status.map_err(|error| self.failure(&format!("cannot be waited for ({error})")))?;
        if status.success() { Ok(()) } else { Err(self.failure(&format!("failed ({status})"))) }
    }

    /// Waits until `found` returns something.
    pub(crate) fn wait_until<T>(
        &mut self,
        what: &str,
        timeout: Duration,
        mut found: impl FnMut(&Process) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(found) = found(self) {
                return Ok(found);
            }
            if self.has_ended()? {
                return Err(self.failure(&format!("ended before it {what}")));
            }
            if Instant::now() > deadline {
                return Err(self.failure(&format!("was too slow: it had not yet {what}")));
            }
            thread::sleep(POLL);
        }
    }

    /// Returns its output so far.
    pub fn printed(&self) -> String {
        text_from(&self.printed, 0)
    }

    /// Returns its process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns an error with the end of the program's error output.
    pub fn failure(&self, what: &str) -> Error {
        Error::new(ErrorKind::Io, format!("{} {what}: {}", self.name, last_words(&self.said).trim()))
    }
}

/// Returns the end of a program's error output, from the file that it goes to.
pub(crate) fn last_words(said: &File) -> String {
    let len = said.metadata().map_or(0, |metadata| metadata.len());
    text_from(said, len.saturating_sub(LAST_WORDS_BYTES))
}

/// Reads a file that another process may be writing to, which shares our file offset. If that fails, an empty
/// text is enough: it is part of another error.
pub(crate) fn text_from(file: &File, offset: u64) -> String {
    let len = file.metadata().map_or(0, |metadata| metadata.len());
    let mut bytes = vec![0; len.saturating_sub(offset) as usize];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => String::new(),
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // The child has not been waited for, so its process ID is still its own.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let deadline = Instant::now() + END_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(POLL);
        }
    }
}

/// Makes a runtime directory for a daemon, accessible to its owner only.
pub fn runtime_dir() -> Result<TempDir> {
    temporary(&std::env::temp_dir())
}

/// Makes such a folder in another one.
pub(crate) fn temporary(dir: &Path) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(&format!("uzram-bench-{}-", std::process::id()))
        .permissions(std::fs::Permissions::from_mode(0o700))
        .tempdir_in(dir)
        .map_err(|error| {
            let what = format!("cannot make a temporary folder in '{}': {error}", dir.display());
            Error::new(ErrorKind::Io, what)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn a_program_that_fails_is_quoted() {
        let error = run_to_end(Command::new("sh").args(["-c", "echo no luck >&2; exit 3"]), TIMEOUT);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("no luck") && error.contains('3'), "{error}");
        let error = run_to_end(&mut Command::new("/nonexistent/program"), TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("cannot start /nonexistent/program"), "{error}");
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let start = Instant::now();
        let error = run_to_end(Command::new("sleep").arg("60"), Duration::from_millis(30)).unwrap_err();
        assert!(error.to_string().contains("in time") && start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn what_a_program_has_started_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let alive = dir.path().join("alive");
        let mut shell = Command::new("sh");
        shell.args(["-c", "while :; do echo >> \"$0\"; sleep 0.02; done & wait"]).arg(&alive);
        run(&mut shell, TIMEOUT, || alive.exists()).unwrap_err();
        let len = || std::fs::metadata(&alive).unwrap().len();
        let mut last = len();
        let end = Instant::now() + TIMEOUT;
        loop {
            thread::sleep(Duration::from_millis(200));
            match len() {
                now if now == last => break,
                now => last = now,
            }
            assert!(Instant::now() < end, "the background process goes on");
        }
    }

    #[test]
    fn signals_from_the_terminal_do_not_reach_a_child() {
        let script = "echo $$; cut -d ' ' -f 5 /proc/$$/stat";
        let printed = run_to_end(Command::new("sh").args(["-c", script]), TIMEOUT).unwrap();
        let [pid, group] = printed.lines().collect::<Vec<_>>()[..] else { panic!("{printed}") };
        assert_eq!(pid, group);
    }

    #[test]
    fn processes_of_processes_are_found() {
        let mut child = Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        while family(child.id()).len() < 2 {
            thread::sleep(Duration::from_millis(1));
        }
        let [parent, grandchild] = family(child.id())[..] else { panic!("more than two") };
        assert_eq!(parent, child.id());
        kill_process(Pid::from_raw(grandchild as i32).unwrap(), Signal::KILL).unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn programs_are_found() {
        assert!(find("sh").is_some_and(|path| path.ends_with("sh")));
        assert_eq!(find("no-such-program"), None);
        assert!(Path::new("/etc/passwd").is_file() && find("/etc/passwd").is_none());
        let error = require(&["sh", "no-such-program"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(require(&["sh"]).is_ok() && error.to_string().contains("no-such-program is missing"));
    }
}
