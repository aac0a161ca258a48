//! close(2) and its relatives: a program that closes all descriptors, as daemons do, does not close the
//! library's own. To the program these are not open.

use std::ffi::{c_int, c_uint};

use uzram_pager::descriptors::is_kept;

use crate::real::{next, set_errno};

/// The highest number that is looked at.
const MOST: c_uint = c_int::MAX as c_uint;

fn not_open() -> c_int {
    set_errno(libc::EBADF);
    -1
}

/// # Safety
/// As close(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    if is_kept(fd) {
        return not_open();
    }
    next!(c"close", fn(c_int) -> c_int, (fd), else -1)
}

crate::real::export! {
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int = close_all;
}

/// # Safety
/// As `close_range`(2).
unsafe fn close_all(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: as the caller's.
    let close = |first: c_uint, last: c_uint| unsafe {
        libc::syscall(libc::SYS_close_range, first, last, flags) as c_int
    };
    if first > last {
        return close(first, last);
    }
    let mut from = first;
    for kept in
        (first.min(MOST)..=last.min(MOST).min(first.max(LEAST) + SPAN)).filter(|fd| is_kept(*fd as c_int))
    {
        if kept > from {
            let closed = close(from, kept - 1);
            if closed != 0 {
                return closed;
            }
        }
        from = kept + 1;
    }
    if from > last { 0 } else { close(from, last) }
}

/// No descriptor of the library has a number above these together.
const LEAST: c_uint = 900;
const SPAN: c_uint = 64;

/// # Safety
/// As closefrom(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: as the caller's.
    unsafe { close_all(first.max(0).cast_unsigned(), c_uint::MAX, 0) };
}

/// # Safety
/// As dup2(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if is_kept(old) || is_kept(new) {
        return not_open();
    }
    next!(c"dup2", fn(c_int, c_int) -> c_int, (old, new), else -1)
}

/// # Safety
/// As dup3(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if is_kept(old) || is_kept(new) {
        return not_open();
    }
    next!(c"dup3", fn(c_int, c_int, c_int) -> c_int, (old, new, flags), else -1)
}
