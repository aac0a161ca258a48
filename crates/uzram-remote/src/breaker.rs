//! Whether a store is written to: not while it fails. What is read must be tried in any case, since nobody
//! else has it.

use std::time::Instant;

use uzram::backing::{Health, Trouble};
use uzram::failures;
use uzram::sync::Mutex;

use crate::Failure;

/// Failures in a row after which no more is written.
const FAILURES: u32 = 3;

/// Stops writes after failures in a row, until a check succeeds.
#[derive(Default)]
pub(crate) struct Breaker {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    failures: u32,
    /// Why nothing is written, and when that was found out last.
    stopped: Option<(Failure, Trouble, Instant)>,
    degraded: Option<Trouble>,
    /// When the last check began that succeeded.
    checked: Option<Instant>,
}

impl State {
    fn stop(&mut self, why: Failure) {
        let trouble = Trouble::again(self.stopped.take().map(|(_, trouble, _)| trouble), why.to_string());
        self.stopped = Some((why, trouble, Instant::now()));
    }
}

impl Breaker {
    /// Fails if nothing may be written. Errors: that of the last write or check that failed, which is not
    /// tried again.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.state.lock().stopped.as_ref().map_or(Ok(()), |(why, ..)| Err(why.clone().given_up()))
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().stopped.is_some()
    }

    /// Changes the state; who reports what fails is told if something is wrong now that was not, or the other
    /// way round.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        let are_wrong = |state: &State| (state.stopped.is_some(), state.degraded.is_some());
        let before = are_wrong(&state);
        change(&mut state);
        let is_new = are_wrong(&state) != before;
        drop(state);
        if is_new {
            failures::note();
        }
    }

    pub(crate) fn note(&self, result: &Result<(), Failure>) {
        self.change(|state| match result {
            Ok(()) => state.failures = 0,
            Err(failure) => {
                state.failures = state.failures.saturating_add(1);
                if state.failures >= FAILURES && state.stopped.is_none() {
                    state.stop(failure.clone());
                }
            }
        });
    }

    pub(crate) fn open(&self, why: Failure) {
        self.change(|state| state.stop(why));
    }

    /// Notes the result of a check that began then: writes stop, or go on while a part of the store may be
    /// wrong. Writes that have stopped since then wait for the next check.
    pub(crate) fn note_check(&self, began: Instant, result: Result<Option<String>, Failure>) {
        self.change(|state| match result {
            Ok(degraded) => {
                if state.stopped.take_if(|(.., at)| *at <= began).is_some() {
                    state.failures = 0;
                }
                let before = state.degraded.take();
                state.degraded = degraded.map(|why| Trouble::again(before, why));
                state.checked = Some(began);
            }
            Err(failure) => state.stop(failure),
        });
    }

    /// Returns what is known about the store, but not the counts.
    pub(crate) fn health(&self) -> Health {
        let state = self.state.lock();
        Health {
            stopped: state.stopped.as_ref().map(|(_, trouble, _)| trouble.clone()),
            degraded: state.degraded.clone(),
            checked: state.checked,
            ..Health::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Meaning;
    use uzram::{Error, ErrorKind};

    #[test]
    fn writes_stop_after_failures_in_a_row_until_a_check_succeeds() {
        let (breaker, early) = (Breaker::default(), Instant::now());
        let failed = |why| Err(Failure::new(Meaning::Refused, Error::new(ErrorKind::Io, why)));
        let gone = failed("gone");
        for result in [&gone, &gone, &Ok(()), &gone, &gone, &Ok(()), &gone, &gone] {
            breaker.note(result);
            assert!(!breaker.is_open());
        }
        breaker.note(&gone);
        assert_eq!(breaker.check(), gone);
        // Those that were under way.
        breaker.note(&Ok(()));
        (0..4).for_each(|_| breaker.note(&failed("still gone")));
        assert!(breaker.is_open());
        let since = |health: Health| health.stopped.map(|trouble| (trouble.why, trouble.since));
        let before = since(breaker.health());
        breaker.open(Failure::new(Meaning::Again, Error::new(ErrorKind::Io, "gone again")));
        let after = since(breaker.health());
        assert_eq!(before.as_ref().map(|(why, _)| why.as_str()), Some("gone"));
        assert_eq!(after.as_ref().map(|(why, _)| why.as_str()), Some("gone again"));
        assert_eq!(before.map(|(_, since)| since), after.map(|(_, since)| since));
        assert!(breaker.check().is_err_and(|failure| !failure.passes()));
        // It has seen nothing of this.
        breaker.note_check(early, Ok(None));
        assert!(breaker.is_open());
        breaker.note_check(Instant::now(), Ok(Some("a node is away".to_owned())));
        assert_eq!((breaker.check(), breaker.is_open(), breaker.health().stopped), (Ok(()), false, None));
        assert_eq!(breaker.health().degraded.map(|trouble| trouble.why), Some("a node is away".to_owned()));
        breaker.note_check(Instant::now(), Ok(None));
        assert_eq!(breaker.health().degraded, None);
    }

    /// Without any write that fails.
    #[test]
    fn whoever_reports_failures_hears_of_each_change() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let breaker = Breaker::default();
        let checked = |result| breaker.note_check(Instant::now(), result);
        let failure = || Failure::new(Meaning::Again, Error::new(ErrorKind::Io, "gone"));
        let changes: [&dyn Fn(); 5] = [
            &|| checked(Ok(Some("a node is away".to_owned()))),
            &|| checked(Ok(None)),
            &|| checked(Err(failure())),
            &|| checked(Ok(None)),
            &|| breaker.open(failure()),
        ];
        for change in changes {
            failures::watch();
            change();
            let began = Instant::now();
            failures::wait(Some(PATIENCE));
            assert!(began.elapsed() < PATIENCE, "{:?}", breaker.health());
        }
    }
}
