//! The JSON of the control API: the daemon, its devices with their attributes and statistics, and NBD
//! clients.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uzram::device::{self, Device, DeviceStats};

use crate::fuse;
use crate::nbd::Client;

/// The description of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// Its process ID.
    pub pid: u32,
    /// The mount of its devices' files, if any.
    pub files: Option<FilesJson>,
    /// Whether it was started for a swap area, and ends with it.
    pub ends_with_swap: bool,
    /// The measures that keep a swap daemon from waiting for memory that only it can free, and the privileges
    /// that it gave up; none of the latter if it starts programs as other users.
    pub protection: Vec<MeasureJson>,
    /// Why its devices cannot become block devices, if they cannot.
    #[serde(default)]
    pub attach_refused: Option<String>,
    /// Its processes; a daemon always tells them.
    #[serde(default)]
    pub survival: Option<SurvivalJson>,
}

/// The processes of a daemon that outlives the one that serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SurvivalJson {
    /// The process that holds the descriptors and starts the others.
    pub holder_pid: u32,
    /// The process that serves.
    pub worker_pid: u32,
    /// The process that takes over when the worker dies; `None` while there is none.
    pub standby_pid: Option<u32>,
    /// Whether the stand-by has mapped the memory of all devices, so that it can take over at once.
    pub standby_ready: bool,
    /// How often a stand-by has taken over.
    pub take_overs: u64,
    /// How long nobody served at the last take-over, in milliseconds.
    pub last_outage_ms: Option<f64>,
    /// Why no process serves any longer, if the holder has stopped replacing workers.
    pub gave_up: Option<String>,
}

/// The mount of the devices' files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesJson {
    /// The mount point.
    pub dir: PathBuf,
    /// The device number of the file system, which identifies it: major, minor.
    pub device: (u32, u32),
    /// The number of threads that serve it.
    pub threads: usize,
    /// The limit on CPU wake-up latency, if there is one.
    pub cpu_latency_us: Option<i32>,
    /// Why the kernel refused a limit, if it did.
    pub cpu_latency_refused: Option<String>,
}

/// A protection measure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasureJson {
    /// The measure.
    pub what: String,
    /// Why it failed, if it did.
    pub refused: Option<String>,
}

impl From<&fuse::Mount> for FilesJson {
    fn from(mount: &fuse::Mount) -> Self {
        let connection = mount.connection();
        let (limit, refused) = connection.cpu_latency();
        FilesJson {
            dir: connection.dir().to_owned(),
            device: connection.identity().device,
            threads: connection.options().threads,
            cpu_latency_us: limit.us().filter(|_| refused.is_none()),
            cpu_latency_refused: refused.map(str::to_owned),
        }
    }
}

impl FilesJson {
    /// Returns the limit on CPU wake-up latency as text, or why there is none.
    pub fn cpu_latency(&self) -> String {
        match (self.cpu_latency_us, &self.cpu_latency_refused) {
            (Some(limit_us), _) => format!("{limit_us} us"),
            (None, Some(why)) => format!("none: {why}"),
            (None, None) => "none".to_owned(),
        }
    }

    /// Returns the path of a device's disk.
    pub fn disk(&self, device: &str) -> PathBuf {
        self.dir.join(device).join(fuse::DISK)
    }
}

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
    pub stats: DeviceStats,
    /// How its backing device is, as the attribute `backing_state` says in its first line; `None` without
    /// one.
    pub backing_state: Option<String>,
    /// The attributes whose text does not grow with the disk. One that cannot be read now is null. `None` in
    /// a list.
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
    let value = |name| device.reading(name).map_or(Value::Null, |reading| value_json(reading.value));
    shown.map(|attribute| (attribute.name.to_owned(), value(attribute.name))).collect()
}

/// Returns the value of an attribute as JSON.
pub fn value_json(value: device::Value) -> Value {
    match value {
        device::Value::Number(number) => number.into(),
        device::Value::Text(text) => text.into(),
        device::Value::List(values) => values.into_iter().map(value_json).collect(),
        device::Value::Fields(fields) => {
            fields.into_iter().map(|(name, field)| (name.to_owned(), value_json(field))).collect()
        }
    }
}

/// Connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientsJson {
    /// The connections.
    pub clients: Vec<Client>,
}
