//! Requests to an attribute's file, which are carried out as in sysfs: a read at offset 0 generates the text, and reads
//! at other offsets go on with that text. Each write sets the attribute to its data, at whatever offset. As setting may
//! take long, the device's pool does it.

use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use uzram::device::{Attribute, AttributeText, Device};

use super::channel::{Channel, Reply};
use super::disk::errno;
use super::proto::fuse_write_out;
use crate::Exports;
use crate::device_pool::DevicePool;

/// The longest text accepted.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// An open attribute's text; `None` until it is read.
pub(super) type OpenText = Mutex<Option<AttributeText>>;

/// Copies the text at an offset into `out`; returns the number of bytes.
pub(super) fn read(
    device: &Device,
    attribute: &Attribute,
    text: &OpenText,
    offset: u64,
    out: &mut [u8],
) -> Result<usize, Errno> {
    let mut text = text.lock().unwrap_or_else(PoisonError::into_inner);
    if offset == 0 {
        *text = None;
    }
    let text = match &mut *text {
        Some(text) => text,
        none => none.insert(device.text(attribute.name).map_err(|error| errno(&error))?),
    };
    Ok(text.read_at(offset, out))
}

/// Sets an attribute to the data written to its file.
pub(super) fn write<C: Channel>(
    exports: &Exports,
    device: Arc<Device>,
    attribute: &'static Attribute,
    pool: &DevicePool,
    data: &[u8],
    reply: Reply<C>,
) {
    if data.len() > MAX_TEXT_BYTES {
        return reply.error(Errno::TOOBIG);
    }
    let Ok(value) = str::from_utf8(data).map(str::to_owned) else { return reply.error(Errno::INVAL) };
    let len = data.len() as u32;
    let permit = pool.try_acquire(value.len());
    let exports = exports.clone();
    let set = move || match set(&exports, &device, attribute, &value) {
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

fn set(exports: &Exports, device: &Device, attribute: &Attribute, value: &str) -> Result<(), Errno> {
    let (name, value) = (attribute.name, value.trim_end());
    match exports.set(device, name, value, &|| true) {
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
