//! Opening `/dev/fuse`: with a mount, and as a further channel of one.
//!
//! Who may mounts through an open directory, so that it is the one that was checked, even if its path was
//! changed. Others need fusermount3(1), which takes paths, and checks that they own them.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use linux_raw_sys::ioctl::FUSE_DEV_IOC_CLONE;
use rustix::fs::{FileType, major, minor};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter};
use rustix::mount::MountFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::mounts::MountPoint;

/// The device that FUSE connections are opened on, and its number: `<linux/miscdevice.h>`.
pub(super) const DEVICE: &str = "/dev/fuse";
const DEVICE_NUMBER: (u32, u32) = (10, 229);
/// The program with which users mount and unmount.
pub(super) const FUSERMOUNT: &str = "fusermount3";
/// The variable that tells the program the descriptor of the socket to which it sends the opened device.
const FUSERMOUNT_SOCKET: &str = "_FUSE_COMMFD";

/// Mounts on `dir`, which is open as `point`, and returns the connection's descriptor.
pub(super) fn mounted(dir: &Path, point: &MountPoint, source: &str) -> io::Result<OwnedFd> {
    let device = open().map_err(|error| explained(&error))?;
    match mount(&device, point, source) {
        Ok(()) => Ok(device),
        Err(Errno::PERM) if !rustix::process::geteuid().is_root() => mount_as_user(dir, source),
        Err(errno @ (Errno::PERM | Errno::ACCESS)) => {
            let why =
                "a container needs CAP_SYS_ADMIN, and a security policy (AppArmor, SELinux) may forbid it";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("mount(2): {errno}: {why}")))
        }
        Err(errno) => Err(errno.into()),
    }
}

fn mount(device: &OwnedFd, point: &MountPoint, source: &str) -> Result<(), Errno> {
    let target = point.open().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let user = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        user.0,
        user.1
    );
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    let target = format!("/proc/self/fd/{}", target.as_raw_fd());
    rustix::mount::mount(source, target, "fuse", flags, &*data)
}

/// Returns the error of opening the device with what would allow it.
fn explained(error: &io::Error) -> io::Error {
    let allow = match Errno::from_io_error(error) {
        Some(Errno::ACCESS) => match std::fs::metadata(DEVICE) {
            Ok(meta) if meta.mode() & 0o006 != 0o006 => format!(
                "it is of user {} and group {}, with mode {:04o}: add this user to the group, or chmod 666 {DEVICE}",
                meta.uid(),
                meta.gid(),
                meta.mode() & 0o7777
            ),
            _ => "a security policy (AppArmor, SELinux) forbids it".to_owned(),
        },
        Some(Errno::PERM) => format!("the container was not given the device (docker run --device {DEVICE})"),
        Some(Errno::NODEV | Errno::NXIO) => "the kernel has no FUSE, or not yet (modprobe fuse)".to_owned(),
        _ => return io::Error::new(error.kind(), format!("{DEVICE}: {error}")),
    };
    io::Error::new(error.kind(), format!("{DEVICE}: {error}: {allow}"))
}

fn mount_as_user(dir: &Path, source: &str) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    // A comma would end the name.
    let name = source.replace('\\', "\\\\").replace(',', "\\,");
    let mut mount = Command::new(FUSERMOUNT);
    mount.arg("-o").arg(format!("fsname={name},default_permissions,nodev,nosuid,noexec"));
    // The socket is its standard input: no other descriptor is inherited.
    mount.arg("--").arg(dir).env(FUSERMOUNT_SOCKET, "0").stdin(OwnedFd::from(theirs));
    let child = mount.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(|error| {
        let install =
            if error.kind() == io::ErrorKind::NotFound { ": install the package fuse3" } else { "" };
        io::Error::new(error.kind(), format!("{FUSERMOUNT}: {error}{install}"))
    })?;
    // The command has a copy of the socket; without it, receiving ends when the program does.
    drop(mount);
    let received = receive(&ours);
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    match received? {
        Some(device) => Ok(device),
        None if said.trim().is_empty() => Err(io::Error::other(format!("{FUSERMOUNT}: {}", output.status))),
        None if ["Permission denied", "Operation not permitted"]
            .iter()
            .any(|denied| said.contains(denied)) =>
        {
            let said = said.trim();
            let why = "it has to be set-uid root, and no security policy may forbid the mount (AppArmor's profile of \
                       fusermount3, SELinux, that of a container)";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{said}: {why}")))
        }
        None => Err(io::Error::other(said.trim().to_owned())),
    }
}

/// Receives a descriptor; `None` if the other end is closed without sending one.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::io::retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut byte)];
        rustix::net::recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(fds.next().and_then(|mut fds| fds.next()))
}

fn open() -> io::Result<OwnedFd> {
    Ok(OpenOptions::new().read(true).write(true).open(DEVICE)?.into())
}

/// Opens a further channel of a connection (Linux 4.2).
pub(super) fn cloned(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let channel = open()?;
    let source = device.as_raw_fd().unsigned_abs();
    // SAFETY: the request reads a 32-bit number, the descriptor of the connection.
    unsafe {
        rustix::ioctl::ioctl(&channel, Setter::<{ FUSE_DEV_IOC_CLONE as Opcode }, u32>::new(source))?;
    }
    Ok(channel)
}

pub(super) fn is_fuse(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|stat| {
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        is_device && (major(stat.st_rdev), minor(stat.st_rdev)) == DEVICE_NUMBER
    })
}
