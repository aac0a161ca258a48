//! What is compared: a [`Heap`] has objects of one size.

use uzram::Result;

/// The measured object sizes.
pub const SIZES_BYTES: [usize; 2] = [64, 256];

/// The allocator that the targets refer to. It is measured last, so that the lab calibrates on it.
pub const YARDSTICK: &str = "mimalloc";

/// An allocator's objects of one size, each named by a word: an address, or a number.
pub trait Heap: Sync {
    /// Allocates an object with undefined contents.
    fn alloc(&self) -> Result<u64>;

    /// Returns the address of an object, which by default is its name.
    ///
    /// # Safety
    /// It is an object of this heap in use.
    #[inline]
    unsafe fn address(&self, object: u64) -> *mut u64 {
        pointer(object)
    }

    /// Frees an object.
    ///
    /// # Safety
    /// It is an object of this heap in use, and is not used afterwards.
    unsafe fn free(&self, object: u64) -> Result<()>;
}

/// The alignment of objects, as `malloc` guarantees it.
pub const ALIGN_BYTES: usize = 16;

/// Returns the pointer to an object whose name is its address.
#[inline]
pub fn pointer<T>(object: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(object as usize)
}
