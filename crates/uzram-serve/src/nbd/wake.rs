//! Wakes a connection's thread from its wait for the client: an eventfd, created on first use, and the flags that say
//! what ends or limits that wait.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Wakes one thread. Other threads call only [`Wake::signal`].
#[derive(Default)]
pub(super) struct Wake {
    fd: OnceLock<OwnedFd>,
    /// Whether a signal ends the thread's wait for its client.
    armed: AtomicBool,
    /// The number of the payload that the client owes and for which memory is held; 0 for none.
    due: AtomicU64,
    /// The number of such payloads so far.
    payloads: AtomicU64,
}

impl Wake {
    /// Creates the eventfd, unless there is one.
    ///
    /// # Errors
    /// The system's, when it refuses a descriptor.
    pub fn prepare(&self) -> io::Result<()> {
        if self.fd.get().is_none() {
            // If another thread was faster, its eventfd is used.
            let _ = self.fd.set(eventfd(0, EventfdFlags::CLOEXEC)?);
        }
        Ok(())
    }

    /// Sets whether [`Wake::signal`] ends waits for the client from now on.
    pub fn arm(&self, armed: bool) {
        self.armed.store(armed, Ordering::Relaxed);
    }

    /// Returns a descriptor that becomes readable on a signal, if this is armed.
    pub fn armed(&self) -> Option<BorrowedFd<'_>> {
        self.fd.get().filter(|_| self.armed.load(Ordering::Relaxed)).map(AsFd::as_fd)
    }

    /// Sets whether the client must send a payload without delay from now on, because memory is held for it.
    pub fn expect_payload(&self, expected: bool) {
        let number = if expected { self.payloads.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
        self.due.store(number, Ordering::Relaxed);
    }

    /// Returns the number of the expected payload, if any.
    pub fn expected_payload(&self) -> Option<u64> {
        Some(self.due.load(Ordering::Relaxed)).filter(|number| *number > 0)
    }

    /// Wakes the thread, or keeps it from sleeping, once for all signals since the last [`Wake::wait`].
    pub fn signal(&self) {
        if let Some(fd) = self.fd.get() {
            // Fails only when the counter is full; it is readable then.
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
