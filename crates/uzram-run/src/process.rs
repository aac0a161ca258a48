//! The process: start, fork(2), threads, and the line at the end.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fd::{FromRawFd, IntoRawFd, OwnedFd};
use uzram::units::{format_size, pages_to_bytes};
use uzram_pager::{Forking, Memory, MemoryStats, descriptors};

use crate::inside::Inside;
use crate::real::{self, next};
use crate::settings::Environment;
use crate::state::{self, NONE, tell, with_memory};
use crate::streams;
use crate::{figures, heap};

/// The loader calls this before the program starts, and passes its environment.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = init;

extern "C" fn init(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    let _inside = Inside::enter();
    // SAFETY: the loader passes it on.
    let Some(mut asked) = unsafe { Environment::new(environment) }.asked() else { return };
    if uzram_pager::is_address_space_limited() {
        let why = "its address space or data is limited (ulimit -v, ulimit -d)";
        return tell(2, &format!("uzram: the program runs without a limit: {why}\n"));
    }
    asked.memory.on_excess = state::on_excess;
    let memory = match Memory::new(asked.memory.clone()) {
        Ok(memory) => memory,
        Err(error) => return tell(2, &format!("uzram: the program runs without a limit: {error}\n")),
    };
    let tells = asked.stats || asked.first_process == Some(std::process::id());
    let process = state::begin(memory, asked, if tells { copy_of_errors() } else { NONE });
    streams::prepare();
    // The library's threads share one arena of the C library's allocator.
    // SAFETY: the call changes a setting.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    // Before there is a pager, which publishes more.
    figures::start(process.asked.limit_bytes);
    // SAFETY: the functions live as long as the process: the library is never unloaded.
    unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child));
        libc::atexit(tell_end);
    }
    if !heap::start(&process.memory) {
        tell(2, "uzram: the program's own memory is not managed: the allocator refuses it\n");
    }
}

/// Returns a descriptor of standard error that the program does not come across.
fn copy_of_errors() -> c_int {
    let copy = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3);
    copy.map_or(NONE, |copy| descriptors::keep(copy).into_raw_fd())
}

/// What is held from before a fork until after it.
struct Held(UnsafeCell<Option<(Forking<'static>, heap::Forking, Inside)>>);

// SAFETY: only the thread that forks uses it, and one forks at a time: `Memory::before_fork` sees to that.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

extern "C" fn before_fork() {
    let inside = Inside::enter();
    streams::lock_list();
    let heap = heap::before_fork();
    let Some(forking) = with_memory(Memory::before_fork) else { return };
    streams::touch_all();
    forking.settle();
    // SAFETY: this thread alone is here.
    unsafe { *HELD.0.get() = Some((forking, heap, inside)) };
}

extern "C" fn after_fork() {
    // SAFETY: as above.
    let Some((forking, heap, inside)) = (unsafe { (*HELD.0.get()).take() }) else { return };
    with_memory(|memory| memory.after_fork(forking));
    streams::unlock_list();
    drop((heap, inside));
}

extern "C" fn after_fork_in_child() {
    // SAFETY: as above; this process has one thread.
    let Some((forking, heap, inside)) = (unsafe { (*HELD.0.get()).take() }) else { return };
    let Some(process) = state::process() else { return };
    streams::reset_list();
    // Before its pager publishes anything.
    figures::begin_in_child();
    IS_RENEWED.store(true, Ordering::Relaxed);
    let renewed = process.memory.after_fork_in_child(forking);
    IS_RENEWED.store(false, Ordering::Relaxed);
    heap::after_fork_in_child(HAS_THREADS.load(Ordering::Relaxed));
    if let Err(error) = renewed {
        tell(2, &format!("uzram: process {} goes on without a limit: {error}\n", std::process::id()));
    }
    process.id.store(std::process::id(), Ordering::Relaxed);
    if !process.asked.stats {
        // It prints no line. Whoever waits for the end of standard error does not wait for this process.
        let errors = process.errors.swap(NONE, Ordering::Relaxed);
        if errors != NONE {
            // SAFETY: the descriptor is the library's, and nothing uses it any more.
            descriptors::close(unsafe { OwnedFd::from_raw_fd(errors) });
        }
    }
    drop((heap, inside));
}

/// Prints what the memory was like, once.
extern "C" fn tell_end() {
    let _inside = Inside::enter();
    let Some(process) = state::process() else { return };
    let (asked, id) = (&process.asked, std::process::id());
    let tells = asked.stats || asked.first_process == Some(id);
    if !tells || process.id.load(Ordering::Relaxed) != id || process.has_told.swap(true, Ordering::Relaxed) {
        return;
    }
    let stats = process.memory.stats();
    if asked.json {
        return process.tell(&(figures::of(&stats).to_json(id) + "\n"));
    }
    let details = if asked.stats { format!("uzram: process {id}: {stats:?}\n") } else { String::new() };
    process.tell(&(end_line(asked.limit_bytes, &stats) + &details));
}

fn end_line(limit_bytes: u64, stats: &MemoryStats) -> String {
    let limit = format_size(limit_bytes);
    if !stats.runs {
        return format!("uzram: the program never used enough memory to compress any (limit {limit})\n");
    }
    let (pager, most) = (&stats.pager, &stats.most_stored);
    let mut text = format!(
        "uzram: at most {} of {limit} in memory, with {} compressed to {}",
        format_size(pages_to_bytes(pager.used_pages_max)),
        format_size(pages_to_bytes(most.compressed_pages)),
        format_size(most.compressed_bytes),
    );
    if most.compressed_bytes > 0 {
        let ratio = pages_to_bytes(most.compressed_pages) as f64 / most.compressed_bytes as f64;
        let _ = write!(text, " (ratio {ratio:.2})");
    }
    let _ = write!(
        text,
        " and {} spilled; {} faults took {:.2} s",
        format_size(pages_to_bytes(most.spilled_pages)),
        pager.faults,
        pager.fault_us as f64 / 1e6,
    );
    if let Some(besides) = resident_bytes() {
        let managed = pages_to_bytes(pager.resident_pages + pager.compressed_pages);
        let _ = write!(text, "; {} besides", format_size(besides.saturating_sub(managed)));
    }
    text.push('\n');
    text
}

/// Returns the memory that this process takes, of all kinds.
fn resident_bytes() -> Option<u64> {
    let sizes = std::fs::read_to_string("/proc/self/statm").ok()?;
    sizes.split(' ').nth(1)?.parse().ok().map(pages_to_bytes)
}

real::export! {
    _exit(status: c_int) -> ! = end;
    _Exit(status: c_int) -> ! = end;
}

/// # Safety
/// As _exit(2).
unsafe fn end(status: c_int) -> ! {
    tell_end();
    loop {
        // SAFETY: the process ends.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;

/// What a thread of the library starts with.
struct Start {
    routine: Routine,
    argument: *mut c_void,
}

extern "C" fn start_inside(start: *mut c_void) -> *mut c_void {
    // It stays inside for ever.
    std::mem::forget(Inside::enter());
    // SAFETY: `pthread_create` below made it for this thread.
    let Start { routine, argument } = *unsafe { Box::from_raw(start.cast::<Start>()) };
    routine(argument)
}

/// The program has started a thread.
static HAS_THREADS: AtomicBool = AtomicBool::new(false);
/// A child's first threads of the library are being started.
static IS_RENEWED: AtomicBool = AtomicBool::new(false);

/// The stack of each of those, and the page below it that is not accessible.
const STACK_BYTES: usize = 512 << 10;
const STACK_GUARD_BYTES: usize = 4096;

/// Maps a stack. It stays when the thread ends: in a child of this process, as a rule.
fn map_stack() -> Option<*mut c_void> {
    let (bytes, flags) =
        (STACK_BYTES + STACK_GUARD_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping at an address that the kernel chooses, of which the first page is made
    // inaccessible.
    unsafe {
        let start = real::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        let is_mapped = start != libc::MAP_FAILED
            && libc::syscall(libc::SYS_mprotect, start, STACK_GUARD_BYTES, libc::PROT_NONE) == 0;
        is_mapped.then(|| start.byte_add(STACK_GUARD_BYTES))
    }
}

/// Has a thread get a stack of its own. Of one that the C library has kept of a thread of the parent's, it
/// would free the variables, which may lie in memory that is not there yet.
fn with_own_stack(create: impl FnOnce(*const libc::pthread_attr_t) -> c_int) -> c_int {
    let Some(stack) = map_stack() else { return libc::EAGAIN };
    let mut attributes = std::mem::MaybeUninit::uninit();
    // SAFETY: the attributes are initialized before they are used, and the stack is mapped.
    unsafe {
        if libc::pthread_attr_init(attributes.as_mut_ptr()) != 0 {
            return libc::EAGAIN;
        }
        libc::pthread_attr_setstack(attributes.as_mut_ptr(), stack, STACK_BYTES);
        let created = create(attributes.as_ptr());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        created
    }
}

/// Marks the library's own threads.
///
/// # Safety
/// As `pthread_create`(3).
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    let is_own = crate::inside::depth() > 0;
    let (mut routine, mut argument) = (routine, argument);
    if is_own {
        argument = Box::into_raw(Box::new(Start { routine, argument })).cast();
        routine = start_inside;
    } else {
        HAS_THREADS.store(true, Ordering::Relaxed);
    }
    let create = |attributes| {
        next!(
            c"pthread_create",
            fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Routine, *mut c_void) -> c_int,
            (thread, attributes, routine, argument),
            else libc::EAGAIN
        )
    };
    let created = if is_own && IS_RENEWED.load(Ordering::Relaxed) {
        with_own_stack(create)
    } else {
        create(attributes)
    };
    if is_own && created != 0 {
        // SAFETY: no thread has got it.
        drop(unsafe { Box::from_raw(argument.cast::<Start>()) });
    }
    created
}
