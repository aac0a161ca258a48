//! What a file lies on: its file system, the block device of that, what a loop device, a partition or a mapped device is
//! made of, and so on.
//!
//! The kernel's lists say it, so that no request goes to a file system whose server may be stopped. They do not show all:
//! not the layers of an overlay, and of a file system on several devices only one.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, major, minor};

use crate::loop_device::{self, needs_device};
use crate::mounts::{self, MountInfo};

/// The number of a file system or block device: major, minor.
pub(crate) type DeviceNumber = (u32, u32);

/// Returns the numbers of all file systems and block devices that an open file lies on; its own number, too, if it is a
/// block device.
///
/// # Errors
/// The file's status or the list of mounts cannot be read.
pub(crate) fn below(file: impl AsFd) -> io::Result<BTreeSet<DeviceNumber>> {
    let stat = rustix::fs::fstat(&file)?;
    let mut stack = Stack { mounts: mounts::all()?, found: BTreeSet::new() };
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        stack.add(number(stat.st_rdev));
    } else {
        stack.add(number(stat.st_dev));
        // Fails for a mount of another namespace.
        mounts::of(&file).iter().for_each(|mount| stack.add_file_system(mount));
    }
    Ok(stack.found)
}

struct Stack {
    mounts: Vec<MountInfo>,
    found: BTreeSet<DeviceNumber>,
}

impl Stack {
    fn add_file_system(&mut self, mount: &MountInfo) {
        self.add(mount.device);
        // Some file systems have a number of their own, which is not their device's.
        if needs_device(&mount.file_system)
            && let Ok(device) = std::fs::metadata(&mount.source)
        {
            self.add(number(device.rdev()));
        }
    }

    /// Adds a file system or block device, and all that it lies on.
    fn add(&mut self, number: DeviceNumber) {
        if !self.found.insert(number) {
            return;
        }
        let dir = PathBuf::from(format!("/sys/dev/block/{}:{}", number.0, number.1));
        if let Some(file) = loop_device::backing_file(&dir)
            && let Some(mount) = self.mount_of(&file)
        {
            self.add_file_system(&mount);
        }
        let parts = std::fs::read_dir(dir.join("slaves")).into_iter().flatten().flatten();
        let parts = parts.map(|part| part.path().join("dev"));
        // A partition lies in the directory of its disk.
        let disk = dir.join("partition").exists().then(|| dir.join("../dev"));
        parts.chain(disk).filter_map(|file| read_number(&file)).for_each(|number| self.add(number));
    }

    /// Returns the mount that a path leads into.
    fn mount_of(&self, path: &Path) -> Option<MountInfo> {
        let mounts = self.mounts.iter().filter(|mount| path.starts_with(&mount.dir));
        // Of several on one directory, the last covers the others.
        mounts.max_by_key(|mount| mount.dir.components().count()).cloned()
    }
}

fn number(device: u64) -> DeviceNumber {
    (major(device), minor(device))
}

/// Reads a file such as `/sys/block/loop0/dev`.
fn read_number(file: &Path) -> Option<DeviceNumber> {
    let text = std::fs::read_to_string(file).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
