//! What is mounted, by `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
//!
//! A mount is known by its number and its file system's device number, which the kernel gives, and by the user who
//! mounted it. Never by its source or path: whoever may run fusermount3(1) chooses the one freely, and the other changes
//! when a directory above it is renamed.
//!
//! Nothing here asks a file system anything: one whose server is stopped would not answer.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// Its number, which another mount may get when it is gone.
    pub id: u64,
    /// The device number of its file system, as in `st_dev`: major, minor.
    pub device: (u32, u32),
    /// Where it is mounted.
    pub dir: PathBuf,
    /// The file system's type, with its subtype, as in `fuse.sshfs`.
    pub file_system: String,
    /// What is mounted: a block device, or what a file system says instead.
    pub source: PathBuf,
    /// Who mounted it, if it is a FUSE file system.
    pub user_id: Option<u32>,
}

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

impl MountInfo {
    /// Whether a process serves it, in the name of `uid`.
    pub fn is_fuse_of(&self, uid: u32) -> bool {
        let is_fuse = self.file_system == "fuse" || self.file_system.starts_with("fuse.");
        is_fuse && self.user_id == Some(uid)
    }
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

/// All mounts that this process sees, in the order in which they were mounted.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn all() -> io::Result<Vec<MountInfo>> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse).collect())
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

/// One line: `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,user_id=0`.
fn parse(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let mut numbers = fields.nth(1)?.split(|byte| *byte == b':').map(number);
    let device = (numbers.next()??, numbers.next()??);
    let dir = unescape(fields.nth(1)?);
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let file_system = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = unescape(fields.next()?);
    // The kernel's own options; a source cannot add to them, as a space or comma in it ends no field of these.
    let mut options = fields.next().unwrap_or_default().split(|byte| *byte == b',');
    let user_id = options.find_map(|option| number(option.strip_prefix(b"user_id=")?));
    Some(MountInfo { id, device, dir, file_system, source, user_id })
}

fn number<N: std::str::FromStr>(text: &[u8]) -> Option<N> {
    str::from_utf8(text).ok()?.parse().ok()
}

/// A path in which space, tab, newline and backslash are written as three octal digits after a backslash.
pub(crate) fn unescape(text: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        let octal = after.get(..3).filter(|_| *byte == b'\\').and_then(|digits| {
            let digits = str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match octal {
            Some(byte) => {
                path.push(byte);
                rest = &after[3..];
            }
            None => {
                path.push(*byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
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
    fn lines_are_read_as_the_kernel_writes_them() {
        let line = b"36 35 98:7 /mnt1 /mnt2 rw,noatime master:1 shared:2 - fuse.sshfs /run/u rw,user_id=1000,group_id=1";
        let plain = parse(line).unwrap();
        assert_eq!((plain.id, plain.device, plain.dir.as_path()), (36, (98, 7), Path::new("/mnt2")));
        assert_eq!((plain.file_system.as_str(), plain.source.as_path()), ("fuse.sshfs", Path::new("/run/u")));
        assert_eq!(plain.user_id, Some(1000));
        assert!(plain.is_fuse_of(1000) && !plain.is_fuse_of(0));
        let escaped = parse(b"1 2 0:3 / /a\\040b\\134c rw - ext4 /dev/loop0 rw").unwrap();
        assert_eq!((escaped.dir.as_path(), escaped.user_id), (Path::new("/a b\\c"), None));
        // A source that looks like options, or like a type, is a source.
        let lies = parse(b"1 2 0:3 / /a rw - fuse x,user_id=0 rw,user_id=65534").unwrap();
        assert_eq!(lies.user_id, Some(65534));
        for cut in [
            "",
            "36 35 98:0 /mnt1",
            "36 35 98:0 / /mnt2 rw",
            "36 35 98:0 / /mnt2 rw - ext3",
            "x 1 0:1 / / rw - a b",
        ] {
            assert_eq!(parse(cut.as_bytes()), None, "{cut}");
        }
        assert_eq!(unescape(b"\\04"), Path::new("\\04"));
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(all().unwrap().iter().any(|mount| mount.dir == Path::new("/")));
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
