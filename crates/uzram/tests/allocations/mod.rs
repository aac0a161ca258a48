//! Counts what this thread allocates: Rust's allocations and those of C code linked in.
//!
//! The program's own `malloc` counts and hands on to glibc's. Rust's allocator and the C libraries
//! linked in here both end in it.

use std::cell::Cell;
use std::ffi::c_void;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn add_one() {
    ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + 1));
}

/// How many allocations this thread has made.
pub fn count() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, bytes: usize) -> *mut c_void;
}

// SAFETY: the C library's malloc with the same contract; every caller gets it from there.
#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    add_one();
    // SAFETY: handed on as it came.
    unsafe { __libc_malloc(bytes) }
}

// SAFETY: as for malloc.
#[unsafe(no_mangle)]
unsafe extern "C" fn calloc(members: usize, bytes: usize) -> *mut c_void {
    add_one();
    // SAFETY: handed on as it came.
    unsafe { __libc_calloc(members, bytes) }
}

// SAFETY: as for malloc.
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    add_one();
    // SAFETY: handed on as it came.
    unsafe { __libc_realloc(old, bytes) }
}
