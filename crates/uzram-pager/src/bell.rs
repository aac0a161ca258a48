//! Wakes one thread that has something to do now and then, as std's `park` and `unpark`: but no matter which
//! thread that is, so that it may be another one in a child.

use std::time::Duration;

use crate::sync::{Futex, Ordering};

const QUIET: u32 = 0;
const RUNG: u32 = 1;
const SLEEPS: u32 = 2;

/// See the [module's documentation](self).
pub(crate) struct Bell(Futex);

impl Bell {
    pub(crate) fn new() -> Bell {
        Bell(Futex::new(QUIET))
    }

    /// Wakes the thread, or has its next [`Bell::wait`] return at once.
    pub(crate) fn ring(&self) {
        // Not read before: that it has rung may be old, and the thread not see any more what it is woken for.
        if self.0.swap(RUNG, Ordering::Release) == SLEEPS {
            self.0.wake_one();
        }
    }

    /// Waits until it rings, or has rung since the last time; or for so long. It may return for no reason.
    pub(crate) fn wait(&self, most: Option<Duration>) {
        let changed = self.0.compare_exchange(QUIET, SLEEPS, Ordering::Acquire, Ordering::Acquire);
        if changed.is_ok() {
            self.0.wait(SLEEPS, most);
        }
        self.0.swap(QUIET, Ordering::Acquire);
    }

    /// Forgets that it rang, and that a thread waits: that is not in this process.
    pub(crate) fn reset(&self) {
        self.0.store(QUIET, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn it_wakes_a_thread_and_is_not_forgotten() {
        let bell = Bell::new();
        bell.ring();
        bell.wait(None);
        let start = Instant::now();
        bell.wait(Some(Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(20));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| bell.wait(None));
            while !waits.is_finished() {
                bell.ring();
                std::thread::yield_now();
            }
        });
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};
    use loom::thread;

    use super::Bell;

    /// A ring is seen by the wait that runs, or comes next, with all that was written before it.
    #[test]
    fn loom_a_ring_is_never_lost() {
        const RINGS: u64 = 2;
        loom::model(|| {
            let shared = Arc::new((Bell::new(), AtomicU64::new(0)));
            let ringer = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    for nth in 1..=RINGS {
                        shared.1.store(nth, Ordering::Relaxed);
                        shared.0.ring();
                    }
                })
            };
            while shared.1.load(Ordering::Relaxed) < RINGS {
                shared.0.wait(None);
            }
            ringer.join().expect("no panic");
        });
    }
}
