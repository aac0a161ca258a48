//! Handles that wait to be freed: a list for each CPU, and batches on their way to the thread that frees them.
//!
//! ```text
//! free ──► list of the CPU ──► queued ──► taken: being freed ──► spare ──► list of a CPU
//! ```
//!
//! A list is a batch; when it is full it is exchanged for a spare one, and queued. A thread takes the oldest queued batch,
//! frees its objects, and makes it spare again. A thread that finds its list full and no batch spare frees the oldest
//! queued batch itself. So at most as many handles wait as the batches have room for, and no list allocates.
//!
//! Until a handle's object is freed, the handle is in a list, in a queued batch, or in a taken one; it only moves in this
//! order, under the locks of both. A batch that is taken has a ticket, so that [`DeferredLists::flush`] can wait for it.
//!
//! Lock order: a CPU's list, then the queue. Neither is held while objects are freed.

use std::collections::VecDeque;
use std::ops::Deref;
use std::thread::{self, Thread};
use std::time::Duration;

use crate::base::cpu::{self, PerCpu};
use crate::base::error::{Error, Result};
use crate::base::sync::{Condvar, Counter, Mutex, classes};

/// The most handles of a batch: enough that most objects of a zspage which are freed one after another are in one batch.
pub(in crate::zsmalloc) const MAX_BATCH: usize = if cfg!(loom) { 4 } else { 2048 };

/// The freer works, or there is none.
const BUSY: u64 = 0;
/// The freer waits for a batch.
const RESTS: u64 = 1;
/// The freer waits for any handle.
const SLEEPS: u64 = 2;

/// See the [module's documentation](self).
pub(in crate::zsmalloc) struct DeferredLists {
    lists: PerCpu<Mutex<Batch>>,
    queue: Mutex<Queue>,
    /// Notified when a batch is spare again.
    freed: Condvar,
    /// What the freer does. It says so before it looks for handles under the locks, and a thread that pushes one looks
    /// after it has released the same lock: of the two holds of that lock either the freer's is the later, and it finds the
    /// handle, or the other's, which then sees what the freer said. So a counter will do.
    freer_state: Counter,
}

struct Batch {
    handles: Box<[u32]>,
    len: usize,
}

struct Queue {
    /// Full batches, or parts of them after a flush; the oldest first.
    queued: VecDeque<Batch>,
    spare: Vec<Batch>,
    /// The tickets of taken batches, and their lengths.
    taken: Vec<(u64, usize)>,
    next_ticket: u64,
    freer: Option<Thread>,
}

/// A batch whose objects the holder frees. It is spare again when this is dropped.
struct Taken<'a> {
    lists: &'a DeferredLists,
    batch: Batch,
    ticket: u64,
}

impl Batch {
    fn new(room: usize) -> Self {
        Batch { handles: vec![0; room].into_boxed_slice(), len: 0 }
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.len == self.handles.len()
    }

    #[inline]
    fn push(&mut self, handle: u32) {
        self.handles[self.len] = handle;
        self.len += 1;
    }
}

impl DeferredLists {
    /// Makes empty lists, in which at most `limit` handles wait.
    ///
    /// # Errors
    /// `Invalid` if that is fewer than one for each possible CPU, and one more.
    pub(in crate::zsmalloc) fn new(limit: u64) -> Result<Self> {
        let batches_at_least = cpu::possible() + 1;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).min(u32::MAX as usize);
        let room = (limit / batches_at_least).min(MAX_BATCH);
        if room == 0 {
            let what = format!("at least {batches_at_least} frees must be able to wait, one more than CPUs");
            return Err(Error::invalid(what).with_setting("defer_frees"));
        }
        let batches = limit / room;
        let spare: Vec<Batch> = (cpu::possible()..batches).map(|_| Batch::new(room)).collect();
        let queue = Queue {
            queued: VecDeque::with_capacity(spare.len()),
            taken: Vec::with_capacity(spare.len()),
            spare,
            next_ticket: 0,
            freer: None,
        };
        Ok(DeferredLists {
            lists: PerCpu::new(|_| Mutex::new(&classes::ZS_DEFERRED, Batch::new(room))),
            queue: Mutex::new(&classes::ZS_DEFERRED_QUEUE, queue),
            freed: Condvar::new(),
            freer_state: Counter::new(BUSY),
        })
    }

    /// Has a handle freed later. If as many wait as may, frees others by `free`, or this one.
    #[inline]
    pub(in crate::zsmalloc) fn defer(&self, handle: u32, free: impl Fn(&[u32])) {
        while !self.push(handle) {
            if !self.free_queued(&free) {
                // All batches are being freed, or are the lists of other CPUs.
                return free(&[handle]);
            }
        }
    }

    /// Adds a handle to the list of this CPU. Returns false if there is no room.
    #[inline]
    fn push(&self, handle: u32) -> bool {
        let mut list = self.lists.local().lock();
        let was_full = list.is_full();
        if was_full && !self.hand_over(&mut list) {
            return false;
        }
        list.push(handle);
        let is_queued = list.is_full() && self.hand_over(&mut list) || was_full;
        let awaited = if is_queued { RESTS } else { SLEEPS };
        drop(list);
        if self.freer_state.get() >= awaited {
            self.wake_freer();
        }
        true
    }

    /// Queues a list's batch, and gives the list a spare one. Returns false if none is spare.
    #[cold]
    fn hand_over(&self, list: &mut Batch) -> bool {
        let mut queue = self.queue.lock();
        let Some(empty) = queue.spare.pop() else { return false };
        queue.queued.push_back(std::mem::replace(list, empty));
        true
    }

    /// Frees the handles of the oldest queued batch by `free`; returns whether there was one.
    pub(in crate::zsmalloc) fn free_queued(&self, free: impl Fn(&[u32])) -> bool {
        self.take().is_some_and(|taken| {
            free(&taken);
            true
        })
    }

    fn take(&self) -> Option<Taken<'_>> {
        let mut queue = self.queue.lock();
        let batch = queue.queued.pop_front()?;
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.taken.push((ticket, batch.len));
        Some(Taken { lists: self, batch, ticket })
    }

    /// Frees all handles that wait by `free`; when it returns, also those are freed that other threads had taken.
    /// Returns whether any waited. Handles that are pushed meanwhile may be left.
    pub(in crate::zsmalloc) fn flush(&self, free: impl Fn(&[u32])) -> bool {
        if self.waiting() == 0 {
            return false;
        }
        for list in self.lists.iter() {
            while !self.hand_over_if_any(list) {
                if !self.free_queued(&free) {
                    self.wait_for_a_batch();
                }
            }
        }
        let queued = self.queue.lock().queued.len();
        for _ in 0..queued {
            self.free_queued(&free);
        }
        self.wait_for_taken();
        true
    }

    /// Queues what a list holds. Returns false if it holds something, and no batch is spare.
    fn hand_over_if_any(&self, list: &Mutex<Batch>) -> bool {
        let mut list = list.lock();
        list.len == 0 || self.hand_over(&mut list)
    }

    /// Waits until a batch is spare or queued.
    fn wait_for_a_batch(&self) {
        let mut queue = self.queue.lock();
        while queue.spare.is_empty() && queue.queued.is_empty() {
            queue = queue.wait(&self.freed);
        }
    }

    /// Waits until the batches that are taken now are freed.
    fn wait_for_taken(&self) {
        let mut queue = self.queue.lock();
        let now = queue.next_ticket;
        while queue.taken.iter().any(|(ticket, _)| *ticket < now) {
            queue = queue.wait(&self.freed);
        }
    }

    /// Returns the number of handles that wait or are being freed. None that waits all the time is missed.
    pub(in crate::zsmalloc) fn waiting(&self) -> u64 {
        let listed: usize = self.lists.iter().map(|list| list.lock().len).sum();
        let queue = self.queue.lock();
        let queued: usize = queue.queued.iter().map(|batch| batch.len).sum();
        let taken: usize = queue.taken.iter().map(|(_, len)| len).sum();
        (listed + queued + taken) as u64
    }

    /// Registers the thread that frees, which is unparked when it waits and there is something to free.
    pub(in crate::zsmalloc) fn set_freer(&self, thread: Option<Thread>) {
        self.queue.lock().freer = thread;
        self.freer_state.set(BUSY);
    }

    #[cold]
    fn wake_freer(&self) {
        // Set before it is unparked: it may rest again as soon as it is.
        self.freer_state.set(BUSY);
        let freer = self.queue.lock().freer.clone();
        freer.into_iter().for_each(|freer| freer.unpark());
    }

    /// Parks the freer until a batch is queued, `at_most` that long.
    pub(in crate::zsmalloc) fn rest(&self, at_most: Duration) {
        self.freer_state.set(RESTS);
        let has_queued = !self.queue.lock().queued.is_empty();
        if !has_queued {
            thread::park_timeout(at_most);
        }
        self.freer_state.set(BUSY);
    }

    /// Parks the freer until a handle waits.
    pub(in crate::zsmalloc) fn sleep(&self) {
        self.freer_state.set(SLEEPS);
        if self.waiting() == 0 {
            thread::park();
        }
        self.freer_state.set(BUSY);
    }
}

impl Deref for Taken<'_> {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.batch.handles[..self.batch.len]
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut spare = std::mem::replace(&mut self.batch, Batch { handles: Box::default(), len: 0 });
        spare.len = 0;
        let mut queue = self.lists.queue.lock();
        queue.taken.retain(|(ticket, _)| *ticket != self.ticket);
        queue.spare.push(spare);
        drop(queue);
        self.lists.freed.notify_all();
    }
}
