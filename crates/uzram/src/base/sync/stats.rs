//! Lock statistics, with the meaning of the kernel's `/proc/lock_stat` (Documentation/locking/lockstat.rst):
//! the feature `lock-stats`. Without it what a lock has of this is empty, and costs nothing.
//!
//! A lock is recorded under its class, and under its mode ([`LockMode`]) if it has readers. An acquisition,
//! or a wait, *bounces* if the lock was last taken on another CPU: then its cache line, and what it protects,
//! have to come from there. The lock itself knows only that CPU ([`LastCpu`]). All counters belong to a class
//! and are per CPU, so that counting moves no cache line between CPUs. An acquisition is counted when the
//! lock is released, which keeps the counting out of the critical section; a hold includes the release, and
//! reading the clock once. Only a hold that ends as its thread waits for a condition is counted just before;
//! taking the lock again after that is an acquisition, and no wait.

pub(super) use recording::{LastCpu, LastCpus};
#[cfg(feature = "lock-stats")]
pub use recording::{
    LockRecording, LockStat, LockTimes, lock_stats, record_locks_on_demand, reset_lock_stats,
};
#[cfg(feature = "lock-stats")]
pub(super) use recording::{Recorded, wait_for};

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum LockMode {
    /// By one thread: the kernel's `-W`.
    Exclusive,
    /// By any number of readers: the kernel's `-R`.
    Shared,
}

#[cfg(not(feature = "lock-stats"))]
mod recording {
    pub(in crate::base::sync) struct LastCpu;

    pub(in crate::base::sync) struct LastCpus;

    impl LastCpu {
        pub(in crate::base::sync) const fn new() -> Self {
            LastCpu
        }
    }

    impl LastCpus {
        pub(in crate::base::sync) fn new() -> Self {
            LastCpus
        }

        #[inline]
        pub(in crate::base::sync) fn of(&self, _key: usize) -> &LastCpu {
            &LastCpu
        }
    }
}

#[cfg(feature = "lock-stats")]
mod recording {
    use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use super::LockMode;
    use crate::base::cpu::{self, Padded};
    use crate::base::sync::{Counter, LockClass, classes};

    /// CPUs with counters of their own; others share theirs with one of these.
    const SHARES: usize = 64;
    const CLASSES: usize = classes::ALL.len();

    /// The counters of each class, each CPU, and both modes. All zeros, so that unused ones take no memory.
    static COUNTERS: [[Padded<[Counters; 2]>; SHARES]; CLASSES] =
        [const { [const { Padded([const { [const { Times::none() }; 2] }; 2]) }; SHARES] }; CLASSES];

    /// Locks are recorded while this is not 0: the number of [`LockRecording`]s, and [`ALWAYS`].
    static RECORDING: Padded<AtomicU32> = Padded(AtomicU32::new(ALWAYS));
    const ALWAYS: u32 = 1 << 31;

    #[inline]
    fn is_recording() -> bool {
        RECORDING.load(Ordering::Relaxed) != 0
    }

    /// The waits and the holds of a class in one mode.
    type Counters = [Times; 2];
    const WAITS: usize = 0;
    const HOLDS: usize = 1;

    #[inline]
    fn local(class: &LockClass, mode: LockMode) -> &'static Counters {
        &COUNTERS[class.rank][cpu::current() % SHARES][mode as usize]
    }

    struct Times([Counter; 5]);

    const COUNT: usize = 0;
    const BOUNCES: usize = 1;
    const TOTAL_NS: usize = 2;
    const MAX_NS: usize = 3;
    /// `u64::MAX` minus the shortest time that is not 0, or 0 if there is none.
    const SHORTEST: usize = 4;

    impl Times {
        const fn none() -> Self {
            Times([const { Counter::new(0) }; 5])
        }

        fn add(&self, time: Duration, bounced: bool) {
            let ns = time.as_nanos() as u64;
            self.0[COUNT].add(1);
            self.0[TOTAL_NS].add(ns);
            self.0[MAX_NS].raise(ns);
            if ns > 0 {
                self.0[SHORTEST].raise(u64::MAX - ns);
            }
            if bounced {
                self.0[BOUNCES].add(1);
            }
        }
    }

    /// The CPU that last took a lock, plus 1; 0 if none has. Written by holders only, but readers share a
    /// lock: then it is the CPU of one of them.
    pub(in crate::base::sync) struct LastCpu(AtomicU16);

    const _: () = assert!(cpu::MAX_CPUS < u16::MAX as usize);

    impl LastCpu {
        pub(in crate::base::sync) const fn new() -> Self {
            LastCpu(AtomicU16::new(0))
        }

        fn is_another(&self) -> bool {
            let last = self.0.load(Ordering::Relaxed);
            last != 0 && last != this_cpu()
        }

        /// Writes down this CPU; returns whether the last one was another.
        #[inline]
        fn replace(&self) -> bool {
            let (last, this) = (self.0.load(Ordering::Relaxed), this_cpu());
            if last == this {
                return false;
            }
            self.0.store(this, Ordering::Relaxed);
            last != 0
        }
    }

    #[inline]
    fn this_cpu() -> u16 {
        cpu::current() as u16 + 1
    }

    /// The [`LastCpu`]s of locks that are bits of a word, which has no room for one. Keys that are a multiple
    /// of [`LastCpus::COUNT`] apart share one: in a store, pages that are 256 MiB apart.
    pub(in crate::base::sync) struct LastCpus(Box<[LastCpu]>);

    impl LastCpus {
        const COUNT: usize = 1 << 16;

        pub(in crate::base::sync) fn new() -> Self {
            LastCpus((0..Self::COUNT).map(|_| LastCpu::new()).collect())
        }

        #[inline]
        pub(in crate::base::sync) fn of(&self, key: usize) -> &LastCpu {
            &self.0[key % Self::COUNT]
        }
    }

    pub(in crate::base::sync) struct Recorded {
        mode: LockMode,
        bounced: bool,
        /// `None` if it is not recorded.
        since: Option<Instant>,
    }

    impl Recorded {
        #[inline]
        pub(in crate::base::sync) fn start(last: &LastCpu, mode: LockMode) -> Self {
            let bounced = last.replace();
            Recorded { mode, bounced, since: is_recording().then(Instant::now) }
        }

        pub(in crate::base::sync) fn restart(&mut self, last: &LastCpu) {
            *self = Recorded::start(last, self.mode);
        }

        #[inline]
        pub(in crate::base::sync) fn end(&mut self, class: &'static LockClass) {
            let Some(since) = self.since.take() else { return };
            let held = since.elapsed();
            local(class, self.mode)[HOLDS].add(held, self.bounced);
        }
    }

    /// Records waiting for a lock that was not free at once.
    pub(in crate::base::sync) fn wait_for<G>(
        class: &'static LockClass,
        last: &LastCpu,
        mode: LockMode,
        wait: impl FnOnce() -> G,
    ) -> G {
        let (bounced, start) = (last.is_another(), is_recording().then(Instant::now));
        let guard = wait();
        if let Some(start) = start {
            local(class, mode)[WAITS].add(start.elapsed(), bounced);
        }
        guard
    }

    /// How often something took time, and how much.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize))]
    #[non_exhaustive]
    pub struct LockTimes {
        /// How often.
        pub count: u64,
        /// The shortest time that was not 0; 0 if there is none.
        pub min_ns: u64,
        /// The longest time.
        pub max_ns: u64,
        /// All of it.
        pub total_ns: u64,
    }

    /// The statistics of one class of locks, in one mode.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize))]
    #[non_exhaustive]
    pub struct LockStat {
        /// The class's name.
        pub class: &'static str,
        /// The mode.
        pub mode: LockMode,
        /// Waits for locks that another CPU had last taken.
        pub contention_bounces: u64,
        /// Waits for locks that were not free at once.
        pub wait: LockTimes,
        /// Acquisitions of locks that another CPU had last taken.
        pub acquisition_bounces: u64,
        /// Acquisitions, from when the lock was taken to when it was free again.
        pub hold: LockTimes,
    }

    /// Returns the statistics of every class, in lock order: exclusive holds, and shared ones if there were
    /// any.
    pub fn lock_stats() -> Vec<LockStat> {
        let of_class = |class: &&'static LockClass| {
            let exclusive = sum(class, LockMode::Exclusive);
            let shared = sum(class, LockMode::Shared);
            let has_readers = shared.hold.count > 0 || shared.wait.count > 0;
            [Some(exclusive), has_readers.then_some(shared)]
        };
        classes::ALL.iter().flat_map(of_class).flatten().collect()
    }

    fn sum(class: &'static LockClass, mode: LockMode) -> LockStat {
        let each = |of: usize, which: usize| {
            COUNTERS[class.rank].iter().map(move |share| share[mode as usize][of].0[which].get())
        };
        let times = |of| LockTimes {
            count: each(of, COUNT).sum(),
            min_ns: each(of, SHORTEST).max().filter(|most| *most > 0).map_or(0, |most| u64::MAX - most),
            max_ns: each(of, MAX_NS).max().unwrap_or_default(),
            total_ns: each(of, TOTAL_NS).sum(),
        };
        LockStat {
            class: class.name,
            mode,
            contention_bounces: each(WAITS, BOUNCES).sum(),
            wait: times(WAITS),
            acquisition_bounces: each(HOLDS, BOUNCES).sum(),
            hold: times(HOLDS),
        }
    }

    /// Sets all statistics to 0. Threads that take locks meanwhile may be recorded in part.
    pub fn reset_lock_stats() {
        let times = COUNTERS.iter().flatten().flat_map(|share| &share.0).flatten();
        times.flat_map(|times| &times.0).for_each(|counter| counter.set(0));
    }

    /// From now on locks are recorded only while a [`LockRecording`] exists, instead of always.
    pub fn record_locks_on_demand() {
        RECORDING.fetch_and(!ALWAYS, Ordering::Relaxed);
    }

    /// While one exists, the locks of all threads are recorded.
    #[must_use]
    pub struct LockRecording(());

    impl LockRecording {
        /// Starts to record.
        pub fn start() -> Self {
            RECORDING.fetch_add(1, Ordering::Relaxed);
            LockRecording(())
        }
    }

    impl Drop for LockRecording {
        fn drop(&mut self) {
            RECORDING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
