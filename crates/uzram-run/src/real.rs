//! The functions whose place this library takes: system calls, and the C library's own.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Also what C code inside the library calls: see `build.rs`.
///
/// # Safety
/// As mmap(2).
#[unsafe(export_name = "__wrap_mmap")]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as the caller's.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, address, len, protection, flags, fd, offset) };
    std::ptr::with_exposed_provenance_mut(mapped as usize)
}

/// As [`mmap`].
///
/// # Safety
/// As munmap(2).
#[unsafe(export_name = "__wrap_munmap")]
pub unsafe extern "C" fn munmap(address: *mut c_void, len: usize) -> c_int {
    // SAFETY: as the caller's.
    unsafe { libc::syscall(libc::SYS_munmap, address, len) as c_int }
}

// The allocator of the C library, by the names that nothing takes the place of.
unsafe extern "C" {
    pub fn __libc_malloc(size: usize) -> *mut c_void;
    pub fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
    pub fn __libc_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    pub fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
    pub fn __libc_free(block: *mut c_void);
}

/// A function of the library behind this one, looked up when it is called first.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub const fn new(name: &'static CStr) -> Next {
        Next { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the function's address; null if there is none.
    pub fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name ends with a zero.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the next function of a name with arguments; evaluates to `$else` if there is none.
macro_rules! next {
    ($name:literal, fn($($kind:ty),*) -> $result:ty, ($($argument:expr),*), else $else:expr) => {{
        static NEXT: $crate::real::Next = $crate::real::Next::new($name);
        let found = NEXT.get();
        if found.is_null() {
            $else
        } else {
            // SAFETY: the C library's function of this name has this type.
            let call = unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($kind),*) -> $result>(found)
            };
            // SAFETY: as the caller's.
            unsafe { call($($argument),*) }
        }
    }};
}
pub(crate) use next;

/// Exports functions by the names of the C library's: each is the one behind the `=`.
macro_rules! export {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty = $function:ident;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            // SAFETY: as the caller's.
            unsafe { $function($($argument),*) }
        }
    )*};
}
pub(crate) use export;

/// Sets errno(3).
pub fn set_errno(error: c_int) {
    // SAFETY: it is this thread's.
    unsafe { *libc::__errno_location() = error };
}
