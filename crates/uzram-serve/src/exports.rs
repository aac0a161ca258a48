//! The devices of a daemon: what its NBD clients can choose from, and what its control clients see.
//!
//! Lock: the list's, a leaf but for a device's own: held while names are compared, never while a
//! device is made, emptied or used.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use uzram::device::Device;
use uzram::{Error, ErrorKind, Result};

/// A list of devices, shared by all who hold a clone of it. Each is exported under its own name; the
/// first is also the default export, which NBD clients ask for with the empty name.
#[derive(Clone, Default)]
pub struct Exports {
    devices: Arc<RwLock<Vec<Arc<Device>>>>,
}

impl Exports {
    /// Offers `devices`, in this order; their names differ.
    pub fn new(devices: impl IntoIterator<Item = Arc<Device>>) -> Self {
        Exports { devices: Arc::new(RwLock::new(devices.into_iter().collect())) }
    }

    /// Offers one more, as the last.
    ///
    /// # Errors
    /// `Busy` when one of that name is offered.
    pub fn add(&self, device: Arc<Device>) -> Result<()> {
        let mut devices = self.write();
        if devices.iter().any(|other| other.name() == device.name()) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("there is a device '{}' already", device.name()),
            ));
        }
        devices.push(device);
        Ok(())
    }

    /// Frees a device and no longer offers it.
    ///
    /// # Errors
    /// `NotFound` when none of that name is offered; `Busy` while it is in use.
    pub fn remove(&self, name: &str) -> Result<()> {
        let device = self.named(name)?;
        // From here on nobody can open it.
        device.remove()?;
        self.write().retain(|other| !Arc::ptr_eq(other, &device));
        Ok(())
    }

    /// The device that an NBD client means by `name`; names compare as bytes.
    pub fn find(&self, name: &[u8]) -> Option<Arc<Device>> {
        let devices = self.read();
        if name.is_empty() {
            return devices.first().cloned();
        }
        devices.iter().find(|device| device.name().as_bytes() == name).cloned()
    }

    /// The device of a name.
    ///
    /// # Errors
    /// `NotFound`, with the names there are.
    pub fn named(&self, name: &str) -> Result<Arc<Device>> {
        let devices = self.read();
        devices.iter().find(|device| device.name() == name).cloned().ok_or_else(|| {
            let names: Vec<&str> = devices.iter().map(|device| device.name()).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            Error::new(ErrorKind::NotFound, format!("no device '{name}'; this daemon has {names}"))
        })
    }

    /// All of them, in order, as of now.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        self.read().clone()
    }

    /// A panic cannot leave the list half changed, so a poisoned lock is as good as any.
    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<Device>>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Arc<Device>>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn device(name: &str) -> Arc<Device> {
        let device = Device::new(name).unwrap();
        device.set("disksize", "64K").unwrap();
        device
    }

    fn names(exports: &Exports) -> Vec<String> {
        exports.devices().iter().map(|device| device.name().to_owned()).collect()
    }

    #[test]
    fn devices_come_and_go_by_name() {
        let exports = Exports::new([device("a")]);
        exports.add(device("b")).unwrap();
        assert_eq!(exports.add(device("b")).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(names(&exports), ["a", "b"]);
        assert_eq!(exports.find(b"").unwrap().name(), "a");
        exports.remove("a").unwrap();
        assert_eq!(exports.find(b"").unwrap().name(), "b");
        assert_eq!(exports.remove("a").unwrap_err().kind(), ErrorKind::NotFound);
        exports.remove("b").unwrap();
        assert!(exports.find(b"").is_none() && exports.named("b").is_err());
    }

    #[test]
    fn a_device_in_use_stays() {
        let exports = Exports::new([device("a")]);
        let open = exports.find(b"a").unwrap().open().unwrap();
        assert_eq!(exports.remove("a").unwrap_err().kind(), ErrorKind::Busy);
        open.write(0, &[7; 4096]).unwrap();
        drop(open);
        let found_before = exports.find(b"a").unwrap();
        exports.remove("a").unwrap();
        // Who found it before it went can neither open it nor bring it back.
        assert!(found_before.open().is_err());
        found_before.set("reset", "1").unwrap();
        assert_eq!(found_before.set("disksize", "64K").unwrap_err().kind(), ErrorKind::NotFound);
    }
}
