//! getrlimit(2) and setrlimit(2) of `RLIMIT_AS` and `RLIMIT_DATA`: the kernel's limits are larger than the program's by what the library
//! reserves, and the program sees its own.
//!
//! Processes that it executes inherit the kernel's, from which managed ones subtract the same at their start. If the kernel does not
//! allow to raise a limit so far, as there is a hard one, the library reserves so little that half of the limit is left.
//!
//! No locks: a child may call these functions between fork(2) and exec.

use std::ffi::{c_int, c_uint};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{RLIM_INFINITY, rlimit64};
use uzram_pager::{Limited, Memory};

use crate::heap;
use crate::inside::Inside;
use crate::process::{is_own_process, with_memory};

/// Address space for all that a program maps; the least that is of use.
const CAPACITY_BYTES: u64 = 256 << 30;
const LEAST_CAPACITY_BYTES: u64 = 128 << 20;
/// For the stacks of the pager's threads, and what is allocated for them.
const THREADS_BYTES: u64 = 128 << 20;
/// At most one part in so many of a limit is reserved, if it cannot be raised.
const SHARE: u64 = 2;

/// A limit, as the program sees it, and as it is.
struct Both {
    program: AtomicU64,
    kernel: AtomicU64,
}

impl Both {
    const fn new() -> Both {
        Both { program: AtomicU64::new(RLIM_INFINITY), kernel: AtomicU64::new(RLIM_INFINITY) }
    }

    fn set(&self, program: u64, kernel: u64) {
        self.program.store(program, Ordering::Relaxed);
        self.kernel.store(kernel, Ordering::Relaxed);
    }

    /// Returns what the program sees if the kernel's limit is this.
    fn seen(&self, kernel: u64, reserved: u64) -> u64 {
        if kernel == self.kernel.load(Ordering::Relaxed) {
            self.program.load(Ordering::Relaxed)
        } else if kernel == RLIM_INFINITY {
            RLIM_INFINITY
        } else {
            kernel.saturating_sub(reserved)
        }
    }

    /// Returns the kernel's limit for the program's: not above the one that is in force if that is the program's, too.
    fn wanted(&self, program: u64, reserved: u64) -> u64 {
        let kernel = program.saturating_add(reserved);
        if program <= self.program.load(Ordering::Relaxed) {
            kernel.min(self.kernel.load(Ordering::Relaxed))
        } else {
            kernel
        }
    }
}

/// A resource that is limited, of this process.
struct Resource {
    number: c_uint,
    limited: Limited,
    /// What the library adds to it.
    reserved: AtomicU64,
    soft: Both,
    hard: Both,
}

impl Resource {
    const fn new(number: c_uint, limited: Limited) -> Resource {
        Resource { number, limited, reserved: AtomicU64::new(0), soft: Both::new(), hard: Both::new() }
    }

    fn seen(&self, kernel: rlimit64) -> rlimit64 {
        let reserved = self.reserved.load(Ordering::Relaxed);
        rlimit64 {
            rlim_cur: self.soft.seen(kernel.rlim_cur, reserved),
            rlim_max: self.hard.seen(kernel.rlim_max, reserved),
        }
    }

    fn wanted(&self, program: rlimit64) -> rlimit64 {
        let reserved = self.reserved.load(Ordering::Relaxed);
        let hard = self.hard.wanted(program.rlim_max, reserved);
        let soft = program.rlim_cur.saturating_add(reserved);
        // One above the hard limit is for the kernel to refuse.
        let soft = if program.rlim_cur <= program.rlim_max { soft.min(hard) } else { soft };
        rlimit64 { rlim_cur: soft, rlim_max: hard }
    }

    fn note(&self, program: rlimit64, kernel: rlimit64) {
        self.soft.set(program.rlim_cur, kernel.rlim_cur);
        self.hard.set(program.rlim_max, kernel.rlim_max);
    }

    /// Has the memory keep the limit that is in force.
    fn enforce(&self, memory: &Memory) {
        let (program, kernel) =
            (self.soft.program.load(Ordering::Relaxed), self.soft.kernel.load(Ordering::Relaxed));
        let is_finite = program != RLIM_INFINITY && kernel != RLIM_INFINITY;
        memory.set_limit(self.limited, is_finite.then(|| kernel.saturating_sub(program)));
    }
}

static RESOURCES: [Resource; 2] =
    [Resource::new(libc::RLIMIT_AS, Limited::AddressSpace), Resource::new(libc::RLIMIT_DATA, Limited::Data)];

/// As prlimit(2).
///
/// # Safety
/// `new` and `old` are valid, or null.
unsafe fn by_kernel(pid: libc::pid_t, resource: c_uint, new: *const rlimit64, old: *mut rlimit64) -> c_int {
    // SAFETY: as the caller's.
    unsafe { libc::syscall(libc::SYS_prlimit64, pid, resource, new, old) as c_int }
}

fn kernel_limit(resource: c_uint) -> rlimit64 {
    let mut limit = rlimit64 { rlim_cur: RLIM_INFINITY, rlim_max: RLIM_INFINITY };
    // SAFETY: the limit is valid. It stays as it is if the kernel refuses.
    unsafe { by_kernel(0, resource, null(), &raw mut limit) };
    limit
}

/// Chooses how much address space the library reserves for a limit of its own, within the limits that the program was started with, and
/// raises them by as much where that is allowed. Returns `None` if they leave too little.
pub fn prepare(limit_bytes: u64) -> Option<u64> {
    let mut capacity_bytes = CAPACITY_BYTES;
    for resource in &RESOURCES {
        let reserves = |capacity: u64| resource.limited.reserved_bytes(capacity, limit_bytes) + THREADS_BYTES;
        let reserved = reserves(CAPACITY_BYTES);
        let is = kernel_limit(resource.number);
        resource.reserved.store(reserved, Ordering::Relaxed);
        // What is larger was set in a managed process, and inherited.
        let program = |limit: u64| match limit {
            RLIM_INFINITY => limit,
            limit => limit.checked_sub(reserved).filter(|rest| *rest > 0).unwrap_or(limit),
        };
        let raised = |limit: u64| program(limit).saturating_add(reserved);
        let seen = rlimit64 { rlim_cur: program(is.rlim_cur), rlim_max: program(is.rlim_max) };
        let both = rlimit64 { rlim_cur: raised(is.rlim_cur), rlim_max: raised(is.rlim_max) };
        let soft = rlimit64 { rlim_cur: both.rlim_cur.min(is.rlim_max), ..is };
        // SAFETY: the limits are valid. The kernel decides which are allowed.
        let set = [both, soft]
            .into_iter()
            .find(|limit| unsafe { by_kernel(0, resource.number, limit, null_mut()) } == 0);
        let set = set.unwrap_or(is);
        resource.note(seen, set);
        if set.rlim_cur < both.rlim_cur {
            while capacity_bytes >= LEAST_CAPACITY_BYTES && reserves(capacity_bytes) > seen.rlim_cur / SHARE {
                capacity_bytes /= 2;
            }
            resource.reserved.store(reserves(capacity_bytes), Ordering::Relaxed);
        }
    }
    if capacity_bytes < LEAST_CAPACITY_BYTES {
        give_back();
        return None;
    }
    Some(capacity_bytes)
}

/// Sets the limits that the program was started with: the library reserves nothing.
pub fn give_back() {
    for resource in &RESOURCES {
        let seen = resource.seen(kernel_limit(resource.number));
        // SAFETY: the limits are valid, and not above those in force.
        unsafe { by_kernel(0, resource.number, &raw const seen, null_mut()) };
        resource.reserved.store(0, Ordering::Relaxed);
        resource.note(seen, seen);
    }
}

/// Has the memory keep the limits that the program was started with.
pub fn start(memory: &Memory) {
    for resource in &RESOURCES {
        resource.enforce(memory);
    }
}

/// Returns whether the program may use so many bytes more, without exceeding its limits.
#[inline]
pub fn may_use(bytes: usize, is_data: bool) -> bool {
    with_memory(|memory| {
        if !memory.is_limited() {
            return true;
        }
        let _inside = Inside::enter();
        memory.may_use(bytes as u64, is_data)
    })
    .unwrap_or(true)
}

/// As prlimit(2), with the program's limits.
///
/// # Safety
/// As prlimit(2).
unsafe fn limit(pid: libc::pid_t, number: c_uint, new: *const rlimit64, old: *mut rlimit64) -> c_int {
    let is_here = pid == 0 || pid.cast_unsigned() == std::process::id();
    let resource = RESOURCES.iter().find(|resource| is_here && resource.number == number);
    let Some(resource) = resource.filter(|_| with_memory(|_| ()).is_some()) else {
        // SAFETY: as the caller's.
        return unsafe { by_kernel(pid, number, new, old) };
    };
    let inside = Inside::enter();
    let mut changed = false;
    // SAFETY: the caller's is valid, or null.
    let program = unsafe { new.as_ref() }.copied();
    let wanted = program.map(|program| resource.wanted(program));
    let mut before = rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both are valid, or null.
    let result =
        unsafe { by_kernel(0, number, wanted.as_ref().map_or(null(), |wanted| wanted), &raw mut before) };
    if result != 0 {
        return result;
    }
    let before = resource.seen(before);
    // A child of vfork(2) has limits of its own, and its parent's memory.
    if let (Some(program), Some(wanted), true) = (program, wanted, is_own_process()) {
        resource.note(program, wanted);
        with_memory(|memory| resource.enforce(memory));
        changed = true;
    }
    drop(inside);
    if changed {
        heap::give_back();
    }
    // SAFETY: as above.
    if let Some(old) = unsafe { old.as_mut() } {
        *old = before;
    }
    0
}

// The C library has two names for each of these where the types are the same.
const _: () = assert!(size_of::<libc::rlimit>() == size_of::<rlimit64>());

/// # Safety
/// As getrlimit(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn getrlimit(resource: c_uint, old: *mut rlimit64) -> c_int {
    // SAFETY: as the caller's.
    unsafe { limit(0, resource, null(), old) }
}

/// # Safety
/// As getrlimit(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn getrlimit64(resource: c_uint, old: *mut rlimit64) -> c_int {
    // SAFETY: as the caller's.
    unsafe { limit(0, resource, null(), old) }
}

/// # Safety
/// As setrlimit(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn setrlimit(resource: c_uint, new: *const rlimit64) -> c_int {
    // SAFETY: as the caller's.
    unsafe { limit(0, resource, new, null_mut()) }
}

/// # Safety
/// As setrlimit(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn setrlimit64(resource: c_uint, new: *const rlimit64) -> c_int {
    // SAFETY: as the caller's.
    unsafe { limit(0, resource, new, null_mut()) }
}

/// # Safety
/// As prlimit(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn prlimit(
    pid: libc::pid_t,
    resource: c_uint,
    new: *const rlimit64,
    old: *mut rlimit64,
) -> c_int {
    // SAFETY: as the caller's.
    unsafe { limit(pid, resource, new, old) }
}

/// # Safety
/// As prlimit(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn prlimit64(
    pid: libc::pid_t,
    resource: c_uint,
    new: *const rlimit64,
    old: *mut rlimit64,
) -> c_int {
    // SAFETY: as the caller's.
    unsafe { limit(pid, resource, new, old) }
}
