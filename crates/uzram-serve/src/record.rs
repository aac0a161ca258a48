//! What a daemon has mounted and attached, recorded so that it is found again by what the kernel knows it by: by the
//! daemon, when the directories that it was started in were moved or unmounted; and when the daemon is dead, by others.
//!
//! The record is a file in the runtime directory, which is the daemon's user's alone. It is written through a descriptor
//! of that directory, so that it stays with the directory; and before what it names can be used, so that there is nothing
//! without a record. Numbers of mounts and attachments begin anew with each boot, which the record names, too.
//!
//! Lock: the record's, a leaf; held while the file is written.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use uzram::{Error, ErrorKind, Result};

use crate::loop_device::LoopAttachment;
use crate::mounts::MountIdentity;

/// The record's file in the runtime directory, and what it is called until it is whole.
const FILE: &str = "attached.json";
const UNFINISHED_FILE: &str = "attached.json.new";
/// The longest record that is read: hundreds of attachments.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// A record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The boot that its numbers belong to.
    boot_id: String,
    /// What the daemon has mounted.
    pub mount: Option<MountRecord>,
    /// What is attached to its files.
    pub attached: Vec<AttachedDevice>,
}

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// Where it was mounted.
    pub dir: PathBuf,
    /// Which it is.
    pub identity: MountIdentity,
}

/// A device of the daemon's that is a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedDevice {
    /// The device's name.
    pub name: String,
    /// The block device.
    pub attachment: LoopAttachment,
}

impl Record {
    /// The record of the daemon, alive or dead, of a runtime directory, which is open, as far as what it names is still
    /// there. Empty when there is none, or one of an earlier boot. `shown` is the directory in messages.
    ///
    /// # Errors
    /// `Io` when it cannot be read, `Invalid` when it makes no sense, `Permission` when it is another user's.
    pub fn read(dir: &OwnedFd, shown: &Path) -> Result<Record> {
        let failed = |error: io::Error| failure(ErrorKind::Io, "read", shown, &error.to_string());
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(dir, FILE, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(Record::default()),
            file => std::fs::File::from(file.map_err(|errno| failed(errno.into()))?),
        };
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(failure(ErrorKind::Permission, "believe", shown, "it is another user's, or no file"));
        }
        let mut text = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(failed)?;
        let mut record = Record::parse(&text)
            .map_err(|error| failure(ErrorKind::Invalid, "understand", shown, &error.to_string()))?;
        if record.boot_id != boot_id().map_err(failed)? {
            return Ok(Record::default());
        }
        record.forget_what_is_gone().map_err(failed)?;
        Ok(record)
    }

    /// Reads a record's text.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(text: &[u8]) -> serde_json::Result<Record> {
        serde_json::from_slice(text)
    }

    /// Whether it names nothing.
    pub fn is_empty(&self) -> bool {
        self.mount.is_none() && self.attached.is_empty()
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

/// The record of this process, a daemon.
pub struct Recorder {
    dir: OwnedFd,
    shown: PathBuf,
    record: Mutex<Record>,
}

impl Recorder {
    /// Begins the record of a daemon that has locked its runtime directory, which is open. `shown` is the directory in
    /// messages.
    ///
    /// # Errors
    /// `Busy` when an earlier daemon, which is dead, has left something; `Io`, `Invalid`, `Permission`.
    pub fn start(dir: OwnedFd, shown: &Path) -> Result<Recorder> {
        let left = Record::read(&dir, shown)?;
        if !left.is_empty() {
            let what = format!(
                "a daemon that died left {}: `uzram detach --force` as root, or `fusermount3 -u` as another user, clears it",
                left.describe()
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let failed = |error: io::Error| failure(ErrorKind::Io, "begin", shown, &error.to_string());
        let record = Mutex::new(Record { boot_id: boot_id().map_err(failed)?, ..Record::default() });
        Ok(Recorder { dir, shown: shown.to_owned(), record })
    }

    /// Nothing panics while it is held, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what is mounted.
    ///
    /// # Errors
    /// `Io` when the record cannot be written, and is as it was.
    pub fn set_mount(&self, mount: MountRecord) -> Result<()> {
        self.change(|record| {
            record.mount = Some(mount);
            Ok(())
        })
    }

    /// Records that a device was attached.
    ///
    /// # Errors
    /// `NotFound` when it is not attached there, `Busy` when it is attached elsewhere already; `Io` as above.
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

    /// What is attached now, in the order in which it was.
    pub fn attached(&self) -> Vec<AttachedDevice> {
        let mut record = self.lock();
        record.attached.retain(|device| device.attachment.is_current());
        record.attached.clone()
    }

    fn change(&self, change: impl FnOnce(&mut Record) -> Result<()>) -> Result<()> {
        let mut record = self.lock();
        let mut new = record.clone();
        new.attached.retain(|device| device.attachment.is_current());
        change(&mut new)?;
        self.write(&new).map_err(|error| failure(ErrorKind::Io, "write", &self.shown, &error.to_string()))?;
        *record = new;
        Ok(())
    }

    /// Replaces the file as a whole.
    fn write(&self, record: &Record) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, UNFINISHED_FILE, flags, Mode::RUSR | Mode::WUSR)?;
        std::fs::File::from(file).write_all(&serde_json::to_vec(record)?)?;
        Ok(rustix::fs::renameat(&self.dir, UNFINISHED_FILE, &self.dir, FILE)?)
    }
}

impl Drop for Recorder {
    /// Removes the file, unless something is left of what it names.
    fn drop(&mut self) {
        let record = self.record.get_mut().unwrap_or_else(PoisonError::into_inner);
        if record.forget_what_is_gone().is_ok() && record.is_empty() {
            // A record of what is gone is one of nothing.
            let _ = rustix::fs::unlinkat(&self.dir, FILE, AtFlags::empty());
        }
    }
}

impl Record {
    /// What it names, for people.
    pub fn describe(&self) -> String {
        let mount = self.mount.iter().map(|mount| format!("a mount on '{}'", mount.dir.display()));
        let devices = self
            .attached
            .iter()
            .map(|device| format!("{} ({})", device.attachment.path().display(), device.name));
        mount.chain(devices).collect::<Vec<_>>().join(", ")
    }
}

/// What tells this boot from all others, random(4).
fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

fn failure(kind: ErrorKind, verb: &str, dir: &Path, why: &str) -> Error {
    Error::new(
        kind,
        format!("cannot {verb} the record of what is attached, '{}': {why}", dir.join(FILE).display()),
    )
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
        // Neither is the mount there, nor what another boot numbered.
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
