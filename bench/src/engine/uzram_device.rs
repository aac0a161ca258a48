//! The measured target: a uzram device, one page an operation.

use std::sync::Arc;

use uzram::Result;
use uzram::device::{Device, DeviceStats, OpenDevice};
use uzram::units::{Page, pages_to_bytes};
use uzram::zsmalloc::ClassStat;

use super::target::Disk;

/// An open device of the engine.
pub struct UzramDevice {
    name: &'static str,
    open: OpenDevice,
    device: Arc<Device>,
    page_count: usize,
}

impl UzramDevice {
    /// Makes a device with these attributes.
    pub fn with_attributes(attributes: &[(&str, String)], size_bytes: u64) -> Result<UzramDevice> {
        let device = Device::new("bench")?;
        attributes.iter().try_for_each(|(name, value)| device.set(name, value))?;
        device.set("disksize", &size_bytes.to_string())?;
        let page_count = uzram::units::page_of(size_bytes) as usize;
        Ok(UzramDevice { name: "uzram", open: device.open()?, device, page_count })
    }

    /// Names the device in the report, where it is not the first.
    #[must_use]
    pub(super) fn named(self, name: &'static str) -> UzramDevice {
        UzramDevice { name, ..self }
    }

    /// Returns the open device.
    pub fn disk(&self) -> &OpenDevice {
        &self.open
    }

    /// Returns its statistics.
    pub fn stats(&self) -> DeviceStats {
        self.device.stats()
    }

    /// Returns the statistics of its pool's size classes.
    pub fn class_stats(&self) -> Vec<ClassStat> {
        self.device.class_stats()
    }

    /// Returns an attribute's text.
    pub fn get(&self, attribute: &str) -> Result<String> {
        self.device.get(attribute)
    }

    /// Sets an attribute.
    pub fn set(&self, attribute: &str, value: &str) -> Result<()> {
        self.device.set(attribute, value)
    }
}

impl Disk for UzramDevice {
    fn name(&self) -> &'static str {
        self.name
    }

    fn page_count(&self) -> usize {
        self.page_count
    }

    fn read(&self, page: usize, buffer: &mut Page) -> Result<()> {
        self.open.read(pages_to_bytes(page as u64), buffer)
    }

    fn write(&self, page: usize, contents: &Page) -> Result<()> {
        self.open.write(pages_to_bytes(page as u64), contents)
    }
}
