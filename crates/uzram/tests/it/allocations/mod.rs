//! Counts this thread's allocations, those of Rust and those of linked C code.
//!
//! The program's own `malloc` counts, and then calls glibc's. Rust's allocator and the C libraries
//! linked in here both call it.

use std::cell::Cell;
use std::ffi::c_void;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn add_one() {
    ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + 1));
}

pub fn count() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, bytes: usize) -> *mut c_void;
}

// SAFETY: it has the contract of the C library's malloc, whose result it returns.
#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    add_one();
    // SAFETY: the caller's argument, unchanged.
    unsafe { __libc_malloc(bytes) }
}

// SAFETY: as for malloc.
#[unsafe(no_mangle)]
unsafe extern "C" fn calloc(members: usize, bytes: usize) -> *mut c_void {
    add_one();
    // SAFETY: the caller's arguments, unchanged.
    unsafe { __libc_calloc(members, bytes) }
}

// SAFETY: as for malloc.
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    add_one();
    // SAFETY: the caller's arguments, unchanged.
    unsafe { __libc_realloc(old, bytes) }
}
