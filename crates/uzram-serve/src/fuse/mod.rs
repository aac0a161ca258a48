//! The devices as files: `DIR/zram0/disk` has the contents of `zram0`, and beside it lies a file for each attribute.
//!
//! The kernel reads and writes the disk through FUSE, without its page cache: a loop device on the file is a disk
//! like any other, on which file systems and swap work. Discards are holes punched into the file. Everything that was
//! written is stored when the write is answered; flush and fsync order, they do not make anything last.
//!
//! Several threads serve the kernel, each with a queue of its own (`FUSE_DEV_IOC_CLONE`).
//!
//! Code map: `tree` names and numbers the files, `handles` has those that are open, `filesystem` answers requests,
//! `cpu_latency` has CPUs wake fast for them, `warm_up` prepares the threads for swap.

mod cpu_latency;
mod filesystem;
mod handles;
mod tree;
mod warm_up;

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use fuser::{BackgroundSession, MountOption, Session};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use uzram::{Error, ErrorKind, Result};

use crate::Exports;
use crate::mounts::{self, MountInfo};
use cpu_latency::CpuLatency;
use filesystem::Files;

pub use cpu_latency::CpuLatencyLimit;
/// The name of the disk's file in its device's directory.
pub use tree::DISK;

/// The longest read or write that the kernel asks for at once: what it allows at most, unless it is told otherwise
/// (`fs.fuse.max_pages_limit`).
pub const MAX_IO_BYTES: usize = 1 << 20;
/// Requests that the kernel has under way at once: more than a loop device's queue holds.
const MAX_BACKGROUND: u16 = 256;
/// What begins the source of our mounts in the system's list.
const SOURCE: &str = "uzram:";

/// What there is to do about mounts whose daemon is gone.
const CLEARS_THEM: &str = "`uzram detach --force` as root, or `fusermount3 -u` as another user, clears them";

/// How files are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The threads that serve the kernel.
    pub threads: usize,
    /// How fast CPUs are to wake for requests that follow each other closely.
    pub cpu_latency: CpuLatencyLimit,
}

impl Default for Options {
    /// A thread for each CPU, and at least two, so that one that is kept waiting does not keep everybody waiting.
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(2, |cpus| cpus.get().max(2));
        Options { threads, cpu_latency: CpuLatencyLimit::default() }
    }
}

/// The mounted files of a daemon's devices.
pub struct Mount {
    dir: PathBuf,
    /// It was made for this, and goes with it.
    is_made: bool,
    threads: usize,
    cpu_latency: String,
    session: Option<BackgroundSession>,
}

impl Mount {
    /// Mounts the files of `exports` in the directory `dir`, which is made if there is none. Whose it is, `owner`, is
    /// what [`mounts_of`] finds it by.
    ///
    /// # Errors
    /// `Unsupported` without `/dev/fuse`; `Invalid` for a path that is not UTF-8; `Busy` when something is mounted there; `Permission`; `Io`.
    pub fn new(dir: &Path, owner: &Path, exports: Exports, options: Options) -> Result<Mount> {
        let failed = |kind, why: &str| cannot_mount(dir, kind, why);
        if !Path::new("/dev/fuse").exists() {
            let why =
                "there is no /dev/fuse: the kernel has no FUSE, or this container was not given the device";
            return Err(failed(ErrorKind::Unsupported, why));
        }
        if let Some(mount) = mounts::at(dir).map_err(|error| failed(ErrorKind::Io, &error.to_string()))? {
            let why = if mount.is_dead() && is_ours(&mount) {
                format!("what a daemon that died had mounted is still there: {CLEARS_THEM}")
            } else {
                "something is mounted there".to_owned()
            };
            return Err(failed(ErrorKind::Busy, &why));
        }
        let is_made = !dir.exists();
        std::fs::create_dir_all(dir).map_err(|error| failed(ErrorKind::Io, &error.to_string()))?;
        let mounted = Mount::on(dir, owner, exports, options, is_made);
        if mounted.is_err() && is_made {
            // Others may have put something there meanwhile.
            let _ = std::fs::remove_dir(dir);
        }
        mounted
    }

    /// [`Mount::new`] on a directory that is there.
    fn on(dir: &Path, owner: &Path, exports: Exports, options: Options, is_made: bool) -> Result<Mount> {
        let failed = |kind, why: &str| cannot_mount(dir, kind, why);
        // As the kernel's lists will have it.
        let dir = dir.canonicalize().map_err(|error| failed(ErrorKind::Io, &error.to_string()))?;
        // The control API tells it in JSON.
        if dir.to_str().is_none() {
            return Err(failed(ErrorKind::Invalid, "its path is not UTF-8; choose another directory"));
        }
        let mut config = fuser::Config::default();
        config.mount_options = vec![
            MountOption::FSName(format!("{SOURCE}{}", owner.display())),
            MountOption::DefaultPermissions,
            MountOption::NoDev,
            MountOption::NoSuid,
            MountOption::NoExec,
        ];
        config.n_threads = Some(options.threads);
        config.clone_fd = true;
        let asked = CpuLatency::new(options.cpu_latency);
        let cpu_latency = match &asked {
            Ok(_) => options.cpu_latency.to_string(),
            Err(error) => format!("{}: {}: {error}", CpuLatencyLimit::NONE, cpu_latency::DEVICE),
        };
        let files = Files::new(exports, options.threads, asked.ok().flatten());
        let session = Session::new(files, &dir, &config).and_then(Session::spawn).map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                _ => ErrorKind::Io,
            };
            failed(kind, &error.to_string())
        })?;
        Ok(Mount { dir, is_made, threads: options.threads, cpu_latency, session: Some(session) })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a device's disk is.
    pub fn disk(&self, device: &str) -> PathBuf {
        self.dir.join(device).join(DISK)
    }

    /// The threads that serve it.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// How fast CPUs are asked to wake for requests, in words; `none` has why, if it was asked for.
    pub fn cpu_latency(&self) -> &str {
        &self.cpu_latency
    }

    /// Unmounts the files, and waits for the threads.
    ///
    /// # Errors
    /// `Busy` while a file is open, that is, while a loop device is attached to one. It stays mounted then.
    pub fn unmount(&mut self) -> Result<()> {
        let is_busy = match rustix::mount::unmount(&self.dir, UnmountFlags::EXPIRE) {
            // That asks whether it is in use, and marks it as not used since; it unmounts what was marked before.
            Err(Errno::BUSY) => true,
            // Not root's: this does it, or says that it is in use.
            Err(Errno::PERM) => {
                let mut unmount = Command::new("fusermount3");
                unmount.args(["-u", "-q", "--"]).arg(&self.dir).stdin(Stdio::null()).stderr(Stdio::null());
                unmount.status().is_ok_and(|status| !status.success())
            }
            _ => false,
        };
        if is_busy {
            return Err(Error::new(ErrorKind::Busy, format!("files in '{}' are in use", self.dir.display())));
        }
        let Some(session) = self.session.take() else { return Ok(()) };
        session.umount_and_join().map_err(|error| {
            Error::new(ErrorKind::Io, format!("cannot unmount '{}': {error}", self.dir.display()))
        })?;
        if self.is_made {
            // Others may have put something there meanwhile.
            let _ = std::fs::remove_dir(&self.dir);
        }
        Ok(())
    }
}

impl Drop for Mount {
    /// What is still in use then fails once this process has ended, and stays mounted: so it is found, and cleared.
    fn drop(&mut self) {
        if self.session.is_none() {
            return;
        }
        let Err(error) = self.unmount() else { return };
        tracing::warn!("{error}, and fail from now on: {CLEARS_THEM}");
        // Its threads serve those who have a file open, until the process ends.
        std::mem::forget(self.session.take());
    }
}

/// The file in the directory `dir` of a mount that takes the writes by which one of its threads is prepared, whose number
/// is below theirs: [`MAX_IO_BYTES`] at a time, one for each thread at once.
pub fn warm_up_file(dir: &Path, number: usize) -> PathBuf {
    dir.join(tree::warm_up_name(number))
}

fn cannot_mount(dir: &Path, kind: ErrorKind, why: &str) -> Error {
    Error::new(kind, format!("cannot mount '{}': {why}", dir.display()))
}

/// Whether a mount is one of these, of whichever daemon.
fn is_ours(mount: &MountInfo) -> bool {
    mount.file_system.starts_with("fuse")
        && mount.source.as_os_str().as_bytes().starts_with(SOURCE.as_bytes())
}

/// What `owner` has mounted, alive or dead.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn mounts_of(owner: &Path) -> io::Result<Vec<MountInfo>> {
    let mut mounts = mounts::all()?;
    let source = format!("{SOURCE}{}", owner.display());
    mounts.retain(|mount| is_ours(mount) && mount.source == Path::new(&source));
    Ok(mounts)
}
