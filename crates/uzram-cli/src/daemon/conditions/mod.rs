//! Reports what is wrong with devices, and clients that are turned away: warnings in the log.
//!
//! A thread reads all conditions (`sources.rs`) when a failure is noted ([`uzram::failures`]), and as long as
//! an episode is open ([`crate::daemon::episodes`]), at most once a second. Requests do not wait for it, so
//! it may wait for memory, and for who reads the log.

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
                lines.iter().for_each(|line| tracing::warn!("{line}"));
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
