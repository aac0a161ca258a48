//! The record of a daemon's mount and attached devices, by their identity in the kernel. The daemon finds
//! them by it even if its directories were moved or unmounted; commands find them by it when the daemon is
//! dead.
//!
//! The record is a file in the runtime directory, which only the daemon's user can access. It is written
//! through a descriptor of that directory, so that it moves with the directory; and before a mount or device
//! can be used, so that none is unrecorded. Mount IDs and disk sequence numbers start anew on each boot, so
//! the record has the boot ID, too.
//!
//! Lock: the record's, a leaf; held while the file is written.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use uzram::sync::Mutex;
use uzram::{Error, ErrorKind, Result};

use crate::loop_device::LoopAttachment;
use crate::mounts::MountIdentity;

/// The record's file in the runtime directory, and its name while it is being written.
const FILE: &str = "attached.json";
const UNFINISHED_FILE: &str = "attached.json.new";
/// The longest record accepted: hundreds of attachments.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The number of a file system or block device: major, minor.
pub(crate) type DeviceNumber = (u32, u32);

/// A record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    boot_id: String,
    /// The daemon's mount.
    pub mount: Option<MountRecord>,
    /// The devices attached to its files.
    pub attached: Vec<AttachedDevice>,
}

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// The original mount point.
    pub dir: PathBuf,
    /// Its identity.
    pub identity: MountIdentity,
}

/// A device of the daemon that is attached as a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedDevice {
    /// The device's name.
    pub name: String,
    /// The block device.
    pub attachment: LoopAttachment,
}

impl Record {
    /// Reads the record in the open runtime directory `dir`, without mounts and devices that no longer exist.
    /// Returns an empty record if there is none, or one of an earlier boot. `shown` is the directory's path
    /// for messages. Errors: `Io` when it cannot be read, `Invalid` when it cannot be parsed, `Permission`
    /// when it belongs to another user.
    pub fn read(dir: &OwnedFd, shown: &Path) -> Result<Record> {
        let failed = |error: io::Error| failure(ErrorKind::Io, "read", shown, &error.to_string());
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(dir, FILE, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(Record::default()),
            file => std::fs::File::from(file.map_err(|errno| failed(errno.into()))?),
        };
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
            let why = "it is another user's, or not a file";
            return Err(failure(ErrorKind::Permission, "trust", shown, why));
        }
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(failed)?;
        let mut record = Record::parse(&text)
            .map_err(|error| failure(ErrorKind::Invalid, "parse", shown, &error.to_string()))?;
        if record.boot_id != boot_id().map_err(failed)? {
            return Ok(Record::default());
        }
        record.forget_what_is_gone().map_err(failed)?;
        Ok(record)
    }

    /// Parses a record's text. Errors: the text is not a record.
    pub fn parse(text: &[u8]) -> serde_json::Result<Record> {
        serde_json::from_slice(text)
    }

    /// Returns whether the record is empty.
    pub fn is_empty(&self) -> bool {
        self.mount.is_none() && self.attached.is_empty()
    }

    /// Describes the mount and devices for messages.
    pub fn describe(&self) -> String {
        let mount = self.mount.iter().map(|mount| format!("a mount on '{}'", mount.dir.display()));
        let shown =
            |device: &AttachedDevice| format!("{} ({})", device.attachment.path().display(), device.name);
        let devices = self.attached.iter().map(shown);
        mount.chain(devices).collect::<Vec<_>>().join(", ")
    }

    fn forget_what_is_gone(&mut self) -> io::Result<()> {
        self.attached.retain(|device| device.attachment.is_current());
        let uid = rustix::process::geteuid().as_raw();
        if let Some(mount) = &self.mount
            && mount.identity.find(uid)?.is_none()
        {
            self.mount = None;
        }
        Ok(())
    }
}

/// Keeps the record of this daemon.
pub struct Recorder {
    dir: OwnedFd,
    shown: PathBuf,
    record: Mutex<Record>,
}

impl Recorder {
    /// Starts the record of a daemon that has locked its open runtime directory `dir`. `shown` is the
    /// directory's path for messages. Errors: `Busy` when a dead daemon has left a mount or a device; `Io`,
    /// `Invalid`, `Permission`.
    pub fn start(dir: OwnedFd, shown: &Path) -> Result<Recorder> {
        let recorder = Recorder::resume(dir, shown)?;
        let left = recorder.record.lock().describe();
        if !left.is_empty() {
            let what = format!(
                "a daemon that died left {left}: `uzram detach --force` as root, or `fusermount3 -u` as another user, clears it"
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        Ok(recorder)
    }

    /// Goes on with the record of a daemon that has locked its open runtime directory `dir`, in another of
    /// its processes than the one that started it. `shown` is the directory's path for messages. Errors:
    /// `Io`, `Invalid`, `Permission`.
    pub fn resume(dir: OwnedFd, shown: &Path) -> Result<Recorder> {
        let mut record = Record::read(&dir, shown)?;
        let failed = |error: io::Error| failure(ErrorKind::Io, "go on with", shown, &error.to_string());
        record.boot_id = boot_id().map_err(failed)?;
        Ok(Recorder { dir, shown: shown.to_owned(), record: Mutex::unordered(record) })
    }

    /// Records the mount. Errors: `Io` when the record cannot be written; it stays unchanged.
    pub fn set_mount(&self, mount: MountRecord) -> Result<()> {
        self.change(|record| {
            record.mount = Some(mount);
            Ok(())
        })
    }

    /// Records an attached device. Errors: `NotFound` when it is not attached, `Busy` when the device is
    /// attached elsewhere already; `Io` as above.
    pub fn add(&self, device: AttachedDevice) -> Result<()> {
        if !device.attachment.is_current() {
            let path = device.attachment.path();
            let what = format!("'{}' is not attached to {}", device.name, path.display());
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        self.change(|record| {
            if let Some(other) = record.attached.iter().find(|other| other.name == device.name) {
                let path = other.attachment.path();
                let what = format!("'{}' is attached already, as {}", device.name, path.display());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            record.attached.push(device);
            Ok(())
        })
    }

    /// Returns the devices attached now, in the order of attachment.
    pub fn attached(&self) -> Vec<AttachedDevice> {
        let mut record = self.record.lock();
        record.attached.retain(|device| device.attachment.is_current());
        record.attached.clone()
    }

    /// Returns what of the daemon's own has one of these numbers, in words: the files, or an attached device.
    pub(crate) fn own_of(&self, numbers: &BTreeSet<DeviceNumber>) -> Option<String> {
        let record = self.record.lock();
        let mount = record.mount.iter().find(|mount| numbers.contains(&mount.identity.device));
        let mount = mount.map(|mount| format!("the files in '{}'", mount.dir.display()));
        let is_below = |device: &&AttachedDevice| numbers.contains(&device.attachment.device_number());
        let device = record.attached.iter().filter(|device| device.attachment.is_current()).find(is_below);
        let device = device.map(|device| format!("{} ({})", device.name, device.attachment.path().display()));
        // A device's own file lies on the mount.
        device.or(mount)
    }

    fn change(&self, change: impl FnOnce(&mut Record) -> Result<()>) -> Result<()> {
        let mut record = self.record.lock();
        let mut new = record.clone();
        new.attached.retain(|device| device.attachment.is_current());
        change(&mut new)?;
        self.write(&new).map_err(|error| failure(ErrorKind::Io, "write", &self.shown, &error.to_string()))?;
        *record = new;
        Ok(())
    }

    fn write(&self, record: &Record) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, UNFINISHED_FILE, flags, Mode::RUSR | Mode::WUSR)?;
        std::fs::File::from(file).write_all(&serde_json::to_vec(record)?)?;
        Ok(rustix::fs::renameat(&self.dir, UNFINISHED_FILE, &self.dir, FILE)?)
    }
}

impl Drop for Recorder {
    /// Removes the file, unless a mount or device is left.
    fn drop(&mut self) {
        let mut record = self.record.lock();
        if record.forget_what_is_gone().is_ok() && record.is_empty() {
            // If this fails, the file is harmless: readers ignore what no longer exists.
            let _ = rustix::fs::unlinkat(&self.dir, FILE, AtFlags::empty());
        }
    }
}

/// Returns the ID of this boot, random(4).
fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

fn failure(kind: ErrorKind, verb: &str, dir: &Path, why: &str) -> Error {
    let file = dir.join(FILE);
    Error::new(kind, format!("cannot {verb} the record of what is attached, '{}': {why}", file.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn open(dir: &Path) -> OwnedFd {
        std::fs::File::open(dir).unwrap().into()
    }

    fn read(dir: &Path) -> Result<Record> {
        Record::read(&open(dir), dir)
    }

    #[test]
    fn what_is_gone_is_in_no_record() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), Record::default());
        let recorder = Recorder::start(open(dir.path()), dir.path()).unwrap();
        let gone = AttachedDevice {
            name: "a".to_owned(),
            attachment: LoopAttachment { number: 1_000_000, diskseq: u64::MAX },
        };
        assert_eq!(recorder.add(gone.clone()).unwrap_err().kind(), ErrorKind::NotFound);
        let identity = MountIdentity { id: u64::MAX, device: (0, u32::MAX), unique_id: None };
        recorder.set_mount(MountRecord { dir: "/x".into(), identity }).unwrap();
        let text = std::fs::read(dir.path().join(FILE)).unwrap();
        let record = Record::parse(&text).unwrap();
        assert_eq!(record.mount.unwrap().identity, identity);
        // The recorded mount does not exist.
        assert!(read(dir.path()).unwrap().is_empty());
        std::fs::write(dir.path().join(FILE), text.repeat(2)).unwrap();
        assert_eq!(read(dir.path()).unwrap_err().kind(), ErrorKind::Invalid);
        drop(recorder);
        assert!(read(dir.path()).unwrap().is_empty() && !dir.path().join(FILE).exists());
    }

    #[test]
    fn a_record_stays_with_its_directory() {
        let root = tempfile::tempdir().unwrap();
        let (dir, moved) = (root.path().join("a"), root.path().join("b"));
        std::fs::create_dir(&dir).unwrap();
        let recorder = Recorder::start(open(&dir), &dir).unwrap();
        std::fs::rename(&dir, &moved).unwrap();
        std::fs::create_dir(&dir).unwrap();
        let identity = MountIdentity { id: 1, device: (0, 1), unique_id: Some(7) };
        recorder.set_mount(MountRecord { dir: dir.clone(), identity }).unwrap();
        assert!(moved.join(FILE).exists() && !dir.join(FILE).exists());
    }
}
