//! The start: the library reserves address space, maps the image into it, and makes a process of it.

use crate::control::{
    BUILD, CALLS, CALLS_AT, CONTROL_KEY, Control, PAGE_BYTES, RESERVED_BYTES, STACK_BYTES, state,
};
use crate::image::Image;
use crate::settings::Settings;
use crate::sys::{self, errno, flags::*, nr};
use core::sync::atomic::Ordering::{Acquire, Relaxed};

/// Why there is no pager; `None` if it has been said.
type Refused = Option<&'static str>;

// Where things lie in the reservation, after the pages of calls. A page without access follows each.
const STACK: usize = CALLS_AT + (CALLS + 1) * PAGE_BYTES;
pub const CHILD_STACK: usize = STACK + STACK_BYTES + PAGE_BYTES;
const IMAGE: usize = CHILD_STACK + STACK_BYTES + PAGE_BYTES;

/// Starts the pager. The control page, or `None`: the program's memory is not managed, and that has been
/// said.
pub fn start(settings: &Settings) -> Option<&'static Control> {
    let mut pairs = [[0; 2]; MAX_PAIRS];
    let auxiliary = auxiliary_vector(&mut pairs);
    // A program that got rights of its file's owner is left alone.
    if auxiliary.iter().any(|[key, secure]| *key == at::SECURE && *secure != 0) {
        return None;
    }
    begin(settings, auxiliary).map_err(|why| refuse(settings, why)).ok()
}

/// Says why the program's memory is not managed; the program ends if it must not run without a limit.
pub fn refuse(settings: &Settings, why: Refused) {
    let how =
        if settings.is_hard { ": the program is not run" } else { ": this program runs without a limit" };
    if let Some(why) = why {
        sys::say(why, how);
    }
    if settings.is_hard {
        sys::exit_group(125);
    }
}

fn begin(settings: &Settings, auxiliary: &[[usize; 2]]) -> Result<&'static Control, Refused> {
    const RLIMIT_DATA: usize = 2;
    const PR_GET_NAME: usize = 16;
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes a name, for which there is room.
    unsafe { sys::raw(nr::PRCTL, [PR_GET_NAME, name.as_mut_ptr() as usize]) };
    if name.starts_with(b"strace\0") {
        return Err(Some("strace runs until it has no child, and the pager would be one"));
    }
    let mut limits = [usize::MAX; 2];
    // SAFETY: the kernel writes both limits.
    unsafe { sys::raw(nr::PRLIMIT64, [0, RLIMIT_DATA, 0, limits.as_mut_ptr() as usize]) };
    if limits[0] != usize::MAX {
        return Err(Some("its data is limited (ulimit -d), and what the pager reserves counts as such"));
    }
    let path = settings.image.ok_or("UZRAM_RUN_IMAGE is not set")?;
    probe()?;
    if auxiliary.is_empty() {
        return Err(Some("no auxiliary vector"));
    }
    let file = sys::open(path, O_CLOEXEC).map_err(|error| match error {
        errno::ENOENT => "the pager's image is not there",
        errno::EACCES => "the pager's image may not be opened",
        _ => "the pager's image cannot be opened",
    })?;
    let started = Image::read(file).map_err(Some).and_then(|image| {
        let kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        // SAFETY: a new mapping.
        let start = unsafe { sys::call(nr::MMAP, [0, RESERVED_BYTES, PROT_NONE, kind, usize::MAX, 0]) }
            .map_err(|_| "no address space for the pager (ulimit -v?)")?;
        // SAFETY: the reservation was made for this.
        let filled = unsafe { fill(start, settings, auxiliary, &image, file) };
        filled.map_err(Some).and_then(|(stack, entry)| run(start, stack, entry)).inspect_err(|why| {
            // A pager that refuses waits for the program's end, in its memory: the end of the pager would
            // end the program.
            if why.is_some() {
                // SAFETY: nothing runs there.
                unsafe { sys::raw(nr::MUNMAP, [start, RESERVED_BYTES]) };
            }
        })
    });
    sys::close(file);
    started
}

/// Whether a pager could do its work here: it may open a userfaultfd which moves pages.
fn probe() -> Result<(), &'static str> {
    const UFFDIO_API: usize = 0xc018_aa3f;
    const USERFAULTFD_IOC_NEW: usize = 0xaa00;
    const FEATURE_MOVE: u64 = 1 << 16;
    // SAFETY: no pointers.
    let opened = unsafe { sys::call(nr::USERFAULTFD, [O_CLOEXEC]) }.or_else(|_| {
        let device = sys::open(c"/dev/userfaultfd", O_RDWR | O_CLOEXEC)?;
        // SAFETY: no pointers.
        let opened = unsafe { sys::call(nr::IOCTL, [device, USERFAULTFD_IOC_NEW, O_CLOEXEC]) };
        sys::close(device);
        opened
    });
    let opened = opened.map_err(|_| {
        "userfaultfd is refused: it takes root, CAP_SYS_PTRACE, sysctl vm.unprivileged_userfaultfd=1, \
         or a /dev/userfaultfd that may be opened"
    })?;
    let mut api = [0xaa, FEATURE_MOVE, 0];
    // SAFETY: the argument is of the size that the operation says, and outlives the call.
    let moves = unsafe { sys::call(nr::IOCTL, [opened, UFFDIO_API, api.as_mut_ptr() as usize]) };
    sys::close(opened);
    moves.map(|_| ()).map_err(|_| "this kernel's userfaultfd cannot move pages, which takes Linux 6.8")
}

/// Starts the image on its stack, and waits until it serves.
fn run(start: usize, stack: usize, entry: usize) -> Result<&'static Control, Refused> {
    // SAFETY: the page is there, and stays for ever.
    let control = unsafe { &*(start as *const Control) };
    let mask = sys::signal_mask(SIG_SETMASK, !0);
    // SAFETY: stack and image are the new process's own. It begins without a thread pointer, as programs do.
    let started = unsafe { launch(control, stack, entry, 0) };
    sys::signal_mask(SIG_SETMASK, mask);
    match started {
        Ok(state::RUNS) => Ok(control),
        Ok(_) => Err(None),
        Err(errno::EAGAIN) => Err(Some("no process for the pager (ulimit -u, pids.max?)")),
        Err(_) => Err(Some("no process for the pager")),
    }
}

/// Starts a pager, with all signals blocked, and waits for what becomes of it: [`Control::state`].
///
/// # Safety
/// As for [`sys::clone_with_memory`].
pub unsafe fn launch(control: &Control, stack: usize, entry: usize, argument: usize) -> Result<u32, i32> {
    let flags = CLONE_VM | CLONE_UNTRACED | CLONE_SETTLS | SIGKILL;
    let thread_pointer = control.thread_pointer.load(Relaxed);
    // SAFETY: as the caller says.
    unsafe { sys::clone_with_memory(flags, stack, thread_pointer, entry, argument) }?;
    loop {
        match control.state.load(Acquire) {
            state::STARTS => sys::futex_wait(&control.state, state::STARTS),
            state => return Ok(state),
        }
    }
}

/// Makes the memory for all, at `start` of the reservation. Where the image's stack and its first instruction
/// are.
///
/// # Safety
/// The reservation is there, and nothing uses it.
unsafe fn fill(
    start: usize,
    settings: &Settings,
    auxiliary: &[[usize; 2]],
    image: &Image,
    file: usize,
) -> Result<(usize, usize), &'static str> {
    let writable = PROT_READ | PROT_WRITE;
    let parts = [
        (0, PAGE_BYTES, writable),
        (STACK, STACK_BYTES, writable),
        (CHILD_STACK, STACK_BYTES, writable),
        (CALLS_AT, CALLS * PAGE_BYTES, PROT_READ),
    ];
    for (at, bytes, protection) in parts {
        // SAFETY: a part of the reservation.
        unsafe { sys::call(nr::MPROTECT, [start + at, bytes, protection]) }
            .map_err(|_| "no memory for the pager")?;
    }
    // SAFETY: as the caller says.
    let (base, image_end) = unsafe { image.map(file, start + IMAGE, start + RESERVED_BYTES) }?;
    // SAFETY: the pager's memory is not for core dumps. The kernel may refuse that; then they are larger.
    unsafe { sys::raw(nr::MADVISE, [start, RESERVED_BYTES, MADV_DONTDUMP]) };
    // SAFETY: the page is there, of zeros, which a control page may be. Nobody else knows it yet.
    let control = unsafe { &mut *(start as *mut Control) };
    control.build = BUILD;
    control.program.store(sys::getpid(), Relaxed);
    control.free.store(image_end + PAGE_BYTES, Relaxed);
    control.tid_address.store(sys::tid_address(), Relaxed);
    Ok((write_stack(start, settings, auxiliary, image, base)?, base + image.entry))
}

/// Writes what a program finds on its stack: arguments, environment, auxiliary vector, and their strings.
/// Returns the stack pointer to begin with.
fn write_stack(
    start: usize,
    settings: &Settings,
    auxiliary: &[[usize; 2]],
    image: &Image,
    base: usize,
) -> Result<usize, &'static str> {
    let name = c"uzram-pager".to_bytes_with_nul();
    let mut random = [0u8; 16];
    // SAFETY: the bytes outlive the call.
    unsafe { sys::raw(nr::GETRANDOM, [random.as_mut_ptr() as usize, random.len(), 0]) };
    let settings_bytes: usize = settings.variables().map(|variable| variable.count_bytes() + 1).sum();
    // Each is longer than the pointer to it.
    if settings_bytes > STACK_BYTES / 4 {
        return Err("too many settings begin with UZRAM_RUN_");
    }
    let words = 8 + settings.variables().count() + 2 * auxiliary.len();
    let bytes = settings_bytes + name.len() + random.len();
    let stack = (start + STACK + STACK_BYTES - bytes - words * size_of::<usize>()) & !63;
    let (mut word, mut string) = (stack, stack + words * size_of::<usize>());
    // SAFETY: the stack is the new process's own, with room for what has been counted.
    let mut push = |value: usize| unsafe {
        (word as *mut usize).write(value);
        word += size_of::<usize>();
    };
    // SAFETY: as above.
    let mut put = |bytes: &[u8]| unsafe {
        let at = string as *mut u8;
        at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        string += bytes.len();
        at as usize
    };
    let (name, random) = (put(name), put(&random));
    // One argument, null; the environment, null.
    [1, name, 0].into_iter().for_each(&mut push);
    settings.variables().for_each(|variable| push(put(variable.to_bytes_with_nul())));
    push(0);
    for &[key, old] in auxiliary {
        push(key);
        push(match key {
            at::PHDR => base + image.program_headers,
            at::PHNUM => image.program_headers_len,
            at::ENTRY => base + image.entry,
            at::RANDOM => random,
            at::EXECFN => name,
            at::BASE | at::SECURE => 0,
            _ => old,
        });
    }
    [CONTROL_KEY, start, at::NULL, 0].into_iter().for_each(push);
    Ok(stack)
}

const MAX_PAIRS: usize = 64;

/// Keys of the auxiliary vector, of the kernel's names.
mod at {
    pub const NULL: usize = 0;
    pub const PHDR: usize = 3;
    pub const PHNUM: usize = 5;
    pub const BASE: usize = 7;
    pub const ENTRY: usize = 9;
    pub const SECURE: usize = 23;
    pub const RANDOM: usize = 25;
    pub const EXECFN: usize = 31;
}

/// The auxiliary vector that the kernel gave the program, without its last pair; nothing before Linux 6.4.
fn auxiliary_vector(pairs: &mut [[usize; 2]; MAX_PAIRS]) -> &[[usize; 2]] {
    const PR_GET_AUXV: usize = 0x4155_5856;
    let arguments = [PR_GET_AUXV, pairs.as_mut_ptr() as usize, size_of_val(pairs), 0, 0];
    // SAFETY: the kernel writes no more than the pairs hold.
    unsafe { sys::raw(nr::PRCTL, arguments) };
    &pairs[..pairs.iter().position(|[key, _]| *key == at::NULL).unwrap_or(0)]
}
