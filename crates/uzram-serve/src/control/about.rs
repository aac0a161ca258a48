//! What there is to say about a daemon, beside its devices.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::fuse;

/// A daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its process.
    pub pid: u32,
    /// Where its devices are files, if anywhere.
    pub files: Option<FilesJson>,
    /// Whether it was started for a swap area, and ends with it.
    pub ends_with_swap: bool,
    /// What keeps it from waiting for memory that only it can free, where it has a swap area; and what it gave up so that
    /// nobody can misuse it. None of the latter while it runs a command.
    pub protection: Vec<MeasureJson>,
}

/// Devices as files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesJson {
    /// Where they were mounted.
    pub dir: PathBuf,
    /// The device number of their file system, by which they are told from others: major, minor.
    pub device: (u32, u32),
    /// The threads that serve them.
    pub threads: usize,
    /// How fast CPUs are asked to wake for requests: `0 us`; `none`, and why, if it was asked for.
    pub cpu_latency: String,
}

/// Something that was done for protection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasureJson {
    /// What.
    pub what: String,
    /// Why it could not be done, if so.
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
    /// A device's disk.
    pub fn disk(&self, device: &str) -> PathBuf {
        self.dir.join(device).join(fuse::DISK)
    }
}
