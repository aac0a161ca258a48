//! mmap(2) and its relatives.
//!
//! Private anonymous mappings of some size are managed, unless they are to be at an address elsewhere, or are
//! stacks, locked or of huge pages: such are the kernel's as before. What concerns managed addresses goes to
//! the pager.

use std::ffi::{c_int, c_void};
use std::ptr::{self, null_mut};

use libc::{
    MAP_32BIT, MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_GROWSDOWN, MAP_HUGETLB,
    MAP_LOCKED, MAP_PRIVATE, MAP_SHARED, MAP_STACK, MREMAP_DONTUNMAP, MREMAP_FIXED, MREMAP_MAYMOVE,
};
use uzram_pager::Memory;

use crate::inside::Inside;
use crate::real::{self, set_errno};
use crate::state::{is_managed_address, with_memory};

/// Smaller mappings are not worth a run of pages of their own.
const LEAST_BYTES: usize = 64 << 10;
const PAGE_BYTES: usize = 4096;
/// No process has more address space.
const MOST_BYTES: usize = 1 << 56;
/// Bits of mappings that are the kernel's as before.
const NOT_MANAGED: c_int = MAP_SHARED
    | MAP_FIXED
    | MAP_FIXED_NOREPLACE
    | MAP_GROWSDOWN
    | MAP_STACK
    | MAP_LOCKED
    | MAP_HUGETLB
    | MAP_32BIT;

/// Calls `f` with the memory as long as the library has one, marked as inside.
fn managed<R>(f: impl FnOnce(&'static Memory) -> R) -> Option<R> {
    let _inside = Inside::enter();
    with_memory(f)
}

/// Calls `f` if an address is managed, and returns what a system call would. `None` if the kernel is to be
/// asked.
fn for_managed(
    address: *mut c_void,
    len: usize,
    f: impl FnOnce(&'static Memory) -> Option<Result<(), c_int>>,
) -> Option<c_int> {
    if !overlaps(address.addr(), len) || !is_sound(address, len) {
        return None;
    }
    Some(match managed(f).flatten()? {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error);
            -1
        }
    })
}

/// Returns whether a range begins with a page, and is not empty or longer than any could be: otherwise the
/// kernel refuses it.
fn is_sound(address: *mut c_void, len: usize) -> bool {
    address.addr().is_multiple_of(PAGE_BYTES) && len > 0 && len < MOST_BYTES
}

fn failed(error: c_int) -> *mut c_void {
    set_errno(error);
    MAP_FAILED
}

real::export! {
    mmap(at: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, from: i64) -> *mut c_void = map;
    mmap64(at: *mut c_void, len: usize, protection: c_int, flags: c_int, fd: c_int, from: i64) -> *mut c_void = map;
    munmap(address: *mut c_void, len: usize) -> c_int = unmap;
    mprotect(address: *mut c_void, len: usize, protection: c_int) -> c_int = protect;
    madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int = advise;
}

/// # Safety
/// As mmap(2).
unsafe fn map(
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as the caller's.
    let by_kernel = || unsafe { real::mmap(address, len, protection, flags, fd, offset) };
    let is_anonymous = flags & MAP_ANONYMOUS != 0 && flags & MAP_PRIVATE != 0;
    if flags & (MAP_FIXED | MAP_FIXED_NOREPLACE) != 0 {
        if flags & MAP_FIXED_NOREPLACE != 0 || !overlaps(address.addr(), len) || !is_sound(address, len) {
            return by_kernel();
        }
        let is_plain = is_anonymous && flags & NOT_MANAGED & !MAP_FIXED == 0;
        return managed(|memory| {
            if is_plain {
                let mapped = memory.map_at(address.addr(), len, protection);
                return mapped.map(|mapped| mapped.map_or_else(failed, |()| address));
            }
            // What is there is lost: so first elsewhere, to see whether it can be mapped at all.
            // SAFETY: a new mapping at an address that the kernel chooses, which is unmapped again.
            let probe = unsafe { real::mmap(null_mut(), len, protection, flags & !MAP_FIXED, fd, offset) };
            if probe == MAP_FAILED {
                return Some(MAP_FAILED);
            }
            // SAFETY: as above.
            unsafe { real::munmap(probe, len) };
            memory.replace(address.addr(), len, by_kernel)
        })
        .flatten()
        .unwrap_or_else(|| failed(libc::ENOMEM));
    }
    if is_anonymous && len >= LEAST_BYTES && flags & NOT_MANAGED == 0 {
        let mapped = managed(|memory| memory.map(len, PAGE_BYTES, protection)).flatten();
        if let Some(mapped) = mapped {
            return mapped.cast();
        }
    }
    by_kernel()
}

/// Returns whether bytes lie among the managed addresses, or some of them.
fn overlaps(address: usize, len: usize) -> bool {
    is_managed_address(address) || is_managed_address(address.saturating_add(len.saturating_sub(1)))
}

/// # Safety
/// As munmap(2).
unsafe fn unmap(address: *mut c_void, len: usize) -> c_int {
    // SAFETY: as the caller's.
    let by_kernel =
        |address: usize, len: usize| unsafe { real::munmap(ptr::with_exposed_provenance_mut(address), len) };
    if !overlaps(address.addr(), len) || !is_sound(address, len) {
        return by_kernel(address.expose_provenance(), len);
    }
    managed(|memory| {
        let others = |address, len| {
            by_kernel(address, len);
        };
        memory.unmap(address.expose_provenance(), len, others)
    });
    0
}

/// # Safety
/// As mprotect(2).
unsafe fn protect(address: *mut c_void, len: usize, protection: c_int) -> c_int {
    let changed = for_managed(address, len, |memory| memory.protect(address.addr(), len, protection));
    // SAFETY: as the caller's.
    changed.unwrap_or_else(|| unsafe { libc::syscall(libc::SYS_mprotect, address, len, protection) as c_int })
}

/// # Safety
/// As madvise(2).
unsafe fn advise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    let taken = for_managed(address, len, |memory| memory.advise(address.addr(), len, advice));
    // SAFETY: as the caller's.
    taken.unwrap_or_else(|| unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) as c_int })
}

/// # Safety
/// As `posix_madvise`(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    // In the C library, too, the one advice that loses contents does nothing.
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: as the caller's.
    unsafe {
        let before = *libc::__errno_location();
        let result = advise(address, len, advice);
        let error = *libc::__errno_location();
        set_errno(before);
        if result == 0 { 0 } else { error }
    }
}

/// Refused: all of the allocator's address space would be brought in, and stay.
///
/// # Safety
/// As mlockall(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    if with_memory(|_| ()).is_some() {
        set_errno(libc::ENOMEM);
        return -1;
    }
    // SAFETY: as the caller's.
    unsafe { libc::syscall(libc::SYS_mlockall, flags) as c_int }
}

/// # Safety
/// As mremap(2), whose last argument is passed like any other, or not at all.
#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    wanted: *mut c_void,
) -> *mut c_void {
    let wanted = if flags & MREMAP_FIXED != 0 { wanted } else { null_mut() };
    let old_at = old.expose_provenance();
    let is_target = flags & MREMAP_FIXED != 0 && overlaps(wanted.addr(), new_len);
    if !overlaps(old_at, old_len.max(1)) && !is_target {
        // SAFETY: as the caller's.
        let moved = unsafe { libc::syscall(libc::SYS_mremap, old, old_len, new_len, flags, wanted) };
        return ptr::with_exposed_provenance_mut(moved as usize);
    }
    if !is_sound(old, old_len) || !is_sound(wanted, new_len) {
        return failed(libc::EINVAL);
    }
    let (old_len, new_len) = (old_len.next_multiple_of(PAGE_BYTES), new_len.next_multiple_of(PAGE_BYTES));
    let (to, is_fixed) = (wanted.addr(), flags & MREMAP_FIXED != 0);
    let overlap = is_fixed && to < old_at.saturating_add(old_len) && old_at < to.saturating_add(new_len);
    let may_move = flags & MREMAP_MAYMOVE != 0;
    if overlap || (flags & (MREMAP_FIXED | MREMAP_DONTUNMAP) != 0 && !may_move) {
        return failed(libc::EINVAL);
    }
    // SAFETY: as the caller's.
    managed(|memory| unsafe { remap(memory, old, old_len, new_len, flags, wanted) })
        .unwrap_or_else(|| failed(libc::ENOMEM))
}

/// Moves or resizes memory of which some is managed. Contents are copied: no pages are exchanged between what
/// is managed and what is not.
///
/// # Safety
/// As mremap(2).
unsafe fn remap(
    memory: &'static Memory,
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    wanted: *mut c_void,
) -> *mut c_void {
    let at = old.expose_provenance();
    let moves = flags & (MREMAP_FIXED | MREMAP_DONTUNMAP) != 0;
    // SAFETY: as the caller's.
    let release =
        |address: usize, len: usize| unsafe { unmap(ptr::with_exposed_provenance_mut(address), len) };
    if !moves && new_len <= old_len {
        if new_len < old_len {
            release(at + new_len, old_len - new_len);
        }
        return old;
    }
    if !moves && is_managed_address(at) && memory.grow(at, old_len, new_len) {
        return old;
    }
    if flags & MREMAP_MAYMOVE == 0 {
        return failed(libc::ENOMEM);
    }
    let Some((protection, _)) = memory.protection(at).filter(|(_, len)| *len >= old_len) else {
        // A file, several mappings, or what is not managed, which is to be moved here.
        return failed(libc::EFAULT);
    };
    let (read_write, anonymous) = (libc::PROT_READ | libc::PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    let fixed = if flags & MREMAP_FIXED != 0 { MAP_FIXED } else { 0 };
    // SAFETY: as the caller's.
    let new = unsafe { map(wanted, new_len, read_write, anonymous | fixed, -1, 0) };
    if new == MAP_FAILED {
        return new;
    }
    let copied = old_len.min(new_len);
    // SAFETY: both are mapped with at least so many bytes, and do not overlap. The program does not use them
    // meanwhile.
    unsafe {
        if protection & libc::PROT_READ == 0 {
            protect(old, old_len, read_write);
        }
        new.cast::<u8>().copy_from_nonoverlapping(old.cast(), copied);
        if protection != read_write {
            protect(new, new_len, protection);
        }
        if flags & MREMAP_DONTUNMAP != 0 {
            advise(old, old_len, libc::MADV_DONTNEED);
            protect(old, old_len, protection);
        } else {
            release(at, old_len);
        }
    }
    new
}
