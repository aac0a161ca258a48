//! fork(2): a child has a copy of everything, and goes on by itself.
//!
//! 1. Before, the thread that forks waits until no other thread is in the pager (`gate.rs`). From then on
//!    nothing moves but the pages that it touches itself.
//! 2. In the parent, all go on. Touches of other threads were left alone meanwhile, and are repeated.
//! 3. The child has the pager's memory as it was, and none of its threads. It opens a userfaultfd of its own,
//!    registers all again, and starts threads of its own. Until then its pages that are not in memory read as
//!    zeros: nothing of the program may run.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use super::{Memory, Running, Threads, lock};
use crate::areas::{Areas, Protection, Use};
use crate::gate::Closed;
use crate::pager::{Evictor, Writers};
use crate::signals::Blocked;
use crate::spill::Sharing;
use crate::sync::RwLockWriteGuard;
use crate::waiters::Waiters;
use uzram::Result;
use uzram::sync::Arc;

/// What a thread holds that forks.
pub struct Forking<'a> {
    areas: MutexGuard<'a, Areas>,
    /// If the pager runs.
    paused: Option<Paused<'a>>,
    _one: MutexGuard<'a, ()>,
    _blocked: Blocked,
}

struct Paused<'a> {
    running: &'a Running,
    stopped: Stopped<'a>,
    closed: Closed<'a>,
    sharing: Option<Sharing>,
}

/// How much of its stack a thread is taken to need yet until it has forked, in bytes: less than the smallest
/// stack has.
const BELOW: usize = 4096;

impl Forking<'_> {
    /// Waits until all pages that this thread has touched are wholly there: a child would have one half
    /// opened for ever. Call it last before the process forks.
    #[inline(never)]
    pub fn settle(&self) {
        let Some(paused) = &self.paused else { return };
        let mut below = std::mem::MaybeUninit::<[u8; BELOW]>::uninit();
        for at in [0, BELOW - 1] {
            // SAFETY: in the array.
            unsafe { below.as_mut_ptr().cast::<u8>().add(at).write_volatile(0) };
        }
        paused.closed.settle();
    }
}

/// Nobody waits for room, evicts, or changes the memory map.
struct Stopped<'a> {
    _changing: RwLockWriteGuard<'a, ()>,
    _evicting: MutexGuard<'a, ()>,
}

impl Running {
    fn stop(&self) -> Stopped<'_> {
        self.core.room.hold(true);
        let _evicting = lock(&self.core.evicting);
        Stopped { _changing: self.core.trap.gate.stop_changes(), _evicting }
    }

    fn pause<'a>(&'a self, stopped: Stopped<'a>) -> Paused<'a> {
        let core = &self.core;
        let closed = core.trap.gate.close(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
        core.store.end_threads();
        // They end when nothing is under way any more.
        lock(&self.threads).as_mut().into_iter().for_each(|threads| drop(threads.writers.take()));
        let sharing = self.spill.as_ref().and_then(|spill| spill.before_fork());
        Paused { running: self, stopped, closed, sharing }
    }
}

impl Memory {
    /// Waits until nothing moves: before fork(2).
    pub fn before_fork(&self) -> Forking<'_> {
        let _blocked = Blocked::new();
        let _one = lock(&self.forks);
        loop {
            let stopped = self.running().map(|running| (running, running.stop()));
            // Before the gate closes: a thread that has locked them may touch its stack.
            let areas = lock(&self.areas);
            // Under the lock it does not start.
            if stopped.is_some() || self.running().is_none() {
                let paused = stopped.map(|(running, stopped)| running.pause(stopped));
                return Forking { areas, paused, _one, _blocked };
            }
        }
    }

    /// Goes on in the process that has forked, or could not.
    pub fn after_fork(&self, forking: Forking<'_>) {
        let Some(Paused { running, stopped, closed, sharing }) = forking.paused else { return };
        let core = &running.core;
        if let Some(spill) = &running.spill {
            spill.after_fork(sharing);
        }
        core.room.hold(false);
        drop((closed, stopped));
        core.trap.retry_all();
        // To start threads takes locks that a thread may have which waits for a page: only now.
        if let Some(threads) = lock(&running.threads).as_mut() {
            // Without them nothing more is spilled.
            threads.writers = Writers::start(&core.store, running.spill.clone()).ok();
        }
        // Without it memory is given back later.
        let _ = core.store.begin_threads();
    }

    /// Goes on in the child.
    ///
    /// # Errors
    /// The child may not trap touches. All of its memory has been brought in then, and is as the kernel
    /// manages it.
    pub fn after_fork_in_child(&self, forking: Forking<'_>) -> Result<()> {
        // Dropped in the reverse order: signals come when no lock is held.
        let Forking { _blocked, _one, areas, paused } = forking;
        let Some(Paused { running, stopped, closed, sharing }) = paused else { return Ok(()) };
        // These are threads of the parent.
        std::mem::forget(lock(&running.threads).take());
        if let Some(spill) = &running.spill {
            spill.after_fork_in_child(sharing);
        }
        let core = &running.core;
        core.room.begin_in_child();
        core.trap.gate.begin_in_child();
        core.room.hold(false);
        let renewed = Self::renew(running, &areas);
        if renewed.is_err() {
            self.bring_all(running, &areas);
        }
        drop((closed, stopped));
        let waiters = renewed?;
        // Now, as it takes the lock that was just held.
        let evictor = Evictor::start(core, self.settings.pager.goal_percent());
        let evictor = evictor.inspect_err(|_| core.room.hold(true))?;
        // Without them nothing is spilled, and memory is given back later.
        let writers = Writers::start(&core.store, running.spill.clone()).ok();
        let _ = core.store.begin_threads();
        *lock(&running.threads) = Some(Threads { waiters, _evictor: evictor, writers });
        Ok(())
    }

    /// Brings all memory, in a child that may not trap touches, and has no pager from now on.
    fn bring_all(&self, running: &Running, areas: &Areas) {
        running.core.trap.give_up();
        for (run, used) in areas.all() {
            let Use::Managed(protection) = used else { continue };
            let protect = |bits: i32| {
                // SAFETY: the pages are mapped. The program does not run yet.
                unsafe { libc::syscall(libc::SYS_mprotect, self.space.address(run.first), run.bytes(), bits) }
            };
            if !protection.may_leave() {
                protect(Protection::READ_WRITE.0);
            }
            if !running.core.bring_all(run) {
                // Nothing can be done for a program that would find other contents than its own.
                std::process::abort();
            }
            if !protection.may_leave() {
                protect(protection.0);
            }
        }
        self.is_off.store(true, Ordering::Relaxed);
    }

    fn renew(running: &Running, areas: &Areas) -> Result<Arc<Waiters>> {
        let core = &running.core;
        core.trap.renew()?;
        core.renew_shelves()?;
        for (run, used) in areas.all() {
            if matches!(used, Use::Managed(_)) {
                core.trap.register(run)?;
            }
        }
        Waiters::start(core, running.waiters, running.waiters)
    }
}
