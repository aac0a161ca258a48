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
use crate::heap::{Heap, pointer};

pub const SYSTEM: &str = "system";
/// The allocator that the targets refer to. It is measured last, so that the lab calibrates on it.
pub const MIMALLOC: &str = "mimalloc";
#[cfg(feature = "jemalloc")]
pub const JEMALLOC: &str = "jemalloc";
#[cfg(feature = "snmalloc")]
pub const SNMALLOC: &str = "snmalloc";

/// The allocators of this build.
pub const NAMES: &[&str] = &[
    SYSTEM,
    #[cfg(feature = "jemalloc")]
    JEMALLOC,
    #[cfg(feature = "snmalloc")]
    SNMALLOC,
    MIMALLOC,
];

/// The allocators that this build leaves out.
pub const LEFT_OUT: &[&str] = &[
    #[cfg(not(feature = "jemalloc"))]
    "jemalloc",
    #[cfg(not(feature = "snmalloc"))]
    "snmalloc",
];

/// Returns the address that an allocator returned, as a word.
#[inline]
fn word(address: *mut c_void) -> Result<u64> {
    if address.is_null() { Err(none()) } else { Ok(address.expose_provenance() as u64) }
}

#[cold]
fn none() -> Error {
    Error::new(ErrorKind::NoMemory, "the allocator returned no memory")
}

pub struct System;

impl Heap for System {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> Result<u64> {
        // SAFETY: malloc may be called with any size.
        word(unsafe { libc::malloc(size_bytes) })
    }

    #[inline]
    unsafe fn free(&self, object: u64, _: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { libc::free(pointer(object)) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        #[cfg(target_env = "gnu")]
        // SAFETY: it may be called at any time.
        unsafe {
            libc::malloc_trim(0);
        }
        Ok(())
    }
}

pub struct Mimalloc;

impl Heap for Mimalloc {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> Result<u64> {
        // MI_SMALL_SIZE_MAX is 1 KiB.
        if size_bytes <= 1024 {
            // SAFETY: the size is small.
            word(unsafe { mimalloc::mi_malloc_small(size_bytes) })
        } else {
            // SAFETY: mi_malloc may be called with any size.
            word(unsafe { mimalloc::mi_malloc(size_bytes) })
        }
    }

    #[inline]
    unsafe fn free(&self, object: u64, _: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { mimalloc::mi_free(pointer(object)) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        // SAFETY: it may be called at any time.
        unsafe { mimalloc::mi_collect(true) };
        Ok(())
    }
}

#[cfg(feature = "jemalloc")]
pub struct Jemalloc;

#[cfg(feature = "jemalloc")]
impl Heap for Jemalloc {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> Result<u64> {
        // SAFETY: malloc may be called with any size.
        word(unsafe { tikv_jemalloc_sys::malloc(size_bytes) })
    }

    #[inline]
    unsafe fn free(&self, object: u64, size_bytes: usize) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { tikv_jemalloc_sys::sdallocx(pointer(object), size_bytes, 0) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        // Flush this thread's cache; then purge all arenas (MALLCTL_ARENAS_ALL is their number).
        for name in [c"thread.tcache.flush", c"arena.4096.purge"] {
            let none = std::ptr::null_mut::<c_void>();
            // SAFETY: the name ends with a zero; these two neither read nor write a value.
            unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), none, none.cast(), none, 0) };
        }
        Ok(())
    }
}

/// snmalloc; the crate has no call to give memory back.
#[cfg(feature = "snmalloc")]
pub struct Snmalloc;

#[cfg(feature = "snmalloc")]
impl Heap for Snmalloc {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> Result<u64> {
        // SAFETY: the alignment is a power of two.
        word(unsafe { snmalloc_sys::sn_rust_alloc(ALIGN_BYTES, size_bytes).cast() })
    }

    #[inline]
    unsafe fn free(&self, object: u64, size_bytes: usize) -> Result<()> {
        // SAFETY: the caller's, with this alignment.
        unsafe { snmalloc_sys::sn_rust_dealloc(pointer(object), ALIGN_BYTES, size_bytes) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        Ok(())
    }
}
