//! The JSON of the control API: the daemon, its devices with their attributes and statistics, and NBD
//! clients.

use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uzram::device::{self, Device, DeviceStats};

use crate::fuse;
use crate::nbd::{Client, Peer};

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
    /// that it gave up; none of the latter if it starts programs
    /// as other users.
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
            threads: connection.threads(),
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
    pub stats: StatsJson,
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

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientJson {
    /// Its id, for `DELETE`.
    pub id: u64,
    /// The address it connected to: `unix:PATH` or `tcp:ADDRESS:PORT`.
    pub listener: String,
    /// The peer as text: `pid N, uid N`, or `ADDRESS:PORT`.
    pub peer: String,
    /// The process that connected to a Unix socket; 0 if it is not visible here.
    pub pid: Option<i32>,
    /// The user of that process.
    pub uid: Option<u32>,
    /// The export that it chose, if any.
    pub export: Option<String>,
    /// When it connected, in seconds since 1970.
    pub connected_at_s: u64,
    /// The number of requests since it chose its export.
    pub requests: u64,
    /// Bytes of read requests.
    pub read_bytes: u64,
    /// Bytes of write requests.
    pub written_bytes: u64,
}

/// Connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientsJson {
    /// The connections.
    pub clients: Vec<ClientJson>,
}

impl From<Client> for ClientJson {
    fn from(client: Client) -> Self {
        let (pid, uid) = match client.peer {
            Peer::Unix { pid, uid } => (Some(pid), Some(uid)),
            Peer::Tcp(_) => (None, None),
        };
        ClientJson {
            id: client.id,
            listener: client.listener.to_string(),
            peer: client.peer.to_string(),
            pid,
            uid,
            export: client.export,
            // A clock before 1970 is not set.
            connected_at_s: client.since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            requests: client.traffic.requests,
            read_bytes: client.traffic.read_bytes,
            written_bytes: client.traffic.written_bytes,
        }
    }
}

/// Declares [`DeviceStats`] as JSON. It is also deserialized, so its fields are repeated here; a test finds a
/// missing one.
macro_rules! mirror {
    ($($field:ident),* $(,)?) => {
        /// The fields of [`DeviceStats`], with the same names, units and meanings.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct StatsJson {
            $(#[doc = concat!("See [`DeviceStats::", stringify!($field), "`].")] pub $field: u64,)*
        }

        impl From<DeviceStats> for StatsJson {
            fn from(stats: DeviceStats) -> Self {
                let DeviceStats { $($field,)* .. } = stats;
                StatsJson { $($field),* }
            }
        }

        impl std::iter::Sum for StatsJson {
            /// Sums the statistics of several devices.
            fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
                all.fold(StatsJson::default(), |sum, one| StatsJson {
                    $($field: sum.$field.saturating_add(one.$field)),*
                })
            }
        }
    };
}

mirror! {
    disksize_bytes, orig_data_bytes, compr_data_bytes, mem_used_bytes, mem_used_max_bytes, mem_limit_bytes,
    mem_charged_bytes, mem_chunk_bytes, reserve_bytes, reserve_free_bytes, reserve_drained, limit_refused,
    mem_fixed_bytes, mem_tables_bytes, same_pages, pages_compacted, pages_recompressed, huge_pages,
    huge_pages_since, pages_read, pages_written, failed_reads, failed_writes, notify_free,
    corrupted_objects, stream_sleeps, backing_bytes, backing_held_bytes, pages_backed, pages_written_back,
    pages_returned, backing_failed_writes, backing_failed_reads, backing_corrupted,
}

impl StatsJson {
    /// Returns all memory that the device takes now: what `mem_limit` bounds, and the tables.
    pub const fn memory_bytes(&self) -> u64 {
        self.mem_charged_bytes.saturating_add(self.mem_tables_bytes)
    }

    /// Returns the memory of the device's contents, which is freed as they are discarded.
    pub const fn kept_bytes(&self) -> u64 {
        self.mem_charged_bytes.saturating_sub(self.reserve_free_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_listed() {
        let fields = |debug: String| debug.split_once(' ').map(|(_, fields)| fields.to_owned());
        let json = StatsJson::from(DeviceStats::default());
        assert_eq!(fields(format!("{json:?}")), fields(format!("{:?}", DeviceStats::default())));
    }
}
