//! Limits the wake-up latency of CPUs while requests follow each other closely.
//!
//! A synchronous request causes three wake-ups: of the loop device's worker, of a thread here, and of the
//! waiting process. If their CPUs are idle, waking them takes most of the time, above all in virtual
//! machines: tens of microseconds each, many times the time for a page. While a process keeps
//! `/dev/cpu_dma_latency` open with a number of microseconds written to it, no idle CPU enters a state with a
//! longer wake-up latency; with 0 idle CPUs poll (PM QoS, `Documentation/power/pm_qos_interface.rst`). This
//! needs a cpuidle driver with a polling state; without one it has no effect.
//!
//! The limit is requested when two requests are close, and dropped when none has come for a while, so that
//! CPUs of an idle machine sleep as usual.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzram::sync::{Condvar, Mutex};

/// The device of the kernel's interface.
const DEVICE: &str = "/dev/cpu_dma_latency";
/// The value for no limit: `PM_QOS_CPU_LATENCY_DEFAULT_VALUE`.
const NO_LIMIT_US: i32 = 2_000_000_000;
const MAX_LIMIT_US: i32 = 1_000_000;
/// The longest gap between two requests that follow each other closely.
const CLOSE: Duration = Duration::from_millis(1);
/// How often the thread checks for requests; after one to two periods without any, the limit is dropped.
const PERIOD: Duration = Duration::from_millis(5);

/// The limit on the wake-up latency of CPUs in microseconds, while requests follow each other closely; or no
/// limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuLatencyLimit(Option<i32>);

impl CpuLatencyLimit {
    /// No limit.
    pub const NONE: Self = CpuLatencyLimit(None);

    /// Returns the limit in microseconds, if there is one.
    pub const fn us(self) -> Option<i32> {
        self.0
    }
}

impl Default for CpuLatencyLimit {
    /// 0: idle CPUs poll.
    fn default() -> Self {
        CpuLatencyLimit(Some(0))
    }
}

impl FromStr for CpuLatencyLimit {
    type Err = String;

    /// Parses a number of microseconds, up to one second, or `none`.
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

/// Returns why the kernel would refuse a limit, if it would.
pub(super) fn refused(limit: CpuLatencyLimit) -> Option<String> {
    let error = limit.0.and_then(|_| open(Path::new(DEVICE)).err())?;
    Some(format!("{DEVICE}: {error}"))
}

fn open(device: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(device)
}

/// A thread that requests the limit from the kernel. Dropping this drops the limit and ends the thread.
pub(super) struct CpuLatency {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

struct Shared {
    /// Whether a request has come in this period. Set under the lock, read without: a stale value at worst
    /// misses a request.
    seen: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The limit is requested, or about to be.
    held: bool,
    /// The time of the last request while it was not.
    last: Option<Instant>,
    ends: bool,
}

impl CpuLatency {
    /// Starts the thread; returns `None` for no limit.
    pub fn new(limit: CpuLatencyLimit) -> io::Result<Option<Self>> {
        limit.0.map(|limit_us| CpuLatency::at(Path::new(DEVICE), limit_us)).transpose()
    }

    fn at(path: &Path, limit_us: i32) -> io::Result<Self> {
        let device = open(path)?;
        let shared = Arc::new(Shared {
            seen: AtomicBool::new(false),
            state: Mutex::unordered(State { held: false, last: None, ends: false }),
            changed: Condvar::new(),
        });
        let run = {
            let shared = Arc::clone(&shared);
            move || shared.run(device, limit_us)
        };
        let keeper = thread::Builder::new().name("cpu-latency".to_owned()).spawn(run)?;
        Ok(CpuLatency { shared, keeper: Some(keeper) })
    }

    /// Records a request.
    #[inline]
    pub fn request(&self) {
        if !self.shared.seen.load(Ordering::Relaxed) {
            self.shared.first_request();
        }
    }
}

impl Drop for CpuLatency {
    fn drop(&mut self) {
        self.shared.state.lock().ends = true;
        self.shared.changed.notify_all();
        if let Some(keeper) = self.keeper.take() {
            // The thread cannot panic, and a panic would need no handling.
            let _ = keeper.join();
        }
    }
}

impl Shared {
    /// Records the first request in a period, or after an idle time.
    #[cold]
    fn first_request(&self) {
        let mut state = self.state.lock();
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
        // Cannot fail: the device is open for writing, and the values are valid.
        let mut ask = |limit_us: i32| drop(device.write(&limit_us.to_ne_bytes()));
        let mut state = self.state.lock();
        loop {
            while !state.held && !state.ends {
                state = state.wait(&self.changed);
            }
            if state.ends {
                return;
            }
            drop(state);
            ask(limit_us);
            state = self.state.lock();
            while state.held && !state.ends {
                state = state.wait_while_for(&self.changed, PERIOD, |state| !state.ends);
                state.held = self.seen.swap(false, Ordering::Relaxed);
            }
            state.last = None;
            drop(state);
            ask(NO_LIMIT_US);
            state = self.state.lock();
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
        // A single request does not request the limit.
        cpu_latency.request();
        thread::sleep(4 * PERIOD);
        assert!(asked(&path).is_empty());
        // On a slow machine, requests may not be close at the first try.
        wait_until(|| {
            (0..4).for_each(|_| cpu_latency.request());
            asked(&path) == [7]
        });
        // The limit stays while requests come, and is dropped soon after.
        let came = Instant::now();
        while came.elapsed() < 4 * PERIOD {
            cpu_latency.request();
        }
        wait_until(|| asked(&path).ends_with(&[NO_LIMIT_US]));
        // The thread also ends while the limit is requested.
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
