//! A lock guard that measures how long the lock is held.

use std::ops::{Deref, DerefMut};
use std::time::Instant;

use super::Counter;

/// A lock's guard, and the time it was taken if hold time is measured.
pub struct Timed<'a, G> {
    guard: G,
    since: Option<(Instant, &'a Counter)>,
}

impl<'a, G> Timed<'a, G> {
    /// Wraps the guard of a lock that was just taken. The time until the drop is added to `hold_ns`.
    pub fn new(guard: G, hold_ns: Option<&'a Counter>) -> Self {
        Timed { guard, since: hold_ns.map(|hold_ns| (Instant::now(), hold_ns)) }
    }

    /// Returns the guard.
    pub fn guard_mut(&mut self) -> &mut G {
        &mut self.guard
    }
}

impl<G: Deref> Deref for Timed<'_, G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Timed<'_, G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

impl<G> Drop for Timed<'_, G> {
    #[inline]
    fn drop(&mut self) {
        if let Some((since, hold_ns)) = self.since {
            hold_ns.add(since.elapsed().as_nanos() as u64);
        }
    }
}
