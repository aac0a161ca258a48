//! Threads that wait for devices, so that the threads of connections need not.
//!
//! Each device that is in use has its [`Crew`] of at most [`MAX_THREADS`], so that nobody waits for another's device.
//! They are started when there is more to do than the others can, and stay until the last connection to their device
//! ends. What waits for a thread or in one is bounded, in number and in bytes, for all of a server's devices together:
//! each job has its [`Room`] before it begins, for as long as what it made is kept. Its bytes are a share of the budget
//! that the server gave: all that NBD clients may make it hold, or what is there for FUSE's jobs alone.
//!
//! Locks: `Waiters::crews`, then that of a crew's `State`, a leaf; none is held while a job runs.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use uzram::device::Device;

use crate::budget::{Budget, Share};

/// Threads of a device: as many requests as these are under way at a time on its backing device, beside those of
/// connections that find no room here.
const MAX_THREADS: usize = 16;
/// Jobs of a server that have room at once.
pub(crate) const MAX_JOBS: usize = 1024;
/// Memory that they need: one of the longest requests, and many short ones.
pub(crate) const JOB_BYTES: usize = 40 << 20;

/// Something that takes its time.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The crews of a server's devices.
pub(crate) struct Waiters {
    /// By the addresses of devices; those that are in use.
    crews: Mutex<HashMap<usize, Weak<Crew>>>,
    bounds: Bounds,
}

/// What jobs are bounded by.
#[derive(Clone)]
struct Bounds {
    /// [`MAX_JOBS`] of them.
    jobs: Arc<Budget>,
    bytes: Arc<Budget>,
}

/// The right to have a job and so much memory for it, given up on drop.
pub(crate) struct Room {
    _job: Share,
    _bytes: Share,
}

/// The threads that wait for one device. Dropped, it waits until all jobs are done.
pub(crate) struct Crew {
    shared: Arc<Shared>,
    bounds: Bounds,
}

#[derive(Default)]
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
    /// It was said that the system gives no thread.
    complained: bool,
    ended: bool,
}

/// Nothing panics while one of these is held, so a poisoned lock is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Waiters {
    /// With [`JOB_BYTES`] of their own.
    fn default() -> Self {
        Waiters::new(Budget::new(JOB_BYTES))
    }
}

impl Waiters {
    /// No crews; their jobs take memory from this budget.
    pub fn new(bytes: Arc<Budget>) -> Self {
        Waiters { crews: Mutex::default(), bounds: Bounds { jobs: Budget::new(MAX_JOBS), bytes } }
    }

    /// The crew of a device, for as long as somebody keeps it.
    pub fn crew(&self, device: &Arc<Device>) -> Arc<Crew> {
        let mut crews = lock(&self.crews);
        let address = Arc::as_ptr(device) as usize;
        if let Some(crew) = crews.get(&address).and_then(Weak::upgrade) {
            return crew;
        }
        crews.retain(|_, crew| crew.strong_count() > 0);
        let crew = Arc::new(Crew { shared: Arc::default(), bounds: self.bounds.clone() });
        crews.insert(address, Arc::downgrade(&crew));
        crew
    }
}

impl Crew {
    /// Room for a job that needs `len_bytes`, and a thread to run it; `None` when there are too many others, or
    /// the system gives no thread.
    pub fn room(&self, len_bytes: usize) -> Option<Room> {
        let mut state = lock(&self.shared.state);
        if state.threads.is_empty() {
            self.shared.start_thread(&mut state);
        }
        if state.threads.is_empty() {
            return None;
        }
        drop(state);
        Some(Room { _job: self.bounds.jobs.take(1)?, _bytes: self.bounds.bytes.take(len_bytes)? })
    }

    /// Runs a job, for which there is room, in one of the threads, as soon as one is free.
    pub fn start(&self, job: Job) {
        let mut state = lock(&self.shared.state);
        state.jobs.push_back(job);
        if state.jobs.len() + state.busy > state.threads.len() && state.threads.len() < MAX_THREADS {
            self.shared.start_thread(&mut state);
        }
        drop(state);
        self.shared.called.notify_one();
    }
}

impl Shared {
    /// Starts one more thread, if the system gives it.
    fn start_thread(self: &Arc<Self>, state: &mut State) {
        let name = format!("wait-{}", state.threads.len());
        let shared = Arc::clone(self);
        match thread::Builder::new().name(name).spawn(move || shared.run()) {
            Ok(thread) => {
                state.threads.push(thread);
                state.complained = false;
            }
            // It is asked again for each request.
            Err(_) if state.complained => {}
            Err(error) => {
                state.complained = true;
                tracing::warn!(%error, "no thread to wait for devices: those who ask wait themselves");
            }
        }
    }

    /// What a thread does.
    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                state.busy += 1;
                drop(state);
                // What a panic leaves behind is the job's own, and is dropped here.
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!("a panic ended a request; please report it");
                }
                state = lock(&self.state);
                state.busy -= 1;
            } else if state.ended {
                return;
            } else {
                state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.ended = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.shared.called.notify_all();
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

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn crew() -> Arc<Crew> {
        Waiters::default().crew(&Device::new("d").unwrap())
    }

    fn start(crew: &Crew, job: Job) {
        let room = crew.room(1).unwrap();
        crew.start(Box::new(move || {
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
        let crew = crew();
        let (running, runs) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..MAX_THREADS + 3 {
            let (end, job) = stuck(&running);
            ends.push(end);
            start(&crew, job);
        }
        for _ in 0..MAX_THREADS {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        assert!(runs.recv_timeout(Duration::from_millis(50)).is_err(), "no more threads");
        assert_eq!(lock(&crew.shared.state).threads.len(), MAX_THREADS);
        drop(ends);
        for _ in 0..3 {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
    }

    #[test]
    fn one_thread_is_enough_for_one_job_after_another() {
        let crew = crew();
        let (running, runs) = mpsc::channel();
        for _ in 0..50 {
            while lock(&crew.shared.state).busy > 0 {
                thread::yield_now();
            }
            let running = running.clone();
            start(&crew, Box::new(move || running.send(()).unwrap()));
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        assert_eq!(lock(&crew.shared.state).threads.len(), 1);
    }

    /// However many wait for one device, others' are waited for at once; but all share one bound.
    #[test]
    fn nobody_waits_for_anothers_device() {
        let waiters = Waiters::default();
        let devices = ["a", "b"].map(|name| Device::new(name).unwrap());
        let [a, b] = devices.each_ref().map(|device| waiters.crew(device));
        assert!(Arc::ptr_eq(&a, &waiters.crew(&devices[0])) && !Arc::ptr_eq(&a, &b));
        let (running, runs) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..2 * MAX_THREADS {
            let (end, job) = stuck(&running);
            ends.push(end);
            start(&a, job);
        }
        for _ in 0..MAX_THREADS {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        start(&b, Box::new(move || running.send(()).unwrap()));
        runs.recv_timeout(TIMEOUT).unwrap();
        assert!(a.room(JOB_BYTES - 2 * MAX_THREADS + 1).is_none());
        drop(ends);
        drop((a, b));
        let again = waiters.crew(&devices[0]);
        assert!(again.room(JOB_BYTES).is_some());
        assert_eq!(lock(&waiters.crews).len(), 1, "what is not in use is forgotten");
    }

    #[test]
    fn room_is_bounded_in_jobs_and_in_bytes() {
        let crew = crew();
        assert!(crew.room(JOB_BYTES + 1).is_none());
        let all = crew.room(JOB_BYTES).unwrap();
        assert!(crew.room(1).is_none() && crew.room(0).is_some());
        drop(all);
        let rooms: Vec<_> = std::iter::from_fn(|| crew.room(1)).collect();
        assert_eq!(rooms.len(), MAX_JOBS);
        drop(rooms);
        assert!(crew.room(JOB_BYTES).is_some());
    }

    #[test]
    fn a_panic_ends_its_job_alone_and_the_end_waits_for_all() {
        let (crew, done) = (crew(), Arc::new(AtomicUsize::new(0)));
        for index in 0..20 {
            let done = Arc::clone(&done);
            let job = move || {
                thread::sleep(Duration::from_millis(2));
                done.fetch_add(1, Relaxed);
                assert!(index % 5 > 0, "a panic that belongs to the test");
            };
            start(&crew, Box::new(job));
        }
        drop(crew);
        assert_eq!(done.load(Relaxed), 20);
    }
}
