//! Wakes one thread that has something to do now and then, as std's `park` and `unpark`: but no matter which thread that is, so that
//! it may be another one in a child.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

const QUIET: u32 = 0;
const RUNG: u32 = 1;
const SLEEPS: u32 = 2;

/// See the [module's documentation](self).
pub(crate) struct Bell(AtomicU32);

impl Bell {
    pub(crate) fn new() -> Bell {
        Bell(AtomicU32::new(QUIET))
    }

    /// Wakes the thread, or has its next [`Bell::wait`] return at once.
    pub(crate) fn ring(&self) {
        if self.0.load(Ordering::Relaxed) != RUNG && self.0.swap(RUNG, Ordering::Release) == SLEEPS {
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
        }
    }

    /// Waits until it rings, or has rung since the last time; or for so long. It may return for no reason.
    pub(crate) fn wait(&self, most: Option<Duration>) {
        let changed = self.0.compare_exchange(QUIET, SLEEPS, Ordering::Acquire, Ordering::Acquire);
        if changed.is_ok() {
            let most = most.map(|most| futex::Timespec {
                tv_sec: most.as_secs() as _,
                tv_nsec: most.subsec_nanos().into(),
            });
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, SLEEPS, most.as_ref());
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
