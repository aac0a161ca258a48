//! What wakes a connection's thread that waits for its client: an eventfd, made when it is first needed, and
//! word that this wait must not be long.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Wakes one thread, which alone calls the methods but [`Wake::signal`].
#[derive(Default)]
pub(super) struct Wake {
    fd: OnceLock<OwnedFd>,
    /// Whether the thread is to be woken when it waits for its client.
    armed: AtomicBool,
    /// The number of the payload that is due, because memory is held for it; 0 for none.
    due: AtomicU64,
    /// How many payloads were due so far.
    payloads: AtomicU64,
}

impl Wake {
    /// Makes what it needs, unless it has it.
    ///
    /// # Errors
    /// The system's, when it has no descriptor to give.
    pub fn prepare(&self) -> io::Result<()> {
        if self.fd.get().is_none() {
            // Another thread's would be as good.
            let _ = self.fd.set(eventfd(0, EventfdFlags::CLOEXEC)?);
        }
        Ok(())
    }

    /// Says whether [`Wake::signal`] is to end waits for the client from now on.
    pub fn arm(&self, armed: bool) {
        self.armed.store(armed, Ordering::Relaxed);
    }

    /// What to wait for beside the client, if it is armed: readable after a signal.
    pub fn armed(&self) -> Option<BorrowedFd<'_>> {
        self.fd.get().filter(|_| self.armed.load(Ordering::Relaxed)).map(AsFd::as_fd)
    }

    /// Says whether the client is to send a payload without delay from now on, because memory is held for it.
    pub fn expect_payload(&self, expected: bool) {
        let number = if expected { self.payloads.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
        self.due.store(number, Ordering::Relaxed);
    }

    /// The number of the payload that is expected, if one is.
    pub fn expected_payload(&self) -> Option<u64> {
        Some(self.due.load(Ordering::Relaxed)).filter(|number| *number > 0)
    }

    /// Wakes the thread, or lets it not fall asleep, once for all signals since the last [`Wake::wait`].
    pub fn signal(&self) {
        if let Some(fd) = self.fd.get() {
            // It fails only when the counter is full, and then it is readable already.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Waits for a signal.
    ///
    /// # Errors
    /// `NotConnected` unless it was [prepared](Wake::prepare); the system's.
    pub fn wait(&self) -> io::Result<()> {
        let fd = self.fd.get().ok_or(io::ErrorKind::NotConnected)?;
        loop {
            match rustix::io::read(fd, &mut [0u8; 8]) {
                Err(Errno::INTR) => {}
                result => return Ok(result.map(drop)?),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_signal_outlasts_the_time_until_somebody_waits() {
        let wake = Wake::default();
        wake.arm(true);
        assert!(wake.armed().is_none() && wake.wait().is_err(), "there is nothing to wait for");
        wake.prepare().unwrap();
        assert!(wake.armed().is_some());
        wake.signal();
        wake.signal();
        wake.wait().unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wake.wait().unwrap());
            assert!(!waiting.is_finished(), "both signals were taken");
            wake.signal();
        });
        wake.arm(false);
        assert!(wake.armed().is_none());
    }
}
