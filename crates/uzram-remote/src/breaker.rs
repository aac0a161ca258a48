//! Whether a store is written to: not while it fails. What is read must be tried in any case, since nobody else has it.

use std::sync::Mutex;

use uzram::{Error, Result};

use crate::lock;

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
    /// Why nothing is written.
    why: Option<Error>,
}

impl Breaker {
    /// Fails if nothing may be written.
    ///
    /// # Errors
    /// The error of the last write that failed.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.state).why.clone().map_or(Ok(()), Err)
    }

    /// Returns whether nothing may be written.
    pub(crate) fn is_open(&self) -> bool {
        lock(&self.state).why.is_some()
    }

    /// Notes the result of a write. Returns whether writes stop now.
    pub(crate) fn note(&self, result: &Result<()>) -> bool {
        let mut state = lock(&self.state);
        match result {
            Ok(()) => {
                state.failures = 0;
                false
            }
            Err(error) => {
                state.failures = state.failures.saturating_add(1);
                let stops = state.failures >= FAILURES && state.why.is_none();
                if stops {
                    state.why = Some(error.clone());
                }
                stops
            }
        }
    }

    /// Stops writes.
    pub(crate) fn open(&self, why: Error) {
        lock(&self.state).why = Some(why);
    }

    /// Lets writes go on.
    pub(crate) fn close(&self) {
        *lock(&self.state) = State::default();
    }

    /// Returns why nothing is written, if nothing is.
    pub(crate) fn why(&self) -> Option<String> {
        lock(&self.state).why.as_ref().map(Error::to_string)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzram::ErrorKind;

    #[test]
    fn writes_stop_after_failures_in_a_row_until_a_check_succeeds() {
        let breaker = Breaker::default();
        let failed = Err(Error::new(ErrorKind::Io, "gone"));
        for _ in 0..3 {
            assert!(!breaker.note(&failed) && !breaker.note(&failed) && !breaker.note(&Ok(())));
        }
        assert!(!breaker.note(&failed) && !breaker.note(&failed) && breaker.note(&failed));
        assert_eq!(breaker.check(), failed);
        // One that was under way.
        assert!(!breaker.note(&Ok(())) && !breaker.note(&failed));
        assert!(breaker.is_open());
        assert_eq!(breaker.why(), Some("gone".to_owned()));
        breaker.close();
        assert_eq!((breaker.check(), breaker.is_open(), breaker.why()), (Ok(()), false, None));
    }
}
