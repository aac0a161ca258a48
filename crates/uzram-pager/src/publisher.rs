//! When figures are published: by the evictor, about once a [`PERIOD`] while they change. In a program that
//! does nothing no thread wakes up for it.
//!
//! A thread that changes them wakes the evictor if nothing was published for a period. From then on the
//! evictor looks by itself, until a period has passed without a change.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::stats::MemoryStats;

/// How often figures are published at most.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);
/// Nobody wants them.
const NEVER: u64 = u64::MAX;

/// What the threads of a pager share about it.
pub(crate) struct Publishing {
    begun: Instant,
    publish: OnceLock<fn(&MemoryStats)>,
    /// From when on a change has the evictor look, in milliseconds since `begun`.
    due_ms: AtomicU64,
}

impl Publishing {
    pub(crate) fn new() -> Publishing {
        Publishing { begun: Instant::now(), publish: OnceLock::new(), due_ms: AtomicU64::new(NEVER) }
    }

    /// Has figures published by a function, which the evictor calls.
    pub(crate) fn start(&self, publish: fn(&MemoryStats)) {
        if self.publish.set(publish).is_ok() {
            self.due_ms.store(0, Ordering::Relaxed);
        }
    }

    /// Returns whether a change has the evictor look. Needs the time only if somebody wants figures.
    #[inline]
    pub(crate) fn is_due(&self, now: impl FnOnce() -> Instant) -> bool {
        let due_ms = self.due_ms.load(Ordering::Relaxed);
        due_ms != NEVER && self.ms(now()) >= due_ms
    }

    fn ms(&self, at: Instant) -> u64 {
        at.duration_since(self.begun).as_millis() as u64
    }
}

/// The evictor's part.
#[derive(Default)]
pub(crate) struct Publisher {
    /// What was published, and when that was found to be so.
    last: Option<(MemoryStats, Instant)>,
}

impl Publisher {
    /// Publishes figures if it is time. Returns how long the evictor may rest until it looks again; `None` if
    /// it need not before a change.
    pub(crate) fn look(
        &mut self,
        publishing: &Publishing,
        figures: impl FnOnce() -> MemoryStats,
    ) -> Option<Duration> {
        let publish = publishing.publish.get()?;
        let now = Instant::now();
        if let Some((_, at)) = &self.last
            && let Some(rest) = PERIOD.checked_sub(now - *at).filter(|rest| !rest.is_zero())
        {
            return Some(rest);
        }
        // A change from here on has the evictor look again.
        let figures = figures();
        if self.last.as_ref().is_some_and(|(last, _)| *last == figures) {
            return None;
        }
        publish(&figures);
        self.last = Some((figures, now));
        publishing.due_ms.store(publishing.ms(now + PERIOD), Ordering::Relaxed);
        Some(PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    static CALLS: AtomicUsize = AtomicUsize::new(0);

    #[test]
    fn figures_are_published_when_they_changed_and_at_most_once_a_period() {
        let calls = || CALLS.load(Ordering::Relaxed);
        let publishing = Publishing::new();
        let mut publisher = Publisher::default();
        let stats = |faults| {
            let mut stats = MemoryStats::default();
            stats.pager.faults = faults;
            stats
        };
        // Nobody wants them.
        assert!(!publishing.is_due(|| Instant::now() + PERIOD));
        assert_eq!(publisher.look(&publishing, || stats(1)), None);
        publishing.start(|_| {
            CALLS.fetch_add(1, Ordering::Relaxed);
        });
        assert!(publishing.is_due(Instant::now));
        assert_eq!((publisher.look(&publishing, || stats(1)), calls()), (Some(PERIOD), 1));
        // Whoever changes something soon after need not wake the evictor, which looks by itself.
        assert!(!publishing.is_due(Instant::now) && publishing.is_due(|| Instant::now() + PERIOD));
        let rest = publisher.look(&publishing, || unreachable!());
        assert!(rest.is_some_and(|rest| rest <= PERIOD) && calls() == 1, "{rest:?}");
        let later = |publisher: &mut Publisher| {
            publisher.last = publisher.last.map(|(last, at)| (last, at - PERIOD));
            publishing.due_ms.store(0, Ordering::Relaxed);
        };
        later(&mut publisher);
        assert_eq!((publisher.look(&publishing, || stats(2)), calls()), (Some(PERIOD), 2));
        later(&mut publisher);
        assert_eq!((publisher.look(&publishing, || stats(2)), calls()), (None, 2));
        assert!(publishing.is_due(Instant::now));
        assert_eq!((publisher.look(&publishing, || stats(3)), calls()), (Some(PERIOD), 3));
    }
}
