//! Requests to a device's files.
//!
//! Its disk ends as a block device does: a read or a zeroing that reaches past the end is cut there, and so
//! is a write; a read at the end gets no bytes, a write ENOSPC, and a zeroing EINVAL.
//!
//! The thread that received a request executes it as far as it need not wait for a backing device or for
//! memory. The rest goes to the device's [`DevicePool`], so that the thread is free for other requests;
//! without a permit for that, the thread waits itself. A task drops its hold on the device before it replies,
//! and its permit last.
//!
//! An attribute is read and written as in sysfs: a read at offset 0 generates the text, and reads at other
//! offsets go on with that text. Each write sets the attribute to its data, at whatever offset. As setting
//! may take long, the device's pool does it.

use std::sync::Arc;

use rustix::io::Errno;
use uzram::Error;
use uzram::device::{Attribute, AttributeText, Device, PageState, Wait};
use uzram::mem::ZeroedPages;
use uzram::sync::Mutex;
use uzram::units::PAGE_SIZE;

use super::channel::Reply;
use super::proto::fuse_write_out;
use super::thread_buffer::reply_from_buffer;
use crate::device_pool::DevicePool;
use crate::{Exports, OpenFile};

/// The most bytes that the thread which received a request zeroes itself; that takes no longer than the
/// longest read.
const ZERO_AT_ONCE_BYTES: u64 = 16 << 20;

/// An open disk file, and the threads that wait for its device.
#[derive(Clone)]
pub(super) struct Disk {
    pub file: OpenFile,
    pub pool: Arc<DevicePool>,
}

impl Disk {
    pub fn read(&self, offset: u64, len: usize, reply: Reply) {
        #[cfg(debug_assertions)]
        die_if_told(offset);
        let device = &self.file.device;
        let len = self.before_end(offset, len as u64) as usize;
        if len == 0 {
            return reply.data(&[]);
        }
        reply_from_buffer(len, reply, |out, reply| {
            let done = match device.read_some(offset, out, Wait::No) {
                Ok(done) if done < len => done,
                read => return answer(reply, read, |reply| reply.data(out)),
            };
            let Some(permit) = self.pool.try_acquire(0) else {
                let read = device.read_some(offset + done as u64, &mut out[done..], Wait::Yes);
                return answer(reply, read, |reply| reply.data(out));
            };
            let device = Arc::clone(device);
            self.pool.start(Box::new(move || {
                reply_from_buffer(len, reply, |out, reply| {
                    // Read from the start: keeping the part that was read would take memory.
                    let read = device.read_some(offset, out, Wait::Yes);
                    drop(device);
                    answer(reply, read, |reply| reply.data(out));
                });
                drop(permit);
            }));
        });
    }

    pub fn write(&self, offset: u64, data: &[u8], reply: Reply) {
        let device = &self.file.device;
        if self.before_end(offset, 1) == 0 {
            return reply.error(Errno::NOSPC);
        }
        let len = self.before_end(offset, data.len() as u64) as usize;
        let data = &data[..len];
        let done = match device.write_some(offset, data, Wait::No) {
            Ok(done) if done < len => done,
            written => return answer_write(reply, written.map(drop), len),
        };
        let (rest, offset) = (&data[done..], offset + done as u64);
        let (Some(permit), Ok(mut copy)) = (self.pool.try_acquire(rest.len()), ZeroedPages::new(rest.len()))
        else {
            return answer_write(reply, device.write(offset, rest), len);
        };
        copy.copy_from_slice(rest);
        let device = Arc::clone(device);
        self.pool.start(Box::new(move || {
            let written = device.write(offset, &copy);
            drop((device, copy));
            answer_write(reply, written, len);
            drop(permit);
        }));
    }

    /// Zeroes a range, as a hole unless it must stay `allocated`.
    pub fn zero(&self, offset: u64, len: u64, allocated: bool, reply: Reply) {
        let device = &self.file.device;
        let len = self.before_end(offset, len);
        if len == 0 {
            return reply.error(Errno::INVAL);
        }
        // Do not split a page: neither part would free it.
        let at_once = len.min(ZERO_AT_ONCE_BYTES - offset % PAGE_SIZE as u64);
        let done = match device.zero_some(offset, at_once, allocated, Wait::No) {
            Ok(done) if done < len => done,
            zeroed => return answer(reply, zeroed, Reply::ok),
        };
        let (offset, len) = (offset + done, len - done);
        let Some(permit) = self.pool.try_acquire(0) else {
            return answer(reply, device.zero_some(offset, len, allocated, Wait::Yes), Reply::ok);
        };
        let device = Arc::clone(device);
        self.pool.start(Box::new(move || {
            let zeroed = device.zero_some(offset, len, allocated, Wait::Yes);
            drop(device);
            answer(reply, zeroed, Reply::ok);
            drop(permit);
        }));
    }

    /// Returns the start of the next data or hole, lseek(2).
    pub fn seek(&self, offset: u64, for_data: bool) -> Result<u64, Errno> {
        let device = &self.file.device;
        let (mut at, end) = (offset, device.size_bytes());
        if at >= end {
            return Err(Errno::NXIO);
        }
        while at < end {
            let extent = device.extent(at, end - at).map_err(|error| errno(&error))?;
            if (extent.state != PageState::Hole) == for_data {
                return Ok(at);
            }
            at += extent.len_bytes;
        }
        // Every file has an implicit hole at its end.
        if for_data { Err(Errno::NXIO) } else { Ok(end) }
    }

    /// Returns the length of the part of a range before the end of the disk.
    pub fn before_end(&self, offset: u64, len: u64) -> u64 {
        self.file.device.size_bytes().saturating_sub(offset).min(len)
    }
}

/// Ends the process if the variable `UZRAM_DIE_AT` has this offset: for tests of requests that kill whoever
/// carries them out. Only in debug builds.
#[cfg(debug_assertions)]
fn die_if_told(offset: u64) {
    static AT: std::sync::OnceLock<Option<u64>> = std::sync::OnceLock::new();
    let at = || std::env::var("UZRAM_DIE_AT").ok()?.parse().ok();
    if *AT.get_or_init(at) == Some(offset) {
        std::process::abort();
    }
}

fn answer<T>(reply: Reply, done: uzram::Result<T>, succeed: impl FnOnce(Reply)) {
    match done {
        Ok(_) => succeed(reply),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Replies to a write of `len` bytes. The protocol's lengths have 32 bits, and so have those of requests.
fn answer_write(reply: Reply, written: uzram::Result<()>, len: usize) {
    answer(reply, written, |reply| reply.message(&fuse_write_out { size: len as u32, padding: 0 }));
}

pub(super) fn errno(error: &Error) -> Errno {
    Errno::from_raw_os_error(error.errno())
}

const MAX_TEXT_BYTES: usize = 64 << 10;

/// An open attribute's text; `None` until it is read.
pub(super) type OpenText = Mutex<Option<AttributeText>>;

/// Copies the text at an offset into `out`; returns the number of bytes.
pub(super) fn read_attribute(
    device: &Device,
    attribute: &Attribute,
    text: &OpenText,
    offset: u64,
    out: &mut [u8],
) -> Result<usize, Errno> {
    let mut text = text.lock();
    if offset == 0 {
        *text = None;
    }
    let text = match &mut *text {
        Some(text) => text,
        none => none.insert(device.text(attribute.name).map_err(|error| errno(&error))?),
    };
    Ok(text.read_at(offset, out))
}

pub(super) fn write_attribute(
    exports: &Exports,
    device: Arc<Device>,
    attribute: &'static Attribute,
    pool: &DevicePool,
    data: &[u8],
    reply: Reply,
) {
    if data.len() > MAX_TEXT_BYTES {
        return reply.error(Errno::TOOBIG);
    }
    let Ok(value) = str::from_utf8(data).map(str::to_owned) else { return reply.error(Errno::INVAL) };
    let len = data.len();
    let permit = pool.try_acquire(value.len());
    let exports = exports.clone();
    let set = move || answer_write(reply, set(&exports, &device, attribute, &value), len);
    match permit {
        Some(permit) => pool.start(Box::new(move || {
            set();
            drop(permit);
        })),
        None => set(),
    }
}

fn set(exports: &Exports, device: &Device, attribute: &Attribute, value: &str) -> uzram::Result<()> {
    let (name, value) = (attribute.name, value.trim_end());
    let done = exports.set(device, name, value, &|| true);
    match &done {
        Ok(()) => tracing::info!(device = device.name(), attribute = name, value, "attribute set"),
        // The writing program only gets an errno, so log the message.
        Err(error) => {
            tracing::warn!(device = device.name(), attribute = name, value, %error, "attribute not set");
        }
    }
    done
}
