//! The minimum speed of a client that transfers bytes for which the server holds memory.
//!
//! It must make progress within the time limit, and transfer [`BYTES_PER_LIMIT`] within each time limit: a client that
//! transfers single bytes is treated like one that is silent.

use std::io;
use std::time::{Duration, Instant};

/// The fewest bytes transferred within each time limit: with the default of 30 s, 35 KiB/s.
const BYTES_PER_LIMIT: u64 = 1 << 20;

/// A transfer in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    limit: Duration,
    started: Instant,
    /// The time of the last progress.
    last: Instant,
    done_bytes: u64,
}

impl Pace {
    /// Starts a transfer now.
    pub fn new(limit: Duration) -> Self {
        let now = Instant::now();
        Pace { limit, started: now, last: now, done_bytes: 0 }
    }

    /// Records that `len_bytes` more were transferred now.
    pub fn progress(&mut self, len_bytes: usize) {
        self.done_bytes += len_bytes as u64;
        self.last = Instant::now();
    }

    /// Returns when progress is due; `None` for never.
    pub fn deadline(&self) -> Option<Instant> {
        let limits = u32::try_from(1 + self.done_bytes / BYTES_PER_LIMIT).unwrap_or(u32::MAX);
        let whole = self.started.checked_add(self.limit.saturating_mul(limits));
        let next = self.last.checked_add(self.limit);
        [whole, next].into_iter().flatten().min()
    }

    /// Returns the error for a client that was too slow; `did` says at what.
    pub fn too_slow(&self, did: &str) -> io::Error {
        let Pace { limit, done_bytes, started, .. } = self;
        let text = format!(
            "{did} too slowly: {done_bytes} bytes in {:?}, with a limit of {limit:?}",
            started.elapsed()
        );
        io::Error::new(io::ErrorKind::ConnectionAborted, text)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn silence_and_trickles_meet_the_limit_and_what_is_fast_enough_goes_on() {
        let limit = Duration::from_secs(30);
        let after = |pace: &Pace| pace.deadline().unwrap() - pace.started;
        let mut pace = Pace::new(limit);
        assert_eq!(after(&pace), limit);
        // Bytes that trickle in do not extend the deadline.
        for _ in 0..1000 {
            pace.progress(1);
        }
        assert_eq!(after(&pace), limit);
        // A fast transfer earns no longer silence.
        pace.progress(100 << 20);
        assert_eq!(pace.deadline().unwrap(), pace.last + limit);
        // At the minimum speed it may go on forever.
        pace.last = pace.started + 100 * limit;
        assert_eq!(after(&pace), 101 * limit);
        pace.last = pace.started + 101 * limit;
        assert!(after(&pace) < 102 * limit);
        assert!(Pace::new(Duration::MAX).deadline().is_none());
    }
}
