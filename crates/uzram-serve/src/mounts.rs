//! Mounts, and how one is told from others.
//!
//! A mount is known by its number and its file system's device number, which the kernel gives, and by the user who
//! mounted it. Never by its source or path: whoever may run fusermount3(1) chooses the one freely, and the other changes
//! when a directory above it is renamed.
//!
//! Nothing here asks a file system anything: one whose server is stopped would not answer.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

pub use uzram::mountinfo::{MountInfo, all};

/// What a mount is known by, also when the process that made it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountIdentity {
    /// As in [`MountInfo`].
    pub id: u64,
    /// As in [`MountInfo`].
    pub device: (u32, u32),
    /// The number that no other mount ever gets until the next boot, from Linux 6.8 on.
    pub unique_id: Option<u64>,
}

/// A directory that something is mounted on: its parent, open, and its name there. Both stay right when a directory
/// above is renamed.
#[derive(Debug)]
pub struct MountPoint {
    parent: OwnedFd,
    name: OsString,
}

impl MountIdentity {
    /// What `mount` is known by, whose root is `root`.
    fn new(mount: &MountInfo, root: &OwnedFd) -> MountIdentity {
        MountIdentity { id: mount.id, device: mount.device, unique_id: unique_id(root) }
    }

    /// The mount that this was, if it is still there and one that `uid` serves.
    ///
    /// # Errors
    /// The kernel's list cannot be read.
    pub fn find(&self, uid: u32) -> io::Result<Option<MountInfo>> {
        let mounts = all()?.into_iter();
        let mut same = mounts.filter(|mount| (mount.id, mount.device) == (self.id, self.device));
        Ok(same.find(|mount| mount.is_fuse_of(uid) && !self.is_another(mount)))
    }

    /// Whether `mount` is certainly not this, though both of its numbers are the same: those of a mount that is gone are
    /// given to the next.
    fn is_another(&self, mount: &MountInfo) -> bool {
        let seen = MountPoint::new(&mount.dir).and_then(|place| place.mount());
        // Of one that is covered by another mount, nothing more can be found out.
        seen.is_ok_and(|(top, identity)| top.id == mount.id && identity.unique_id != self.unique_id)
    }
}

impl MountPoint {
    /// That of a directory, by its path.
    ///
    /// # Errors
    /// The parent cannot be opened; `InvalidInput` for a path without one.
    pub fn new(dir: &Path) -> io::Result<MountPoint> {
        let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is the root"));
        };
        let parent = rustix::fs::openat(
            CWD,
            parent,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(MountPoint { parent, name: name.to_owned() })
    }

    /// What is there: the topmost mount's root, or the directory itself.
    ///
    /// # Errors
    /// The system's; `ELOOP` or `ENOTDIR` for what is no directory.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.parent, &*self.name, flags, Mode::empty())?)
    }

    /// The topmost mount there.
    ///
    /// # Errors
    /// It cannot be opened, or the kernel's lists cannot be read.
    pub fn mount(&self) -> io::Result<(MountInfo, MountIdentity)> {
        let root = self.open()?;
        let mount = of(&root)?;
        let identity = MountIdentity::new(&mount, &root);
        Ok((mount, identity))
    }

    /// Unmounts it, if `identity` is what is mounted there.
    ///
    /// # Errors
    /// umount(2)'s; `NotFound` when something else is mounted there, or nothing.
    pub fn unmount(&self, identity: &MountIdentity, flags: UnmountFlags) -> io::Result<()> {
        if self.mount()?.1 != *identity {
            return Err(io::Error::new(io::ErrorKind::NotFound, "something else is there now"));
        }
        self.unmount_top(flags)
    }

    /// Unmounts what is on top there.
    fn unmount_top(&self, flags: UnmountFlags) -> io::Result<()> {
        let path = Path::new("/proc/self/fd").join(self.parent.as_raw_fd().to_string()).join(&self.name);
        Ok(rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW)?)
    }
}

/// Unmounts `mount`, which is in the kernel's list.
///
/// # Errors
/// umount(2)'s; `NotFound` when it is not the topmost one in its place, or there no more.
pub fn unmount(mount: &MountInfo, flags: UnmountFlags) -> io::Result<()> {
    let place = MountPoint::new(&mount.dir)?;
    let (top, _) = place.mount()?;
    if (top.id, top.device) != (mount.id, mount.device) {
        return Err(io::Error::new(io::ErrorKind::NotFound, "something else is mounted on top of it"));
    }
    place.unmount_top(flags)
}

/// The mount that an open file lies in.
///
/// # Errors
/// The kernel's lists cannot be read; `NotFound` when it is in none that this process sees.
pub fn of(file: impl AsFd) -> io::Result<MountInfo> {
    let id = mount_id(&file)?;
    let mount = all()?.into_iter().find(|mount| mount.id == id);
    mount.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "it lies in no mount of this process's"))
}

/// The number of the mount that an open file lies in: `mnt_id` of proc_pid_fdinfo(5).
fn mount_id(file: &impl AsFd) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("the kernel does not say in which mount a file lies"))
}

/// `STATX_MNT_ID_UNIQUE`, `<linux/stat.h>`.
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

/// The unique number of the mount that `root` lies in, if the kernel has such.
fn unique_id(root: &OwnedFd) -> Option<u64> {
    // What the file system would have to be asked for is taken from memory.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let statx =
        rustix::fs::statx(root, c"", flags, StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE)).ok()?;
    (statx.stx_mask & STATX_MNT_ID_UNIQUE != 0).then_some(statx.stx_mnt_id)
}

/// What is mounted on a directory, if anything is.
///
/// # Errors
/// As [`all`].
pub fn at(dir: &Path) -> io::Result<Option<MountInfo>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = match rustix::fs::openat(CWD, dir, flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        opened => opened?,
    };
    let mount = of(&opened)?;
    // The path as the kernel has it: without links, and as it is called now.
    let path = std::fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd()))?;
    Ok(Some(mount).filter(|mount| mount.dir == path))
}

/// Opens a file below `root` by the names of two components, of which neither is a symbolic link.
///
/// # Errors
/// openat(2)'s.
pub fn open_below(root: &OwnedFd, dir: &OsStr, name: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
    let between = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(root, dir, between, Mode::empty())?;
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
        // It is no FUSE mount, whoever asks.
        assert_eq!(identity.find(0).unwrap(), None);
        let other = MountIdentity { id: u64::MAX, ..identity };
        assert_eq!(place.unmount(&other, UnmountFlags::empty()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
