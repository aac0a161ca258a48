//! uzram's disk as a block device, and mounted file systems; both are removed when dropped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use uzram::Result;

use super::PATIENCE;
use crate::harness::io_error;
use crate::harness::process::{Process, find, run_to_end, runtime_dir};

const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How often unmounting is tried while something else has a file open.
const TRIES: usize = 50;

/// The disk of a daemon, which ends when this is dropped.
pub struct Attached {
    device: PathBuf,
    program: PathBuf,
    process: Option<Process>,
    dir: TempDir,
}

impl Attached {
    /// Starts `PROGRAM up --attach` with an algorithm and more options, and waits until it names its device.
    pub fn new(program: &Path, algorithm: &str, size_bytes: u64, options: &[&str]) -> Result<Attached> {
        let (device, program) = (PathBuf::new(), program.to_owned());
        let mut attached = Attached { device, program, process: None, dir: runtime_dir()? };
        let mut command = attached.command(&["up", "--attach", "--algorithm", algorithm]);
        command.arg("--size").arg(format!("{size_bytes}B")).args(options);
        let process = attached.process.insert(Process::start(&mut command)?);
        attached.device = process.wait_until("named its device", START_TIMEOUT, |process| {
            named_device(&process.printed(), "attached")
        })?;
        Ok(attached)
    }

    /// Returns one of the program's commands, for this daemon.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).arg("--runtime-dir").arg(self.dir.path());
        command
    }

    /// Returns the path of the block device.
    pub fn path(&self) -> &Path {
        &self.device
    }

    /// Returns whether the device is attached to the disk, or to one whose mount is gone.
    fn is_attached(&self) -> bool {
        let Some(name) = self.device.file_name() else { return false };
        let file = Path::new("/sys/block").join(name).join("loop/backing_file");
        let file = fs::read_to_string(file).unwrap_or_default();
        let file = Path::new(file.trim_end());
        file.starts_with(self.dir.path()) || file == Path::new("/zram0/disk")
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Ends the daemon, cleanly if possible.
        self.process = None;
        let mut outcome = run_to_end(&mut self.command(&["detach", "--force"]), PATIENCE).map(drop);
        if self.is_attached() {
            // A daemon that was asked to end twice has removed its mount, by which its devices are
            // recognised.
            let losetup = find("losetup").unwrap_or_else(|| "losetup".into());
            outcome = run_to_end(Command::new(losetup).arg("--detach").arg(&self.device), PATIENCE).map(drop);
        }
        if let (Err(error), true) = (outcome, self.is_attached()) {
            eprintln!("{} stays: {error}", self.device.display());
        }
    }
}

/// Returns the device on the line of a daemon's output that begins with this word and is complete.
pub(super) fn named_device(printed: &str, word: &str) -> Option<PathBuf> {
    let whole = &printed[..printed.rfind('\n')?];
    whole.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(word)).then(|| words.next().map(PathBuf::from)).flatten()
    })
}

/// A file system, mounted with its default options.
pub struct Mounted {
    dir: PathBuf,
    mounted: bool,
}

impl Mounted {
    /// Mounts a device at a directory.
    pub fn new(device: &Path, file_system: &str, dir: &Path) -> Result<Mounted> {
        mount(device, dir, file_system, MountFlags::empty(), None)
            .map_err(|error| io_error(device, error))?;
        Ok(Mounted { dir: dir.to_owned(), mounted: true })
    }

    /// Returns where it is mounted.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes back dirty data, and closes the device.
    pub fn unmount(mut self) -> Result<()> {
        self.try_unmount()
    }

    fn try_unmount(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for _ in 0..TRIES {
            outcome = unmount(&self.dir, UnmountFlags::empty());
            match outcome {
                Ok(()) => {
                    self.mounted = false;
                    return Ok(());
                }
                Err(Errno::BUSY) => thread::sleep(Duration::from_millis(20)),
                Err(_) => break,
            }
        }
        outcome.map_err(|error| io_error(&self.dir, error))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.mounted || self.try_unmount().is_ok() {
            return;
        }
        // At least detach it from the directory.
        if let Err(error) = unmount(&self.dir, UnmountFlags::DETACH) {
            eprintln!("{} stays mounted: {error}", self.dir.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_when_its_line_is_whole() {
        let facts = "size        1 GiB\nattached    /dev/loop7 (zram0)\n";
        assert_eq!(named_device(facts, "attached").unwrap(), Path::new("/dev/loop7"));
        assert_eq!(named_device(facts, "swap"), None);
        assert_eq!(named_device("size  1\nattached    /dev/lo", "attached"), None);
        assert_eq!(named_device("", "attached"), None);
    }

    #[test]
    fn a_program_that_names_no_device_is_an_error() {
        let error = Attached::new(Path::new("/bin/false"), "lz4", 1 << 20, &[]).err().unwrap().to_string();
        assert!(error.contains("ended before it named its device"), "{error}");
    }
}
