//! The memory of a daemon's processes: what is their own and was written, and the page tables of what they map.

use std::fs;
use std::path::PathBuf;

use serde::Serialize;
use uzram::{Error, ErrorKind, Result};

use super::daemon::Processes;
use crate::block::io_error;

/// The memory of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessMemory {
    /// `Private_Dirty` of its `smaps_rollup`.
    pub private_dirty_bytes: u64,
    /// `VmPTE` of its `status`.
    pub page_table_bytes: u64,
}

/// The memory of a daemon's processes at some moment.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryRow {
    /// The pool's memory, as it was wanted.
    pub pool_bytes: u64,
    /// When it was read.
    pub when: &'static str,
    /// The process that holds all descriptors.
    pub holder: ProcessMemory,
    /// The process that serves.
    pub worker: ProcessMemory,
    /// The process that takes over.
    pub standby: ProcessMemory,
}

impl MemoryRow {
    /// Reads it.
    pub(super) fn read(pool_bytes: u64, when: &'static str, processes: &Processes) -> Result<MemoryRow> {
        let of = |pid: Option<i32>| {
            pid.ok_or_else(|| Error::new(ErrorKind::Io, "the daemon has no holder or no stand-by"))
                .and_then(ProcessMemory::read)
        };
        Ok(MemoryRow {
            pool_bytes,
            when,
            holder: of(processes.holder_pid)?,
            worker: of(Some(processes.worker_pid))?,
            standby: of(processes.standby_pid)?,
        })
    }
}

impl ProcessMemory {
    fn read(pid: i32) -> Result<ProcessMemory> {
        Ok(ProcessMemory {
            private_dirty_bytes: figure(pid, "smaps_rollup", "Private_Dirty:")?,
            page_table_bytes: figure(pid, "status", "VmPTE:")?,
        })
    }
}

/// Reads a figure in KiB from a file of a process; returns bytes.
fn figure(pid: i32, file: &str, name: &str) -> Result<u64> {
    let path = PathBuf::from(format!("/proc/{pid}/{file}"));
    let text = fs::read_to_string(&path).map_err(|error| io_error(&path, error))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next());
    let kib = value.and_then(|value| value.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| Error::new(ErrorKind::Io, format!("{} has no {name}", path.display())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn own_memory_is_found() {
        let own = std::process::id() as i32;
        let before = ProcessMemory::read(own).unwrap();
        const BYTES: usize = 32 << 20;
        let memory = vec![1u8; BYTES];
        let now = ProcessMemory::read(own).unwrap();
        drop(memory);
        assert!(before.private_dirty_bytes > 0 && before.page_table_bytes > 0);
        assert!(now.private_dirty_bytes >= BYTES as u64, "{now:?}");
        assert!(figure(own, "status", "VmNothing:").unwrap_err().to_string().contains("VmNothing"));
        assert!(ProcessMemory::read((1 << 22) + 1).is_err());
    }
}
