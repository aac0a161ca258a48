//! The description of a daemon, besides its devices.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::fuse;

/// The description of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// Its process ID.
    pub pid: u32,
    /// The mount of its devices' files, if any.
    pub files: Option<FilesJson>,
    /// Whether it was started for a swap area, and ends with it.
    pub ends_with_swap: bool,
    /// The measures that keep a swap daemon from waiting for memory that only it can free, and the privileges that it
    /// gave up; none of the latter if it runs a command.
    pub protection: Vec<MeasureJson>,
    /// Why its devices cannot become block devices, if they cannot.
    #[serde(default)]
    pub attach_refused: Option<String>,
    /// Its processes; `None` if it does not outlive the one that serves.
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
        let (limit, refused) = mount.cpu_latency();
        FilesJson {
            dir: mount.dir().to_owned(),
            device: mount.identity().device,
            threads: mount.threads(),
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
