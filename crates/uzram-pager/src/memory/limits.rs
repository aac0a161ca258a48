//! Limits on address space and data, setrlimit(2), of a program that has a [`Memory`].
//!
//! The kernel counts what is reserved for the memory, and not which parts of that the program uses. So its limit is to be larger than
//! the program's, and what the program is about to use is asked for here: by a mapping that has just the length with which
//! the kernel exceeds its limit if the program would exceed the program's. It is unmapped at once. In this way the kernel's own counts
//! decide, whatever else the process has mapped, and no descriptor is needed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use rustix::mm::{MapFlags, ProtFlags};
use uzram::units::{PAGE_SIZE, pages_to_bytes};

use super::{HEAP_SHARE, HEAP_STEP_BYTES, Memory};
use crate::core::lock;
use crate::signals::Blocked;

/// What the store reserves for a byte of the capacity, `RESERVE_FACTOR` of the store, and one byte of so many for tables.
const STORE_FACTOR: u64 = 4;
const TABLES_SHARE: u64 = 32;

/// What is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limited {
    /// `RLIMIT_AS`.
    AddressSpace,
    /// `RLIMIT_DATA`: what is private and writable.
    Data,
}

impl Limited {
    /// All of them.
    pub const ALL: [Limited; 2] = [Limited::AddressSpace, Limited::Data];

    /// Returns the most bytes that a memory adds to what the kernel counts, of this capacity, whose pager has this limit, but for
    /// the stacks of its threads and what these allocate.
    pub fn reserved_bytes(self, capacity_bytes: u64, limit_bytes: u64) -> u64 {
        let tables = capacity_bytes / TABLES_SHARE;
        let compressed = limit_bytes.min(capacity_bytes);
        match self {
            Limited::AddressSpace => capacity_bytes * (1 + STORE_FACTOR) + tables + compressed,
            Limited::Data => heap_bytes(capacity_bytes) + tables + compressed,
        }
    }

    fn of<T>(self, both: &[T; 2]) -> &T {
        let [address_space, data] = both;
        match self {
            Limited::AddressSpace => address_space,
            Limited::Data => data,
        }
    }
}

/// Returns how much of a memory is the allocator's.
pub(super) fn heap_bytes(capacity_bytes: u64) -> u64 {
    (capacity_bytes / HEAP_SHARE).next_multiple_of(HEAP_STEP_BYTES)
}

/// No limit.
const NONE: u64 = u64::MAX;

pub(super) struct Limits {
    is_set: AtomicBool,
    /// By how much the kernel's limit is larger than the program's; [`NONE`] if there is none.
    beyond: [AtomicU64; 2],
    /// What the pager has added to the kernel's counts when it started.
    pager: [AtomicU64; 2],
    /// Odd while the pager starts: what it maps meanwhile is not known yet.
    starts: AtomicU32,
    /// Held by a thread that asks: two would find each other's mappings.
    asking: Mutex<()>,
}

impl Limits {
    pub(super) fn new() -> Limits {
        Limits {
            is_set: AtomicBool::new(false),
            beyond: [const { AtomicU64::new(NONE) }; 2],
            pager: [const { AtomicU64::new(0) }; 2],
            starts: AtomicU32::new(0),
            asking: Mutex::default(),
        }
    }

    /// Has no thread ask while the result lives.
    pub(super) fn hold(&self) -> MutexGuard<'_, ()> {
        lock(&self.asking)
    }

    /// Notes that a pager starts, which `start` does, and what it adds to the kernel's counts. Meanwhile whatever is asked for is
    /// given: nobody waits, as the pager's threads are started with locks that who asks may have.
    pub(super) fn start_pager<R>(&self, start: impl FnOnce() -> R) -> R {
        self.starts.fetch_add(1, Ordering::SeqCst);
        // Nobody asks any more.
        drop(self.hold());
        let before = counts();
        let started = start();
        self.note_pager(before);
        self.starts.fetch_add(1, Ordering::SeqCst);
        started
    }

    fn note_pager(&self, before: Option<[u64; 2]>) {
        let (Some(before), Some(after)) = (before, counts()) else { return };
        for ((pager, before), after) in self.pager.iter().zip(before).zip(after) {
            pager.store(after.saturating_sub(before), Ordering::Relaxed);
        }
    }
}

/// Returns how many bytes the kernel counts for the limits, but for the main thread's stack, which it counts as data here alone.
fn counts() -> Option<[u64; 2]> {
    let sizes = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut sizes = sizes.split_ascii_whitespace().map(|pages| pages.parse().ok().map(pages_to_bytes));
    Some([sizes.next()??, sizes.nth(4)??])
}

impl Memory {
    /// Notes that a limit is in force: the kernel's is so many bytes larger than the program's. `None`: there is no limit.
    pub fn set_limit(&self, limited: Limited, beyond_bytes: Option<u64>) {
        let limits = &self.limits;
        limited.of(&limits.beyond).store(beyond_bytes.unwrap_or(NONE), Ordering::Relaxed);
        let is_set = limits.beyond.iter().any(|beyond| beyond.load(Ordering::Relaxed) != NONE);
        limits.is_set.store(is_set, Ordering::Relaxed);
    }

    /// Returns whether a limit is in force.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.limits.is_set.load(Ordering::Relaxed)
    }

    /// Returns whether the program may use so many bytes more, without exceeding its limits. `is_data`: they are private, and it may
    /// write them.
    #[inline]
    pub fn may_use(&self, bytes: u64, is_data: bool) -> bool {
        !self.is_limited() || bytes == 0 || self.ask(bytes, is_data)
    }

    #[cold]
    fn ask(&self, bytes: u64, is_data: bool) -> bool {
        let _blocked = Blocked::new();
        let _one = self.limits.hold();
        let starts = self.limits.starts.load(Ordering::SeqCst);
        if starts % 2 == 1 {
            return true;
        }
        let may_use = Limited::ALL.into_iter().all(|limited| {
            let beyond = limited.of(&self.limits.beyond).load(Ordering::Relaxed);
            if beyond == NONE || (limited == Limited::Data && !is_data) {
                return true;
            }
            // The kernel counts these, used or not.
            let counted = match limited {
                Limited::AddressSpace => self.space.len_bytes() as u64,
                // The store's memory becomes writable as it is needed.
                Limited::Data => {
                    self.heap.bytes() as u64
                        + self.core().map_or(0, |core| core.store.stats().compr_data_bytes)
                }
            };
            let counted = counted + limited.of(&self.limits.pager).load(Ordering::Relaxed);
            let used = match limited {
                Limited::AddressSpace => self.heap_bytes.get() + self.mapped_bytes.get(),
                // The kernel counts mappings itself.
                Limited::Data => self.heap_bytes.get(),
            };
            let asked = used.saturating_add(bytes).saturating_add(beyond).saturating_sub(counted);
            asked == 0 || is_room(limited, asked)
        });
        may_use || self.limits.starts.load(Ordering::SeqCst) != starts
    }
}

/// Returns whether the kernel maps so many bytes.
fn is_room(limited: Limited, bytes: u64) -> bool {
    let access = match limited {
        Limited::AddressSpace => ProtFlags::empty(),
        Limited::Data => ProtFlags::READ | ProtFlags::WRITE,
    };
    let Some(len) = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(PAGE_SIZE))
    else {
        return false;
    };
    // SAFETY: a new mapping at an address that the kernel chooses, which nobody else knows, and which is unmapped again.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let mapped = rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, flags);
        mapped.is_ok_and(|mapped| rustix::mm::munmap(mapped, len).is_ok())
    }
}
