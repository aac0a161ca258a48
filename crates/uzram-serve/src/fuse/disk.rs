//! Requests to a device's disk file, which ends as a block device does: a read or a zeroing that reaches past the end is
//! cut there, and so is a write; a read at the end gets no bytes, a write ENOSPC, and a zeroing EINVAL.
//!
//! The thread that received a request executes it as far as it need not wait for a backing device or for memory. The
//! rest goes to the device's [`DevicePool`], so that the thread is free for other requests; without a permit for that,
//! the thread waits itself. A task drops its hold on the device before it replies, and its permit last.

use std::sync::Arc;

use rustix::io::Errno;
use uzram::Error;
use uzram::device::{PageState, Wait};
use uzram::units::PAGE_SIZE;

use super::channel::{Channel, Reply};
use super::proto::fuse_write_out;
use super::thread_buffer::{allocate, reply_from_buffer};
use crate::OpenFile;
use crate::device_pool::DevicePool;

/// The most bytes that the thread which received a request zeroes itself; that takes no longer than the longest read.
const ZERO_AT_ONCE_BYTES: u64 = 16 << 20;

/// An open disk file, and the threads that wait for its device.
#[derive(Clone)]
pub(super) struct Disk {
    pub file: OpenFile,
    pub pool: Arc<DevicePool>,
}

impl Disk {
    pub fn read<C: Channel>(&self, offset: u64, len: usize, reply: Reply<C>) {
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
                read => return reply_data(reply, read, out),
            };
            let Some(permit) = self.pool.try_acquire(0) else {
                let read = device.read_some(offset + done as u64, &mut out[done..], Wait::Yes);
                return reply_data(reply, read, out);
            };
            let device = Arc::clone(device);
            self.pool.start(Box::new(move || {
                reply_from_buffer(len, reply, |out, reply| {
                    // Read from the start: keeping the part that was read would take memory.
                    let read = device.read_some(offset, out, Wait::Yes);
                    drop(device);
                    reply_data(reply, read, out);
                });
                drop(permit);
            }));
        });
    }

    pub fn write<C: Channel>(&self, offset: u64, data: &[u8], reply: Reply<C>) {
        let device = &self.file.device;
        if self.before_end(offset, 1) == 0 {
            return reply.error(Errno::NOSPC);
        }
        let len = self.before_end(offset, data.len() as u64) as usize;
        let data = &data[..len];
        let done = match device.write_some(offset, data, Wait::No) {
            Ok(done) if done < len => done,
            written => return reply_written(reply, written.map(drop), len),
        };
        let (rest, offset) = (&data[done..], offset + done as u64);
        let (Some(permit), Ok(mut copy)) = (self.pool.try_acquire(rest.len()), allocate(rest.len())) else {
            return reply_written(reply, device.write(offset, rest), len);
        };
        copy.copy_from_slice(rest);
        let device = Arc::clone(device);
        self.pool.start(Box::new(move || {
            let written = device.write(offset, &copy);
            drop((device, copy));
            reply_written(reply, written, len);
            drop(permit);
        }));
    }

    /// Zeroes a range, as a hole unless it must stay `allocated`.
    pub fn zero<C: Channel>(&self, offset: u64, len: u64, allocated: bool, reply: Reply<C>) {
        let device = &self.file.device;
        let len = self.before_end(offset, len);
        if len == 0 {
            return reply.error(Errno::INVAL);
        }
        // Do not split a page: neither part would free it.
        let at_once = len.min(ZERO_AT_ONCE_BYTES - offset % PAGE_SIZE as u64);
        let done = match device.zero_some(offset, at_once, allocated, Wait::No) {
            Ok(done) if done < len => done,
            zeroed => return reply_zeroed(reply, zeroed),
        };
        let (offset, len) = (offset + done, len - done);
        let Some(permit) = self.pool.try_acquire(0) else {
            return reply_zeroed(reply, device.zero_some(offset, len, allocated, Wait::Yes));
        };
        let device = Arc::clone(device);
        self.pool.start(Box::new(move || {
            let zeroed = device.zero_some(offset, len, allocated, Wait::Yes);
            drop(device);
            reply_zeroed(reply, zeroed);
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

/// Ends the process if the variable `UZRAM_DIE_AT` has this offset: for tests of requests that kill whoever carries them
/// out. Only in debug builds.
#[cfg(debug_assertions)]
fn die_if_told(offset: u64) {
    static AT: std::sync::OnceLock<Option<u64>> = std::sync::OnceLock::new();
    let at = || std::env::var("UZRAM_DIE_AT").ok()?.parse().ok();
    if *AT.get_or_init(at) == Some(offset) {
        std::process::abort();
    }
}

fn reply_data<C: Channel>(reply: Reply<C>, read: uzram::Result<usize>, bytes: &[u8]) {
    match read {
        Ok(_) => reply.data(bytes),
        Err(error) => reply.error(errno(&error)),
    }
}

fn reply_written<C: Channel>(reply: Reply<C>, written: uzram::Result<()>, len: usize) {
    match written {
        // The protocol's lengths have 32 bits, and so have those of requests.
        Ok(()) => reply.message(&fuse_write_out { size: len as u32, padding: 0 }),
        Err(error) => reply.error(errno(&error)),
    }
}

fn reply_zeroed<C: Channel>(reply: Reply<C>, zeroed: uzram::Result<u64>) {
    match zeroed {
        Ok(_) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Returns the errno that a program gets for an error.
pub(super) fn errno(error: &Error) -> Errno {
    Errno::from_raw_os_error(error.errno())
}
