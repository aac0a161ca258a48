//! What the library in the program and the pager's process share: one page at the start of the reservation,
//! in which all memory of the pager lies.
//!
//! The library calls the pager by touching a page that is never there ([`Call`]): no system call, so that it
//! works under any seccomp list, and the thread waits until the pager places the page. Calls are made one
//! after the other, under [`Control::forking`]; the pager takes a page away again when the next call comes,
//! which shows that the last one has returned.

use core::ops::Range;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize};

/// The size of a page.
pub const PAGE_BYTES: usize = 4096;
/// The address space that a pager reserves: its image, stacks, heap, tables, and compressed memory.
pub const RESERVED_BYTES: usize = 2 << 40;
/// The image's main stack, and the one on which it begins in a child.
pub const STACK_BYTES: usize = 512 << 10;
const BUILD_BYTES: usize = 32;
/// The build that library and image must both be of; zeros if `tools/pager` did not build this.
pub const BUILD: [u8; BUILD_BYTES] = match option_env!("UZRAM_BUILD") {
    None => [0; BUILD_BYTES],
    Some(build) => match build.as_bytes().as_array() {
        Some(build) => *build,
        None => panic!("UZRAM_BUILD must be of BUILD_BYTES"),
    },
};
/// Settings, as environment variables, begin so.
pub const PREFIX: &[u8] = b"UZRAM_RUN_";
/// The key of the auxiliary vector by which the image finds the control page: none of the kernel's.
pub const CONTROL_KEY: usize = 0x757a_7261;

/// The values of [`Control::state`].
pub mod state {
    /// The pager is being started.
    pub const STARTS: u32 = 0;
    /// It runs.
    pub const RUNS: u32 = 1;
    /// It does not, and has said why: the program's memory is not managed.
    pub const REFUSED: u32 = 2;
    /// Of a child: it does not, and all memory is in place, which is as the kernel manages it.
    pub const IN_PLACE: u32 = 3;
}

/// The values of [`Control::fork_as`], the answer to [`Call::ForkAsks`].
pub mod fork_as {
    /// The child gets a pager: the library stops the pager at clone(2) itself, and starts the child's.
    pub const MANAGED: u32 = 0;
    /// All memory is in place until `Call::ForkEnds`, and the child has no pager.
    ///
    /// The library sets it before it asks if it cannot do the other: this must be the answer then.
    pub const UNMANAGED: u32 = 1;
    /// What the library sets before it asks: nobody has answered.
    pub const UNANSWERED: u32 = 2;
}

/// What the library has the pager do, by touching a page of its own for each.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Call {
    /// A thread is about to fork. The answer is in [`Control::fork_as`].
    ForkAsks = 0,
    /// It forks at once: the pager rests from here on, and serves this thread alone.
    ForkBegins = 1,
    /// It has forked, or failed to ([`Control::child`]). In the parent alone. It may come without
    /// [`Call::ForkAsks`], and then means nothing.
    ForkEnds = 2,
    /// The program ends: the last line is due.
    Ends = 3,
}

/// How many calls there are.
pub const CALLS: usize = 4;
/// Where their pages lie, from the control page on.
pub const CALLS_AT: usize = 2 * PAGE_BYTES;

/// The page. The library makes it, of zeros, before it starts the image.
#[repr(C)]
pub struct Control {
    /// The library's [`BUILD`].
    pub build: [u8; BUILD_BYTES],
    /// A futex (not a private one, the waiter is another process): see [`state`].
    pub state: AtomicU32,
    /// The process whose memory this is.
    pub program: AtomicI32,
    /// The pager's process.
    pub pager: AtomicI32,
    /// The keeper's.
    pub keeper: AtomicI32,
    /// How many calls have been made. A page of calls that is touched by something else, as mlockall(2), is
    /// no call.
    pub asked: AtomicU32,
    /// How many of them have been answered.
    pub answered: AtomicU32,
    /// The lock of calls: the thread pointer of the thread that forks, or ends; 0 if none does. A futex, by
    /// its lower half.
    pub forking: AtomicUsize,
    /// See [`fork_as`].
    pub fork_as: AtomicU32,
    /// The child after a fork; negative if there is none, 0 if it is not known (of an unmanaged one).
    pub child: AtomicI32,
    /// The first address of the reservation that was never used.
    pub free: AtomicUsize,
    /// Where the kernel clears the id of the program's main thread, and wakes who waits for that, when it
    /// leaves this memory: at exec and at exit.
    pub tid_address: AtomicUsize,
    /// How a child starts its pager, set by the image: a function that takes the control page.
    pub child_entry: AtomicUsize,
    /// The thread pointer that it needs.
    pub thread_pointer: AtomicUsize,
}

const _: () = assert!(size_of::<Control>() <= PAGE_BYTES);

impl Control {
    /// Returns the addresses of the reservation.
    pub fn reservation(&self) -> Range<usize> {
        let start = &raw const *self as usize;
        start..start + RESERVED_BYTES
    }

    /// Returns the address of the page for a call.
    pub fn call(&self, call: Call) -> usize {
        self.reservation().start + CALLS_AT + call as usize * PAGE_BYTES
    }
}
