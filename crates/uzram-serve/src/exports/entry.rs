//! One device of the list: its policy, its users, and the rules by which they admit further users.
//!
//! Lock: an entry's `Users`, a leaf.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use uzram::device::{Device, OpenDevice};
use uzram::{Error, ErrorKind, Result};

/// When NBD clients may open a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Export {
    /// While its file is not open for writing.
    #[default]
    WhileFree,
    /// At any time; read-only while its file is open for writing.
    Always,
    /// Never.
    Never,
}

impl From<Option<bool>> for Export {
    /// Converts the user's setting: `export = true`, `export = false`, or none.
    fn from(export: Option<bool>) -> Self {
        match export {
            None => Export::WhileFree,
            Some(true) => Export::Always,
            Some(false) => Export::Never,
        }
    }
}

/// How a device is exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportPolicy {
    /// When it is exported.
    pub export: Export,
    /// Whether it is exported read-only.
    pub read_only: bool,
}

/// What an NBD client may do with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Read and write.
    Write,
}

/// The number of users of a device, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// NBD clients that may only read.
    pub readers: usize,
    /// NBD clients that may write.
    pub writers: usize,
    /// Files open read-only.
    pub reading_files: usize,
    /// Files open for writing: a loop device has one.
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

    /// Returns the number of NBD clients.
    pub fn clients(&self) -> usize {
        self.readers + self.writers
    }

    /// Returns the number of open files.
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

    /// Opens the device for an NBD client.
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
        Ok(ExportedDevice { device: Arc::new(self.device.open()?), access, _user: user })
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

    /// Nothing panics while the lock is held, so poisoning is ignored.
    pub fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the access of a client that connects now; `None` if it is refused.
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

/// Whether a user is an NBD client or an open file, and whether it may write.
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

/// A device that an NBD client uses. Drop it after everything else that uses the device.
pub struct ExportedDevice {
    /// The open device.
    pub device: Arc<OpenDevice>,
    /// The client's access.
    pub access: Access,
    _user: UserGuard,
}

/// An open file of a device. All clones count as one user.
#[derive(Clone)]
pub struct OpenFile {
    /// The open device.
    pub device: Arc<OpenDevice>,
    _user: Arc<UserGuard>,
}
