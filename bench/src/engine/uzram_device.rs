//! The measured target: a uzram device, one page an operation.

use std::sync::Arc;

use uzram::Result;
use uzram::device::{Device, OpenDevice};
use uzram::units::{Page, pages_to_bytes};

use super::target::Disk;

/// An open device of the engine.
pub struct UzramDevice {
    pub(super) name: &'static str,
    /// As it is read and written.
    pub open: OpenDevice,
    /// Its attributes and statistics.
    pub device: Arc<Device>,
    pub(super) page_count: usize,
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
