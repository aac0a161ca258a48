//! The other allocators, each by its calls that were fastest here.
//!
//! | allocator | calls | instead of, slower or not faster |
//! |---|---|---|
//! | system (glibc) | `malloc`, `free` | it has no others |
//! | jemalloc 5.3 | `malloc`, `sdallocx` with the size | `free`, `mallocx`, `dallocx` |
//! | snmalloc 0.7 | `sn_rust_alloc`, `sn_rust_dealloc` with size and alignment | it has no others |
//! | mimalloc 3.3 | `mi_malloc_small`, `mi_free` | `mi_malloc`, `mi_free_small`, `mi_theap_malloc_small` |
//!
//! The size is a constant in every call, as in a program that uses them. All are built with their crates'
//! defaults, optimised and without checks. Each is one heap for the whole process, so these types are empty.

use std::ffi::c_void;

use libmimalloc_sys as mimalloc;
use uzram::{Error, ErrorKind, Result};

#[cfg(feature = "snmalloc")]
use crate::heap::ALIGN_BYTES;
use crate::heap::{Heap, SIZES_BYTES, YARDSTICK};
use crate::measured::Measured;

/// The C library's.
pub const SYSTEM: &str = "system";
/// mimalloc.
pub const MIMALLOC: &str = YARDSTICK;
#[cfg(feature = "jemalloc")]
pub const JEMALLOC: &str = "jemalloc";
#[cfg(feature = "snmalloc")]
pub const SNMALLOC: &str = "snmalloc";

/// The allocators of this build; the yardstick is the last.
pub const NAMES: &[&str] = &[
    SYSTEM,
    #[cfg(feature = "jemalloc")]
    JEMALLOC,
    #[cfg(feature = "snmalloc")]
    SNMALLOC,
    YARDSTICK,
];

/// The allocators that this build leaves out.
pub const LEFT_OUT: &[&str] = &[
    #[cfg(not(feature = "jemalloc"))]
    "jemalloc",
    #[cfg(not(feature = "snmalloc"))]
    "snmalloc",
];

/// Opens the heap of that name, for objects of one of [`SIZES_BYTES`].
pub fn open(name: &str, size_bytes: usize) -> Option<Box<dyn Measured>> {
    match size_bytes {
        64 => of_size::<64>(name),
        256 => of_size::<256>(name),
        _ => None,
    }
}

const _: () = assert!(SIZES_BYTES[0] == 64 && SIZES_BYTES[1] == 256, "open() knows these");

fn of_size<const SIZE: usize>(name: &str) -> Option<Box<dyn Measured>> {
    Some(match name {
        SYSTEM => Box::new(System::<SIZE>),
        #[cfg(feature = "jemalloc")]
        JEMALLOC => Box::new(Jemalloc::<SIZE>),
        #[cfg(feature = "snmalloc")]
        SNMALLOC => Box::new(Snmalloc::<SIZE>),
        YARDSTICK => Box::new(Mimalloc::<SIZE>),
        _ => return None,
    })
}

/// Returns the address that an allocator returned, as a word.
#[inline]
pub fn word(address: *mut c_void) -> Result<u64> {
    if address.is_null() { Err(none()) } else { Ok(address.expose_provenance() as u64) }
}

#[cold]
fn none() -> Error {
    Error::new(ErrorKind::NoMemory, "the allocator returned no memory")
}

/// Returns the pointer to an object whose name is its address.
#[inline]
pub fn pointer<T>(object: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(object as usize)
}

/// The C library's allocator.
pub struct System<const SIZE: usize>;

impl<const SIZE: usize> Heap for System<SIZE> {
    #[inline]
    fn alloc(&self) -> Result<u64> {
        // SAFETY: malloc may be called with any size.
        word(unsafe { libc::malloc(SIZE) })
    }

    #[inline]
    unsafe fn free(&self, object: u64) -> Result<()> {
        // SAFETY: the caller's object came from `alloc` and is in use.
        unsafe { libc::free(pointer(object)) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        give_back_system()
    }
}

/// Has the C library return memory to the system.
pub fn give_back_system() -> Result<()> {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
    Ok(())
}

/// mimalloc.
pub struct Mimalloc<const SIZE: usize>;

impl<const SIZE: usize> Heap for Mimalloc<SIZE> {
    #[inline]
    fn alloc(&self) -> Result<u64> {
        // SAFETY: SIZE is below MI_SMALL_SIZE_MAX, which is 1 KiB.
        word(unsafe { mimalloc::mi_malloc_small(SIZE) })
    }

    #[inline]
    unsafe fn free(&self, object: u64) -> Result<()> {
        // SAFETY: the caller's object came from `alloc` and is in use.
        unsafe { mimalloc::mi_free(pointer(object)) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        give_back_mimalloc()
    }
}

/// Has mimalloc return memory to the system.
pub fn give_back_mimalloc() -> Result<()> {
    // SAFETY: it may be called at any time.
    unsafe { mimalloc::mi_collect(true) };
    Ok(())
}

/// jemalloc.
#[cfg(feature = "jemalloc")]
pub struct Jemalloc<const SIZE: usize>;

#[cfg(feature = "jemalloc")]
impl<const SIZE: usize> Heap for Jemalloc<SIZE> {
    #[inline]
    fn alloc(&self) -> Result<u64> {
        // SAFETY: malloc may be called with any size.
        word(unsafe { tikv_jemalloc_sys::malloc(SIZE) })
    }

    #[inline]
    unsafe fn free(&self, object: u64) -> Result<()> {
        // SAFETY: the caller's object came from `alloc`, with this size, and is in use.
        unsafe { tikv_jemalloc_sys::sdallocx(pointer(object), SIZE, 0) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        give_back_jemalloc()
    }
}

/// Has jemalloc return memory to the system.
#[cfg(feature = "jemalloc")]
pub fn give_back_jemalloc() -> Result<()> {
    // Flush this thread's cache; then purge all arenas (MALLCTL_ARENAS_ALL is their number).
    for name in [c"thread.tcache.flush", c"arena.4096.purge"] {
        let none = std::ptr::null_mut::<c_void>();
        // SAFETY: the name ends with a zero; these two neither read nor write a value.
        unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), none, none.cast(), none, 0) };
    }
    Ok(())
}

/// snmalloc.
#[cfg(feature = "snmalloc")]
pub struct Snmalloc<const SIZE: usize>;

#[cfg(feature = "snmalloc")]
impl<const SIZE: usize> Heap for Snmalloc<SIZE> {
    #[inline]
    fn alloc(&self) -> Result<u64> {
        // SAFETY: the alignment is a power of two.
        word(unsafe { snmalloc_sys::sn_rust_alloc(ALIGN_BYTES, SIZE) })
    }

    #[inline]
    unsafe fn free(&self, object: u64) -> Result<()> {
        // SAFETY: the caller's object came from `alloc`, with this size and alignment, and is in use.
        unsafe { snmalloc_sys::sn_rust_dealloc(pointer(object), ALIGN_BYTES, SIZE) };
        Ok(())
    }

    /// Does nothing: the crate has no call for it.
    fn give_back(&self) -> Result<()> {
        Ok(())
    }
}
