//! Devices and their attributes as JSON.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uzram::device::{self, Device};

use super::stats::StatsJson;

/// All devices.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DevicesJson {
    /// The devices.
    pub devices: Vec<DeviceJson>,
}

/// A device.
#[derive(Debug, Serialize, Deserialize)]
pub struct DeviceJson {
    /// Its name, as in `zram0`.
    pub name: String,
    /// The first of its NBD URIs; none if it is not exported now.
    pub uri: Option<String>,
    /// The NBD URIs that serve it.
    pub uris: Vec<String>,
    /// Its file, if devices are shown as files.
    pub file: Option<PathBuf>,
    /// Its statistics.
    pub stats: StatsJson,
    /// How its backing device is, as the attribute `backing_state` says in its first line; `None` without one.
    pub backing_state: Option<String>,
    /// The attributes whose text does not grow with the disk. One that cannot be read now is null. `None` in a list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<Map<String, Value>>,
}

/// An attribute.
#[derive(Debug, Serialize, Deserialize)]
pub struct AttributeJson {
    /// Its name.
    pub name: String,
    /// Its value; `None` for an attribute whose text grows with the disk.
    pub value: Option<Value>,
    /// As the kernel's file shows it, without the last newline.
    pub text: String,
}

/// Returns the attributes of a device whose text does not grow with the disk.
pub fn attributes(device: &Device) -> Map<String, Value> {
    let shown = Device::attributes().iter().filter(|attribute| attribute.readable() && !attribute.is_long());
    let value = |name| device.reading(name).map_or(Value::Null, |reading| value(reading.value));
    shown.map(|attribute| (attribute.name.to_owned(), value(attribute.name))).collect()
}

/// Returns the value of an attribute as JSON.
pub fn value(value: device::Value) -> Value {
    match value {
        device::Value::Number(number) => number.into(),
        device::Value::Text(text) => text.into(),
        device::Value::List(values) => values.into_iter().map(self::value).collect(),
        device::Value::Fields(fields) => {
            fields.into_iter().map(|(name, field)| (name.to_owned(), self::value(field))).collect()
        }
    }
}
