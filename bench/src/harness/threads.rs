//! Jobs that run at the same time: starts them together, and measures their total time.

use std::sync::RwLock;
use std::thread;
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};

use super::usage::Usage;

/// When a job ran, and its thread's resource usage.
#[derive(Clone, Copy)]
pub struct Span {
    /// When it started.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
    /// Its thread's resource usage.
    pub usage: Usage,
}

impl Span {
    /// Returns the time from the start of the first job to the end of the last, and the sum of their usage.
    pub fn together(spans: impl Iterator<Item = Span> + Clone) -> (Duration, Usage) {
        let elapsed =
            match (spans.clone().map(|span| span.start).min(), spans.clone().map(|span| span.end).max()) {
                (Some(start), Some(end)) => end - start,
                _ => Duration::ZERO,
            };
        let mut usage = Usage::default();
        spans.for_each(|span| usage += span.usage);
        (elapsed, usage)
    }
}

/// Jobs wait here until all of them have started.
pub struct Gate(RwLock<()>);

impl Gate {
    /// Waits until it opens.
    pub fn pass(&self) {
        // A poisoned lock is passed as well: it protects no data.
        drop(self.0.read());
    }
}

/// Runs each job on its own thread and returns their results. A job that could not be started is dropped; the
/// others run to their end all the same.
pub fn run_together<F, T>(jobs: impl Iterator<Item = F>) -> Result<Vec<T>>
where
    F: FnOnce(&Gate) -> Result<T> + Send,
    T: Send,
{
    // Held for writing until every thread is there, so that they start together. If one cannot be started,
    // the others run to their end and nothing waits for ever.
    let gate = Gate(RwLock::new(()));
    thread::scope(|scope| {
        let closed = gate.0.write();
        let threads: Vec<_> = jobs
            .enumerate()
            .map(|(number, job)| {
                let gate = &gate;
                let thread = thread::Builder::new().name(format!("bench-{number}"));
                thread.spawn_scoped(scope, move || job(gate))
            })
            .collect();
        drop(closed);
        let ended: Vec<Result<T>> = threads
            .into_iter()
            .map(|thread| match thread {
                Ok(thread) => thread
                    .join()
                    .map_err(|_| Error::new(ErrorKind::Io, "a job of the benchmark panicked"))
                    .flatten(),
                Err(error) => Err(Error::new(ErrorKind::NoMemory, format!("cannot start a job: {error}"))
                    .with_setting("--jobs")),
            })
            .collect();
        ended.into_iter().collect()
    })
}

/// Waits for a thread beside the jobs; returns its result.
pub fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "a thread of the benchmark panicked")))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_job_that_fails_does_not_keep_the_others_from_their_end() {
        let ended = AtomicUsize::new(0);
        let job = |number: usize| {
            let ended = &ended;
            move |gate: &Gate| {
                gate.pass();
                if number == 1 {
                    return Err(Error::invalid("no such work"));
                }
                ended.fetch_add(1, Ordering::Relaxed);
                Ok(number)
            }
        };
        assert_eq!(run_together((2..5).map(job)).unwrap(), [2, 3, 4]);
        let error = run_together((0..3).map(job)).unwrap_err();
        assert_eq!((error.to_string().as_str(), ended.load(Ordering::Relaxed)), ("no such work", 5));
    }

    #[test]
    fn jobs_take_from_the_first_start_to_the_last_end() {
        let now = Instant::now();
        let at = |ms: u64| now + Duration::from_millis(ms);
        let span = |start, end| Span {
            start: at(start),
            end: at(end),
            usage: Usage { user: Duration::from_millis(5), ..Usage::default() },
        };
        let (elapsed, usage) = Span::together([span(2, 8), span(1, 4), span(3, 9)].into_iter());
        assert_eq!((elapsed, usage.user), (Duration::from_millis(8), Duration::from_millis(15)));
    }
}
