//! Mounts and their identity.
//!
//! A mount is identified by its mount ID and its file system's device number, which the kernel assigns, and
//! by the user who mounted it. Never by its source or path: any user of fusermount3(1) can choose the source,
//! and the path changes when a parent directory is renamed.
//!
//! Nothing here sends requests to a file system, which would hang if its server is stopped.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

pub use uzram::mountinfo::{MountInfo, all};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The identity of a mount, which outlives the process that mounted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountIdentity {
    /// As in [`MountInfo`].
    pub id: u64,
    /// As in [`MountInfo`].
    pub device: (u32, u32),
    /// The mount ID that is not reused before the next boot, from Linux 6.8 on.
    pub unique_id: Option<u64>,
}

/// A mount point: its open parent directory, and its name in that. Both stay valid when a parent directory is
/// renamed.
#[derive(Debug)]
pub struct MountPoint {
    parent: OwnedFd,
    name: OsString,
}

impl MountIdentity {
    /// Returns the mount of this identity, if it still exists and `uid` serves it. Errors: the kernel's list
    /// cannot be read.
    pub fn find(&self, uid: u32) -> io::Result<Option<MountInfo>> {
        let mounts = all()?.into_iter();
        let mut same = mounts.filter(|mount| (mount.id, mount.device) == (self.id, self.device));
        Ok(same.find(|mount| mount.is_fuse_of(uid) && !self.is_another(mount)))
    }

    /// Returns whether `mount`, which has the same numbers, is certainly another mount: the kernel reuses the
    /// numbers of removed mounts.
    fn is_another(&self, mount: &MountInfo) -> bool {
        let seen = MountPoint::new(&mount.dir).and_then(|place| place.mount());
        // The unique ID of a mount that another one covers cannot be read.
        seen.is_ok_and(|(top, identity)| top.id == mount.id && identity.unique_id != self.unique_id)
    }
}

impl MountPoint {
    /// Opens the mount point at a path. Errors: the parent cannot be opened; `InvalidInput` for a path
    /// without a parent.
    pub fn new(dir: &Path) -> io::Result<MountPoint> {
        let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is the root"));
        };
        let parent = rustix::fs::openat(CWD, parent, DIRECTORY, Mode::empty())?;
        Ok(MountPoint { parent, name: name.to_owned() })
    }

    pub(crate) fn from_parent(parent: OwnedFd, name: &OsStr) -> MountPoint {
        MountPoint { parent, name: name.to_owned() }
    }

    pub(crate) fn parent(&self) -> BorrowedFd<'_> {
        self.parent.as_fd()
    }

    /// Opens the topmost mount's root, or the directory itself if nothing is mounted there. Errors: the
    /// system's; `ELOOP` or `ENOTDIR` if it is not a directory.
    pub fn open(&self) -> io::Result<OwnedFd> {
        Ok(rustix::fs::openat(&self.parent, &*self.name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?)
    }

    /// Returns the topmost mount there. Errors: the directory cannot be opened, or the kernel's lists cannot
    /// be read.
    pub fn mount(&self) -> io::Result<(MountInfo, MountIdentity)> {
        let root = self.open()?;
        let mount = of(&root)?;
        let identity = MountIdentity { id: mount.id, device: mount.device, unique_id: unique_id(&root) };
        Ok((mount, identity))
    }

    /// Unmounts the topmost mount there if it has this identity. Errors: umount(2)'s; `NotFound` when another
    /// mount or none is there.
    pub fn unmount(&self, identity: &MountIdentity, flags: UnmountFlags) -> io::Result<()> {
        if self.mount()?.1 != *identity {
            return Err(io::Error::new(io::ErrorKind::NotFound, "something else is there now"));
        }
        self.unmount_top(flags)
    }

    fn unmount_top(&self, flags: UnmountFlags) -> io::Result<()> {
        let path = Path::new("/proc/self/fd").join(self.parent.as_raw_fd().to_string()).join(&self.name);
        Ok(rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW)?)
    }
}

/// Unmounts `mount`, which is in the kernel's list. Errors: umount(2)'s; `NotFound` when it is not the
/// topmost mount there, or no longer mounted.
pub fn unmount(mount: &MountInfo, flags: UnmountFlags) -> io::Result<()> {
    let place = MountPoint::new(&mount.dir)?;
    let (top, _) = place.mount()?;
    if (top.id, top.device) != (mount.id, mount.device) {
        return Err(io::Error::new(io::ErrorKind::NotFound, "something else is mounted on top of it"));
    }
    place.unmount_top(flags)
}

/// Returns the mount of an open file. Errors: the kernel's lists cannot be read; `NotFound` when the mount is
/// not visible to this process.
pub fn of(file: impl AsFd) -> io::Result<MountInfo> {
    let id = mount_id(&file)?;
    let mount = all()?.into_iter().find(|mount| mount.id == id);
    mount.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "its mount is not visible to this process"))
}

/// Returns the ID of an open file's mount: `mnt_id` of proc_pid_fdinfo(5).
fn mount_id(file: &impl AsFd) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("the kernel does not say in which mount a file lies"))
}

/// `STATX_MNT_ID_UNIQUE`, `<linux/stat.h>`.
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

/// Returns the unique ID of the mount of `root`, if the kernel supports it.
fn unique_id(root: &OwnedFd) -> Option<u64> {
    // Uses cached attributes, so that no request goes to the file system.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let statx =
        rustix::fs::statx(root, c"", flags, StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE)).ok()?;
    (statx.stx_mask & STATX_MNT_ID_UNIQUE != 0).then_some(statx.stx_mnt_id)
}

/// Returns the mount whose root is `dir`, if any. Errors: as [`all`].
pub fn at(dir: &Path) -> io::Result<Option<MountInfo>> {
    let opened = match rustix::fs::openat(CWD, dir, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        opened => opened?,
    };
    let mount = match of(&opened) {
        // The kernel lists no mount whose root lies outside of the process's root directory (chroot(2));
        // those that are mounted inside are listed.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        mount => mount?,
    };
    // The kernel's current path, without symbolic links.
    let path = std::fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd()))?;
    Ok(Some(mount).filter(|mount| mount.dir == path))
}

/// Opens the file `dir/name` below `root`; neither component may be a symbolic link. Errors: openat(2)'s.
pub fn open_below(root: &OwnedFd, dir: &OsStr, name: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
    let dir = rustix::fs::openat(root, dir, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
    Ok(rustix::fs::openat(&dir, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_directory_is_looked_up_by_its_path() {
        assert_eq!(at(Path::new("/proc")).unwrap().unwrap().file_system, "proc");
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(at(dir.path()).unwrap(), None);
        let link = dir.path().join("link");
        assert_eq!(at(&link).unwrap(), None);
        std::os::unix::fs::symlink("/proc", &link).unwrap();
        assert_eq!(at(&link).unwrap(), at(Path::new("/proc")).unwrap());
    }

    #[test]
    fn a_mount_point_is_found_by_its_parent() {
        let place = MountPoint::new(Path::new("/proc")).unwrap();
        let (mount, identity) = place.mount().unwrap();
        assert_eq!(mount.file_system, "proc");
        assert_eq!((identity.id, identity.device), (mount.id, mount.device));
        assert_eq!(of(place.open().unwrap()).unwrap(), mount);
        assert!(MountPoint::new(Path::new("/")).is_err());
        // It is not a FUSE mount.
        assert_eq!(identity.find(0).unwrap(), None);
        let other = MountIdentity { id: u64::MAX, ..identity };
        assert_eq!(place.unmount(&other, UnmountFlags::empty()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
