//! Devices whose backing device fails, or holds transfers up, when a test says so.

use std::sync::Arc;

use uzram::backing::{Direction, Fault, FaultKind, Faults, FaultyBacking, FileBacking, FileOptions};
use uzram::device::{Device, NamedBacking};

use super::eventually;

pub struct Gate {
    pub faults: Faults,
    _directory: tempfile::TempDir,
}

/// Keeps a gate shut until dropped.
pub struct Shut<'a> {
    gate: &'a Gate,
    /// Transfers that were blocked before.
    before: u64,
}

impl Gate {
    /// Blocks transfers from now on.
    pub fn shut(&self, direction: Direction) -> Shut<'_> {
        let before = self.faults.injected();
        self.faults.add(Fault { direction: Some(direction), ..Fault::always(FaultKind::Hold) });
        Shut { gate: self, before }
    }
}

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.gate.faults.clear();
    }
}

impl Shut<'_> {
    pub fn wait_for(&self, count: u64) {
        eventually(|| self.gate.faults.injected() - self.before >= count);
    }
}

/// Returns a device of that name with a backing device that can be shut.
pub fn gated(name: &str, size: &str, settings: &[(&str, &str)]) -> (Arc<Device>, Gate) {
    let directory = tempfile::tempdir().unwrap();
    let options =
        FileOptions { size_bytes: Some(64 << 20), ..FileOptions::new(directory.path().join("backing")) };
    let backing = FaultyBacking::new(FileBacking::open(&options).unwrap(), super::seed());
    let gate = Gate { faults: backing.faults(), _directory: directory };
    let device = Device::new(name).unwrap();
    device.set_backing(Some(NamedBacking::new("gate", "in a test", Arc::new(backing)))).unwrap();
    settings.iter().for_each(|(name, value)| device.set(name, value).unwrap());
    device.set("disksize", size).unwrap();
    (device, gate)
}
