//! The engine `threads`: a few threads that read and write, for systems without io_uring.
//!
//! Lock: `backing queue`, held only to add transfers to the queue and to take them out.

use std::collections::VecDeque;
use std::thread::JoinHandle;

use super::engine::Target;
use crate::backing::{Started, Transfer, dead};
use crate::base::error::Result;
use crate::base::sync::{Arc, Condvar, Mutex, classes};
use crate::base::thread::{join, spawn_relied_on};

/// The maximum number of threads of a backing.
const MAX_THREADS: usize = 4;

/// The threads of a backing. When this is dropped, they carry out all queued transfers and end.
pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    target: Arc<Target>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

struct Queue {
    transfers: VecDeque<Started>,
    /// The error of all transfers after a panic.
    usable: Result<()>,
    closed: bool,
}

impl Threads {
    /// Starts the threads.
    ///
    /// # Errors
    /// `NoMemory` when the system gives no thread.
    pub(super) fn new(target: Arc<Target>, queue_depth: usize) -> Result<Self> {
        let transfers = VecDeque::with_capacity(queue_depth);
        let queue = Queue { transfers, usable: Ok(()), closed: false };
        let queue = Mutex::new(&classes::BACKING_QUEUE, queue);
        let shared = Arc::new(Shared { target, queue, changed: Condvar::new() });
        // If a thread cannot be started, dropping this ends the earlier ones.
        let mut engine = Threads { shared, threads: Vec::new() };
        for number in 0..queue_depth.min(MAX_THREADS) {
            let (name, shared) = (format!("uzram-back-{number}"), Arc::clone(&engine.shared));
            let thread =
                spawn_relied_on(&name, shared, |shared| shared.run(), |shared, why| shared.refuse(why))?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    pub(super) fn start(&self, transfer: Transfer) {
        self.shared.queue.lock().transfers.push_back(Started::new(transfer));
        self.shared.changed.notify_one();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_all();
        self.threads.drain(..).for_each(join);
    }
}

impl Shared {
    fn run(&self) {
        while let Some((mut transfer, usable)) = self.next() {
            let Transfer { direction, offset, len_bytes, buffer, .. } = &mut *transfer;
            let result = usable.and_then(|()| self.target.carry_out(*direction, *offset, *len_bytes, buffer));
            transfer.finish(result);
        }
    }

    /// After a panic: keeps running, and fails all transfers.
    fn refuse(&self, why: &str) {
        self.queue.lock().usable = Err(dead(why));
        self.run();
    }

    /// Waits for a transfer, and returns it with the error to end it with, if any. Returns `None` when the backing is
    /// dropped and the queue is empty.
    fn next(&self) -> Option<(Started, Result<()>)> {
        let mut queue = self.queue.lock();
        loop {
            match queue.transfers.pop_front() {
                Some(transfer) => return Some((transfer, queue.usable.clone())),
                None if queue.closed => return None,
                None => queue = queue.wait(&self.changed),
            }
        }
    }
}
