//! Which devices the server offers, and under which names.

use std::sync::Arc;

use uzram::device::Device;

/// The export list: each device under its own name; the first is also the default export, which
/// clients ask for with the empty name.
#[derive(Clone)]
pub struct Exports {
    devices: Vec<Arc<Device>>,
}

impl Exports {
    /// Offers `devices`, in this order.
    pub fn new(devices: impl IntoIterator<Item = Arc<Device>>) -> Self {
        Exports { devices: devices.into_iter().collect() }
    }

    /// The device that a client means by `name`; names compare as bytes.
    pub fn find(&self, name: &[u8]) -> Option<&Arc<Device>> {
        if name.is_empty() {
            return self.devices.first();
        }
        self.devices.iter().find(|device| device.name().as_bytes() == name)
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().map(|device| device.name())
    }
}
