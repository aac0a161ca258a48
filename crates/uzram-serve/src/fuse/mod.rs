//! The devices as files: `DIR/zram0/disk` has the contents of `zram0`, next to a file for each attribute.
//!
//! The kernel reads and writes the disk through FUSE, without its page cache. A loop device on the file is an ordinary
//! disk, for file systems and swap. Discards punch holes into the file. A write is stored before its reply; flush and
//! fsync make nothing durable.
//!
//! Several threads serve the kernel, each with its own channel (`FUSE_DEV_IOC_CLONE`).
//!
//! Code map: `tree` names and numbers the files, `handles` has the open ones, `filesystem` answers requests, by `disk`
//! for disks and by `attribute` for setting attributes; `thread_buffer` has the memory of the threads, `cpu_latency`
//! makes CPUs wake fast for requests, `warm_up` prepares the threads for swap.

mod attribute;
mod cpu_latency;
mod disk;
mod filesystem;
mod handles;
mod thread_buffer;
mod tree;
mod warm_up;

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, MountOption, Session, SessionACL};
use rustix::fs::Stat;
use rustix::mount::{MountFlags, UnmountFlags};
use uzram::trusted_path::{Place, Refused};
use uzram::{Error, ErrorKind, Result};

use crate::Exports;
use crate::mounts::{self, MountIdentity, MountPoint};
use cpu_latency::CpuLatency;
use filesystem::Files;

pub use cpu_latency::CpuLatencyLimit;
/// The name of the disk's file in its device's directory.
pub use tree::DISK;

/// The longest read or write that the kernel may send at once: its limit, unless `fs.fuse.max_pages_limit` is changed.
pub const MAX_IO_BYTES: usize = 1 << 20;
/// Requests that the kernel has in flight at once: more than a loop device's queue holds.
const MAX_BACKGROUND: u16 = 256;
/// The device that FUSE connections are opened on.
const DEVICE: &str = "/dev/fuse";
/// The prefix of our mounts' source in the kernel's list. Only informative: any user can mount something with that
/// source.
const SOURCE: &str = "uzram:";
/// How long the threads may take to end after unmounting.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// The remedy for mounts whose daemon is dead.
const CLEARS_THEM: &str = "`uzram detach --force` as root, or `fusermount3 -u` as another user, clears them";

/// How files are mounted and served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// Threads that serve the kernel.
    pub threads: usize,
    /// The longest read or write that the kernel sends at once, at most [`MAX_IO_BYTES`]. Each thread has two buffers
    /// of this size, which a swap daemon locks in memory; long sequential requests are faster in one piece.
    pub max_io_bytes: u32,
    /// The limit on CPU wake-up latency while requests follow each other closely.
    pub cpu_latency: CpuLatencyLimit,
}

impl Default for MountOptions {
    /// A thread for each CPU, and at least two, so that one waiting thread does not delay all requests.
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(2, |cpus| cpus.get().max(2));
        MountOptions { threads, max_io_bytes: MAX_IO_BYTES as u32, cpu_latency: CpuLatencyLimit::default() }
    }
}

/// The mounted files of a daemon's devices.
pub struct Mount {
    dir: PathBuf,
    point: MountPoint,
    identity: MountIdentity,
    /// The directory was created for this mount, and is removed with it.
    is_made: bool,
    threads: usize,
    cpu_latency: String,
    session: Option<BackgroundSession>,
}

impl Mount {
    /// Mounts the files of `exports` on the directory `dir`, which is created if it is missing. `owner` is shown in the
    /// kernel's list of mounts.
    ///
    /// # Errors
    /// `Unsupported` without `/dev/fuse`; `Invalid` for a path that is not UTF-8; `Busy` when something is mounted
    /// there; `Permission`; `Io`.
    pub fn new(dir: &Path, owner: &Path, exports: Exports, options: MountOptions) -> Result<Mount> {
        let failed = |kind, why: &str| cannot_mount(dir, kind, why);
        if !Path::new(DEVICE).exists() {
            let why =
                "there is no /dev/fuse: the kernel has no FUSE, or this container was not given the device";
            return Err(failed(ErrorKind::Unsupported, why));
        }
        if let Some(mount) = mounts::at(dir).map_err(|error| failed(ErrorKind::Io, &error.to_string()))? {
            let why = format!(
                "something is mounted there ('{}'; if it is of a uzram that died, {CLEARS_THEM})",
                mount.source.display()
            );
            return Err(failed(ErrorKind::Busy, &why));
        }
        if let Some(parent) = dir.parent().filter(|parent| parent.exists()) {
            // Create nothing behind another user's symbolic link.
            resolve(parent)?;
        }
        let is_made = !dir.exists();
        std::fs::create_dir_all(dir).map_err(|error| failed(ErrorKind::Io, &error.to_string()))?;
        let mounted = Mount::on(dir, owner, exports, options, is_made);
        if mounted.is_err() && is_made {
            // Fails if another process has created a file in it meanwhile.
            let _ = std::fs::remove_dir(dir);
        }
        mounted
    }

    /// Does [`Mount::new`] on an existing directory.
    fn on(dir: &Path, owner: &Path, exports: Exports, options: MountOptions, is_made: bool) -> Result<Mount> {
        let failed_io = |error: io::Error| {
            let kind = match error.kind() {
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                _ => ErrorKind::Io,
            };
            cannot_mount(dir, kind, &error.to_string())
        };
        let place = resolve(dir)?;
        // The path that the kernel's lists will show.
        let dir = dir.canonicalize().map_err(failed_io)?;
        // The control API reports it in JSON.
        if dir.to_str().is_none() {
            let why = "its path is not UTF-8; choose another directory";
            return Err(cannot_mount(&dir, ErrorKind::Invalid, why));
        }
        let point = MountPoint::new(&dir).map_err(failed_io)?;
        if place.status().ok().map(file_number)
            != point.open().and_then(|open| Ok(rustix::fs::fstat(&open)?)).ok().map(file_number)
        {
            return Err(cannot_mount(&dir, ErrorKind::Busy, "the directory was replaced just now"));
        }
        let asked = CpuLatency::new(options.cpu_latency);
        let cpu_latency = match &asked {
            Ok(_) => options.cpu_latency.to_string(),
            Err(error) => format!("{}: {}: {error}", CpuLatencyLimit::NONE, cpu_latency::DEVICE),
        };
        let files = Files::new(exports, &options, asked.ok().flatten());
        let source = format!("{SOURCE}{}", owner.display());
        let session = start(files, &dir, &point, &source, options.threads).map_err(failed_io)?;
        let uid = rustix::process::geteuid().as_raw();
        match point.mount() {
            Ok((mount, identity)) if mount.is_fuse_of(uid) => Ok(Mount {
                dir,
                point,
                identity,
                is_made,
                threads: options.threads,
                cpu_latency,
                session: Some(session),
            }),
            found => {
                let why = found
                    .err()
                    .map_or_else(|| "something else is on top of it".to_owned(), |e| e.to_string());
                Err(cannot_mount(&dir, ErrorKind::Busy, &why))
            }
        }
    }

    /// Returns the mount point.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the identity of the mount.
    pub fn identity(&self) -> MountIdentity {
        self.identity
    }

    /// Returns the path of a device's disk.
    pub fn disk(&self, device: &str) -> PathBuf {
        self.dir.join(device).join(DISK)
    }

    /// Returns the number of threads that serve it.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Returns the limit on CPU wake-up latency as text; `none` with the reason, if the kernel refused one.
    pub fn cpu_latency(&self) -> &str {
        &self.cpu_latency
    }

    /// Unmounts the files, unless they were unmounted already, and waits for the threads.
    ///
    /// # Errors
    /// `Busy` while a file is open, by a loop device for example. It stays mounted then.
    pub fn unmount(&mut self) -> Result<()> {
        let Some(session) = &self.session else { return Ok(()) };
        let failed = |error: io::Error| {
            let kind =
                if error.raw_os_error() == Some(libc::EBUSY) { ErrorKind::Busy } else { ErrorKind::Io };
            Error::new(kind, format!("cannot unmount '{}': {error}", self.dir.display()))
        };
        let uid = rustix::process::geteuid().as_raw();
        if self.identity.find(uid).map_err(failed)?.is_some() {
            self.point
                .unmount(&self.identity, UnmountFlags::empty())
                .or_else(|error| {
                    // Without root, fusermount3 unmounts it, or fails because it is in use.
                    if error.raw_os_error() == Some(libc::EPERM) {
                        self.unmount_as_user()
                    } else {
                        Err(error)
                    }
                })
                .map_err(failed)?;
        }
        // The threads end when the last file is closed; one may stay open after the mount itself is gone.
        let deadline = Instant::now() + END_TIMEOUT;
        while !session.guard.is_finished() {
            if Instant::now() >= deadline {
                let what = format!("files of '{}' are still in use", self.dir.display());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            thread::sleep(Duration::from_millis(1));
        }
        if let Some(session) = self.session.take()
            && let Err(error) = session.join()
        {
            tracing::warn!(%error, "serving files ended with an error");
        }
        if self.is_made
            && let Err(error) = std::fs::remove_dir(&self.dir)
        {
            // Another process may have created a file in it; and root's daemon may not remove anything from another
            // user's directory.
            tracing::warn!("'{}', which was made for the files, stays: {error}", self.dir.display());
        }
        Ok(())
    }

    fn unmount_as_user(&self) -> io::Result<()> {
        let mut unmount = Command::new("fusermount3");
        unmount.args(["-u", "-q", "--"]).arg(&self.dir).stdin(Stdio::null()).stderr(Stdio::null());
        match unmount.status()? {
            status if status.success() => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        }
    }
}

impl Drop for Mount {
    /// Unmounts. If a file is still open, the mount stays, and its files fail once this process has ended.
    fn drop(&mut self) {
        let Err(error) = self.unmount() else { return };
        tracing::warn!("{error}; they fail from now on: {CLEARS_THEM}");
        // The session's threads serve open files until the process ends.
        std::mem::forget(self.session.take());
    }
}

/// Mounts `files` and begins to serve them.
///
/// Root mounts and unmounts through an open directory, so that it is the one that was checked, even if its path was
/// changed. Other users need fusermount3(1), which takes paths, and checks that they own them.
fn start(
    files: Files,
    dir: &Path,
    point: &MountPoint,
    source: &str,
    threads: usize,
) -> io::Result<BackgroundSession> {
    let mut config = fuser::Config::default();
    config.n_threads = Some(threads);
    config.clone_fd = true;
    if !rustix::process::geteuid().is_root() {
        config.mount_options = vec![
            MountOption::FSName(source.to_owned()),
            MountOption::DefaultPermissions,
            MountOption::NoDev,
            MountOption::NoSuid,
            MountOption::NoExec,
        ];
        return Session::new(files, dir, &config)?.spawn();
    }
    let connection = OwnedFd::from(OpenOptions::new().read(true).write(true).open(DEVICE)?);
    let target = point.open()?;
    let user = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        connection.as_raw_fd(),
        user.0,
        user.1
    );
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    let target = format!("/proc/self/fd/{}", target.as_raw_fd());
    rustix::mount::mount(source, target, "fuse", flags, &*CString::new(data)?)?;
    let session = Session::from_fd(files, connection, SessionACL::Owner, config).and_then(Session::spawn);
    if session.is_err() {
        // The mount is ours, and no thread serves it.
        let _ = point.mount().and_then(|(_, identity)| point.unmount(&identity, UnmountFlags::DETACH));
    }
    session
}

/// Returns the name of the file in a mount's root for warming up thread `number`. Write to the files of all threads at
/// the same time, each write as long as the file.
pub fn warm_up_file(number: usize) -> String {
    tree::warm_up_name(number)
}

/// Resolves a directory by a path that no other user can redirect.
fn resolve(dir: &Path) -> Result<Place> {
    Place::resolve(dir).map_err(|refused| {
        let kind = match refused {
            Refused::Link { .. } => ErrorKind::Permission,
            Refused::System(_) => ErrorKind::Io,
        };
        cannot_mount(dir, kind, &refused.to_string())
    })
}

/// Returns the device and inode number, which identify a file.
fn file_number(stat: Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn cannot_mount(dir: &Path, kind: ErrorKind, why: &str) -> Error {
    Error::new(kind, format!("cannot mount '{}': {why}", dir.display()))
}
