//! How slow a client may be with bytes that the server holds memory for.
//!
//! It must make progress within the time limit, and [`BYTES_PER_LIMIT`] within each time limit: who takes or sends
//! a byte at a time is as slow as who does nothing.

use std::io;
use std::time::{Duration, Instant};

/// What must have gone over within each time limit: with the default of 30 s, 35 KiB a second.
const BYTES_PER_LIMIT: u64 = 1 << 20;

/// A transfer under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    limit: Duration,
    started: Instant,
    /// When there was progress last.
    last: Instant,
    done_bytes: u64,
}

impl Pace {
    /// A transfer that begins now.
    pub fn new(limit: Duration) -> Self {
        let now = Instant::now();
        Pace { limit, started: now, last: now, done_bytes: 0 }
    }

    /// More has gone over, now.
    pub fn progress(&mut self, len_bytes: usize) {
        self.done_bytes += len_bytes as u64;
        self.last = Instant::now();
    }

    /// When there must be progress; `None` for never.
    pub fn deadline(&self) -> Option<Instant> {
        let limits = u32::try_from(1 + self.done_bytes / BYTES_PER_LIMIT).unwrap_or(u32::MAX);
        let whole = self.started.checked_add(self.limit.saturating_mul(limits));
        let next = self.last.checked_add(self.limit);
        [whole, next].into_iter().flatten().min()
    }

    /// The end of a connection whose client was too slow; `did` is what it did.
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
        // Bytes that trickle in do not put the end off.
        for _ in 0..1000 {
            pace.progress(1);
        }
        assert_eq!(after(&pace), limit);
        // What was fast has no time to be silent later.
        pace.progress(100 << 20);
        assert_eq!(pace.deadline().unwrap(), pace.last + limit);
        // At the least speed it goes on for ever.
        pace.last = pace.started + 100 * limit;
        assert_eq!(after(&pace), 101 * limit);
        pace.last = pace.started + 101 * limit;
        assert!(after(&pace) < 102 * limit);
        assert!(Pace::new(Duration::MAX).deadline().is_none());
    }
}
