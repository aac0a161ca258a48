//! Threads of a server that wait for its devices, so that the threads of its connections need not.
//!
//! There are at most [`MAX_THREADS`], each started when there is more to do than the others can, and all of them
//! stay until the server ends. What waits for a thread or in one is bounded, in number and in bytes: each job has
//! its [`Room`] before it begins, for as long as what it made is kept.
//!
//! Lock: that of `State`, a leaf; never held while a job runs.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Threads of a server: as many requests as these are under way at a time on its backing devices, beside those of
/// connections that find no room here.
const MAX_THREADS: usize = 16;
/// Jobs of a server that have room at once.
pub(super) const MAX_JOBS: usize = 1024;
/// Memory that they may take: one of the longest requests, and many short ones.
const MAX_BYTES: usize = 40 << 20;

/// Something that takes its time.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// The threads. Dropped, it waits until all jobs are done.
pub(super) struct Waiters(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Signalled for each job, and when the threads are to end.
    called: Condvar,
}

/// Protected by the lock.
#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that run a job.
    busy: usize,
    /// Jobs that have room, and their bytes.
    taken_jobs: usize,
    taken_bytes: usize,
    ended: bool,
}

/// The right to have a job and so much memory for it, given up on drop.
pub(super) struct Room {
    shared: Arc<Shared>,
    len_bytes: usize,
}

impl Waiters {
    /// No threads yet.
    pub fn new() -> Self {
        Waiters(Arc::new(Shared { state: Mutex::default(), called: Condvar::new() }))
    }

    /// Room for a job that needs `len_bytes`, and a thread to run it; `None` when there are too many others, or
    /// the system gives no thread.
    pub fn room(&self, len_bytes: usize) -> Option<Room> {
        let mut state = self.0.lock();
        if state.taken_jobs == MAX_JOBS || len_bytes > MAX_BYTES - state.taken_bytes {
            return None;
        }
        if state.threads.is_empty() {
            self.0.start_thread(&mut state);
        }
        if state.threads.is_empty() {
            return None;
        }
        state.taken_jobs += 1;
        state.taken_bytes += len_bytes;
        Some(Room { shared: Arc::clone(&self.0), len_bytes })
    }

    /// Runs a job, for which there is room, in one of the threads, as soon as one is free.
    pub fn start(&self, job: Job) {
        let mut state = self.0.lock();
        state.jobs.push_back(job);
        if state.jobs.len() + state.busy > state.threads.len() && state.threads.len() < MAX_THREADS {
            self.0.start_thread(&mut state);
        }
        drop(state);
        self.0.called.notify_one();
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.taken_jobs -= 1;
        state.taken_bytes -= self.len_bytes;
    }
}

impl Shared {
    /// Nothing panics while it is held, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one more thread, if the system gives it.
    fn start_thread(self: &Arc<Self>, state: &mut State) {
        let name = format!("nbd-wait-{}", state.threads.len());
        let shared = Arc::clone(self);
        match thread::Builder::new().name(name).spawn(move || shared.run()) {
            Ok(thread) => state.threads.push(thread),
            Err(error) => {
                tracing::warn!(%error, "no thread to wait for devices: connections wait themselves")
            }
        }
    }

    /// What a thread does.
    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                state.busy += 1;
                drop(state);
                // What a panic leaves behind is the job's own, and is dropped here.
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!("a panic ended a request; please report it");
                }
                state = self.lock();
                state.busy -= 1;
            } else if state.ended {
                return;
            } else {
                state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.0.called.notify_all();
        for thread in threads {
            // A job's panic has been reported and did not end its thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn start(waiters: &Waiters, job: Job) {
        let room = waiters.room(1).unwrap();
        waiters.start(Box::new(move || {
            job();
            drop(room);
        }));
    }

    /// A job that says that it runs, and then waits until it is told to end, or the other end is gone.
    fn stuck(running: &mpsc::Sender<()>) -> (mpsc::Sender<()>, Job) {
        let (end, ended) = mpsc::channel();
        let running = running.clone();
        let job = move || {
            running.send(()).unwrap();
            let _ = ended.recv_timeout(TIMEOUT);
        };
        (end, Box::new(job))
    }

    #[test]
    fn jobs_do_not_wait_for_each_other_until_all_threads_do() {
        let waiters = Waiters::new();
        let (running, runs) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..MAX_THREADS + 3 {
            let (end, job) = stuck(&running);
            ends.push(end);
            start(&waiters, job);
        }
        for _ in 0..MAX_THREADS {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        assert!(runs.recv_timeout(Duration::from_millis(50)).is_err(), "no more threads");
        assert_eq!(waiters.0.lock().threads.len(), MAX_THREADS);
        drop(ends);
        for _ in 0..3 {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
    }

    #[test]
    fn one_thread_is_enough_for_one_job_after_another() {
        let waiters = Waiters::new();
        let (running, runs) = mpsc::channel();
        for _ in 0..50 {
            while waiters.0.lock().busy > 0 {
                thread::yield_now();
            }
            let running = running.clone();
            start(&waiters, Box::new(move || running.send(()).unwrap()));
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        assert_eq!(waiters.0.lock().threads.len(), 1);
    }

    #[test]
    fn room_is_bounded_in_jobs_and_in_bytes() {
        let waiters = Waiters::new();
        assert!(waiters.room(MAX_BYTES + 1).is_none());
        let all = waiters.room(MAX_BYTES).unwrap();
        assert!(waiters.room(1).is_none() && waiters.room(0).is_some());
        drop(all);
        let rooms: Vec<_> = std::iter::from_fn(|| waiters.room(1)).collect();
        assert_eq!(rooms.len(), MAX_JOBS);
        drop(rooms);
        assert!(waiters.room(MAX_BYTES).is_some());
    }

    #[test]
    fn a_panic_ends_its_job_alone_and_the_end_waits_for_all() {
        let (waiters, done) = (Waiters::new(), Arc::new(AtomicUsize::new(0)));
        for index in 0..20 {
            let done = Arc::clone(&done);
            let job = move || {
                thread::sleep(Duration::from_millis(2));
                done.fetch_add(1, Relaxed);
                assert!(index % 5 > 0, "a panic that belongs to the test");
            };
            start(&waiters, Box::new(job));
        }
        drop(waiters);
        assert_eq!(done.load(Relaxed), 20);
    }
}
