//! The library's own memory: the C library's allocator, by the names that nothing takes the place of. The
//! program does not use it any more. Its locks are free when a process forks: the C library sees to that.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_void};

use crate::heap::release;
use crate::real::{__libc_calloc, __libc_free, __libc_malloc, __libc_memalign, __libc_realloc};

/// What malloc(3) aligns blocks to.
const ALIGN: usize = 16;

struct Own;

#[global_allocator]
static OWN: Own = Own;

// SAFETY: the C library's allocator does what malloc(3) says.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size is allowed, and alignments are powers of two.
        let block = unsafe {
            if layout.align() <= ALIGN {
                __libc_malloc(layout.size())
            } else {
                __libc_memalign(layout.align(), layout.size())
            }
        };
        block.cast()
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= ALIGN {
            // SAFETY: any size is allowed.
            return unsafe { __libc_calloc(1, layout.size()) }.cast();
        }
        // SAFETY: the caller's promises; the block has this size.
        unsafe {
            let block = self.alloc(layout);
            if !block.is_null() {
                block.write_bytes(0, layout.size());
            }
            block
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promises.
        unsafe {
            if layout.align() <= ALIGN {
                return __libc_realloc(block.cast(), size).cast();
            }
            let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !new.is_null() {
                new.copy_from_nonoverlapping(block, size.min(layout.size()));
                self.dealloc(block, layout);
            }
            new
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: it is a block of this allocator.
        unsafe { __libc_free(block.cast()) };
    }
}

// What C code inside the library calls: see `build.rs`.
crate::real::export! {
    __wrap_malloc(size: usize) -> *mut c_void = __libc_malloc;
    __wrap_calloc(count: usize, size: usize) -> *mut c_void = __libc_calloc;
    __wrap_realloc(block: *mut c_void, size: usize) -> *mut c_void = __libc_realloc;
    // Not `__libc_free`: what the C library returns, such as a path, may be the program's.
    __wrap_free(block: *mut c_void) -> () = release;
    __wrap_aligned_alloc(align: usize, size: usize) -> *mut c_void = __libc_memalign;
}

/// # Safety
/// As `posix_memalign`(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    // SAFETY: as the caller's.
    unsafe {
        let block = __libc_memalign(align, size);
        if block.is_null() {
            return libc::ENOMEM;
        }
        *out = block;
    }
    0
}
