//! Threads that carry out transfers, or prepare them.
//!
//! Lock: `backing queue`, held only to add transfers to the queue and to take them out.

use std::collections::VecDeque;
use std::thread::JoinHandle;

use super::{Started, Transfer, dead};
use crate::base::error::Result;
use crate::base::sync::{Arc, Condvar, Mutex, classes};
use crate::base::thread::{join, spawn_relied_on};

/// What is done with each transfer. If there is an error, it is to end with that.
type CarryOut = Box<dyn Fn(Started, Result<()>) + Send + Sync>;

/// Some threads. When this is dropped, they carry out all queued transfers and end.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    carry_out: CarryOut,
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
    /// Starts `count` threads, which have room for so many transfers in their queue without taking memory.
    pub(crate) fn new(name: &str, count: usize, queue_depth: usize, carry_out: CarryOut) -> Result<Self> {
        let transfers = VecDeque::with_capacity(queue_depth);
        let queue = Queue { transfers, usable: Ok(()), closed: false };
        let queue = Mutex::new(&classes::BACKING_QUEUE, queue);
        let shared = Arc::new(Shared { carry_out, queue, changed: Condvar::new() });
        // If a thread cannot be started, dropping this ends the earlier ones.
        let mut engine = Threads { shared, threads: Vec::new() };
        for number in 0..count {
            let (name, shared) = (format!("{name}-{number}"), Arc::clone(&engine.shared));
            let thread =
                spawn_relied_on(&name, shared, |shared| shared.run(), |shared, why| shared.refuse(why))?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    pub(crate) fn start(&self, transfer: Transfer) {
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
        while let Some((transfer, usable)) = self.next() {
            (self.carry_out)(transfer, usable);
        }
    }

    /// After a panic: keeps running, and fails all transfers.
    fn refuse(&self, why: &str) {
        self.queue.lock().usable = Err(dead(why));
        self.run();
    }

    /// Waits for a transfer, and the error to end it with, if any. `None` when all is done and dropped.
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
