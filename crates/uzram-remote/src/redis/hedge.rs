//! When a read that takes long is asked for elsewhere, too: after as long as 19 of 20 reads take (J. Dean and
//! L. A. Barroso, "The Tail at Scale", 2013).

use std::future::Future;
use std::time::Duration;

use uzram::sync::Mutex;

use crate::Failure;

/// Reads of which the times are known.
const READS: usize = 256;
/// Reads after which the 95th percentile is computed anew.
const EACH: usize = 32;
/// Before there are times, and at most.
const LONGEST: Duration = Duration::from_millis(10);
/// At least: below it, a second request costs more than it gains.
const SHORTEST: Duration = Duration::from_micros(500);

#[derive(Default)]
pub(super) struct Latencies {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last: Vec<Duration>,
    next: usize,
    percentile: Option<Duration>,
}

impl Latencies {
    /// Returns how long to wait for a read before it is asked for elsewhere.
    pub(super) fn hedge_after(&self) -> Duration {
        let state = self.state.lock();
        state.percentile.map_or(LONGEST, |time| time.clamp(SHORTEST, LONGEST))
    }

    pub(super) fn note(&self, time: Duration) {
        let mut state = self.state.lock();
        let State { last, next, percentile } = &mut *state;
        match last.len() < READS {
            true => last.push(time),
            false => last[*next % READS] = time,
        }
        *next += 1;
        if *next % EACH == 0 {
            let mut sorted = last.clone();
            let at = sorted.len() * 95 / 100;
            *percentile = Some(*sorted.select_nth_unstable(at).1);
        }
    }
}

/// Returns what `first` returns. If it fails, or takes longer than `after`, `other` is run, too; then the
/// first success is returned, or the error of `first`; that of `other` if only `first` did not find it.
pub(super) async fn either<T>(
    first: impl Future<Output = Result<T, Failure>>,
    other: impl Future<Output = Result<T, Failure>>,
    after: Duration,
) -> Result<T, Failure> {
    tokio::pin!(first);
    tokio::pin!(other);
    let failure = match tokio::time::timeout(after, &mut first).await {
        Ok(Ok(read)) => return Ok(read),
        Ok(Err(failure)) => failure,
        Err(_) => tokio::select! {
            read = &mut first => match read {
                Ok(read) => return Ok(read),
                Err(failure) => failure,
            },
            read = &mut other => match read {
                Ok(read) => return Ok(read),
                Err(of_other) => return first.await.map_err(|failure| either_error(failure, of_other)),
            },
        },
    };
    other.await.map_err(|of_other| either_error(failure, of_other))
}

/// Nothing is lost as long as one of them may have it.
fn either_error(of_first: Failure, of_other: Failure) -> Failure {
    if of_first.is_lost() { of_other } else { of_first }
}

#[cfg(test)]
mod tests {
    use uzram::{Error, ErrorKind};

    use super::*;
    use crate::Meaning;

    #[test]
    fn a_read_is_hedged_after_the_95th_percentile() {
        let latencies = Latencies::default();
        assert_eq!(latencies.hedge_after(), LONGEST);
        (0..10 * READS as u64).for_each(|at| latencies.note(Duration::from_micros(1000 + at % 100)));
        let after = latencies.hedge_after();
        assert!((1090..1099).contains(&after.as_micros()), "{after:?}");
        (0..READS).for_each(|_| latencies.note(Duration::ZERO));
        assert_eq!(latencies.hedge_after(), SHORTEST);
    }

    #[test]
    fn the_first_success_counts() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let in_ms = |ms, result: Result<u32, Failure>| async move {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            result
        };
        let fail =
            |meaning, number: u32| Err(Failure::new(meaning, Error::new(ErrorKind::Io, number.to_string())));
        let failed = |number| fail(Meaning::Again, number);
        let lost = |number| fail(Meaning::Lost, number);
        let cases = [
            ((1, Ok(1)), (1, Ok(2)), Ok(1)),
            ((9, Ok(1)), (1, Ok(2)), Ok(2)),
            ((9, Ok(1)), (20, Ok(2)), Ok(1)),
            ((1, failed(1)), (9, Ok(2)), Ok(2)),
            ((9, failed(1)), (9, Ok(2)), Ok(2)),
            ((9, Ok(1)), (1, failed(2)), Ok(1)),
            ((9, failed(1)), (1, failed(2)), failed(1)),
            ((1, failed(1)), (1, failed(2)), failed(1)),
            ((1, lost(1)), (1, failed(2)), failed(2)),
            ((9, lost(1)), (9, failed(2)), failed(2)),
            ((9, lost(1)), (1, failed(2)), failed(2)),
            ((1, failed(1)), (1, lost(2)), failed(1)),
            ((9, failed(1)), (1, lost(2)), failed(1)),
            ((1, lost(1)), (1, lost(2)), lost(2)),
            ((9, lost(1)), (1, Ok(2)), Ok(2)),
        ];
        runtime.expect("a runtime").block_on(async {
            for ((first_ms, first), (other_ms, other), expected) in cases {
                let found =
                    either(in_ms(first_ms, first), in_ms(other_ms, other), Duration::from_millis(5)).await;
                assert_eq!(found, expected);
            }
        });
    }
}
