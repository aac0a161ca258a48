//! What is compared: a [`Heap`] has objects, whose size is a constant in every call that is timed, as in a
//! program that uses it.

use uzram::Result;
use uzram::mem::{Arena, Gfp};
use uzram::slab::{Cache, CacheConfig, Policy};
use uzram::sync::Arc;

pub const SIZES_BYTES: [usize; 2] = [64, 256];

/// The slab caches by default, without hardening.
pub const PLAIN: &str = "uzram";
/// The slab caches as the engine uses them.
pub const HARDENED: &str = "uzram hardened";

/// An allocator's objects, each named by a word: an address, or a number.
pub trait Heap: Sync {
    /// Allocates an object with undefined contents.
    fn alloc(&self, size_bytes: usize) -> Result<u64>;

    /// Returns the address of an object, which by default is its name.
    ///
    /// # Safety
    /// It is an object of this heap in use.
    #[inline]
    unsafe fn address(&self, object: u64) -> *mut u8 {
        pointer(object)
    }

    /// Frees an object.
    ///
    /// # Safety
    /// It is an object of this heap in use, of this size, and is not used afterwards.
    unsafe fn free(&self, object: u64, size_bytes: usize) -> Result<()>;

    /// Returns as much memory to the system as it can.
    fn give_back(&self) -> Result<()>;
}

/// The alignment of objects, as `malloc` guarantees it.
pub const ALIGN_BYTES: usize = 16;

/// Returns the pointer to an object whose name is its address.
#[inline]
pub fn pointer<T>(object: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(object as usize)
}

pub struct OfSize<H, const SIZE: usize>(pub H);

/// A slab cache, whose objects have one size.
pub struct Slab<P: Policy> {
    cache: Cache<P>,
    arena: Arc<Arena>,
}

impl<P: Policy> Slab<P> {
    pub fn new(size_bytes: usize, max_objects: u64) -> Result<Slab<P>> {
        // Twice, to have room for partly filled slabs, and in small caches for a slab of each CPU.
        let reserve_bytes = 2 * max_objects * size_bytes as u64 + (64 << 20);
        let arena = Arc::new(Arena::new(reserve_bytes)?);
        let options = CacheConfig::new("bench", size_bytes, ALIGN_BYTES, max_objects);
        Ok(Slab { cache: Cache::new(Arc::clone(&arena), options)?, arena })
    }
}

impl<P: Policy> Heap for Slab<P> {
    #[inline]
    fn alloc(&self, _: usize) -> Result<u64> {
        self.cache.alloc(Gfp::MayWait).map(u64::from)
    }

    #[inline]
    unsafe fn address(&self, object: u64) -> *mut u8 {
        self.cache.address(object as u32)
    }

    #[inline]
    unsafe fn free(&self, object: u64, _: usize) -> Result<()> {
        self.cache.free(object as u32)
    }

    fn give_back(&self) -> Result<()> {
        self.cache.shrink()?;
        // The arena's free memory kept for reuse is also the cache's.
        self.arena.release_free();
        Ok(())
    }
}
