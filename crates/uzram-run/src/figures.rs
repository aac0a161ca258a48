//! The figures that `uzram list` and `uzram stat` show: a text in a file without a name (memfd), which they
//! find among the descriptors of the process.
//!
//! It is written by a mapping: the descriptor may be another file's, if the program has closed it by a system
//! call of its own, and `RLIMIT_FSIZE` would make a write a signal.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use rustix::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use uzram::units::pages_to_bytes;
use uzram_pager::{Figures, MemoryStats, descriptors};

/// No descriptor.
const NONE: c_int = -1;

static DESCRIPTOR: AtomicI32 = AtomicI32::new(NONE);
/// Where the text is mapped; null if there is none. One thread writes to it at a time: the one that starts
/// the process, or goes on in a child, and after that the pager's.
static TEXT: AtomicPtr<u8> = AtomicPtr::new(null_mut());
static LIMIT_BYTES: AtomicU64 = AtomicU64::new(0);

/// Makes the file. Without it the process is not listed.
pub fn start(limit_bytes: u64) {
    LIMIT_BYTES.store(limit_bytes, Ordering::Relaxed);
    let Some(file) = new_file().map(descriptors::keep) else { return };
    if !descriptors::is_kept(file.as_raw_fd()) {
        // There the program would come across it.
        return;
    }
    map(&file);
    DESCRIPTOR.store(file.into_raw_fd(), Ordering::Relaxed);
    publish(&MemoryStats::default());
}

/// Makes a file of its own for a child, in place of the parent's.
pub fn begin_in_child() {
    let number = DESCRIPTOR.load(Ordering::Relaxed);
    if number == NONE {
        return;
    }
    let file = new_file();
    // The parent's is mapped until this is done.
    if !file.as_ref().is_some_and(map) {
        TEXT.store(null_mut(), Ordering::Relaxed);
    }
    let renewed = file.is_some_and(|file| {
        // SAFETY: the number is the library's own.
        unsafe { libc::syscall(libc::SYS_dup3, file.as_raw_fd(), number, libc::O_CLOEXEC) >= 0 }
    });
    if !renewed {
        DESCRIPTOR.store(NONE, Ordering::Relaxed);
        // SAFETY: as above, and it is not used any more.
        descriptors::close(unsafe { OwnedFd::from_raw_fd(number) });
    }
    publish(&MemoryStats::default());
}

/// Returns a file of the right size; `None` if there can be none.
fn new_file() -> Option<OwnedFd> {
    let size = Figures::TEXT_BYTES as u64;
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < size) {
        return None;
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL;
    let file = rustix::fs::memfd_create(Figures::FILE_NAME, flags).ok()?;
    rustix::fs::ftruncate(&file, size).ok()?;
    // Nobody can make accesses to the mapping fail.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
    Some(file)
}

/// Maps a file, in place of the one that was mapped. Returns whether it could.
fn map(file: &OwnedFd) -> bool {
    let (protection, before) = (ProtFlags::READ | ProtFlags::WRITE, TEXT.load(Ordering::Relaxed));
    let flags = if before.is_null() { MapFlags::SHARED } else { MapFlags::SHARED | MapFlags::FIXED };
    // SAFETY: the address is the system's choice, or that of the mapping of before, which nobody uses at this
    // moment.
    let mapped = unsafe { rustix::mm::mmap(before.cast(), Figures::TEXT_BYTES, protection, flags, file, 0) };
    if let Ok(text) = mapped {
        TEXT.store(text.cast(), Ordering::Relaxed);
    }
    mapped.is_ok()
}

pub fn publish(stats: &MemoryStats) {
    let to = TEXT.load(Ordering::Relaxed);
    if to.is_null() {
        return;
    }
    let text = of(stats).to_text();
    // SAFETY: the mapping has these bytes, which this thread alone writes to. Who reads them does so by
    // read(2).
    unsafe { to.copy_from_nonoverlapping(text.as_ptr(), text.len()) };
}

pub fn of(stats: &MemoryStats) -> Figures {
    let (limit_bytes, pager) = (LIMIT_BYTES.load(Ordering::Relaxed), &stats.pager);
    Figures {
        process: std::process::id().into(),
        limit_bytes,
        limit_now_bytes: if stats.runs { pages_to_bytes(pager.limit_pages) } else { limit_bytes },
        runs: stats.runs.into(),
        used_bytes: pages_to_bytes(pager.used_pages),
        used_max_bytes: pages_to_bytes(pager.used_pages_max),
        resident_bytes: pages_to_bytes(pager.resident_pages),
        stored_bytes: pages_to_bytes(stats.stored.compressed_pages),
        compressed_bytes: stats.stored.compressed_bytes,
        stored_max_bytes: pages_to_bytes(stats.most_stored.compressed_pages),
        compressed_max_bytes: stats.most_stored.compressed_bytes,
        spilled_bytes: pages_to_bytes(stats.stored.spilled_pages),
        spilled_max_bytes: pages_to_bytes(stats.most_stored.spilled_pages),
        spill_written_bytes: stats.stored.spill_written_bytes,
        faults: pager.faults,
        fault_us: pager.fault_us,
    }
}
