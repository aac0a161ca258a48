//! Wakes the thread that reports what fails, of which a process has at most one.
//!
//! That thread sleeps as long as nothing fails, without a time limit. Whoever counts a failure, or changes a
//! state that says one, calls [`note`] afterwards: a fence and a load, and a system call only if the thread
//! sleeps. Requests that succeed do not come here.

use std::time::Duration;

use super::sync::{AtomicU32, Ordering, fence};

const AWAKE: u32 = 0;
const WAITS: u32 = 1;

static REPORTER: AtomicU32 = AtomicU32::new(AWAKE);

/// Wakes the thread that waits for failures, if there is one.
#[cold]
pub fn note() {
    // Either this sees that the thread waits, or the thread sees the change: it looks after `watch`.
    fence(Ordering::SeqCst);
    if REPORTER.load(Ordering::Relaxed) == WAITS && REPORTER.swap(AWAKE, Ordering::Relaxed) == WAITS {
        let _ = rustix::thread::futex::wake(&REPORTER, rustix::thread::futex::Flags::PRIVATE, 1);
    }
}

/// Has failures from now on end the next [`wait`]. The thread then looks at all that may have failed before.
pub fn watch() {
    REPORTER.store(WAITS, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Waits until a failure was noted after [`watch`], or for so long. It may return for no reason.
pub fn wait(most: Option<Duration>) {
    use rustix::thread::futex;
    let most =
        most.map(|most| futex::Timespec { tv_sec: most.as_secs() as _, tv_nsec: most.subsec_nanos().into() });
    // An error is a reason to look again.
    let _ = futex::wait(&REPORTER, futex::Flags::PRIVATE, WAITS, most.as_ref());
    REPORTER.store(AWAKE, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_not_missed_and_wakes_a_thread_that_waits() {
        // Other tests of this process may note failures, too: a wait may only end early.
        watch();
        note();
        wait(None);
        watch();
        wait(Some(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                watch();
                wait(None);
            });
            while !waits.is_finished() {
                note();
                std::thread::yield_now();
            }
        });
    }
}
