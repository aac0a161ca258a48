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
use crate::heap::{Heap, SIZES_BYTES, YARDSTICK, pointer};
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
        SYSTEM => Box::new(OfSize::<System, SIZE>(System)),
        #[cfg(feature = "jemalloc")]
        JEMALLOC => Box::new(OfSize::<Jemalloc, SIZE>(Jemalloc)),
        #[cfg(feature = "snmalloc")]
        SNMALLOC => Box::new(OfSize::<Snmalloc, SIZE>(Snmalloc)),
        YARDSTICK => Box::new(OfSize::<Mimalloc, SIZE>(Mimalloc)),
        _ => return None,
    })
}

/// An allocator of memory of any size, one for the whole process.
pub trait Peer: Sync {
    /// Allocates memory; null if there is none.
    fn alloc(&self, size_bytes: usize) -> *mut c_void;

    /// Frees memory.
    ///
    /// # Safety
    /// `alloc` returned it for that size, and it was not freed since.
    unsafe fn free(&self, address: *mut c_void, size_bytes: usize);

    /// Returns as much memory to the system as it can.
    fn give_back(&self);
}

/// Objects of one size, which is a constant in every call, as in a program that uses them.
pub struct OfSize<P, const SIZE: usize>(pub P);

impl<P: Peer, const SIZE: usize> Heap for OfSize<P, SIZE> {
    #[inline]
    fn alloc(&self) -> Result<u64> {
        word(self.0.alloc(SIZE))
    }

    #[inline]
    unsafe fn free(&self, object: u64) -> Result<()> {
        // SAFETY: the caller's object came from `alloc` and is in use.
        unsafe { self.0.free(pointer(object), SIZE) };
        Ok(())
    }
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

/// The C library's allocator.
pub struct System;

impl Peer for System {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> *mut c_void {
        // SAFETY: malloc may be called with any size.
        unsafe { libc::malloc(size_bytes) }
    }

    #[inline]
    unsafe fn free(&self, address: *mut c_void, _: usize) {
        // SAFETY: the caller's.
        unsafe { libc::free(address) }
    }

    fn give_back(&self) {
        #[cfg(target_env = "gnu")]
        // SAFETY: it may be called at any time.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// mimalloc.
pub struct Mimalloc;

impl Peer for Mimalloc {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> *mut c_void {
        // MI_SMALL_SIZE_MAX is 1 KiB.
        if size_bytes <= 1024 {
            // SAFETY: the size is small.
            unsafe { mimalloc::mi_malloc_small(size_bytes) }
        } else {
            // SAFETY: mi_malloc may be called with any size.
            unsafe { mimalloc::mi_malloc(size_bytes) }
        }
    }

    #[inline]
    unsafe fn free(&self, address: *mut c_void, _: usize) {
        // SAFETY: the caller's.
        unsafe { mimalloc::mi_free(address) }
    }

    fn give_back(&self) {
        // SAFETY: it may be called at any time.
        unsafe { mimalloc::mi_collect(true) };
    }
}

/// jemalloc.
#[cfg(feature = "jemalloc")]
pub struct Jemalloc;

#[cfg(feature = "jemalloc")]
impl Peer for Jemalloc {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> *mut c_void {
        // SAFETY: malloc may be called with any size.
        unsafe { tikv_jemalloc_sys::malloc(size_bytes) }
    }

    #[inline]
    unsafe fn free(&self, address: *mut c_void, size_bytes: usize) {
        // SAFETY: the caller's.
        unsafe { tikv_jemalloc_sys::sdallocx(address, size_bytes, 0) }
    }

    fn give_back(&self) {
        // Flush this thread's cache; then purge all arenas (MALLCTL_ARENAS_ALL is their number).
        for name in [c"thread.tcache.flush", c"arena.4096.purge"] {
            let none = std::ptr::null_mut::<c_void>();
            // SAFETY: the name ends with a zero; these two neither read nor write a value.
            unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), none, none.cast(), none, 0) };
        }
    }
}

/// snmalloc; the crate has no call to give memory back.
#[cfg(feature = "snmalloc")]
pub struct Snmalloc;

#[cfg(feature = "snmalloc")]
impl Peer for Snmalloc {
    #[inline]
    fn alloc(&self, size_bytes: usize) -> *mut c_void {
        // SAFETY: the alignment is a power of two.
        unsafe { snmalloc_sys::sn_rust_alloc(ALIGN_BYTES, size_bytes).cast() }
    }

    #[inline]
    unsafe fn free(&self, address: *mut c_void, size_bytes: usize) {
        // SAFETY: the caller's, with this alignment.
        unsafe { snmalloc_sys::sn_rust_dealloc(address.cast(), ALIGN_BYTES, size_bytes) }
    }

    fn give_back(&self) {}
}
