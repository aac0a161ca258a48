//! What a file lies on: its file system, the block device of that, what a loop device, a partition or a
//! mapped device is made of, and so on; and so, backing files on a daemon's own devices: on a file system of
//! a block device that is attached to one of its files, or among these files. Pages would leave memory for
//! memory, and neither device could be freed before the other.
//!
//! The kernel's lists say it, so that no request goes to a file system whose server may be stopped. They do
//! not show all: not the layers of an overlay, and of a file system on several devices only one.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, OFlags, major, minor};
use rustix::io::Errno;
use uzram::device::{Device, NamedBacking};
use uzram::{Error, Result};

use crate::loop_device::{self, LoopAttachment, needs_device};
use crate::mounts::{self, MountInfo};
use crate::record::{DeviceNumber, Recorder};

/// Checks that no file of a value of `backing_dev` lies on a device of the daemon that `recorder` records, as
/// far as the kernel tells. Files that do not exist yet are looked for by their directory. Errors: `Invalid`
/// if one does.
pub(crate) fn check_backing(recorder: &Recorder, backing: &str) -> Result<()> {
    for path in NamedBacking::paths(backing) {
        let open = |path: &Path| rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let opened = match (open(path), path.parent()) {
            (Err(Errno::NOENT), Some(dir)) => open(dir),
            (opened, _) => opened,
        };
        // If it cannot be opened, using it fails with the reason.
        let numbers = opened.ok().and_then(|file| below(file).ok());
        if let Some(own) = numbers.and_then(|numbers| recorder.own_of(&numbers)) {
            let what = format!(
                "the backing device '{}' lies on {own}, of this daemon: pages would leave memory for memory, and neither \
                 device could be freed before the other; choose another place",
                path.display()
            );
            return Err(Error::invalid(what).with_setting("backing_dev"));
        }
    }
    Ok(())
}

/// Returns what has to end before a block device is free, for the end of a message: the devices whose backing
/// files lie on it.
pub fn way_out(devices: &[Arc<Device>], attachment: LoopAttachment) -> String {
    let on_it = |device: &Arc<Device>| {
        let (name, backing) = (device.name(), device.backing()?);
        let is_on = |(_, file): &(&str, _)| {
            below(file).is_ok_and(|numbers| numbers.contains(&attachment.device_number()))
        };
        let (path, _) = backing.files().find(is_on)?;
        Some(format!(
            "; the backing file of {name}, '{path}', lies there: end the use of {name}, then `uzram remove {name}`, then \
             unmount"
        ))
    };
    devices.iter().filter_map(on_it).collect()
}

/// Returns the numbers of all file systems and block devices that an open file lies on; its own number, too,
/// if it is a block device.
fn below(file: impl AsFd) -> io::Result<BTreeSet<DeviceNumber>> {
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
