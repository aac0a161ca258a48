//! Keeping CPUs awake between requests that are waited for, one after the other.
//!
//! Such a request is three wakings: of the loop device's worker, of a thread here, and of whoever waits. Where each
//! finds its CPU asleep, waking CPUs takes most of the time, in virtual machines above all: there it is some 30 µs a
//! time, ten times what a page takes. Kernels that may do so therefore poll for a while before a CPU sleeps (the
//! cpuidle governor haltpoll: 200 µs). Here a thread on each CPU does, by the policy `SCHED_IDLE`: it takes what nobody
//! else wants, and gives way at once.
//!
//! It polls while requests follow each other closely and none is under way for most of the time. Where they are, CPUs
//! have enough to do to stay awake, and polling would only hide from the scheduler that one has nothing.
//!
//! No lock: a few words, and a futex on which the threads sleep.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, futex, sched_getaffinity, sched_setaffinity};

/// Requests in a row, each close to the one before, after which it is polled.
const ROW: u32 = 4;
/// Looks after which it is decided whether polling is worth it.
const LOOKS: u32 = 256;
/// Of these, those that may find requests under way.
const MOST_BUSY_LOOKS: u32 = 192;
/// For how long it is not polled when it was not worth it.
const PAUSE: Duration = Duration::from_millis(1);

/// The threads that poll. Dropped, they end.
pub(super) struct Awake {
    shared: Option<Arc<Shared>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    start: Instant,
    /// Requests this close to each other are polled for.
    close_ns: u64,
    /// When the last request was answered, in nanoseconds since the start.
    answered_ns: AtomicU64,
    /// Requests that were close to the one before, since one was not.
    row: AtomicU32,
    under_way: AtomicU32,
    /// 1 while the threads sleep, or are about to.
    asleep: AtomicU32,
    ends: AtomicBool,
}

/// A request that is under way.
pub(super) struct UnderWay<'a>(Option<&'a Shared>);

impl Awake {
    /// Threads that poll for so long after a request; none, if it is for no time, or the system allows none: then CPUs
    /// sleep as ever.
    pub fn new(close: Duration) -> Self {
        let mut awake = Awake { shared: None, threads: Vec::new() };
        let Ok(allowed) = sched_getaffinity(None) else { return awake };
        if close.is_zero() {
            return awake;
        }
        let shared = Arc::new(Shared {
            start: Instant::now(),
            close_ns: close.as_nanos().try_into().unwrap_or(u64::MAX),
            answered_ns: AtomicU64::new(0),
            row: AtomicU32::new(0),
            under_way: AtomicU32::new(0),
            asleep: AtomicU32::new(1),
            ends: AtomicBool::new(false),
        });
        let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
        let start = |cpu| {
            let shared = Arc::clone(&shared);
            let run = move || {
                if stay_on(cpu) {
                    shared.run();
                }
            };
            thread::Builder::new().name(format!("awake-{cpu}")).spawn(run).ok()
        };
        awake.threads = cpus.filter_map(start).collect();
        awake.shared = Some(shared);
        awake
    }

    /// A request begins; it ends when the answer is dropped.
    #[inline]
    pub fn begin(&self) -> UnderWay<'_> {
        let shared = self.shared.as_deref();
        if let Some(shared) = shared {
            shared.begin();
        }
        UnderWay(shared)
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.ends.store(true, Ordering::Relaxed);
            shared.wake();
        }
        for thread in self.threads.drain(..) {
            // It has no way to panic, and nothing is left to do if it did.
            let _ = thread.join();
        }
    }
}

impl Drop for UnderWay<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(shared) = self.0 {
            shared.answered_ns.store(shared.now_ns(), Ordering::Relaxed);
            shared.under_way.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Puts this thread on a CPU, for when nobody else wants it; whether the system allows that.
fn stay_on(cpu: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(cpu);
    // SAFETY: a structure of one number, of which this policy wants 0.
    let param: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: this thread, and a structure that lives through the call.
    let is_idle = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param) } == 0;
    is_idle && sched_setaffinity(None, &set).is_ok()
}

impl Shared {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
    }

    /// How long ago the last request was answered.
    fn idle_ns(&self) -> u64 {
        self.now_ns().saturating_sub(self.answered_ns.load(Ordering::Relaxed))
    }

    #[inline]
    fn begin(&self) {
        let is_first = self.under_way.fetch_add(1, Ordering::Relaxed) == 0;
        if self.asleep.load(Ordering::Relaxed) == 0 {
            return;
        }
        if is_first && self.idle_ns() > self.close_ns {
            self.row.store(0, Ordering::Relaxed);
        } else if self.row.fetch_add(1, Ordering::Relaxed) >= ROW {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if self.asleep.swap(0, Ordering::Relaxed) == 1 {
            // Without it they sleep on, which costs nothing but time.
            let _ = futex::wake(&self.asleep, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    fn run(&self) {
        let (mut looks, mut busy_looks) = (0, 0);
        while !self.ends.load(Ordering::Relaxed) {
            let is_busy = self.under_way.load(Ordering::Relaxed) > 0;
            if !is_busy && self.idle_ns() > self.close_ns {
                self.row.store(0, Ordering::Relaxed);
                self.asleep.store(1, Ordering::Relaxed);
                if !self.ends.load(Ordering::Relaxed) {
                    let _ = futex::wait(&self.asleep, futex::Flags::PRIVATE, 1, None);
                }
                continue;
            }
            looks += 1;
            busy_looks += u32::from(is_busy);
            if looks == LOOKS {
                if busy_looks > MOST_BUSY_LOOKS {
                    thread::sleep(PAUSE);
                }
                (looks, busy_looks) = (0, 0);
            }
            (0..32).for_each(|_| std::hint::spin_loop());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const CLOSE: Duration = Duration::from_millis(20);

    fn is_asleep(awake: &Awake) -> bool {
        awake.shared.as_ref().unwrap().asleep.load(Ordering::Relaxed) == 1
    }

    fn wait_until(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !what() {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn it_is_polled_for_requests_in_a_row_and_not_for_long() {
        let awake = Awake::new(CLOSE);
        assert_eq!(awake.threads.len(), thread::available_parallelism().unwrap().get());
        wait_until(|| is_asleep(&awake));
        // One that comes alone wakes nobody.
        drop(awake.begin());
        assert!(is_asleep(&awake));
        // How close they are is up to the machine.
        wait_until(|| {
            (0..=ROW + 1).for_each(|_| drop(awake.begin()));
            !is_asleep(&awake)
        });
        wait_until(|| is_asleep(&awake));
        // It ends asleep or not.
        (0..=ROW + 1).for_each(|_| drop(awake.begin()));
        drop(awake);
    }

    #[test]
    fn for_no_time_there_are_no_threads() {
        let awake = Awake::new(Duration::ZERO);
        assert!(awake.shared.is_none() && awake.threads.is_empty());
        drop(awake.begin());
    }

    #[test]
    fn requests_that_are_under_way_at_once_are_counted() {
        let awake = Awake::new(CLOSE);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| drop(awake.begin())));
            }
        });
        assert_eq!(awake.shared.as_ref().unwrap().under_way.load(Ordering::Relaxed), 0);
    }
}
