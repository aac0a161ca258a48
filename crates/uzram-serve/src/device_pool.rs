//! Threads that wait for devices, so that threads which serve NBD connections and the kernel need not.
//!
//! Each device in use has a [`DevicePool`] of at most [`MAX_THREADS`] threads, so that no request waits for
//! another device. A pool starts a thread when all others are busy, and keeps it until the last user of the
//! device is gone. Tasks that are queued or running are bounded in number and in bytes for all devices of a
//! server together: a [`TaskPermit`] is taken before a task starts, and held as long as the task's result is
//! kept. Its bytes are a share of the server's budget: for NBD, of the memory that all clients share; for
//! FUSE, of a budget for tasks alone.
//!
//! Locks: `DevicePools::pools`, then a pool's `State`, a leaf. None is held while a task runs.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use uzram::device::Device;
use uzram::sync::{Condvar, Mutex};

/// The most threads of a pool. This many requests of a device can wait for its backing device at a time,
/// besides those of connections that got no permit.
const MAX_THREADS: usize = 16;
pub(crate) const MAX_TASKS: usize = 1024;
/// Memory for tasks: enough for one of the longest requests, and many short ones.
pub(crate) const TASK_BYTES: usize = 40 << 20;

/// A quantity that a server's clients share: bytes of memory, or a number of tasks. A caller takes a
/// [`Share`] and returns it by dropping it. Nothing waits: if too little is left, taking fails, and the
/// caller falls back to less.
pub(crate) struct Budget {
    total: usize,
    left: AtomicUsize,
}

/// A part of a budget, returned on drop.
pub(crate) struct Share {
    budget: Arc<Budget>,
    amount: usize,
}

impl Budget {
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Budget { total, left: AtomicUsize::new(total) })
    }

    pub fn total(&self) -> usize {
        self.total
    }

    /// Takes a share; `None` when less is left.
    pub fn take(self: &Arc<Self>, amount: usize) -> Option<Share> {
        self.take_leaving(amount, 0)
    }

    /// Takes a share; `None` when less than `rest` would be left then.
    pub fn take_leaving(self: &Arc<Self>, amount: usize, rest: usize) -> Option<Share> {
        let without = |left: usize| left.checked_sub(amount).filter(|left| *left >= rest);
        // Relaxed: only the number is shared, and orders no other memory accesses.
        self.left.fetch_update(Relaxed, Relaxed, without).ok()?;
        Some(Share { budget: Arc::clone(self), amount })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.amount, Relaxed);
    }
}

/// Work that may wait for a device.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

pub(crate) struct DevicePools {
    /// The pools of devices in use, by the devices' addresses.
    pools: Mutex<HashMap<usize, Weak<DevicePool>>>,
    bounds: Bounds,
}

#[derive(Clone)]
struct Bounds {
    tasks: Arc<Budget>,
    bytes: Arc<Budget>,
}

/// Permission to start a task and use a number of bytes for it; returned on drop.
pub(crate) type TaskPermit = (Share, Share);

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
    busy: usize,
    /// A refused thread has been logged.
    warned: bool,
    ending: bool,
}

impl DevicePools {
    /// Creates pools for so many tasks, which take their memory from `bytes`. If there can be none, every
    /// caller does its work itself.
    pub fn new(tasks: usize, bytes: Arc<Budget>) -> Self {
        let bounds = Bounds { tasks: Budget::new(tasks), bytes };
        DevicePools { pools: Mutex::default(), bounds }
    }

    /// Returns the pool of a device. It lives as long as a caller holds it.
    pub fn pool(&self, device: &Arc<Device>) -> Arc<DevicePool> {
        let mut pools = self.pools.lock();
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
    /// Takes a permit for a task that needs `len_bytes`, and ensures that there is a thread to run it; `None`
    /// when there are too many tasks, or the system refuses a thread.
    pub fn try_acquire(&self, len_bytes: usize) -> Option<TaskPermit> {
        let permit = (self.bounds.tasks.take(1)?, self.bounds.bytes.take(len_bytes)?);
        let mut state = self.shared.state.lock();
        if state.threads.is_empty() {
            self.shared.start_thread(&mut state);
        }
        (!state.threads.is_empty()).then_some(permit)
    }

    /// Runs a task, for which the caller holds a permit, in one of the threads as soon as one is free.
    pub fn start(&self, task: Task) {
        let mut state = self.shared.state.lock();
        state.tasks.push_back(task);
        if state.tasks.len() + state.busy > state.threads.len() && state.threads.len() < MAX_THREADS {
            self.shared.start_thread(&mut state);
        }
        drop(state);
        self.shared.work.notify_one();
    }
}

impl Shared {
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

    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                state.busy += 1;
                drop(state);
                // A panic affects only the task's own state, which is dropped here.
                if catch_unwind(AssertUnwindSafe(task)).is_err() {
                    tracing::error!("a panic ended a request; please report it");
                }
                state = self.state.lock();
                state.busy -= 1;
            } else if state.ending {
                return;
            } else {
                state = state.wait(&self.work);
            }
        }
    }
}

impl Drop for DevicePool {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
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

    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn pools(tasks: usize) -> DevicePools {
        DevicePools::new(tasks, Budget::new(TASK_BYTES))
    }

    fn device(name: &str) -> Arc<Device> {
        Device::new(name).unwrap()
    }

    fn start(pool: &DevicePool, task: impl FnOnce() + Send + 'static) {
        let permit = pool.try_acquire(1).unwrap();
        pool.start(Box::new(move || {
            task();
            drop(permit);
        }));
    }

    #[test]
    fn no_more_is_taken_than_there_is() {
        let budget = Budget::new(10);
        assert!(budget.take(11).is_none() && budget.take(usize::MAX).is_none());
        let all = budget.take(10).unwrap();
        assert!(budget.take(1).is_none() && budget.take(0).is_some());
        drop(all);
        assert!(budget.take_leaving(5, 6).is_none());
        let half = budget.take_leaving(5, 5).unwrap();
        assert!(budget.take_leaving(1, 5).is_none() && budget.take(5).is_some());
        drop(half);
        assert_eq!((budget.left.load(Relaxed), budget.total()), (10, 10));
        thread::scope(|scope| {
            for thread in 1..5 {
                let budget = &budget;
                scope.spawn(move || {
                    for _ in 0..10_000 {
                        let held: Vec<_> = (0..3).filter_map(|_| budget.take(thread)).collect();
                        assert!(held.len() * thread <= 10);
                    }
                });
            }
        });
        assert_eq!(budget.left.load(Relaxed), 10);
    }

    #[test]
    fn one_thread_is_enough_for_one_task_after_another() {
        let pool = pools(MAX_TASKS).pool(&device("d"));
        let (running, runs) = mpsc::channel();
        for _ in 0..50 {
            while pool.shared.state.lock().busy > 0 {
                thread::yield_now();
            }
            let running = running.clone();
            start(&pool, move || running.send(()).unwrap());
            runs.recv_timeout(TIMEOUT).unwrap();
        }
        assert_eq!(pool.shared.state.lock().threads.len(), 1);
    }

    #[test]
    fn tasks_of_all_devices_are_bounded_in_number_and_in_bytes() {
        let pools = pools(MAX_TASKS);
        let devices = ["a", "b"].map(device);
        let [pool, other] = devices.each_ref().map(|device| pools.pool(device));
        assert!(Arc::ptr_eq(&pool, &pools.pool(&devices[0])) && !Arc::ptr_eq(&pool, &other));
        assert!(pool.try_acquire(TASK_BYTES + 1).is_none());
        let all = pool.try_acquire(TASK_BYTES).unwrap();
        assert!(other.try_acquire(1).is_none() && other.try_acquire(0).is_some());
        drop((all, other));
        let permits: Vec<_> = std::iter::from_fn(|| pool.try_acquire(1)).collect();
        assert_eq!(permits.len(), MAX_TASKS);
        drop(permits);
        drop(pool);
        let again = pools.pool(&devices[1]);
        assert!(again.try_acquire(TASK_BYTES).is_some());
        assert_eq!(pools.pools.lock().len(), 1, "what is not in use is forgotten");
        let none = self::pools(0).pool(&device("d"));
        assert!(none.try_acquire(0).is_none() && none.shared.state.lock().threads.is_empty());
    }

    #[test]
    fn a_panic_ends_its_task_alone_and_the_end_waits_for_all() {
        let (pool, done) = (pools(MAX_TASKS).pool(&device("d")), Arc::new(AtomicUsize::new(0)));
        for index in 0..20 {
            let done = Arc::clone(&done);
            start(&pool, move || {
                thread::sleep(Duration::from_millis(2));
                done.fetch_add(1, Relaxed);
                assert!(index % 5 > 0, "a panic that belongs to the test");
            });
        }
        drop(pool);
        assert_eq!(done.load(Relaxed), 20);
    }
}
