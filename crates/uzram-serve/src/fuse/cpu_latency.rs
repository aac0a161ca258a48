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
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use uzram::sync::Mutex;

const DEVICE: &str = "/dev/cpu_dma_latency";
/// The value for no limit: `PM_QOS_CPU_LATENCY_DEFAULT_VALUE`.
const NO_LIMIT_US: i32 = 2_000_000_000;
const MAX_LIMIT_US: i32 = 1_000_000;
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
    /// [`IDLE`] while the limit is not requested; else [`HELD`], or [`SEEN`] if a request has come in this
    /// period. Requests raise it to `SEEN`; the thread lowers it each period.
    state: Arc<AtomicU8>,
    /// When the last request came while the limit was not requested.
    last: Mutex<Option<Instant>>,
    /// Tells the thread to request the limit. `None` once it has to end.
    closely: Option<SyncSender<()>>,
    keeper: Option<JoinHandle<()>>,
}

const IDLE: u8 = 0;
const HELD: u8 = 1;
const SEEN: u8 = 2;

impl CpuLatency {
    /// Starts the thread; returns `None` for no limit.
    pub fn new(limit: CpuLatencyLimit) -> io::Result<Option<Self>> {
        limit.0.map(|limit_us| CpuLatency::at(Path::new(DEVICE), limit_us)).transpose()
    }

    fn at(path: &Path, limit_us: i32) -> io::Result<Self> {
        let (device, state) = (open(path)?, Arc::new(AtomicU8::new(IDLE)));
        let (closely, told) = sync_channel(1);
        let run = {
            let state = Arc::clone(&state);
            move || keep(device, limit_us, &state, &told)
        };
        let keeper = thread::Builder::new().name("cpu-latency".to_owned()).spawn(run)?;
        Ok(CpuLatency { state, last: Mutex::default(), closely: Some(closely), keeper: Some(keeper) })
    }

    /// Records a request. A stale state at worst misses one.
    #[inline]
    pub fn request(&self) {
        if self.state.load(Ordering::Relaxed) != SEEN {
            self.first_request();
        }
    }

    #[cold]
    fn first_request(&self) {
        if self.state.compare_exchange(HELD, SEEN, Ordering::Relaxed, Ordering::Relaxed) != Err(IDLE) {
            return;
        }
        let now = Instant::now();
        let before = self.last.lock().replace(now);
        let is_close = before.is_some_and(|before| now.duration_since(before) < CLOSE);
        if is_close && self.state.swap(SEEN, Ordering::Relaxed) == IDLE {
            // Never full: the thread has taken the message of the time before when the state is idle again.
            self.closely.iter().for_each(|closely| _ = closely.try_send(()));
        }
    }
}

impl Drop for CpuLatency {
    fn drop(&mut self) {
        self.closely = None;
        // The thread cannot panic, and a panic would need no handling.
        let _ = self.keeper.take().map(JoinHandle::join);
    }
}

/// Requests the limit each time that this is told, until periods pass without a request.
fn keep(mut device: File, limit_us: i32, state: &AtomicU8, told: &Receiver<()>) {
    // Cannot fail: the device is open for writing, and the values are valid.
    let mut ask = |limit_us: i32| drop(device.write(&limit_us.to_ne_bytes()));
    while told.recv().is_ok() {
        ask(limit_us);
        loop {
            if told.recv_timeout(PERIOD) == Err(RecvTimeoutError::Disconnected) {
                return;
            }
            // SEEN becomes HELD, and that IDLE: only this thread leaves them.
            if state.fetch_sub(1, Ordering::Relaxed) == HELD {
                break;
            }
        }
        ask(NO_LIMIT_US);
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
