//! Objects that the allocating thread writes and the freeing thread checks: so no access is optimised away,
//! and an object that two threads had at the same time is detected.

use std::sync::Arc;

use uzram::mem::{Arena, Gfp};
use uzram::slab::{Cache, CacheConfig, CacheInfo, Policy};
use uzram::{Error, ErrorKind, Result};

/// Objects beside those in flight: room in the slabs that CPUs hold.
const SLACK_OBJECTS: u64 = 1 << 16;

pub(crate) struct Objects<P: Policy> {
    cache: Cache<P>,
    size_bytes: usize,
}

impl<P: Policy> Objects<P> {
    /// Makes a cache for `in_flight` objects at a time, and as many again for slabs that are not full.
    pub(crate) fn new(
        arena: &Arc<Arena>,
        name: &str,
        size_bytes: usize,
        align_bytes: usize,
        in_flight: u64,
    ) -> Result<Self> {
        let mut options = CacheConfig::new(name, size_bytes, align_bytes, 2 * in_flight + SLACK_OBJECTS);
        options.max_objects_setting = "--jobs";
        Ok(Objects { cache: Cache::new(Arc::clone(arena), options)?, size_bytes })
    }

    #[inline]
    pub(crate) fn take(&self, content: &[u8]) -> Result<u32> {
        debug_assert!(content.len() <= self.size_bytes);
        let object = self.cache.alloc(Gfp::MayWait)?;
        let len_bytes = content.len().min(self.size_bytes);
        // SAFETY: the object has `size_bytes` bytes and is in use by its taker alone, this thread,
        // until that hands its number on.
        unsafe { self.cache.address(object).copy_from_nonoverlapping(content.as_ptr(), len_bytes) };
        Ok(object)
    }

    /// Checks an object's content and frees it.
    ///
    /// # Safety
    /// The object is in use, and the thread that took it handed its number to this thread alone.
    #[inline]
    pub(crate) unsafe fn give_back(&self, object: u32, content: &[u8]) -> Result<()> {
        let len_bytes = content.len().min(self.size_bytes);
        // SAFETY: an object in use has `size_bytes` bytes, the thread that took it wrote the bytes that are
        // read, and by the caller's promise no thread writes to it now.
        let found = unsafe { std::slice::from_raw_parts(self.cache.address(object).cast_const(), len_bytes) };
        if found != content {
            let what = format!("an object of {} was not received as it was sent", self.cache.info().name);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        self.cache.free(object)
    }

    pub(crate) fn info(&self) -> CacheInfo {
        self.cache.info()
    }
}

/// The content of a message or packet: N bytes that identify its sender; the first eight hold its number
/// among those of this sender.
pub(crate) struct Content<const N: usize>([u8; N]);

impl<const N: usize> Content<N> {
    pub(crate) fn of(sender: usize) -> Self {
        // Never zero, as fresh memory is.
        Content([sender as u8 | 0x80; N])
    }

    /// Sets the number; returns the bytes.
    #[inline]
    pub(crate) fn numbered(&mut self, number: u64) -> &[u8] {
        const { assert!(N >= size_of::<u64>()) };
        self.0[..size_of::<u64>()].copy_from_slice(&number.to_le_bytes());
        &self.0
    }
}
