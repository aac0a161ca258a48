//! Reports what is wrong with devices, and clients that are turned away: warnings in the log.
//!
//! A thread reads all conditions when a failure is noted ([`uzram::failures`]), and as long as an episode is
//! open, at most once a second. It sleeps as long as nothing is wrong. Requests do not wait for it, so it may
//! wait for memory, and for who reads the log.
//!
//! `sources.rs` has the conditions, and what is said of them; [`crate::daemon::episodes`] says when.

mod sources;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use uzram::failures;
use uzram_serve::{Exports, nbd};

use crate::daemon::episodes::Episodes;
use crate::daemon::survive::lives::Lives;

/// The shortest time between two looks while an episode is open.
const PERIOD: Duration = Duration::from_secs(1);

/// The thread. Dropping this ends it.
pub struct Reporter {
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    /// Starts the thread for these devices and clients. It goes on with the episodes of the process before.
    pub fn start(exports: Exports, clients: nbd::Clients, lives: Arc<Lives>) -> io::Result<Self> {
        Reporter::start_with(exports, clients, lives, |line| tracing::warn!("{line}"))
    }

    /// As [`Reporter::start`], with another log.
    fn start_with(
        exports: Exports,
        clients: nbd::Clients,
        lives: Arc<Lives>,
        mut log: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Self> {
        let (ends, end) = mpsc::channel();
        let run = move || {
            let mut episodes = Episodes::new(lives.episodes());
            loop {
                failures::watch();
                // Checked after `watch`: an end after this ends the wait.
                if end.try_recv() == Err(TryRecvError::Disconnected) {
                    return;
                }
                let (lines, next) = episodes.look(&sources::read(&exports, &clients), now_ms());
                lines.iter().for_each(|line| log(line));
                if next.is_some() && end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
                failures::wait(next.map(|next| next.saturating_sub(PERIOD)));
            }
        };
        let thread = thread::Builder::new().name("conditions".to_owned()).spawn(run)?;
        Ok(Reporter { ends: Some(ends), thread: Some(thread) })
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.ends = None;
        failures::note();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread needs no handling.
            let _ = thread.join();
        }
    }
}

/// Returns the time since boot, which is the same in all processes.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Mutex, PoisonError};
    use std::time::Instant;

    use uzram::backing::{Direction, Fault, FaultKind, FaultyBacking, FileBacking, FileOptions};
    use uzram::device::{Device, NamedBacking};
    use uzram::random::Random;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < PATIENCE, "{what}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// One line at the first failure and one at the end, over several processes' worth of reporters.
    #[test]
    fn a_backing_that_fails_for_a_while_is_reported_twice() {
        let dir = tempfile::tempdir().unwrap();
        let options = FileOptions { size_bytes: Some(8 << 20), ..FileOptions::new(dir.path().join("cold")) };
        let backing = FaultyBacking::new(FileBacking::open(&options).unwrap(), 1).unwrap();
        let faults = backing.faults();
        let device = Device::new("zram7").unwrap();
        device.set_backing(Some(NamedBacking::new("faulty", "in a test", Arc::new(backing)))).unwrap();
        device.set("mem_limit", "16M").unwrap();
        device.set("disksize", "16M").unwrap();
        let disk = device.open().unwrap();
        let mut random = Random::new(1);
        (0..16).for_each(|page| disk.write(page * 4096, &random.bytes(4096)).unwrap());
        let lines = Arc::new(Mutex::new(Vec::new()));
        let lives = Arc::new(Lives::new().unwrap());
        let start = || {
            let (exports, lives, lines) =
                (Exports::new([Arc::clone(&device)]), Arc::clone(&lives), Arc::clone(&lines));
            let log =
                move |line: &str| lines.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
            Reporter::start_with(exports, nbd::Clients::default(), lives, log).unwrap()
        };
        let count = || lines.lock().unwrap().len();
        let reporter = start();
        faults.add(Fault { direction: Some(Direction::Write), ..Fault::always(FaultKind::Error) });
        for _ in 0..3 {
            assert!(device.set("writeback", "all").is_err());
        }
        wait_until("it is reported", || count() == 1);
        // Another process takes over.
        drop(reporter);
        let reporter = start();
        assert!(device.set("writeback", "all").is_err());
        faults.clear();
        device.set("writeback", "all").unwrap();
        wait_until("its end is reported", || count() == 2);
        drop(reporter);
        let lines = lines.lock().unwrap();
        assert!(lines[0].starts_with("zram7: the backing device is failing: "), "{lines:?}");
        assert!(lines[1].starts_with("zram7: the backing device is ok again after "), "{lines:?}");
        assert_eq!(lines.len(), 2, "{lines:?}");
    }
}
