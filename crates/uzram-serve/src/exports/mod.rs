//! The devices of a daemon, and who may open which.
//!
//! A device is opened in two ways: over NBD, by any client that a listener admits, and through its file, by root's
//! programs and by the kernel, whose loop device makes it a disk for file systems and swap. No NBD client may read or
//! write a device that the kernel expects to use exclusively. So, for each device:
//!
//! - While its file is open for writing (because it is *attached*, say), it is not exported; with [`Export::Always`] it
//!   is exported read-only.
//! - Its file is not opened for writing while an NBD client may write, nor, without [`Export::Always`], while one is
//!   connected.
//! - A client that was admitted as a reader stays a reader.
//!
//! A listener may name the devices that it serves ([`Exports::only`]).
//!
//! Locks: the list's, then an entry's `Users`, then a device's own. Held while names are compared and users counted,
//! never while a device is created, opened, emptied or used.

mod entry;
#[cfg(test)]
mod tests;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use uzram::device::Device;
use uzram::named::hint;
use uzram::{Error, ErrorKind, Result};

use crate::own_devices;
use crate::record::Recorder;
use entry::Entry;

pub use entry::{Access, Export, ExportPolicy, ExportedDevice, OpenFile, Users};

/// Checks what an attribute of a device is about to be set to; the error says what to set instead.
pub type SettingCheck = Arc<dyn Fn(&Device, &str, &str) -> Result<()> + Send + Sync>;

/// A list of devices, shared by all clones of it. Names are unique; the first exported device is also the default
/// export, which NBD clients request by the empty name.
#[derive(Clone, Default)]
pub struct Exports {
    devices: Arc<RwLock<Vec<Arc<Entry>>>>,
    /// The names that NBD clients see; `None` for all.
    only: Option<Arc<[String]>>,
    /// The record of what the devices are attached to, if any is kept.
    recorder: Option<Arc<Recorder>>,
    /// What else is demanded of settings.
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
            devices: Arc::new(RwLock::new(devices.into_iter().map(entry).collect())),
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

    /// Returns the same list, of which NBD clients see only these names. Devices of these names need not exist yet.
    pub fn only(&self, names: Arc<[String]>) -> Self {
        Exports { only: Some(names), ..self.clone() }
    }

    /// Sets an attribute of a device, as [`Device::set_interruptible`] does.
    ///
    /// # Errors
    /// Also those of the check of [`Exports::checked_by`], and `Invalid` if the value is a backing device that lies on the daemon's
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

    /// Adds a device to the end of the list.
    ///
    /// # Errors
    /// `Busy` when the list has a device of that name.
    pub fn add(&self, device: Arc<Device>, policy: ExportPolicy) -> Result<()> {
        let mut devices = self.write();
        if devices.iter().any(|other| other.device.name() == device.name()) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("there is a device '{}' already", device.name()),
            ));
        }
        devices.push(Arc::new(Entry::new(device, policy)));
        Ok(())
    }

    /// Frees a device and removes it from the list.
    ///
    /// # Errors
    /// `NotFound` when the list has no device of that name; `Busy` while it is in use.
    pub fn remove(&self, name: &str) -> Result<()> {
        let device = self.named(name)?;
        // From here on it cannot be opened.
        device.remove()?;
        self.write().retain(|other| !Arc::ptr_eq(&other.device, &device));
        Ok(())
    }

    /// Returns the export of a name; names compare as bytes. Connecting may still be refused. An export that NBD
    /// clients may never use is not found.
    pub fn find(&self, name: &[u8]) -> Option<NamedExport> {
        let devices = self.read();
        let mut shown = devices.iter().filter(|entry| self.shows(entry));
        let entry = if name.is_empty() {
            shown.find(|entry| entry.access(&entry.users()).is_some())
        } else {
            shown.find(|entry| entry.device.name().as_bytes() == name)
        };
        entry.map(|entry| NamedExport { entry: Arc::clone(entry) })
    }

    /// Returns the names of all exports that NBD clients may open now, in order.
    pub fn exported(&self) -> Vec<String> {
        let devices = self.read();
        let shown = devices.iter().filter(|entry| self.shows(entry));
        let usable = shown.filter(|entry| entry.access(&entry.users()).is_some());
        usable.map(|entry| entry.device.name().to_owned()).collect()
    }

    /// Returns whether NBD clients may ever open a device.
    fn shows(&self, entry: &Entry) -> bool {
        let name = entry.device.name();
        entry.policy.export != Export::Never
            && self.only.as_ref().is_none_or(|only| only.iter().any(|shown| shown == name))
    }

    /// Opens a device's file, for writing or not.
    ///
    /// # Errors
    /// `Busy` when an NBD client forbids it, or the device is uninitialised; `NotFound` when it has been removed.
    pub fn open_file(&self, device: &Arc<Device>, writes: bool) -> Result<OpenFile> {
        let found = self.read().iter().find(|entry| Arc::ptr_eq(&entry.device, device)).cloned();
        let entry = found
            .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("'{}' was removed", device.name())))?;
        entry.open_file(writes)
    }

    /// Returns the number of open files of a device besides `own` ones. Waits up to `patience` until there are none: a
    /// block device that was just detached closes its file a moment later.
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
        let devices = self.read();
        devices
            .iter()
            .find(|entry| entry.device.name() == name)
            .map(|entry| *entry.users())
            .unwrap_or_default()
    }

    /// Returns the device of a name.
    ///
    /// # Errors
    /// `NotFound`, with the existing names.
    pub fn named(&self, name: &str) -> Result<Arc<Device>> {
        let devices = self.read();
        let found = devices.iter().find(|entry| entry.device.name() == name);
        found.map(|entry| Arc::clone(&entry.device)).ok_or_else(|| {
            let names: Vec<&str> = devices.iter().map(|entry| entry.device.name()).collect();
            let known = if names.is_empty() { "this daemon has none".to_owned() } else { hint(name, &names) };
            Error::new(ErrorKind::NotFound, format!("no device '{name}'; {known}"))
        })
    }

    /// Returns all devices, in order, exported or not.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        self.read().iter().map(|entry| Arc::clone(&entry.device)).collect()
    }

    /// A panic cannot leave the list half changed, so poisoning is ignored.
    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<Entry>>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Arc<Entry>>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An export that an NBD client has named.
pub struct NamedExport {
    entry: Arc<Entry>,
}

impl NamedExport {
    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.entry.device
    }

    /// Opens the device for a client.
    ///
    /// # Errors
    /// `Permission` when the device is not exported now; `Busy` when it is uninitialised.
    pub fn connect(self) -> Result<ExportedDevice> {
        self.entry.connect()
    }
}
