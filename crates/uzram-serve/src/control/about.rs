//! What there is to say about a daemon, beside its devices.

use std::path::{Path, PathBuf};

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
    /// What keeps it from waiting for memory that only it can free; none of that without a swap area.
    pub protection: Vec<MeasureJson>,
}

/// Devices as files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesJson {
    /// Where they are mounted.
    pub dir: PathBuf,
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

    /// The device whose disk a file is, if it is one.
    pub fn device<'a>(&self, file: &'a Path) -> Option<&'a str> {
        let of = file.strip_prefix(&self.dir).ok()?.parent()?.to_str()?;
        let is_name = !of.is_empty() && !of.contains('/');
        (is_name && file == self.disk(of)).then_some(of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_told_from_other_files() {
        let files = FilesJson { dir: "/run/x".into(), ..FilesJson::default() };
        assert_eq!(files.device(&files.disk("zram0")), Some("zram0"));
        for other in ["/run/x/disk", "/run/x/zram0/mm_stat", "/run/y/zram0/disk", "/run/x", "/run/x/a/b/disk"]
        {
            assert_eq!(files.device(Path::new(other)), None, "{other}");
        }
    }
}
