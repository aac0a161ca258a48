//! Reads an object: pins it, checks its handle and owner, and unpins it when the bytes are dropped.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;

use crate::base::cpu::prefetch;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Access;

use super::design::{Pinned, PoolLocks};
use super::raw::{LINE_BYTES, RawPool};
use super::word::{Cell, Location};

impl<D: PoolLocks> RawPool<D> {
    /// Protects the first `len` bytes of an object for reading. Fails with `Corrupt` when the object does not
    /// belong to this handle and owner.
    ///
    /// # Safety
    /// The handle is in use and is not being freed; unless [`READS_OUTLIVE_FREES`], it is not freed
    /// before the result is dropped.
    ///
    /// [`READS_OUTLIVE_FREES`]: super::design::PoolLocks::READS_OUTLIVE_FREES
    #[inline]
    pub unsafe fn read(&self, handle: u32, owner: u32, len: usize) -> Result<ObjectRead<'_, D>> {
        // SAFETY: the caller's promise.
        let object = unsafe { D::pin(self, handle) };
        self.note_access(object, Access::read);
        let (start, header_bytes) = self.place(object);
        let bytes = NonNull::new(start.wrapping_add(header_bytes)).unwrap_or(NonNull::dangling());
        // Unpins on every return path.
        let read = ObjectRead { pool: self, handle, object, bytes, len };
        // The hardware prefetcher starts only after some misses: too late for an object this short.
        (0..len).step_by(LINE_BYTES).for_each(|at| prefetch(start.wrapping_add(at)));
        let room = usize::from(self.classes.get(object.class).size_bytes) - header_bytes;
        let named = if header_bytes == 0 {
            [handle, self.huge_owner(object.page)]
        } else {
            // SAFETY: the pin keeps the object in place, and its header was written before its handle was
            // published.
            unsafe { start.cast::<[u32; 2]>().read() }
        };
        if named != [handle, owner] || len > room {
            return Err(Error::new(ErrorKind::Corrupt, "the stored page is damaged: its header is wrong"));
        }
        Ok(read)
    }

    /// Prefetches what [`RawPool::free`] will touch: a hint. `handle` need not be a valid handle.
    #[inline]
    pub fn prefetch(&self, handle: u32) {
        // Models have no caches and need not explore hints.
        if cfg!(loom) {
            return;
        }
        let Some(cell) = self.handles.hint(handle) else { return };
        // The handle may be freed concurrently and its memory reused for anything.
        // SAFETY: a hint is aligned, and stays mapped.
        let Some(object) = (unsafe { D::Cell::hint(cell) }) else { return };
        let (page, class) = (object.page as usize, usize::from(object.class));
        if page < self.page_table.len() && class < self.classes.iter().len() {
            prefetch(&raw const self.page_table[page]);
            prefetch(self.place(object).0);
        }
    }
}

/// The bytes of an object, which neither move nor change until this is dropped.
pub struct ObjectRead<'a, D: PoolLocks = Pinned> {
    pool: &'a RawPool<D>,
    handle: u32,
    object: Location,
    bytes: NonNull<u8>,
    len: usize,
}

impl<D: PoolLocks> Deref for ObjectRead<'_, D> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `read` checked that the object has room for `len` bytes from `bytes` on, and they were
        // written before it was published; the pin keeps it in place, and no thread writes to a stored
        // object.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

impl<D: PoolLocks> fmt::Debug for ObjectRead<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectRead({} bytes)", self.len())
    }
}

impl<D: PoolLocks> Drop for ObjectRead<'_, D> {
    #[inline]
    fn drop(&mut self) {
        self.pool.note_access(self.object, Access::read);
        // SAFETY: this value holds the pin.
        if let Some(released) = unsafe { D::unpin(self.pool, self.handle, self.object) } {
            self.pool.release(self.handle, released);
        }
    }
}
