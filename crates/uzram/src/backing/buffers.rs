//! The memory of transfers: buffers of one size, made beforehand, aligned to [`PAGE_SIZE`], which is what O_DIRECT
//! wants of a file that is used with it (`file/open.rs`), whatever the host's pages are.
//!
//! All buffers of a pool lie in one mapping, which takes memory where it was touched. It lives as long as any of
//! them, so that a transfer may outlast the pool it came from.
//!
//! Lock: `backing buffers`, a leaf.

use std::ops::{Deref, DerefMut};

use super::SETTING;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Access, Mapping};
use crate::base::sync::{Arc, Condvar, Counter, Mutex, classes};
use crate::base::units::PAGE_SIZE;

/// The largest size of a buffer: one transfer moves it at once.
pub const MAX_BUFFER_BYTES: usize = 1 << 30;

/// A fixed number of buffers of one size.
pub struct Buffers {
    pool: Arc<Pool>,
}

struct Pool {
    mapping: Mapping,
    buffer_bytes: usize,
    count: u32,
    /// The numbers of the buffers that nobody has. It has room for all.
    free: Mutex<Vec<u32>>,
    /// Threads that wait for one.
    waiting: Counter,
    given_back: Condvar,
}

/// Bytes of a [`Buffers`]. Dropped, they go back to it. They are zeros the first time and whatever was in them
/// later.
pub struct Buffer {
    pool: Arc<Pool>,
    number: u32,
}

impl Buffers {
    /// Makes `count` buffers of `buffer_bytes` each, a multiple of [`PAGE_SIZE`].
    ///
    /// # Errors
    /// `Invalid` for another size, or one above [`MAX_BUFFER_BYTES`]; `NoMemory`.
    pub fn new(count: u32, buffer_bytes: usize) -> Result<Self> {
        if buffer_bytes == 0 || buffer_bytes > MAX_BUFFER_BYTES || !buffer_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(Error::invalid(format!("buffers of {buffer_bytes} bytes are no whole pages")));
        }
        let too_many = || Error::new(ErrorKind::NoMemory, "buffers larger than the address space");
        let len_bytes = (count as usize).checked_mul(buffer_bytes).ok_or_else(too_many)?;
        let mapping = Mapping::new(len_bytes.max(PAGE_SIZE), Access::ReadWrite)
            .map_err(|error| error.with_setting(SETTING))?;
        // The first are taken first.
        let free = Mutex::new(&classes::BACKING_BUFFERS, (0..count).rev().collect());
        let (waiting, given_back) = (Counter::default(), Condvar::new());
        Ok(Buffers { pool: Arc::new(Pool { mapping, buffer_bytes, count, free, waiting, given_back }) })
    }

    /// One of them, unless all are in use.
    pub fn take(&self) -> Option<Buffer> {
        let number = self.pool.free.lock().pop()?;
        Some(Buffer { pool: Arc::clone(&self.pool), number })
    }

    /// One of them, when one is free. There must be at least one.
    pub fn take_waiting(&self) -> Buffer {
        let mut free = self.pool.free.lock();
        loop {
            if let Some(number) = free.pop() {
                return Buffer { pool: Arc::clone(&self.pool), number };
            }
            // Under the lock, so that who gives one back after this sees it.
            self.pool.waiting.add(1);
            free = free.wait(&self.pool.given_back);
            self.pool.waiting.sub(1);
        }
    }

    /// How many could be taken now.
    pub fn free(&self) -> usize {
        self.pool.free.lock().len()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.pool.count as usize
    }

    /// The size of each.
    pub fn buffer_bytes(&self) -> usize {
        self.pool.buffer_bytes
    }
}

impl Buffer {
    /// The first of its bytes. Who uses it owns the buffer, and so keeps it from being read or given back.
    pub(super) fn start(&self) -> *mut u8 {
        // SAFETY: the mapping has `count` times `buffer_bytes`, and `number` is below `count`.
        unsafe { self.pool.mapping.base().add(self.number as usize * self.pool.buffer_bytes) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes lie in the pool's mapping, which this buffer keeps alive, and were initialised as
        // zeros. No other buffer has this number until this one is dropped, and the kernel writes to them only
        // while a backing owns this buffer.
        unsafe { std::slice::from_raw_parts(self.start(), self.pool.buffer_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; and this borrow of the buffer is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.pool.buffer_bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let is_awaited = {
            let mut free = self.pool.free.lock();
            free.push(self.number);
            self.pool.waiting.get() > 0
        };
        if is_awaited {
            self.pool.given_back.notify_one();
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} of {}, {} bytes)", self.number, self.pool.count, self.pool.buffer_bytes)
    }
}
