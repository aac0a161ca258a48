//! One device of the list: its policy, its users, and what the ones allow the others.
//!
//! Lock: an entry's `Users`, a leaf.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uzram::device::{Device, OpenDevice};
use uzram::{Error, ErrorKind, Result};

/// When NBD clients may reach a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Export {
    /// While its file is not open for writing.
    #[default]
    WhileFree,
    /// At any time; for reading only while its file is open for writing.
    Always,
    /// Never.
    Never,
}

impl From<Option<bool>> for Export {
    /// As users say it: `export = true`, `export = false`, or nothing.
    fn from(export: Option<bool>) -> Self {
        match export {
            None => Export::WhileFree,
            Some(true) => Export::Always,
            Some(false) => Export::Never,
        }
    }
}

/// How a device is exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportPolicy {
    /// When.
    pub export: Export,
    /// Only for reading.
    pub read_only: bool,
}

/// What an NBD client may do with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read it.
    Read,
    /// Read and change it.
    Write,
}

/// The number of users of a device, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// NBD clients that may only read.
    pub readers: usize,
    /// NBD clients that may write.
    pub writers: usize,
    /// Open files of it that may only read.
    pub reading_files: usize,
    /// Open files of it that may write: a loop device has one.
    pub writing_files: usize,
}

impl Users {
    fn of(&mut self, role: Role) -> &mut usize {
        match role {
            Role::Reader => &mut self.readers,
            Role::Writer => &mut self.writers,
            Role::ReadingFile => &mut self.reading_files,
            Role::WritingFile => &mut self.writing_files,
        }
    }

    /// NBD clients.
    pub fn clients(&self) -> usize {
        self.readers + self.writers
    }

    /// Open files.
    pub fn files(&self) -> usize {
        self.reading_files + self.writing_files
    }
}

/// One device.
pub(super) struct Entry {
    pub device: Arc<Device>,
    pub policy: ExportPolicy,
    users: Mutex<Users>,
}

impl Entry {
    pub fn new(device: Arc<Device>, policy: ExportPolicy) -> Self {
        Entry { device, policy, users: Mutex::default() }
    }

    /// Lets an NBD client in.
    ///
    /// # Errors
    /// `Permission` when the device is not exported now; `Busy` when it is uninitialised.
    pub fn connect(self: Arc<Self>) -> Result<ExportedDevice> {
        let mut users = self.users();
        let Some(access) = self.access(&users) else {
            let what = format!(
                "'{}' is attached or open for writing on its machine, and not exported meanwhile (export = true exports \
                 it for reading)",
                self.device.name()
            );
            return Err(Error::new(ErrorKind::Permission, what).with_setting("export"));
        };
        let role = match access {
            Access::Read => Role::Reader,
            Access::Write => Role::Writer,
        };
        *users.of(role) += 1;
        drop(users);
        let user = UserGuard { entry: Arc::clone(&self), role };
        Ok(ExportedDevice { device: self.device.open()?, access, user })
    }

    /// Opens the device's file, for writing or not.
    ///
    /// # Errors
    /// `Busy` when an NBD client forbids it, or the device is uninitialised.
    pub fn open_file(self: Arc<Self>, writes: bool) -> Result<OpenFile> {
        let mut users = self.users();
        if let Some(why) = self.writing_obstacle(&users).filter(|_| writes) {
            let what = format!("'{}' cannot be opened for writing: {why}", self.device.name());
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let role = if writes { Role::WritingFile } else { Role::ReadingFile };
        *users.of(role) += 1;
        drop(users);
        let user = UserGuard { entry: Arc::clone(&self), role };
        Ok(OpenFile { device: Arc::new(self.device.open()?), _user: Arc::new(user) })
    }

    /// Nothing panics while the lock is held, so a poisoned one is as good as any.
    pub fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what a client that connects now may do; `None` if it is not let in.
    pub fn access(&self, users: &Users) -> Option<Access> {
        match self.policy.export {
            Export::Never => None,
            Export::WhileFree if users.writing_files > 0 => None,
            Export::Always if users.writing_files > 0 => Some(Access::Read),
            _ if self.policy.read_only => Some(Access::Read),
            _ => Some(Access::Write),
        }
    }

    /// Returns why the file cannot be opened for writing now, if it cannot.
    fn writing_obstacle(&self, users: &Users) -> Option<&'static str> {
        match self.policy.export {
            _ if users.writers > 0 => Some("NBD clients may write to it"),
            Export::WhileFree if users.readers > 0 => Some("NBD clients have it open"),
            _ => None,
        }
    }
}

/// What a user may do, and whether it is an NBD client or an open file.
#[derive(Clone, Copy)]
enum Role {
    Reader,
    Writer,
    ReadingFile,
    WritingFile,
}

/// Counts one of a device's users until it is dropped.
struct UserGuard {
    entry: Arc<Entry>,
    role: Role,
}

impl Drop for UserGuard {
    fn drop(&mut self) {
        *self.entry.users().of(self.role) -= 1;
    }
}

/// A device that an NBD client uses.
pub struct ExportedDevice {
    /// Its contents.
    pub device: OpenDevice,
    /// What the client may do.
    pub access: Access,
    user: UserGuard,
}

impl ExportedDevice {
    /// Returns the open device, and the guard that counts its user: to be dropped after everything that uses the device.
    pub fn into_parts(self) -> (OpenDevice, ClientUse) {
        (self.device, ClientUse { _user: self.user })
    }
}

/// Counts a client among a device's users until it is dropped.
pub struct ClientUse {
    _user: UserGuard,
}

/// A device's file that is open. All clones of it are one user.
#[derive(Clone)]
pub struct OpenFile {
    /// Its contents.
    pub device: Arc<OpenDevice>,
    _user: Arc<UserGuard>,
}
