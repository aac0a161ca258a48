//! The library's state, and which addresses it looks at.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use uzram::units::format_size;
use uzram_pager::Memory;

use crate::settings::Asked;

/// The library's state, from its start on.
pub struct Process {
    pub memory: Memory,
    pub asked: Asked,
    /// A descriptor of standard error as it was at the start, for the line at the end; -1 if this process
    /// prints none.
    pub errors: AtomicI32,
    /// This process. A child of vfork(2) has another number, and this memory.
    pub id: AtomicU32,
    pub has_told: AtomicBool,
    has_warned: AtomicBool,
    /// Whether it was said that the limit is exceeded.
    has_exceeded: AtomicBool,
}

/// No descriptor.
pub const NONE: c_int = -1;

static PROCESS: OnceLock<Process> = OnceLock::new();
/// The managed addresses: the first, and how many bytes.
static START: AtomicUsize = AtomicUsize::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);

/// Calls `f` with the memory, if the library has one.
pub fn with_memory<R>(f: impl FnOnce(&'static Memory) -> R) -> Option<R> {
    PROCESS.get().map(|process| f(&process.memory))
}

/// Returns whether an address is among the managed ones.
#[inline]
pub fn is_managed_address(address: usize) -> bool {
    address.wrapping_sub(START.load(Ordering::Relaxed)) < LEN.load(Ordering::Relaxed)
}

/// Where the C library's code and the loader's are: for each the first address, and how many bytes.
static CODE: [[AtomicUsize; 2]; 2] = [const { [const { AtomicUsize::new(0) }; 2] }; 2];

/// Returns whether code at an address is the C library's, or the loader's.
#[inline]
pub fn is_of_libc(address: usize) -> bool {
    CODE.iter()
        .any(|[start, len]| address.wrapping_sub(start.load(Ordering::Relaxed)) < len.load(Ordering::Relaxed))
}

/// Looks for their code.
fn find_code() {
    extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, nth: *mut c_void) -> c_int {
        // SAFETY: the loader passes a valid entry, whose arrays are as long as it says.
        let (name, headers, base) = unsafe {
            let info = &*info;
            let name = if info.dlpi_name.is_null() { c"" } else { CStr::from_ptr(info.dlpi_name) };
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            (name, headers, info.dlpi_addr as usize)
        };
        let file = name.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if !file.starts_with(b"libc.so.") && !file.starts_with(b"ld-linux") {
            return 0;
        }
        // SAFETY: it is the counter below.
        let nth = unsafe { &mut *nth.cast::<usize>() };
        let code =
            headers.iter().find(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0);
        if let (Some(code), Some([start, len])) = (code, CODE.get(*nth)) {
            start.store(base + code.p_vaddr as usize, Ordering::Relaxed);
            len.store(code.p_memsz as usize, Ordering::Relaxed);
            *nth += 1;
        }
        0
    }
    let mut nth = 0usize;
    // SAFETY: the function gets the counter, and keeps nothing.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut nth).cast()) };
}

/// Prints text to a descriptor, without the program's buffers.
pub fn tell(fd: c_int, text: &str) {
    // SAFETY: the text is readable. If it cannot be written, there is nobody to tell.
    unsafe { libc::write(fd, text.as_ptr().cast(), text.len()) };
}

impl Process {
    pub fn tell(&self, text: &str) {
        tell(Some(self.errors.load(Ordering::Relaxed)).filter(|fd| *fd != NONE).unwrap_or(2), text);
    }
}

/// Says once if the pager cannot start.
pub fn warn_of_failure(memory: &Memory) {
    if let Some(error) = memory.failure()
        && let Some(process) = PROCESS.get()
        && !process.has_warned.swap(true, Ordering::Relaxed)
    {
        process.tell(&format!("uzram: process {} runs without a limit: {error}\n", std::process::id()));
    }
}

/// Says once that the limit cannot be kept, or ends the process.
pub fn on_excess() {
    let Some(process) = PROCESS.get() else { return };
    let why = if process.asked.spills {
        "the spill file has no room: raise --limit, or the size of --spill"
    } else {
        "there is no spill file: give --spill, or raise --limit"
    };
    let (id, limit) = (std::process::id(), format_size(process.asked.limit_bytes));
    if process.asked.memory.hard {
        process.tell(&format!("uzram: process {id} ends, as it needs more than {limit}, and {why}\n"));
        std::process::abort();
    }
    if !process.has_exceeded.swap(true, Ordering::Relaxed) {
        process.tell(&format!("uzram: process {id} uses more than {limit}: {why}\n"));
    }
}

/// Has all know the library's state, which begins.
pub fn begin(memory: Memory, asked: Asked, errors: c_int) -> &'static Process {
    let (start, len) = memory.addresses();
    let process = PROCESS.get_or_init(|| Process {
        memory,
        asked,
        errors: AtomicI32::new(errors),
        id: AtomicU32::new(std::process::id()),
        has_told: AtomicBool::new(false),
        has_warned: AtomicBool::new(false),
        has_exceeded: AtomicBool::new(false),
    });
    START.store(start, Ordering::Relaxed);
    LEN.store(len, Ordering::Relaxed);
    find_code();
    process
}

/// Returns the library's state, if it has begun.
pub fn process() -> Option<&'static Process> {
    PROCESS.get()
}
