//! The devices of a daemon, and who may open which.
//!
//! A device is opened in two ways: over NBD, by any client that a listener admits, and through its file, by
//! root's programs and by the kernel, whose loop device makes it a disk for file systems and swap. No NBD
//! client may read or write a device that the kernel expects to use exclusively. So, for each device:
//!
//! - While its file is open for writing (because it is *attached*, say), it is not exported; with
//!   [`Export::Always`] it is exported read-only.
//! - Its file is not opened for writing while an NBD client may write, nor, without [`Export::Always`], while
//!   one is connected.
//! - A client that was admitted as a reader stays a reader.
//!
//! A listener may name the devices that it serves ([`Exports::only`]).
//!
//! Locks: the list's, then an entry's `Users`. Held while names are compared and users counted, never while a
//! device is created, opened, emptied or used.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzram::device::{Device, OpenDevice};
use uzram::named::hint;
use uzram::sync::{Mutex, MutexGuard};
use uzram::{Error, ErrorKind, Result};

use crate::own_devices;
use crate::record::Recorder;

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
    /// Returns the number of NBD clients.
    pub fn clients(&self) -> usize {
        self.readers + self.writers
    }

    /// Returns the number of open files.
    pub fn files(&self) -> usize {
        self.reading_files + self.writing_files
    }
}

/// A device of the list.
pub struct Entry {
    device: Arc<Device>,
    policy: ExportPolicy,
    users: Mutex<Users>,
}

impl Entry {
    fn new(device: Arc<Device>, policy: ExportPolicy) -> Self {
        Entry { device, policy, users: Mutex::default() }
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Opens the device for an NBD client. Errors: `Permission` when the device is not exported now; `Busy`
    /// when it is uninitialised.
    pub fn connect(self: Arc<Self>) -> Result<ExportedDevice> {
        let users = self.users.lock();
        let Some(access) = self.access(&users) else {
            let what = format!(
                "'{}' is attached or open for writing on its machine, and not exported meanwhile (export = true exports \
                 it for reading)",
                self.device.name()
            );
            return Err(Error::new(ErrorKind::Permission, what).with_setting("export"));
        };
        let counted: Counted = match access {
            Access::Read => |users| &mut users.readers,
            Access::Write => |users| &mut users.writers,
        };
        let (device, user) = self.admit(users, counted)?;
        Ok(ExportedDevice { device, access, _user: user })
    }

    /// Opens the device's file, for writing or not. Errors: `Busy` when an NBD client forbids it, or the
    /// device is uninitialised.
    fn open_file(self: Arc<Self>, writes: bool) -> Result<OpenFile> {
        let users = self.users.lock();
        if let Some(why) = self.writing_obstacle(&users).filter(|_| writes) {
            let what = format!("'{}' cannot be opened for writing: {why}", self.device.name());
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let counted: Counted = match writes {
            false => |users| &mut users.reading_files,
            true => |users| &mut users.writing_files,
        };
        let (device, user) = self.admit(users, counted)?;
        Ok(OpenFile { device, _user: Arc::new(user) })
    }

    fn admit(
        self: &Arc<Self>,
        mut users: MutexGuard<'_, Users>,
        counted: Counted,
    ) -> Result<(Arc<OpenDevice>, UserGuard)> {
        *counted(&mut users) += 1;
        drop(users);
        let user = UserGuard { entry: Arc::clone(self), counted };
        Ok((Arc::new(self.device.open()?), user))
    }

    /// Returns the access of a client that connects now; `None` if it is refused.
    fn access(&self, users: &Users) -> Option<Access> {
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

/// The number in [`Users`] that a user counts in.
type Counted = fn(&mut Users) -> &mut usize;

/// Counts one of a device's users until it is dropped.
struct UserGuard {
    entry: Arc<Entry>,
    counted: Counted,
}

impl Drop for UserGuard {
    fn drop(&mut self) {
        *(self.counted)(&mut self.entry.users.lock()) -= 1;
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

/// Checks what an attribute of a device is about to be set to; the error says what to set instead.
pub type SettingCheck = Arc<dyn Fn(&Device, &str, &str) -> Result<()> + Send + Sync>;

/// A list of devices, shared by all clones of it. Names are unique; the first exported device is also the
/// default export, which NBD clients request by the empty name.
#[derive(Clone, Default)]
pub struct Exports {
    devices: Arc<Mutex<Vec<Arc<Entry>>>>,
    /// The names that NBD clients see; `None` for all.
    only: Option<Arc<[String]>>,
    recorder: Option<Arc<Recorder>>,
    check: Option<SettingCheck>,
}

impl Exports {
    /// Offers `devices`, in this order, each with the default policy; their names differ.
    pub fn new(devices: impl IntoIterator<Item = Arc<Device>>) -> Self {
        Exports::with_policies(devices.into_iter().map(|device| (device, ExportPolicy::default())))
    }

    /// Offers devices, in this order, each with a policy; their names differ.
    pub fn with_policies(devices: impl IntoIterator<Item = (Arc<Device>, ExportPolicy)>) -> Self {
        let entry = |(device, policy)| Arc::new(Entry::new(device, policy));
        Exports {
            devices: Arc::new(Mutex::unordered(devices.into_iter().map(entry).collect())),
            ..Exports::default()
        }
    }

    /// Returns the same list, with the record of what its devices are attached to.
    #[must_use]
    pub fn recorded_by(self, recorder: Arc<Recorder>) -> Self {
        Exports { recorder: Some(recorder), ..self }
    }

    /// Returns the same list, of whose devices no attribute is set that `check` refuses.
    #[must_use]
    pub fn checked_by(self, check: Option<SettingCheck>) -> Self {
        Exports { check, ..self }
    }

    /// Returns the record of what the devices are attached to, if any is kept.
    pub fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// Returns the same list, of which NBD clients see only these names. Devices of these names need not
    /// exist yet.
    pub fn only(&self, names: Arc<[String]>) -> Self {
        Exports { only: Some(names), ..self.clone() }
    }

    /// Sets an attribute of a device, as [`Device::set_interruptible`] does. Errors: also those of the check
    /// of [`Exports::checked_by`], and `Invalid` if the value is a backing device that lies on the daemon's
    /// own devices.
    pub fn set(
        &self,
        device: &Device,
        attribute: &str,
        value: &str,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<()> {
        self.check.as_ref().map_or(Ok(()), |check| check(device, attribute, value))?;
        if let Some(recorder) = self.recorder.as_ref().filter(|_| attribute == "backing_dev") {
            own_devices::check_backing(recorder, value)?;
        }
        device.set_interruptible(attribute, value, is_wanted)
    }

    /// Adds a device to the end of the list. Errors: `Busy` when the list has a device of that name.
    pub fn add(&self, device: Arc<Device>, policy: ExportPolicy) -> Result<()> {
        let mut devices = self.devices.lock();
        if devices.iter().any(|other| other.device.name() == device.name()) {
            let what = format!("there is a device '{}' already", device.name());
            return Err(Error::new(ErrorKind::Busy, what));
        }
        devices.push(Arc::new(Entry::new(device, policy)));
        Ok(())
    }

    /// Frees a device and removes it from the list. Errors: `NotFound` when the list has no device of that
    /// name; `Busy` while it is in use.
    pub fn remove(&self, name: &str) -> Result<()> {
        let device = self.named(name)?;
        // From here on it cannot be opened.
        device.remove()?;
        self.devices.lock().retain(|other| !Arc::ptr_eq(&other.device, &device));
        Ok(())
    }

    /// Returns the export of a name; names compare as bytes. Connecting may still be refused. An export that
    /// NBD clients may never use is not found.
    pub fn find(&self, name: &[u8]) -> Option<Arc<Entry>> {
        let devices = self.devices.lock();
        let mut shown = devices.iter().filter(|entry| self.shows(entry));
        let entry = if name.is_empty() {
            shown.find(|entry| entry.access(&entry.users.lock()).is_some())
        } else {
            shown.find(|entry| entry.device.name().as_bytes() == name)
        };
        entry.cloned()
    }

    /// Returns the names of all exports that NBD clients may open now, in order.
    pub fn exported(&self) -> Vec<String> {
        let devices = self.devices.lock();
        let shown = devices.iter().filter(|entry| self.shows(entry));
        let usable = shown.filter(|entry| entry.access(&entry.users.lock()).is_some());
        usable.map(|entry| entry.device.name().to_owned()).collect()
    }

    fn shows(&self, entry: &Entry) -> bool {
        let name = entry.device.name();
        entry.policy.export != Export::Never
            && self.only.as_ref().is_none_or(|only| only.iter().any(|shown| shown == name))
    }

    /// Opens a device's file, for writing or not. Errors: `Busy` when an NBD client forbids it, or the device
    /// is uninitialised; `NotFound` when it has been removed.
    pub fn open_file(&self, device: &Arc<Device>, writes: bool) -> Result<OpenFile> {
        let found = self.devices.lock().iter().find(|entry| Arc::ptr_eq(&entry.device, device)).cloned();
        let entry = found
            .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("'{}' was removed", device.name())))?;
        entry.open_file(writes)
    }

    /// Returns the number of open files of a device besides `own` ones. Waits up to `patience` until there
    /// are none: a block device that was just detached closes its file a moment later.
    pub fn other_files(&self, name: &str, own: usize, patience: Duration) -> usize {
        let deadline = Instant::now() + patience;
        loop {
            match self.users(name).files().saturating_sub(own) {
                0 => return 0,
                others if Instant::now() >= deadline => return others,
                _ => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Returns the number of users of a device, by kind; none if there is no such device.
    pub fn users(&self, name: &str) -> Users {
        let devices = self.devices.lock();
        let found = devices.iter().find(|entry| entry.device.name() == name);
        found.map(|entry| *entry.users.lock()).unwrap_or_default()
    }

    /// Returns the device of a name. Errors: `NotFound`, with the existing names.
    pub fn named(&self, name: &str) -> Result<Arc<Device>> {
        let devices = self.devices.lock();
        let found = devices.iter().find(|entry| entry.device.name() == name);
        found.map(|entry| Arc::clone(&entry.device)).ok_or_else(|| {
            let names: Vec<&str> = devices.iter().map(|entry| entry.device.name()).collect();
            let known = if names.is_empty() { "this daemon has none".to_owned() } else { hint(name, &names) };
            Error::new(ErrorKind::NotFound, format!("no device '{name}'; {known}"))
        })
    }

    /// Returns all devices, in order, exported or not.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        self.devices.lock().iter().map(|entry| Arc::clone(&entry.device)).collect()
    }
}

#[cfg(test)]
mod tests;
