//! A FUSE connection: mounted, initialised, and with a channel for each thread.
//!
//! The kernel keeps a connection while any process has its descriptors. So a process that was handed them
//! ([`Connection::parts`]) can go on where one that was killed stopped: the kernel sends all unanswered
//! requests again, or they are found where they were received. All channels must be handed on, as closing one
//! fails the requests that were read from it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};
use uzram::trusted_path::{Place, Refused};
use uzram::{Error, ErrorKind, Result};

use super::cpu_latency::{self, CpuLatencyLimit};
use super::proto::{FUSE_DIRECT_IO_ALLOW_MMAP, FUSE_HAS_RESEND};
use super::received::Received;
use super::tree::DISK;
use super::{handshake, open_device};
use crate::mounts::{self, MountIdentity, MountPoint};

/// The longest read or write that the kernel may send at once: its limit, unless `fs.fuse.max_pages_limit` is
/// changed.
pub const MAX_IO_BYTES: usize = 1 << 20;
const MAX_THREADS: usize = 1024;
/// The prefix of our mounts' source in the kernel's list. Only informative: any user can mount something with
/// that source.
const SOURCE: &str = "uzram:";
/// How long files may stay open when they are unmounted, and the threads may take to end then.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Where the kernel lists connections by their file systems' minor device numbers, fusectl.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";
/// The remedy for mounts whose daemon is dead.
pub(super) const CLEARS_THEM: &str =
    "`uzram detach --force` as root, or `fusermount3 -u` as another user, clears them";

/// How files are mounted and served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountOptions {
    /// Threads that serve the kernel.
    pub threads: usize,
    /// The longest read or write that the kernel sends at once, at most [`MAX_IO_BYTES`]. Each thread has two
    /// buffers of this size, resident and, as far as the system allows, locked in memory; long sequential
    /// requests are faster in one piece.
    pub max_io_bytes: u32,
    /// The limit on CPU wake-up latency while requests follow each other closely.
    pub cpu_latency: CpuLatencyLimit,
    /// Whether the kernel is asked to send unanswered requests again when another process goes on, if it can
    /// (Linux 6.9). Tests of what is done on older kernels have it not asked.
    pub resend: bool,
    /// Whether files cannot be mapped shared. What programs change in such mappings is written out from the
    /// page cache.
    #[serde(default)]
    pub refuses_shared_mappings: bool,
    /// Whether requests that take long start no thread: those that serve the kernel carry them out.
    #[serde(default)]
    pub starts_no_threads: bool,
}

impl Default for MountOptions {
    /// A thread for each CPU, and at least two, so that one waiting thread does not delay all requests.
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(2, |cpus| cpus.get().max(2));
        MountOptions {
            threads,
            max_io_bytes: MAX_IO_BYTES as u32,
            cpu_latency: CpuLatencyLimit::default(),
            resend: true,
            refuses_shared_mappings: false,
            starts_no_threads: false,
        }
    }
}

impl MountOptions {
    fn clamped(self) -> Self {
        MountOptions {
            threads: self.threads.clamp(1, MAX_THREADS),
            max_io_bytes: self.max_io_bytes.clamp(rustix::param::page_size() as u32, MAX_IO_BYTES as u32),
            ..self
        }
    }

    /// Returns the flags of the protocol that are not asked of the kernel.
    fn unwanted(&self) -> u64 {
        let resend = if self.resend { 0 } else { FUSE_HAS_RESEND };
        resend | if self.refuses_shared_mappings { FUSE_DIRECT_IO_ALLOW_MMAP } else { 0 }
    }
}

/// A mounted and initialised connection. Dropping it closes its descriptors, but does not unmount; if it was
/// unmounted, the directory that was made for it is removed.
#[derive(Debug)]
pub struct Connection {
    facts: ConnectionRecord,
    point: MountPoint,
    /// What notifications are written to. Nobody reads it.
    device: OwnedFd,
    channels: Vec<OwnedFd>,
    /// Where requests arrive, if they are to outlive the process and the kernel cannot send them again.
    received: Option<Received>,
    is_aborted: bool,
}

/// The description of a connection, for the process that is handed its descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionRecord {
    dir: PathBuf,
    identity: MountIdentity,
    is_made: bool,
    options: MountOptions,
    /// Why the kernel refuses the limit on CPU wake-up latency, if it does.
    #[serde(default)]
    cpu_latency_refused: Option<String>,
    /// What was negotiated with the kernel, `FUSE_INIT`.
    flags: u64,
    keeps_requests: bool,
}

impl Connection {
    /// Mounts on the directory `dir`, which is created if only it is missing, and initialises the connection.
    /// `owner` is shown in the kernel's list of mounts.
    ///
    /// The directory is empty: what is in it would be hidden, and whoever needs it, perhaps this process
    /// before it serves, would wait for the connection. Errors: `Unsupported` without `/dev/fuse`, or with a
    /// kernel before Linux 5.4; `Invalid` for a path that is not UTF-8; `NotFound` if the directory it is to
    /// be in does not exist; `Busy` when something is in the directory or mounted there; `Permission`; `Io`.
    pub fn mount(dir: &Path, owner: &Path, options: MountOptions) -> Result<Connection> {
        let failed = |kind, why: &str| cannot_mount(dir, kind, why);
        if !Path::new(open_device::DEVICE).exists() {
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
        if let Some(parent) = dir.parent() {
            if !parent.exists() {
                let why =
                    format!("'{}' does not exist: create it, or choose another directory", parent.display());
                return Err(failed(ErrorKind::NotFound, &why));
            }
            // Create nothing behind another user's symbolic link.
            resolve(parent)?;
        }
        let is_made = match std::fs::create_dir(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(failed(ErrorKind::Io, &error.to_string())),
        };
        let mounted = Connection::on(dir, owner, options.clamped(), is_made);
        if mounted.is_err() && is_made {
            // Fails if another process has created a file in it meanwhile.
            let _ = std::fs::remove_dir(dir);
        }
        mounted
    }

    /// Does [`Connection::mount`] on an existing directory.
    fn on(dir: &Path, owner: &Path, options: MountOptions, is_made: bool) -> Result<Connection> {
        let failed_io = |error: io::Error| {
            let kind = match error.kind() {
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                io::ErrorKind::Unsupported => ErrorKind::Unsupported,
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
        if let Some(name) = first_entry(&point).map_err(failed_io)? {
            let why = format!("it has '{name}' in it, which would be hidden; choose an empty directory");
            return Err(cannot_mount(&dir, ErrorKind::Busy, &why));
        }
        let source = format!("{SOURCE}{}", owner.display());
        let device = open_device::mounted(&dir, &point, &source).map_err(failed_io)?;
        let uid = rustix::process::geteuid().as_raw();
        let identity = match point.mount() {
            Ok((mount, identity)) if mount.is_fuse_of(uid) => identity,
            found => {
                let why = found
                    .err()
                    .map_or_else(|| "something else is on top of it".to_owned(), |error| error.to_string());
                return Err(cannot_mount(&dir, ErrorKind::Busy, &why));
            }
        };
        let answered = handshake::answer_init(device.as_fd(), options.max_io_bytes, options.unwanted());
        let initialised = answered.and_then(|flags| {
            let channels = (0..options.threads).map(|_| open_device::cloned(device.as_fd()));
            Ok((flags, channels.collect::<io::Result<Vec<_>>>()?))
        });
        match initialised {
            Ok((flags, channels)) => {
                let cpu_latency_refused = cpu_latency::refused(options.cpu_latency);
                let keeps_requests = false;
                let facts = ConnectionRecord {
                    dir,
                    identity,
                    is_made,
                    options,
                    cpu_latency_refused,
                    flags,
                    keeps_requests,
                };
                Ok(Connection { facts, point, device, channels, received: None, is_aborted: false })
            }
            Err(error) => {
                let _ = unmount(&dir, &point, &identity, UnmountFlags::DETACH);
                Err(failed_io(error))
            }
        }
    }

    /// Returns the description and the descriptors with which another process can go on
    /// ([`Connection::from_parts`]).
    pub fn parts(&self) -> (&ConnectionRecord, impl Iterator<Item = BorrowedFd<'_>>) {
        let channels = self.channels.iter().map(OwnedFd::as_fd);
        let received = self.received.as_ref().map(Received::as_fd);
        let fds = [self.device.as_fd()].into_iter().chain(channels).chain(received);
        (&self.facts, fds.chain([self.point.parent()]))
    }

    /// Takes over a connection from what [`Connection::parts`] returned. Errors: `Invalid` when the
    /// descriptors are not those of the record.
    pub fn from_parts(record: ConnectionRecord, fds: Vec<OwnedFd>) -> Result<Connection> {
        let invalid = |why: &str| Error::invalid(format!("not the parts of a FUSE connection: {why}"));
        let Some(name) = record.dir.file_name() else { return Err(invalid("the mount point is the root")) };
        if record.options != record.options.clamped() {
            return Err(invalid("the options are out of range"));
        }
        let (threads, keeps_requests) = (record.options.threads, record.keeps_requests);
        if fds.len() != threads + 2 + usize::from(keeps_requests) {
            return Err(invalid(&format!("{} descriptors for {threads} threads", fds.len(),)));
        }
        let mut fds = fds.into_iter();
        let (Some(device), Some(parent)) = (fds.next(), fds.next_back()) else {
            return Err(invalid("too few descriptors"));
        };
        let received = if keeps_requests { fds.next_back() } else { None };
        let received =
            received.map(|fd| Received::from_fd(fd, threads, record.options.max_io_bytes as usize));
        let received = received.transpose()?;
        let channels = fds.collect::<Vec<_>>();
        if ![&device].into_iter().chain(&channels).all(|fd| open_device::is_fuse(fd.as_fd())) {
            return Err(invalid("a descriptor is not of /dev/fuse"));
        }
        let point = MountPoint::from_parent(parent, name);
        Ok(Connection { facts: record, point, device, channels, received, is_aborted: false })
    }

    /// Lets unanswered requests outlive the process, where the kernel cannot send them again: they are
    /// received in memory that another process can open, and none is handed to another thread. Call it before
    /// the connection is served. Errors: `NoMemory` or `Io`: the system refuses the memory.
    pub fn outlives(&mut self) -> Result<()> {
        if !self.can_resend() {
            let MountOptions { threads, max_io_bytes, .. } = self.facts.options;
            self.received = Some(Received::new(threads, max_io_bytes as usize)?);
            self.facts.keeps_requests = true;
        }
        Ok(())
    }

    pub(super) fn received(&self) -> Option<&Received> {
        self.received.as_ref()
    }

    /// Returns whether the kernel can send unanswered requests again (Linux 6.9).
    pub(super) fn can_resend(&self) -> bool {
        self.facts.flags & FUSE_HAS_RESEND != 0
    }

    /// Has the kernel send all requests again that were read and not answered. No process may read any
    /// channel meanwhile, except to end. Errors: the kernel's.
    pub(super) fn resend(&self) -> io::Result<()> {
        handshake::notify_resend(self.device.as_fd())
    }

    /// Fails all requests, now and later, once every process that has the connection has called this or
    /// ended: it closes the connection's descriptors here. Where the kernel's list of connections is mounted,
    /// they fail at once. Errors: the kernel's list of mounts cannot be read, or the system refuses a
    /// descriptor.
    pub fn abort(&mut self) -> Result<()> {
        let failed = |connection: &Connection, error: io::Error| connection.cannot("abort", &error);
        // The minor number of a file system that is gone may be another's by now.
        if self.is_mounted().map_err(|error| failed(self, error))? {
            let path = Path::new(CONNECTIONS).join(self.facts.identity.device.1.to_string()).join("abort");
            if let Err(error) = std::fs::write(&path, "1") {
                tracing::debug!(path = %path.display(), %error, "connection not aborted");
            }
        }
        let null = std::fs::File::open("/dev/null").map_err(|error| failed(self, error))?;
        for fd in self.channels.iter_mut().chain([&mut self.device]) {
            let closed = rustix::io::dup3(&null, fd, rustix::io::DupFlags::CLOEXEC);
            closed.map_err(|errno| {
                let what = format!("cannot abort '{}': {errno}", self.facts.dir.display());
                Error::new(ErrorKind::Io, what)
            })?;
        }
        self.is_aborted = true;
        Ok(())
    }

    /// Returns whether it was aborted.
    pub fn is_aborted(&self) -> bool {
        self.is_aborted
    }

    /// Unmounts the files, unless they were unmounted already. Errors: `Busy` if a file stays open for two
    /// seconds. A process that looks at a loop device has its file open, even if it was detached.
    pub fn unmount(&self) -> Result<()> {
        let unmount = || unmount(self.dir(), &self.point, &self.facts.identity, UnmountFlags::empty());
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            let unmounted = self.is_mounted().and_then(|is_so| if is_so { unmount() } else { Ok(()) });
            match unmounted.map_err(|error| self.cannot("unmount", &error)) {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(10));
                }
                unmounted => return unmounted,
            }
        }
    }

    /// Returns the mount point.
    pub fn dir(&self) -> &Path {
        &self.facts.dir
    }

    /// Returns the identity of the mount.
    pub fn identity(&self) -> MountIdentity {
        self.facts.identity
    }

    /// Returns the path of a device's disk.
    pub fn disk(&self, device: &str) -> PathBuf {
        self.dir().join(device).join(DISK)
    }

    /// Returns the limit on CPU wake-up latency, and why the kernel refuses it, if it does.
    pub fn cpu_latency(&self) -> (CpuLatencyLimit, Option<&str>) {
        (self.facts.options.cpu_latency, self.facts.cpu_latency_refused.as_deref())
    }

    /// Returns the options, each in its range.
    pub fn options(&self) -> &MountOptions {
        &self.facts.options
    }

    /// Returns the channel of a thread; panics if there are fewer threads.
    pub(super) fn channel(&self, thread: usize) -> BorrowedFd<'_> {
        self.channels[thread].as_fd()
    }

    fn is_mounted(&self) -> io::Result<bool> {
        let uid = rustix::process::geteuid().as_raw();
        Ok(self.facts.identity.find(uid)?.is_some())
    }

    fn cannot(&self, what: &str, error: &io::Error) -> Error {
        let kind = if error.raw_os_error() == Some(libc::EBUSY) { ErrorKind::Busy } else { ErrorKind::Io };
        Error::new(kind, format!("cannot {what} '{}': {error}", self.dir().display()))
    }
}

impl Drop for Connection {
    /// Removes the directory that was made for it, if nothing is mounted there.
    fn drop(&mut self) {
        if !self.facts.is_made || self.is_mounted().unwrap_or(true) {
            return;
        }
        if let Err(error) = std::fs::remove_dir(self.dir())
            && error.kind() != io::ErrorKind::NotFound
        {
            // Another process may have created a file in it; and root's daemon may not remove anything from
            // another user's directory.
            tracing::warn!("'{}', which was made for the files, stays: {error}", self.dir().display());
        }
    }
}

fn unmount(dir: &Path, point: &MountPoint, identity: &MountIdentity, flags: UnmountFlags) -> io::Result<()> {
    point.unmount(identity, flags).or_else(|error| {
        // Without root, fusermount3 unmounts it, or fails because it is in use.
        if Errno::from_io_error(&error) == Some(Errno::PERM) {
            unmount_as_user(dir, flags)
        } else {
            Err(error)
        }
    })
}

fn unmount_as_user(dir: &Path, flags: UnmountFlags) -> io::Result<()> {
    let mut unmount = Command::new(open_device::FUSERMOUNT);
    unmount.args(["-u", "-q"]);
    if flags.contains(UnmountFlags::DETACH) {
        unmount.arg("-z");
    }
    unmount.arg("--").arg(dir).stdin(Stdio::null()).stderr(Stdio::null());
    match unmount.status()? {
        status if status.success() => Ok(()),
        _ => Err(Errno::BUSY.into()),
    }
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

fn first_entry(point: &MountPoint) -> io::Result<Option<String>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(point.open()?, c".", flags, Mode::empty())?;
    for entry in rustix::fs::Dir::new(dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn file_number(stat: Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn cannot_mount(dir: &Path, kind: ErrorKind, why: &str) -> Error {
    Error::new(kind, format!("cannot mount '{}': {why}", dir.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_the_parts_of_a_connection_are_taken_over() {
        let record = ConnectionRecord {
            dir: "/mnt/files".into(),
            identity: MountIdentity { id: 1, device: (0, 1), unique_id: None },
            is_made: false,
            options: MountOptions { threads: 2, ..MountOptions::default() },
            cpu_latency_refused: None,
            flags: FUSE_HAS_RESEND,
            keeps_requests: false,
        };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<ConnectionRecord>(&text).unwrap(), record);
        let fds = |path: &str, count| (0..count).map(|_| std::fs::File::open(path).unwrap().into()).collect();
        let refused = |record: &ConnectionRecord, fds| {
            Connection::from_parts(record.clone(), fds).unwrap_err().to_string()
        };
        assert!(refused(&record, fds("/dev/null", 4)).contains("not of /dev/fuse"));
        for count in [0, 1, 3, 5] {
            assert!(refused(&record, fds("/dev/null", count)).contains("descriptors"), "{count}");
        }
        let keeps = ConnectionRecord { keeps_requests: true, ..record.clone() };
        assert!(refused(&keeps, fds("/dev/null", 4)).contains("descriptors"));
        assert!(refused(&keeps, fds("/dev/null", 5)).contains("memory file"));
        let root = ConnectionRecord { dir: "/".into(), ..record.clone() };
        assert!(refused(&root, fds("/dev/null", 4)).contains("root"));
        let options = MountOptions { threads: usize::MAX, ..record.options };
        assert!(refused(&ConnectionRecord { options, ..record }, fds("/dev/null", 4)).contains("range"));
    }
}
