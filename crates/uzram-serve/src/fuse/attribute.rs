//! Writes to an attribute's file set the attribute. As this may take long, the device's pool does it.

use std::sync::Arc;

use rustix::io::Errno;
use uzram::device::{Attribute, Device};

use super::channel::{Channel, Reply};
use super::disk::errno;
use super::proto::fuse_write_out;
use crate::device_pool::DevicePool;

/// The longest text accepted.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// Sets an attribute to the data written to its file.
pub(super) fn write<C: Channel>(
    device: Arc<Device>,
    attribute: &'static Attribute,
    pool: &DevicePool,
    offset: u64,
    data: &[u8],
    reply: Reply<C>,
) {
    let text = str::from_utf8(data).ok().filter(|_| offset == 0 && data.len() <= MAX_TEXT_BYTES);
    let Some(value) = text.map(str::to_owned) else { return reply.error(Errno::INVAL) };
    let len = data.len() as u32;
    let permit = pool.try_acquire(value.len());
    let set = move || match set(&device, attribute, &value) {
        Ok(()) => reply.message(&fuse_write_out { size: len, padding: 0 }),
        Err(errno) => reply.error(errno),
    };
    match permit {
        Some(permit) => pool.start(Box::new(move || {
            set();
            drop(permit);
        })),
        None => set(),
    }
}

fn set(device: &Device, attribute: &Attribute, value: &str) -> Result<(), Errno> {
    let (name, value) = (attribute.name, value.trim_end());
    match device.set(name, value) {
        Ok(()) => {
            tracing::info!(device = device.name(), attribute = name, value, "attribute set");
            Ok(())
        }
        Err(error) => {
            // The writing program only gets an errno, so log the message.
            tracing::warn!(device = device.name(), attribute = name, value, %error, "attribute not set");
            Err(errno(&error))
        }
    }
}
