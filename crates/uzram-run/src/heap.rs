//! malloc(3) and its relatives.
//!
//! A block is mimalloc's in the managed memory; or a mapping of its own there if it is large, to be aligned
//! to more than 64 KiB, or mimalloc has no room; or of the C library's allocator: what was allocated before
//! the library started, for it, or when there was no room. Its address tells which.
//!
//! # fork(2)
//!
//! Nothing here may be half done in a child: [`before_fork`] takes the locks. Signals are blocked while one
//! is held, as a handler may fork. If one thread purges, as a flag of mimalloc's says, when another one
//! forks, nobody would purge in the child: each freed page is purged at once there ([`after_fork_in_child`]).

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr::{self, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use libmimalloc_sys as mi;
use uzram_pager::{BlockedSignals, Memory};

use crate::inside::{self, Inside};
use crate::real::{__libc_calloc, __libc_free, __libc_malloc, __libc_memalign, __libc_realloc, set_errno};
use crate::state;

/// mimalloc's options by number: libmimalloc-sys has names for some, from other versions.
const PURGE_DELAY_MS: mi::mi_option_t = 15;
const DISALLOW_OS_ALLOC: mi::mi_option_t = 17;
const ARENA_MAX_OBJECT_KIB: mi::mi_option_t = 45;
/// What one arena of mimalloc manages at most: the tables of a larger one are too large.
const ARENA_BYTES: usize = 8 << 30;
/// The least.
const LEAST_ARENA_BYTES: usize = 64 << 20;
/// How long mimalloc keeps memory that was freed, in case that it is needed soon.
const PURGE_AFTER_MS: i64 = 100;
/// Blocks of this size are mappings of their own.
const OWN_MAPPING_BYTES: usize = 1 << 30;
/// The most that mimalloc aligns to inside an arena.
const MOST_ALIGN: usize = 64 << 10;
/// What malloc(3) aligns to.
const LEAST_ALIGN: usize = 16;
/// mimalloc begins to use no less than this.
const LEAST_COMMIT_BYTES: usize = 64 << 10;

type CommitFunction = unsafe extern "C" fn(bool, *mut c_void, usize, *mut bool, *mut c_void) -> bool;

unsafe extern "C" {
    /// mimalloc.h, from 3.2 on.
    fn mi_manage_memory(
        start: *mut c_void,
        size: usize,
        is_committed: bool,
        is_pinned: bool,
        is_zero: bool,
        numa_node: c_int,
        exclusive: bool,
        commit: Option<CommitFunction>,
        argument: *mut c_void,
        arena: *mut mi::mi_arena_id_t,
    ) -> bool;
}

/// The memory that mimalloc manages: its first address, and how many bytes. 0 until the library has started.
static START: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
/// How much of it has an arena.
static USED: Mutex<usize> = Mutex::new(0);
/// Blocks that are mappings of their own, by address: their bytes.
static MAPPED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
/// Held shared while mimalloc's memory is emptied, and exclusively by a thread that forks.
static PURGES: RwLock<()> = RwLock::new(());

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread holds that forks.
pub struct Forking {
    _used: MutexGuard<'static, usize>,
    _mapped: MutexGuard<'static, BTreeMap<usize, usize>>,
    _purges: RwLockWriteGuard<'static, ()>,
    _blocked: BlockedSignals,
}

/// Waits until no other thread is in here: before fork(2), and before [`Memory::before_fork`]. What holds
/// these locks may touch the memory.
pub fn before_fork() -> Forking {
    let _blocked = BlockedSignals::new();
    Forking {
        _used: lock(&USED),
        _mapped: lock(&MAPPED),
        _purges: PURGES.write().unwrap_or_else(PoisonError::into_inner),
        _blocked,
    }
}

/// Goes on in a child. `had_threads`: the program had others than the one that forked.
pub fn after_fork_in_child(had_threads: bool) {
    if had_threads {
        // SAFETY: the option exists.
        unsafe { mi::mi_option_set(PURGE_DELAY_MS, 0) };
    }
}

/// Has the program's blocks come from the managed memory from now on. Returns false if mimalloc refuses it.
pub fn start(memory: &'static Memory) -> bool {
    let (start, len) = memory.heap();
    // SAFETY: the options exist.
    unsafe {
        mi::mi_option_set(DISALLOW_OS_ALLOC, 1);
        mi::mi_option_set(PURGE_DELAY_MS, PURGE_AFTER_MS);
        mi::mi_option_set(ARENA_MAX_OBJECT_KIB, (ARENA_BYTES >> 10) as i64);
    }
    START.store(start.expose_provenance(), Ordering::Relaxed);
    if !more(len) {
        return false;
    }
    LEN.store(len, Ordering::Release);
    true
}

/// Gives mimalloc another arena, of `len` bytes of memory in all. Returns false if there is none left.
fn more(len: usize) -> bool {
    let (_inside, _blocked) = (Inside::enter(), BlockedSignals::new());
    let mut used = lock(&USED);
    let bytes = ARENA_BYTES.min(len - *used);
    if bytes < LEAST_ARENA_BYTES {
        return false;
    }
    let start = ptr::with_exposed_provenance_mut(START.load(Ordering::Relaxed) + *used);
    let mut arena = null_mut();
    let (committed, pinned, zero, exclusive, any_node) = (false, false, true, false, -1);
    // SAFETY: nobody else uses this part of the memory.
    let managed = unsafe {
        let (commit, arena): (Option<CommitFunction>, _) = (Some(commit), &raw mut arena);
        mi_manage_memory(
            start,
            bytes,
            committed,
            pinned,
            zero,
            any_node,
            exclusive,
            commit,
            null_mut(),
            arena,
        )
    };
    *used += bytes;
    managed
}

/// mimalloc calls this before it uses a part of the memory, and when it does not need it any more.
unsafe extern "C" fn commit(
    commits: bool,
    start: *mut c_void,
    size: usize,
    is_zero: *mut bool,
    _: *mut c_void,
) -> bool {
    if !is_zero.is_null() {
        // Parts of it may have been in use.
        // SAFETY: mimalloc passes a place for the answer, or null.
        unsafe { *is_zero = false };
    }
    if inside::depth() > 0 {
        // An arena's own tables, of which next to nothing is touched.
        return true;
    }
    let _inside = Inside::enter();
    state::with_memory(|memory| {
        if !commits {
            let _blocked = BlockedSignals::new();
            // While the process forks it stays as it is: mimalloc must not wait here, see above.
            if let Ok(_purges) = PURGES.try_read() {
                memory.discard(start.addr(), size);
            }
            return true;
        }
        memory.commit(start.addr(), size);
        state::warn_of_failure(memory);
        true
    })
    .unwrap_or(true)
}

/// Returns whether the calling thread's blocks are the program's, and managed.
#[inline(always)]
fn is_managed() -> bool {
    LEN.load(Ordering::Relaxed) != 0 && inside::depth() == 0
}

/// Returns whether a block is mimalloc's.
#[inline(always)]
fn is_ours(block: *const c_void) -> bool {
    block.addr().wrapping_sub(START.load(Ordering::Relaxed)) < LEN.load(Ordering::Relaxed)
}

fn refused(error: c_int) -> *mut c_void {
    set_errno(error);
    null_mut()
}

/// Allocates a block of `size` by mimalloc's function `allocate`. If that finds no memory: after more was
/// given, as a mapping, and then by `otherwise`.
#[inline(always)]
fn allocate_by(
    size: usize,
    allocate: impl Fn() -> *mut c_void,
    otherwise: impl Fn() -> *mut c_void,
) -> *mut c_void {
    let block = allocate();
    if block.is_null() { again(size, allocate, otherwise) } else { block }
}

#[cold]
#[inline(never)]
fn again(
    size: usize,
    allocate: impl Fn() -> *mut c_void,
    otherwise: impl Fn() -> *mut c_void,
) -> *mut c_void {
    if more(LEN.load(Ordering::Relaxed)) {
        let block = allocate();
        if !block.is_null() {
            return block;
        }
    }
    let mapped = if size >= LEAST_COMMIT_BYTES { map_block(MOST_ALIGN, size) } else { None };
    mapped.unwrap_or_else(otherwise)
}

crate::real::export! {
    malloc(size: usize) -> *mut c_void = allocate;
    free(block: *mut c_void) -> () = release;
    realloc(block: *mut c_void, size: usize) -> *mut c_void = resize;
    memalign(align: usize, size: usize) -> *mut c_void = allocate_aligned;
    aligned_alloc(align: usize, size: usize) -> *mut c_void = allocate_aligned;
    malloc_usable_size(block: *mut c_void) -> usize = usable_size;
}

/// # Safety
/// As malloc(3).
#[inline]
unsafe fn allocate(size: usize) -> *mut c_void {
    if !is_managed() {
        // SAFETY: any size is allowed.
        return unsafe { __libc_malloc(size) };
    }
    if size >= OWN_MAPPING_BYTES {
        return allocate_mapped(LEAST_ALIGN, size);
    }
    // SAFETY: as above.
    allocate_by(size, || unsafe { mi::mi_malloc(size) }, || unsafe { __libc_malloc(size) })
}

/// # Safety
/// As calloc(3).
///
/// What the C library and the loader allocate so, they touch in a child before it has a pager: the tables of
/// threads' variables. It is not managed. The caller is known by where it returns to.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    core::arch::naked_asm!("mov rdx, qword ptr [rsp]", "jmp {calloc_for}", calloc_for = sym calloc_for)
}

/// # Safety
/// As calloc(3).
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn calloc_for(count: usize, size: usize, caller: usize) -> *mut c_void {
    // SAFETY: as the caller's.
    unsafe {
        if state::is_of_libc(caller) {
            return __libc_calloc(count, size);
        }
        allocate_zeros(count, size)
    }
}

#[cfg(not(target_arch = "x86_64"))]
crate::real::export! {
    calloc(count: usize, size: usize) -> *mut c_void = allocate_zeros;
}

/// # Safety
/// As calloc(3).
#[inline]
unsafe fn allocate_zeros(count: usize, size: usize) -> *mut c_void {
    if !is_managed() {
        // SAFETY: any size is allowed.
        return unsafe { __libc_calloc(count, size) };
    }
    let Some(bytes) = count.checked_mul(size) else { return refused(libc::ENOMEM) };
    if bytes >= OWN_MAPPING_BYTES {
        return allocate_mapped(LEAST_ALIGN, bytes);
    }
    // SAFETY: as above.
    allocate_by(bytes, || unsafe { mi::mi_calloc(count, size) }, || unsafe { __libc_calloc(count, size) })
}

/// # Safety
/// As free(3).
#[inline]
pub unsafe fn release(block: *mut c_void) {
    // SAFETY: it is a block of the allocator whose address it has.
    unsafe {
        if is_ours(block) {
            mi::mi_free(block);
        } else if !block.is_null() && !free_mapped(block) {
            __libc_free(block);
        }
    }
}

/// # Safety
/// As realloc(3).
#[inline]
unsafe fn resize(block: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: as the caller's; a block goes to the allocator whose address it has.
    unsafe {
        if block.is_null() {
            return allocate(size);
        }
        if size == 0 {
            release(block);
            return null_mut();
        }
        if is_ours(block) {
            if size < OWN_MAPPING_BYTES {
                let new = mi::mi_realloc(block, size);
                if !new.is_null() {
                    return new;
                }
            }
        } else {
            match mapped_size(block) {
                None => return __libc_realloc(block, size),
                Some(len) if size >= OWN_MAPPING_BYTES && size <= len => return block,
                Some(len) if grow_mapped(block, len, size) => return block,
                _ => {}
            }
        }
        let new = allocate(size);
        if !new.is_null() {
            new.cast::<u8>().copy_from_nonoverlapping(block.cast(), size.min(usable_size(block)));
            release(block);
        }
        new
    }
}

/// # Safety
/// As reallocarray(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn reallocarray(block: *mut c_void, count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return refused(libc::ENOMEM) };
    // SAFETY: as the caller's.
    unsafe { resize(block, bytes) }
}

/// # Safety
/// As memalign(3).
#[inline]
unsafe fn allocate_aligned(align: usize, size: usize) -> *mut c_void {
    let Some(align) = align.max(LEAST_ALIGN).checked_next_power_of_two() else {
        return refused(libc::EINVAL);
    };
    if !is_managed() {
        // SAFETY: any size is allowed.
        return unsafe { __libc_memalign(align, size) };
    }
    if align > MOST_ALIGN || size >= OWN_MAPPING_BYTES {
        return allocate_mapped(align, size);
    }
    // SAFETY: as above.
    let allocate = || unsafe { mi::mi_malloc_aligned(size, align) };
    // SAFETY: as above.
    allocate_by(size, allocate, || unsafe { __libc_memalign(align, size) })
}

/// # Safety
/// As `posix_memalign`(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    // SAFETY: as the caller's. It leaves errno as it is.
    unsafe {
        let error = *libc::__errno_location();
        let block = allocate_aligned(align, size);
        set_errno(error);
        if block.is_null() {
            return libc::ENOMEM;
        }
        *out = block;
    }
    0
}

/// # Safety
/// As valloc(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: as the caller's.
    unsafe { allocate_aligned(4096, size) }
}

/// # Safety
/// As pvalloc(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    let Some(size) = size.checked_next_multiple_of(4096) else { return refused(libc::ENOMEM) };
    // SAFETY: as the caller's.
    unsafe { allocate_aligned(4096, size) }
}

/// # Safety
/// As `malloc_usable_size`(3).
#[inline]
unsafe fn usable_size(block: *mut c_void) -> usize {
    if block.is_null() {
        return 0;
    }
    if is_ours(block) {
        // SAFETY: the caller's: it is a block. It lies in mimalloc's memory, so mimalloc allocated it.
        return unsafe { mi::mi_usable_size(block) };
    }
    mapped_size(block).unwrap_or_else(
        || crate::real::next!(c"malloc_usable_size", fn(*mut c_void) -> usize, (block), else 0),
    )
}

/// Maps a block that mimalloc does not have. It reads as zeros.
#[cold]
fn allocate_mapped(align: usize, size: usize) -> *mut c_void {
    map_block(align, size).unwrap_or_else(|| {
        // SAFETY: any size is allowed. So large a block it maps, and it reads as zeros.
        unsafe { __libc_memalign(align, size) }
    })
}

/// Maps a block of zeros; returns `None` if there is no room.
fn map_block(align: usize, size: usize) -> Option<*mut c_void> {
    let _inside = Inside::enter();
    let len = size.max(1).checked_next_multiple_of(4096)?;
    let map = |memory: &Memory| memory.map(len, align, libc::PROT_READ | libc::PROT_WRITE);
    let block: *mut c_void = state::with_memory(map).flatten()?.cast();
    let _blocked = BlockedSignals::new();
    lock(&MAPPED).insert(block.expose_provenance(), len);
    Some(block)
}

/// Has such a block grow where it is. Returns whether it could.
fn grow_mapped(block: *mut c_void, old_len: usize, size: usize) -> bool {
    let Some(len) = size.checked_next_multiple_of(4096) else { return false };
    if len <= old_len {
        return false;
    }
    let (_inside, _blocked) = (Inside::enter(), BlockedSignals::new());
    let mut mapped = lock(&MAPPED);
    let grows = |memory: &Memory| memory.grow(block.addr(), old_len, len);
    if !state::with_memory(grows).unwrap_or(false) {
        return false;
    }
    mapped.insert(block.addr(), len);
    true
}

/// Returns the bytes of a block that is a mapping of its own.
fn mapped_size(block: *const c_void) -> Option<usize> {
    if !state::is_managed_address(block.addr()) {
        return None;
    }
    let (_inside, _blocked) = (Inside::enter(), BlockedSignals::new());
    lock(&MAPPED).get(&block.addr()).copied()
}

/// Unmaps such a block; returns false for others.
fn free_mapped(block: *mut c_void) -> bool {
    if !state::is_managed_address(block.addr()) {
        return false;
    }
    let (_inside, _blocked) = (Inside::enter(), BlockedSignals::new());
    let len = lock(&MAPPED).remove(&block.addr());
    let Some(len) = len else { return false };
    state::with_memory(|memory| memory.unmap(block.addr(), len, |_, _| {}));
    true
}
