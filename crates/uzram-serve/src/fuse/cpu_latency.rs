//! Having CPUs wake fast while requests follow each other closely.
//!
//! A request that is waited for is three wakings: of the loop device's worker, of a thread here, and of whoever waits.
//! Where each finds its CPU asleep, waking CPUs takes most of the time, in virtual machines above all: there it is tens
//! of microseconds a time, many times what a page takes. The kernel has a way to ask for better: while a process keeps
//! `/dev/cpu_dma_latency` open with a number of microseconds written to it, no idle CPU sleeps so deeply that waking
//! it takes longer; with 0 it polls, and gives way at once (PM QoS, `Documentation/power/pm_qos_interface.rst`). That takes
//! a driver of idle CPUs, and one with a state that polls: without, CPUs sleep as ever.
//!
//! That is asked for from the second of two requests that are close, and no longer once none has come for a while: an
//! idle machine sleeps as ever.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Where it is asked for.
pub(super) const DEVICE: &str = "/dev/cpu_dma_latency";
/// What stands for no limit there: `PM_QOS_CPU_LATENCY_DEFAULT_VALUE`.
const NO_LIMIT_US: i32 = 2_000_000_000;
const MAX_LIMIT_US: i32 = 1_000_000;
/// Requests are close if one comes so soon after another.
const CLOSE: Duration = Duration::from_millis(1);
/// How often it is looked whether a request has come; after one to two of these without, CPUs may sleep again.
const PERIOD: Duration = Duration::from_millis(5);

/// The most microseconds that waking a CPU may take, while requests follow each other closely; or no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuLatencyLimit(Option<i32>);

impl CpuLatencyLimit {
    /// CPUs sleep as they do without us.
    pub const NONE: Self = CpuLatencyLimit(None);
}

impl Default for CpuLatencyLimit {
    /// 0: idle CPUs poll.
    fn default() -> Self {
        CpuLatencyLimit(Some(0))
    }
}

impl FromStr for CpuLatencyLimit {
    type Err = String;

    /// A number of microseconds, up to one second; or `none`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(CpuLatencyLimit::NONE);
        }
        let limit_us = text.parse().ok().filter(|limit_us| (0..=MAX_LIMIT_US).contains(limit_us));
        let why = || format!("write a number of microseconds from 0 to {MAX_LIMIT_US}, or none");
        limit_us.map(|limit_us| CpuLatencyLimit(Some(limit_us))).ok_or_else(why)
    }
}

impl fmt::Display for CpuLatencyLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(limit_us) => write!(f, "{limit_us} us"),
            None => f.write_str("none"),
        }
    }
}

/// A thread that asks the kernel for it. Dropped, it asks no more and ends.
pub(super) struct CpuLatency {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

struct Shared {
    /// A request has come in this period. Written with the lock, read without: read late, it is at worst a request that
    /// is not counted.
    seen: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The limit is asked for, or about to be.
    held: bool,
    /// When the last request came while it was not.
    last: Option<Instant>,
    ends: bool,
}

impl CpuLatency {
    /// Asks for CPUs that wake within the limit, while it is worth it; without one, for nothing.
    ///
    /// # Errors
    /// Why the system does not let this process ask.
    pub fn new(limit: CpuLatencyLimit) -> io::Result<Option<Self>> {
        limit.0.map(|limit_us| CpuLatency::at(Path::new(DEVICE), limit_us)).transpose()
    }

    fn at(path: &Path, limit_us: i32) -> io::Result<Self> {
        let device = OpenOptions::new().write(true).open(path)?;
        let shared = Arc::new(Shared {
            seen: AtomicBool::new(false),
            state: Mutex::new(State { held: false, last: None, ends: false }),
            changed: Condvar::new(),
        });
        let run = {
            let shared = Arc::clone(&shared);
            move || shared.run(device, limit_us)
        };
        let keeper = thread::Builder::new().name("cpu-latency".to_owned()).spawn(run)?;
        Ok(CpuLatency { shared, keeper: Some(keeper) })
    }

    /// A request has come.
    #[inline]
    pub fn request(&self) {
        if !self.shared.seen.load(Ordering::Relaxed) {
            self.shared.first_request();
        }
    }
}

impl Drop for CpuLatency {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.changed.notify_all();
        if let Some(keeper) = self.keeper.take() {
            // It has no way to panic, and nothing is left to do if it did.
            let _ = keeper.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first in a while, or in a period.
    #[cold]
    fn first_request(&self) {
        let mut state = self.lock();
        if !state.held {
            let now = Instant::now();
            let is_close = state.last.is_some_and(|last| now - last < CLOSE);
            state.last = Some(now);
            if !is_close {
                return;
            }
            state.held = true;
            self.changed.notify_all();
        }
        self.seen.store(true, Ordering::Relaxed);
    }

    fn run(&self, mut device: File, limit_us: i32) {
        // Whoever may open it may write to it, and the values are right: there is nothing that could fail.
        let mut ask = |limit_us: i32| drop(device.write(&limit_us.to_ne_bytes()));
        let mut state = self.lock();
        loop {
            let sleeps = |state: &mut State| !state.held && !state.ends;
            state = self.changed.wait_while(state, sleeps).unwrap_or_else(PoisonError::into_inner);
            if state.ends {
                return;
            }
            drop(state);
            ask(limit_us);
            state = self.lock();
            while state.held && !state.ends {
                let waited = self.changed.wait_timeout_while(state, PERIOD, |state| !state.ends);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                state.held = self.seen.swap(false, Ordering::Relaxed);
            }
            state.last = None;
            drop(state);
            ask(NO_LIMIT_US);
            state = self.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;

    fn asked(path: &Path) -> Vec<i32> {
        let number = |bytes: &[u8]| i32::from_ne_bytes(bytes.try_into().unwrap());
        fs::read(path).unwrap().chunks(4).map(number).collect()
    }

    fn wait_until(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !what() {
            assert!(Instant::now() < deadline);
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn it_is_asked_for_while_requests_are_close() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cpu_dma_latency");
        assert!(CpuLatency::at(&path, 0).is_err(), "there is none");
        fs::write(&path, "").unwrap();
        let cpu_latency = CpuLatency::at(&path, 7).unwrap();
        // One that comes alone is not worth it.
        cpu_latency.request();
        thread::sleep(4 * PERIOD);
        assert!(asked(&path).is_empty());
        // How close two are is up to the machine.
        wait_until(|| {
            (0..4).for_each(|_| cpu_latency.request());
            asked(&path) == [7]
        });
        // It stays while they come, and not for long.
        let came = Instant::now();
        while came.elapsed() < 4 * PERIOD {
            cpu_latency.request();
        }
        wait_until(|| asked(&path).ends_with(&[NO_LIMIT_US]));
        // It ends asked or not.
        wait_until(|| {
            (0..4).for_each(|_| cpu_latency.request());
            asked(&path).ends_with(&[7])
        });
        drop(cpu_latency);
    }

    #[test]
    fn limits_are_read_and_shown() {
        assert_eq!("none".parse(), Ok(CpuLatencyLimit::NONE));
        assert_eq!("0".parse(), Ok(CpuLatencyLimit::default()));
        assert_eq!("50".parse::<CpuLatencyLimit>().unwrap().to_string(), "50 us");
        for wrong in ["", "-1", "1000001", "1ms", "None"] {
            assert!(wrong.parse::<CpuLatencyLimit>().unwrap_err().contains("from 0 to 1000000"), "{wrong}");
        }
    }
}
