//! The description of a daemon, besides its devices.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::fuse;

/// The description of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The limit on CPU wake-up latency, as in `0 us`; `none`, with the reason if the kernel refused a limit.
    pub cpu_latency: String,
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
        FilesJson {
            dir: mount.dir().to_owned(),
            device: mount.identity().device,
            threads: mount.threads(),
            cpu_latency: mount.cpu_latency().to_owned(),
        }
    }
}

impl FilesJson {
    /// Returns the path of a device's disk.
    pub fn disk(&self, device: &str) -> PathBuf {
        self.dir.join(device).join(fuse::DISK)
    }
}
