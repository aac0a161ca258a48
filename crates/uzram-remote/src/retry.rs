//! The time that opening a store may take; trying a request again that failed for a reason that may pass,
//! until its time is over.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;
use uzram::ErrorKind;

use crate::answers::Failure;
use crate::error;

/// How long opening a store may take, with all checks.
pub(crate) const OPENED_WITHIN: Duration = Duration::from_secs(5);
/// The first wait; each is twice as long as the one before, up to [`LONGEST`].
const FIRST: Duration = Duration::from_millis(50);
/// A store that is back is noticed so late.
const LONGEST: Duration = Duration::from_millis(400);

/// Returns what opens a store. Errors: `Io` if that takes longer than [`OPENED_WITHIN`].
pub(crate) async fn opened<T>(
    store: &impl std::fmt::Display,
    opening: impl Future<Output = uzram::Result<T>>,
) -> uzram::Result<T> {
    tokio::time::timeout(OPENED_WITHIN, opening).await.unwrap_or_else(|_| {
        let what = format!("{store} did not answer within {} s", OPENED_WITHIN.as_secs());
        Err(error(ErrorKind::Io, what))
    })
}

/// Carries out a request, and again while it fails for a reason that may pass and there is time. Does not end
/// a request that is under way at that time. Errors: that of the last try.
pub(crate) async fn tried<T, F>(until: Instant, request: impl Fn() -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Failure>>,
{
    let mut wait = FIRST;
    loop {
        match request().await {
            Err(failure) if failure.passes() && Instant::now() + wait < until => {
                tokio::time::sleep(wait).await;
                wait = LONGEST.min(2 * wait);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::cell::Cell;

    use uzram::Error;

    use super::*;
    use crate::answers::Meaning;

    /// Tries a request that fails until so many milliseconds have passed. Returns whether it succeeded, after
    /// how long, and how often it was tried.
    async fn try_for_5_s(meaning: Meaning, fails_for_ms: u64) -> (bool, u128, u32) {
        let (began, tries) = (Instant::now(), Cell::new(0));
        let request = || {
            tries.set(tries.get() + 1);
            let is_over = began.elapsed() >= Duration::from_millis(fails_for_ms);
            let failure = Failure::new(meaning, Error::new(ErrorKind::Io, "busy"));
            std::future::ready(if is_over { Ok(()) } else { Err(failure) })
        };
        let result = tried(began + Duration::from_secs(5), request).await;
        (result.is_ok(), began.elapsed().as_millis(), tries.get())
    }

    #[tokio::test(start_paused = true)]
    async fn what_may_pass_is_tried_until_the_time_is_over() {
        assert_eq!(try_for_5_s(Meaning::Again, 0).await, (true, 0, 1));
        let (is_done, after_ms, tries) = try_for_5_s(Meaning::Again, 3000).await;
        assert!(is_done && (3000..3500).contains(&after_ms) && tries < 15, "{after_ms} ms, {tries} tries");
        let (is_done, after_ms, tries) = try_for_5_s(Meaning::Again, 60_000).await;
        assert!(!is_done && (4500..=5000).contains(&after_ms) && tries < 20, "{after_ms} ms, {tries} tries");
        for meaning in [Meaning::Full, Meaning::Lost, Meaning::Refused] {
            assert_eq!(try_for_5_s(meaning, 60_000).await, (false, 0, 1));
        }
    }
}
