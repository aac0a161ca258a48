//! The memory of transfers: buffers of one size, allocated in advance and aligned to [`PAGE_SIZE`], as
//! O_DIRECT needs it for the files that use it (`file/open.rs`), whatever the host's page size.
//!
//! All buffers of a pool lie in one mapping, which takes memory only where it was touched. The mapping lives
//! as long as any buffer, so that a transfer may outlive the pool of its buffer.
//!
//! Lock: `backing buffers`, a leaf.

use std::ops::{Deref, DerefMut};

use super::SETTING;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Access, Mapping};
use crate::base::sync::{Arc, Condvar, Counter, Mutex, classes};
use crate::base::units::PAGE_SIZE;

/// The maximum size of a buffer, and so of a transfer.
pub const MAX_BUFFER_BYTES: usize = 1 << 30;

/// A fixed number of buffers of one size.
pub struct Buffers {
    pool: Arc<Pool>,
}

struct Pool {
    mapping: Mapping,
    buffer_bytes: usize,
    count: u32,
    /// The numbers of the free buffers, with capacity for all.
    free: Mutex<Vec<u32>>,
    waiting: Counter,
    given_back: Condvar,
}

/// A buffer of a [`Buffers`], which gets it back when it is dropped. It holds zeros the first time, and its
/// old contents later.
pub struct Buffer {
    pool: Arc<Pool>,
    number: u32,
}

impl Buffers {
    /// Creates `count` buffers of `buffer_bytes` each, a multiple of [`PAGE_SIZE`].
    /// Fails with `Invalid` for another size, or one above [`MAX_BUFFER_BYTES`]; `NoMemory`.
    pub fn new(count: u32, buffer_bytes: usize) -> Result<Self> {
        if buffer_bytes == 0 || buffer_bytes > MAX_BUFFER_BYTES || !buffer_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(Error::invalid(format!("buffers of {buffer_bytes} bytes are not whole pages")));
        }
        let too_many = || Error::new(ErrorKind::NoMemory, "buffers larger than the address space");
        let len_bytes = (count as usize).checked_mul(buffer_bytes).ok_or_else(too_many)?;
        let mapping = Mapping::new(len_bytes.max(PAGE_SIZE), Access::ReadWrite)
            .map_err(|error| error.with_setting(SETTING))?;
        // In reverse, so that the lowest numbers are taken first.
        let free = Mutex::new(&classes::BACKING_BUFFERS, (0..count).rev().collect());
        let (waiting, given_back) = (Counter::default(), Condvar::new());
        Ok(Buffers { pool: Arc::new(Pool { mapping, buffer_bytes, count, free, waiting, given_back }) })
    }

    /// Takes a buffer, unless all are in use.
    pub fn take(&self) -> Option<Buffer> {
        let number = self.pool.free.lock().pop()?;
        Some(Buffer { pool: Arc::clone(&self.pool), number })
    }

    /// Takes a buffer; waits while all are in use. There must be at least one.
    pub fn take_waiting(&self) -> Buffer {
        let mut free = self.pool.free.lock();
        loop {
            if let Some(number) = free.pop() {
                return Buffer { pool: Arc::clone(&self.pool), number };
            }
            // Under the lock, so that a thread that gives one back after this sees it.
            self.pool.waiting.add(1);
            free = free.wait(&self.pool.given_back);
            self.pool.waiting.sub(1);
        }
    }

    /// Returns the number of free buffers.
    pub fn free(&self) -> usize {
        self.pool.free.lock().len()
    }

    /// Returns the size of all buffers.
    pub fn max_bytes(&self) -> usize {
        self.pool.count as usize * self.pool.buffer_bytes
    }
}

impl Buffer {
    /// Returns a pointer to the first byte. The user of the pointer must own the buffer, so that it is
    /// neither read nor given back meanwhile.
    pub(super) fn start(&self) -> *mut u8 {
        // SAFETY: the mapping has `count` times `buffer_bytes`, and `number` is below `count`.
        unsafe { self.pool.mapping.base().add(self.number as usize * self.pool.buffer_bytes) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes lie in the pool's mapping, which this buffer keeps alive, and were initialised as
        // zeros. No other buffer has this number until this one is dropped, and the kernel writes to them
        // only while a backing owns this buffer.
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
