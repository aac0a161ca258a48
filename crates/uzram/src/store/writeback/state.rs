//! How a backing device is, for those who ask or warn: what it knows of itself, and whether requests have
//! failed just now.
//!
//! Lock: `backing extents`, a leaf.

use std::fmt;
use std::time::{Duration, Instant};

use crate::backing::{Direction, Tiers, Trouble};
use crate::base::error::Error;
use crate::base::failures;
use crate::base::sync::{Mutex, classes};

/// How long a read that failed counts. Those of a device that fails are rarely further apart.
const LASTS: Duration = Duration::from_secs(10);

/// How a backing device is. Prints as a line that says so, and since when; `{:#}` leaves out since when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BackingState {
    /// Pages leave and can be read.
    #[default]
    Ok,
    /// They can, though a part of it is away or full.
    Degraded(Trouble),
    /// It is full: pages leave again when enough of those on it were overwritten or discarded, without a
    /// restart.
    Full,
    /// Reads or writes fail.
    Failing(Trouble),
}

impl BackingState {
    /// Returns the state of a backing of which no request has failed.
    pub(crate) fn of(backing: &Tiers) -> Self {
        BackingState::with(backing, &Failures::default())
    }

    pub(super) fn with(backing: &Tiers, failures: &Failures) -> Self {
        let health = backing.health().unwrap_or_default();
        let failing = health.stopped.or_else(|| failures.since(health.checked));
        let degraded = || health.degraded.map_or(BackingState::Ok, BackingState::Degraded);
        failing.map_or_else(degraded, BackingState::Failing)
    }

    /// Returns the name of the state.
    pub const fn name(&self) -> &'static str {
        match self {
            BackingState::Ok => "ok",
            BackingState::Degraded(_) => "degraded",
            BackingState::Full => "full",
            BackingState::Failing(_) => "failing",
        }
    }
}

impl fmt::Display for BackingState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            BackingState::Ok => Ok(()),
            BackingState::Full => f.write_str(
                ": no more pages leave memory until some on it are overwritten or discarded; a larger one has room",
            ),
            BackingState::Degraded(Trouble { why, since }) | BackingState::Failing(Trouble { why, since }) => {
                if !f.alternate() {
                    write!(f, " for {} s", since.elapsed().unwrap_or_default().as_secs())?;
                }
                write!(f, ": {why}")
            }
        }
    }
}

/// The last failure of a read, which counts for [`LASTS`], and of a write, which counts until one succeeds.
pub(super) struct Failures(Mutex<[Option<(Instant, Trouble)>; 2]>);

impl Default for Failures {
    fn default() -> Self {
        Failures(Mutex::new(&classes::BACKING_EXTENTS, Default::default()))
    }
}

impl Failures {
    /// Notes the result of a write, or a read that failed.
    pub(super) fn note(&self, direction: Direction, error: Option<&Error>) {
        let why = error.map(Error::to_string);
        let is_new = {
            let last = &mut self.0.lock()[direction as usize];
            let counts = |at: Instant| direction == Direction::Write || at.elapsed() < LASTS;
            let before = last.take().filter(|(at, _)| counts(*at));
            let is_new = before.is_some() != why.is_some();
            *last = why.map(|why| (Instant::now(), Trouble::again(before.map(|(_, trouble)| trouble), why)));
            is_new
        };
        if is_new {
            failures::note();
        }
    }

    fn since(&self, checked: Option<Instant>) -> Option<Trouble> {
        let [read, write] = &*self.0.lock();
        let counts = |at: Instant| checked.is_none_or(|checked| checked <= at);
        let write = write.as_ref().filter(|(at, _)| counts(*at));
        let read = || read.as_ref().filter(|(at, _)| counts(*at) && at.elapsed() < LASTS);
        write.or_else(read).map(|(_, trouble)| trouble.clone())
    }
}
