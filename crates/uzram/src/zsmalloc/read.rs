//! Reading an object: pin it, check that it is the caller's, and let go when the bytes are dropped.

use std::ops::Deref;
use std::ptr::NonNull;

use crate::base::cpu::prefetch;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Ordering;

use super::design::PoolLocks;
use super::raw::{LINE_BYTES, RawPool};
use super::word::{Cell, Location};

impl<D: PoolLocks> RawPool<D> {
    /// Protects the first `len` bytes of an object for reading.
    ///
    /// # Errors
    /// `Corrupt` when what is there does not belong to this handle and owner.
    ///
    /// # Safety
    /// The handle is in use and is not being freed; unless [`READS_OUTLIVE_FREES`], it is not freed
    /// before the result is dropped.
    ///
    /// [`READS_OUTLIVE_FREES`]: super::design::PoolLocks::READS_OUTLIVE_FREES
    #[inline]
    pub unsafe fn read(&self, handle: u32, owner: u32, len: usize) -> Result<RawRead<'_, D>> {
        // SAFETY: the caller's promise.
        let object = unsafe { D::pin(self, handle) };
        self.contents().read(object);
        let (start, header_bytes) = self.place(object);
        let bytes = NonNull::new(start.wrapping_add(header_bytes)).unwrap_or(NonNull::dangling());
        // Unpins on every way out.
        let read = RawRead { pool: self, handle, object, bytes, len };
        // The processor's own prefetcher starts after some misses, which is late for so short a run.
        (0..len).step_by(LINE_BYTES).for_each(|at| prefetch(start.wrapping_add(at)));
        let room = usize::from(self.classes.get(object.class).size_bytes) - header_bytes;
        let named = if header_bytes == 0 {
            [handle, (self.page_table[object.page as usize].load(Ordering::Relaxed) >> 32) as u32]
        } else {
            // SAFETY: the pin keeps the object where it is, and its header was written before its handle
            // was known.
            unsafe { start.cast::<[u32; 2]>().read() }
        };
        if named != [handle, owner] || len > room {
            return Err(Error::new(ErrorKind::Corrupt, "the stored page is damaged: it belongs to another"));
        }
        Ok(read)
    }

    /// Brings nearer what [`RawPool::free`] will touch: a hint, for a number that need not be a
    /// handle at all.
    #[inline]
    pub fn prefetch(&self, handle: u32) {
        // Models have no caches, and need not explore what a hint finds.
        if cfg!(loom) {
            return;
        }
        let Some(cell) = self.handles.hint(handle) else { return };
        // The handle may be freed meanwhile, and its memory be used for anything.
        // SAFETY: a hint is aligned, and stays mapped.
        let Some(object) = (unsafe { D::Cell::hint(cell) }) else { return };
        let (page, class) = (object.page as usize, usize::from(object.class));
        if page < self.page_table.len() && class < self.classes.iter().len() {
            prefetch(&raw const self.page_table[page]);
            prefetch(self.place(object).0);
        }
    }
}

/// The bytes of an object, protected until this is dropped.
pub struct RawRead<'a, D: PoolLocks> {
    pool: &'a RawPool<D>,
    handle: u32,
    object: Location,
    bytes: NonNull<u8>,
    len: usize,
}

impl<D: PoolLocks> Deref for RawRead<'_, D> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `read` found that the object has room for `len` bytes from `bytes` on, which were
        // written with it; the pin keeps it where it is, and nobody writes to an object that is stored.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

impl<D: PoolLocks> Drop for RawRead<'_, D> {
    #[inline]
    fn drop(&mut self) {
        self.pool.contents().read(self.object);
        // SAFETY: this pinned the handle.
        if let Some(released) = unsafe { D::unpin(self.pool, self.handle, self.object) } {
            self.pool.release(self.handle, released);
        }
    }
}
