//! The C library's streams, stdio(3), when a process forks.
//!
//! In the child the C library resets the lock of each open stream before the child has a pager of its own:
//! all streams must be in memory then. fork(3) takes the lock of their list, and a thread that has it may
//! wait for a page: so it is taken before the pager stops, and held until the process has forked.

use std::ffi::c_void;

use crate::real::Next;
use crate::state::is_managed_address;

/// Where a stream has the address of its lock: `struct _IO_FILE` of <bits/types/struct_FILE.h> is in the ABI.
const LOCK_OFFSET: usize = 136;
/// The size of that struct, up to the part that only the library uses.
const STREAM_BYTES: usize = 216;

type Stream = *mut c_void;

static LOCK: Next = Next::new(c"_IO_list_lock");
static UNLOCK: Next = Next::new(c"_IO_list_unlock");
static RESET: Next = Next::new(c"_IO_list_resetlock");
static BEGIN: Next = Next::new(c"_IO_iter_begin");
static END: Next = Next::new(c"_IO_iter_end");
static NEXT: Next = Next::new(c"_IO_iter_next");
static FILE: Next = Next::new(c"_IO_iter_file");

/// Looks the functions up. Later, the loader may be held up by a thread that waits for a page.
pub fn prepare() {
    for function in [&LOCK, &UNLOCK, &RESET, &BEGIN, &END, &NEXT, &FILE] {
        function.get();
    }
}

fn call(function: &Next) {
    let found = function.get();
    if !found.is_null() {
        // SAFETY: the functions that are called so take and return nothing.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(found)() };
    }
}

fn stream_of(function: &Next, argument: Stream) -> Stream {
    let found = function.get();
    if found.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the functions that are called so return a stream, and take one, or nothing.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Stream) -> Stream>(found)(argument) }
}

pub fn lock_list() {
    call(&LOCK);
}

/// Not in a child: see [`reset_list`].
pub fn unlock_list() {
    call(&UNLOCK);
}

/// Frees the lock in a child. The C library does so only in one of a process with threads.
pub fn reset_list() {
    call(&RESET);
}

/// Touches all streams. The caller holds the lock of the list.
pub fn touch_all() {
    let none = std::ptr::null_mut();
    let (end, mut at) = (stream_of(&END, none), stream_of(&BEGIN, none));
    while at != end {
        let stream = stream_of(&FILE, at).cast::<u8>();
        if !stream.is_null() {
            // SAFETY: the stream is in the list, which nobody changes, and so is its lock, if it has one.
            unsafe {
                touch(stream);
                touch(stream.add(STREAM_BYTES - 1));
                touch(stream.add(LOCK_OFFSET).cast::<*mut u8>().read_unaligned());
            }
        }
        at = stream_of(&NEXT, at);
    }
}

/// Has a page in memory, if it is managed.
///
/// # Safety
/// The address is readable, or not managed.
unsafe fn touch(address: *mut u8) {
    if is_managed_address(address.addr()) {
        // SAFETY: as the caller's.
        unsafe { address.read_volatile() };
    }
}
