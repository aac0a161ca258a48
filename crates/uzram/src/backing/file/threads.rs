//! The engine `threads`: a few threads that read and write, for where io_uring may not be used.
//!
//! Lock: `backing queue`, held only to put transfers into the queue and to take them out.

use std::collections::VecDeque;
use std::thread::JoinHandle;

use super::engine::Target;
use crate::backing::{Started, Transfer, dead};
use crate::base::error::Result;
use crate::base::sync::{Arc, Condvar, Mutex, classes};
use crate::base::thread::{join, spawn_relied_on};

/// The most threads that one backing has.
const MAX_THREADS: usize = 4;

/// The threads of a backing. Dropped, they carry out what is queued and end.
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
    /// Why no transfer is carried out any more, if so.
    usable: Result<()>,
    closed: bool,
}

impl Threads {
    /// Starts them.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub(super) fn new(target: Arc<Target>, queue_depth: usize) -> Result<Self> {
        let transfers = VecDeque::with_capacity(queue_depth);
        let queue = Queue { transfers, usable: Ok(()), closed: false };
        let queue = Mutex::new(&classes::BACKING_QUEUE, queue);
        let shared = Arc::new(Shared { target, queue, changed: Condvar::new() });
        // Those that were started end when a later one can not be.
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

    /// After a panic: goes on, to say no.
    fn refuse(&self, why: &str) {
        self.queue.lock().usable = Err(dead(why));
        self.run();
    }

    /// Waits for a transfer, and says whether it may be carried out; none when the backing is dropped and all are done.
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
