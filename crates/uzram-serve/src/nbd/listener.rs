//! Listening sockets: Unix ones with their files, and TCP.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, getsockname, listen,
    socket_with, sockopt,
};
use uzram::{Error, ErrorKind, Result};

use super::address::{Endpoint, Listen, ListenAddress, SocketAccess};
use super::socket::Socket;
use crate::Exports;

const BACKLOG: i32 = 1024;
/// The default mode of a socket file: only the server's user may connect.
const SOCKET_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// A TCP connection without traffic is probed after this long…
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// …and again at this interval, until [`KEEPALIVE_PROBES`] went unanswered: a host that vanished
/// is noticed within two minutes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 6;
/// Probes are not sent while data is unacknowledged, so that has a time limit, too: the same two minutes.
const UNACKNOWLEDGED_TIMEOUT_MS: u32 = 120_000;

/// The listening sockets of a server. They may outlive it: clients that connect meanwhile wait for the next
/// server on them.
pub struct Sockets(Vec<Arc<Bound>>);

impl Sockets {
    /// Listens at all these addresses. Clients can connect from now on. Errors: `Busy` when another server
    /// has a path or port; `Invalid` when a path cannot be a socket's; `Io` for the rest.
    pub fn bind(addresses: &[Listen]) -> Result<Sockets> {
        let bind = |listen: &Listen| match &listen.address {
            ListenAddress::Unix(path) => bind_unix(path, listen.access),
            ListenAddress::Tcp(address) => bind_tcp(*address),
        };
        Ok(Sockets(addresses.iter().map(|listen| bind(listen).map(Arc::new)).collect::<Result<_>>()?))
    }

    /// Takes sockets that another process bound for these addresses, in their order. Errors: `Invalid` unless
    /// there is a socket for each address; `Io` when the address of one cannot be read.
    pub fn adopt(addresses: &[Listen], sockets: Vec<OwnedFd>) -> Result<Sockets> {
        if sockets.len() != addresses.len() {
            let what = format!("{} listening sockets for {} addresses", sockets.len(), addresses.len());
            return Err(refused(ErrorKind::Invalid, what));
        }
        let take = |(fd, listen): (OwnedFd, &Listen)| match &listen.address {
            ListenAddress::Unix(path) => {
                let file = SocketFile::at(path)?;
                Ok(Bound { fd, address: listen.address.clone(), _file: Some(file) })
            }
            ListenAddress::Tcp(_) => {
                let address = getsockname(&fd).and_then(SocketAddr::try_from);
                let address = address.map_err(|errno| failure("use", &listen.address, errno))?;
                Ok(Bound { fd, address: ListenAddress::Tcp(address), _file: None })
            }
        };
        let taken = sockets.into_iter().zip(addresses).map(|socket| take(socket).map(Arc::new));
        Ok(Sockets(taken.collect::<Result<_>>()?))
    }

    /// Returns the sockets, in the order of the addresses.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|bound| bound.fd.as_fd())
    }

    /// Returns the sockets, bound for `addresses`, as listeners of a server with these exports.
    pub(super) fn listeners(&self, addresses: &[Listen], exports: &Exports) -> Vec<Listener> {
        let listener = |(bound, listen): (&Arc<Bound>, &Listen)| {
            let devices = listen.devices.clone();
            let exports = devices.clone().map_or_else(|| exports.clone(), |only| exports.only(only));
            Listener { bound: Arc::clone(bound), devices, exports }
        };
        self.0.iter().zip(addresses).map(listener).collect()
    }
}

pub(super) struct Listener {
    pub bound: Arc<Bound>,
    devices: Option<Arc<[String]>>,
    pub exports: Exports,
}

impl Listener {
    /// Accepts the next waiting connection; `WouldBlock` when there is none.
    pub fn accept(&self) -> io::Result<Socket> {
        let fd = accept_with(&self.bound.fd, SocketFlags::CLOEXEC)?;
        if let ListenAddress::Tcp(_) = self.bound.address {
            set_tcp_options(&fd)?;
        }
        Ok(Socket::new(fd))
    }

    pub fn endpoint(&self, tls: bool) -> Endpoint {
        Endpoint { address: self.bound.address.clone(), devices: self.devices.clone(), tls }
    }
}

fn failure(what: &str, address: &ListenAddress, errno: Errno) -> Error {
    refused(ErrorKind::Io, format!("cannot {what} {address}: {errno}"))
}

fn refused(kind: ErrorKind, what: String) -> Error {
    Error::new(kind, what).with_setting("listen")
}

pub(super) struct Bound {
    pub fd: OwnedFd,
    /// Its address, with the actual port.
    pub address: ListenAddress,
    /// The file of a Unix socket, removed on drop.
    _file: Option<SocketFile>,
}

/// Listens on a new socket file. On Linux the file gets the mode of the unbound socket, less the umask, so
/// the mode is set before `bind`, and other users cannot connect at any moment. For other access, the mode is
/// 0 until owner and group are set.
fn bind_unix(path: &Path, access: SocketAccess) -> Result<Bound> {
    let address = ListenAddress::Unix(path.to_owned());
    let name = SocketAddrUnix::new(path).map_err(|_| {
        let what = format!("the socket path {} is longer than the 107 bytes Linux allows", path.display());
        refused(ErrorKind::Invalid, what)
    })?;
    remove_stale(path, &name)?;
    let fd = stream_socket(AddressFamily::UNIX).map_err(|errno| failure("create", &address, errno))?;
    let is_default = access == SocketAccess::default();
    let first_mode = if is_default { SOCKET_MODE } else { Mode::empty() };
    rustix::fs::fchmod(&fd, first_mode).map_err(|errno| failure("set the mode of", &address, errno))?;
    bind(&fd, &name).map_err(|errno| failure("bind", &address, errno))?;
    let file = SocketFile::at(path)?;
    if !is_default {
        set_access(path, access)?;
    }
    listen(&fd, BACKLOG).map_err(|errno| failure("listen on", &address, errno))?;
    Ok(Bound { fd, address, _file: Some(file) })
}

/// Sets owner, group and mode of the file of a socket that was just bound, which has mode 0.
fn set_access(path: &Path, access: SocketAccess) -> Result<()> {
    let refused = |what: &str, why: &dyn std::fmt::Display, setting| {
        let text = format!("cannot {what} of {}: {why}", path.display());
        Err(Error::new(ErrorKind::Io, text).with_setting(setting))
    };
    let (file, stat) = match hold(path) {
        Ok(opened) => opened,
        Err(errno) => return refused("set the mode", &errno, "socket-mode"),
    };
    // A process that may write to the directory may have replaced the file.
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::Socket
        && stat.st_mode & 0o777 == 0
        && stat.st_uid == rustix::process::geteuid().as_raw();
    if !is_ours {
        return refused("set the mode", &"it is another file now", "listen");
    }
    // The group first: after chown to another user, this process may not set it any more.
    let group = access.group.map(Gid::from_raw);
    if let Err(errno) = rustix::fs::chownat(&file, "", None, group, AtFlags::EMPTY_PATH) {
        return refused("set the group", &errno, "socket-group");
    }
    let owner = access.owner.map(Uid::from_raw);
    if let Err(errno) = rustix::fs::chownat(&file, "", owner, None, AtFlags::EMPTY_PATH) {
        return refused("set the owner", &errno, "socket-owner");
    }
    match set_mode(&file, access.mode.map_or(SOCKET_MODE, Mode::from_raw_mode)) {
        Ok(()) => Ok(()),
        Err(errno) => refused("set the mode", &errno, "socket-mode"),
    }
}

/// Opens a file with `O_PATH`, which needs no permissions on it, and returns its status.
fn hold(path: &Path) -> rustix::io::Result<(OwnedFd, Stat)> {
    let file =
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    Ok((file, stat))
}

/// Sets the mode of a file opened with `O_PATH`: fchmod(2) refuses such a descriptor, chmod(2) of its `/proc`
/// path works.
fn set_mode(file: &OwnedFd, mode: Mode) -> rustix::io::Result<()> {
    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)
}

fn bind_tcp(wanted: SocketAddr) -> Result<Bound> {
    let address = ListenAddress::Tcp(wanted);
    let open = || {
        let family = if wanted.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let fd = stream_socket(family)?;
        // Connections of an earlier server may still be in TIME_WAIT.
        sockopt::set_socket_reuseaddr(&fd, true)?;
        if wanted.is_ipv6() {
            // So that [::] does not also take 0.0.0.0's connections, and both can be listened on.
            sockopt::set_ipv6_v6only(&fd, true)?;
        }
        bind(&fd, &wanted)?;
        listen(&fd, BACKLOG)?;
        let real = SocketAddr::try_from(getsockname(&fd)?)?;
        Ok((fd, real))
    };
    let (fd, real) = open().map_err(|errno| match errno {
        Errno::ADDRINUSE => refused(ErrorKind::Busy, format!("another server has {address}")),
        errno => failure("listen on", &address, errno),
    })?;
    Ok(Bound { fd, address: ListenAddress::Tcp(real), _file: None })
}

/// Makes the kernel send small replies at once and notice hosts that vanish, without waking this process for
/// an idle connection.
fn set_tcp_options(fd: &OwnedFd) -> rustix::io::Result<()> {
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(fd, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(fd, KEEPALIVE_PROBES)?;
    sockopt::set_tcp_user_timeout(fd, UNACKNOWLEDGED_TIMEOUT_MS)
}

/// Returns whether only programs on this machine can connect to `address`.
pub(super) fn is_local(address: &ListenAddress) -> bool {
    match address {
        ListenAddress::Unix(_) => true,
        ListenAddress::Tcp(address) => address.ip().to_canonical().is_loopback(),
    }
}

fn stream_socket(family: AddressFamily) -> rustix::io::Result<OwnedFd> {
    socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

/// A socket's file; removed on drop, if it is still the same file.
struct SocketFile {
    path: PathBuf,
    /// Device and inode number, so that another server's file is not removed.
    id: (u64, u64),
}

impl SocketFile {
    fn at(path: &Path) -> Result<SocketFile> {
        let metadata = fs::symlink_metadata(path)
            .map_err(|error| Error::new(ErrorKind::Io, format!("{} vanished: {error}", path.display())))?;
        Ok(SocketFile { path: path.to_owned(), id: (metadata.dev(), metadata.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let removed = match fs::symlink_metadata(&self.path) {
            Ok(file) if (file.dev(), file.ino()) == self.id => fs::remove_file(&self.path),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            // In another user's directory this may no longer be permitted.
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the NBD socket");
        }
    }
}

/// Removes a socket file that nothing listens on.
///
/// Two servers that start on one path at the same moment can both find it stale; callers that may start two
/// must serialize them with a lock on the directory.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<()> {
    let there = path.display();
    let is_served = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(refused(ErrorKind::Io, format!("cannot look at {there}: {error}"))),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(refused(ErrorKind::Invalid, format!("{there} exists and is not a socket")));
        }
        Ok(_) => is_served(path, address),
    };
    match is_served {
        Ok(false) => fs::remove_file(path)
            .map_err(|error| Error::new(ErrorKind::Io, format!("cannot remove the stale {there}: {error}"))),
        Ok(true) => Err(refused(ErrorKind::Busy, format!("another server has {there}"))),
        Err(errno) => {
            let what =
                format!("cannot find out whether a server has {there}: {errno}; remove it if none has");
            Err(refused(ErrorKind::Busy, what))
        }
    }
}

/// Returns whether a process listens on a socket file. This needs permission to connect, which `socket-mode`
/// may deny even to the server's own user; then the file's owner gets it for the time of this check.
fn is_served(path: &Path, address: &SocketAddrUnix) -> rustix::io::Result<bool> {
    let probe = || {
        // The socket is non-blocking: a full backlog gives EAGAIN.
        let probe = stream_socket(AddressFamily::UNIX)?;
        match connect(&probe, address) {
            Err(Errno::ACCESS) => Err(Errno::ACCESS),
            Err(Errno::CONNREFUSED) => Ok(false),
            _ => Ok(true),
        }
    };
    let refused = match probe() {
        Err(Errno::ACCESS) => Errno::ACCESS,
        known => return known,
    };
    let (file, stat) = hold(path)?;
    let mode = Mode::from_raw_mode(stat.st_mode & 0o777);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || mode.contains(Mode::WUSR) {
        return Err(refused);
    }
    set_mode(&file, mode | Mode::WUSR)?;
    let is_served = probe();
    if is_served != Ok(false) {
        set_mode(&file, mode)?;
    }
    is_served
}
