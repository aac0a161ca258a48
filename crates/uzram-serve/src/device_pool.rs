//! Threads that wait for devices, so that threads which serve NBD connections and the kernel need not.
//!
//! Each device in use has a [`DevicePool`] of at most [`MAX_THREADS`] threads, so that no request waits for another
//! device. A pool starts a thread when all others are busy, and keeps it until the last user of the device is gone.
//! Tasks that are queued or running are bounded in number and in bytes for all devices of a server together: a
//! [`TaskPermit`] is taken before a task starts, and held as long as the task's result is kept. Its bytes are a share
//! of the server's budget: for NBD, of the memory that all clients share; for FUSE, of a budget for tasks alone.
//!
//! Locks: `DevicePools::pools`, then a pool's `State`, a leaf. None is held while a task runs.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use uzram::device::Device;

use crate::budget::{Budget, Share};

/// The most threads of a pool. This many requests of a device can wait for its backing device at a time, besides those
/// of connections that got no permit.
const MAX_THREADS: usize = 16;
/// The most tasks of a server at a time.
const MAX_TASKS: usize = 1024;
/// Memory for tasks: enough for one of the longest requests, and many short ones.
pub(crate) const TASK_BYTES: usize = 40 << 20;

/// Work that may wait for a device.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// The pools of a server's devices.
pub(crate) struct DevicePools {
    /// The pools of devices in use, by the devices' addresses.
    pools: Mutex<HashMap<usize, Weak<DevicePool>>>,
    bounds: Bounds,
}

/// The bounds of all tasks of a server.
#[derive(Clone)]
struct Bounds {
    /// [`MAX_TASKS`].
    tasks: Arc<Budget>,
    bytes: Arc<Budget>,
}

/// Permission to start a task and use a number of bytes for it; returned on drop.
pub(crate) struct TaskPermit {
    _task: Share,
    _bytes: Share,
}

/// The threads that wait for one device. When dropped, waits until all tasks are done.
pub(crate) struct DevicePool {
    shared: Arc<Shared>,
    bounds: Bounds,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signalled for each task, and when the threads must end.
    work: Condvar,
}

/// Protected by the lock.
#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that run a task.
    busy: usize,
    /// A refused thread has been logged.
    warned: bool,
    ending: bool,
}

/// Nothing panics while one of these locks is held, so poisoning is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for DevicePools {
    /// Creates pools with their own budget of [`TASK_BYTES`].
    fn default() -> Self {
        DevicePools::new(Budget::new(TASK_BYTES))
    }
}

impl DevicePools {
    /// Creates pools whose tasks take their memory from `bytes`.
    pub fn new(bytes: Arc<Budget>) -> Self {
        DevicePools::bounded(Budget::new(MAX_TASKS), bytes)
    }

    /// Creates pools that take no tasks: every caller does its work itself.
    pub fn without_tasks() -> Self {
        DevicePools::bounded(Budget::new(0), Budget::new(0))
    }

    fn bounded(tasks: Arc<Budget>, bytes: Arc<Budget>) -> Self {
        DevicePools { pools: Mutex::default(), bounds: Bounds { tasks, bytes } }
    }

    /// Returns the pool of a device. It lives as long as a caller holds it.
    pub fn pool(&self, device: &Arc<Device>) -> Arc<DevicePool> {
        let mut pools = lock(&self.pools);
        let address = Arc::as_ptr(device) as usize;
        if let Some(pool) = pools.get(&address).and_then(Weak::upgrade) {
            return pool;
        }
        pools.retain(|_, pool| pool.strong_count() > 0);
        let pool = Arc::new(DevicePool { shared: Arc::default(), bounds: self.bounds.clone() });
        pools.insert(address, Arc::downgrade(&pool));
        pool
    }
}

impl DevicePool {
    /// Takes a permit for a task that needs `len_bytes`, and ensures that there is a thread to run it; `None` when
    /// there are too many tasks, or the system refuses a thread.
    pub fn try_acquire(&self, len_bytes: usize) -> Option<TaskPermit> {
        let permit =
            TaskPermit { _task: self.bounds.tasks.take(1)?, _bytes: self.bounds.bytes.take(len_bytes)? };
        let mut state = lock(&self.shared.state);
        if state.threads.is_empty() {
            self.shared.start_thread(&mut state);
        }
        (!state.threads.is_empty()).then_some(permit)
    }

    /// Runs a task, for which the caller holds a permit, in one of the threads as soon as one is free.
    pub fn start(&self, task: Task) {
        let mut state = lock(&self.shared.state);
        state.tasks.push_back(task);
        if state.tasks.len() + state.busy > state.threads.len() && state.threads.len() < MAX_THREADS {
            self.shared.start_thread(&mut state);
        }
        drop(state);
        self.shared.work.notify_one();
    }
}

impl Shared {
    /// Starts one more thread, if the system allows it.
    fn start_thread(self: &Arc<Self>, state: &mut State) {
        let name = format!("blocking-{}", state.threads.len());
        let shared = Arc::clone(self);
        match thread::Builder::new().name(name).spawn(move || shared.run()) {
            Ok(thread) => {
                state.threads.push(thread);
                state.warned = false;
            }
            // Already logged; the next request tries again.
            Err(_) if state.warned => {}
            Err(error) => {
                state.warned = true;
                tracing::warn!(%error, "no thread to wait for devices: requests wait in the threads that serve them");
            }
        }
    }

    /// Runs tasks until the pool ends.
    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(task) = state.tasks.pop_front() {
                state.busy += 1;
                drop(state);
                // A panic affects only the task's own state, which is dropped here.
                if catch_unwind(AssertUnwindSafe(task)).is_err() {
                    tracing::error!("a panic ended a request; please report it");
                }
                state = lock(&self.state);
                state.busy -= 1;
            } else if state.ending {
                return;
            } else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Drop for DevicePool {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.ending = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.shared.work.notify_all();
        for thread in threads {
            // A task's panic has been reported and did not end the thread.
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

    fn pool() -> Arc<DevicePool> {
        DevicePools::default().pool(&Device::new("d").unwrap())
    }

    fn start(pool: &DevicePool, task: Task) {
        let room = pool.try_acquire(1).unwrap();
        pool.start(Box::new(move || {
            task();
            drop(room);
        }));
    }

    /// Returns a task that reports that it runs, then waits until the returned sender signals it or is dropped.
    fn stuck(running: &mpsc::Sender<()>) -> (mpsc::Sender<()>, Task) {
        let (end, ended) = mpsc::channel();
        let running = running.clone();
        let task = move || {
            running.send(()).unwrap();
            let _ = ended.recv_timeout(TIMEOUT);
        };
        (end, Box::new(task))
    }

    #[test]
    fn jobs_do_not_wait_for_each_other_until_all_threads_do() {
        let pool = pool();
        let (running, runs) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..MAX_THREADS + 3 {
            let (end, task) = stuck(&running);
            ends.push(end);
            start(&pool, task);
        }
        for _ in 0..MAX_THREADS {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        assert!(runs.recv_timeout(Duration::from_millis(50)).is_err(), "no more threads");
        assert_eq!(lock(&pool.shared.state).threads.len(), MAX_THREADS);
        drop(ends);
        for _ in 0..3 {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
    }

    #[test]
    fn one_thread_is_enough_for_one_job_after_another() {
        let pool = pool();
        let (running, runs) = mpsc::channel();
        for _ in 0..50 {
            while lock(&pool.shared.state).busy > 0 {
                thread::yield_now();
            }
            let running = running.clone();
            start(&pool, Box::new(move || running.send(()).unwrap()));
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        assert_eq!(lock(&pool.shared.state).threads.len(), 1);
    }

    /// Tasks that wait for one device do not delay tasks of another device, but all share one bound.
    #[test]
    fn nobody_waits_for_anothers_device() {
        let pools = DevicePools::default();
        let devices = ["a", "b"].map(|name| Device::new(name).unwrap());
        let [a, b] = devices.each_ref().map(|device| pools.pool(device));
        assert!(Arc::ptr_eq(&a, &pools.pool(&devices[0])) && !Arc::ptr_eq(&a, &b));
        let (running, runs) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..2 * MAX_THREADS {
            let (end, task) = stuck(&running);
            ends.push(end);
            start(&a, task);
        }
        for _ in 0..MAX_THREADS {
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        start(&b, Box::new(move || running.send(()).unwrap()));
        runs.recv_timeout(TIMEOUT).unwrap();
        assert!(a.try_acquire(TASK_BYTES - 2 * MAX_THREADS + 1).is_none());
        drop(ends);
        drop((a, b));
        let again = pools.pool(&devices[0]);
        assert!(again.try_acquire(TASK_BYTES).is_some());
        assert_eq!(lock(&pools.pools).len(), 1, "what is not in use is forgotten");
    }

    #[test]
    fn room_is_bounded_in_jobs_and_in_bytes() {
        let pool = pool();
        assert!(pool.try_acquire(TASK_BYTES + 1).is_none());
        let all = pool.try_acquire(TASK_BYTES).unwrap();
        assert!(pool.try_acquire(1).is_none() && pool.try_acquire(0).is_some());
        drop(all);
        let rooms: Vec<_> = std::iter::from_fn(|| pool.try_acquire(1)).collect();
        assert_eq!(rooms.len(), MAX_TASKS);
        drop(rooms);
        assert!(pool.try_acquire(TASK_BYTES).is_some());
        let none = DevicePools::without_tasks().pool(&Device::new("d").unwrap());
        assert!(none.try_acquire(0).is_none() && lock(&none.shared.state).threads.is_empty());
    }

    #[test]
    fn a_panic_ends_its_job_alone_and_the_end_waits_for_all() {
        let (pool, done) = (pool(), Arc::new(AtomicUsize::new(0)));
        for index in 0..20 {
            let done = Arc::clone(&done);
            let task = move || {
                thread::sleep(Duration::from_millis(2));
                done.fetch_add(1, Relaxed);
                assert!(index % 5 > 0, "a panic that belongs to the test");
            };
            start(&pool, Box::new(task));
        }
        drop(pool);
        assert_eq!(done.load(Relaxed), 20);
    }
}
