//! Wakes threads that wait for something to change: a page's state, room, or what the evictor has to do. As
//! std's `park`, but no matter which thread waits: it may be another one in a child.
//!
//! A waiter reads the bell's number, looks whether it has to wait, and sleeps for as long as the number
//! stays. So it misses no ring in between.

use std::time::Duration;

use crate::sync::{Futex, Ordering};

/// The bit of the number that says that threads sleep.
const SLEEPS: u32 = 1;

#[derive(Default)]
pub(crate) struct Bell(Futex);

impl Bell {
    /// Returns the number, for [`Bell::wait`].
    pub(crate) fn number(&self) -> u32 {
        self.0.number.load(Ordering::SeqCst) & !SLEEPS
    }

    /// Sleeps until it rings, or for so long, unless it has since it had this number. It may return early.
    pub(crate) fn wait(&self, number: u32, most: Option<Duration>) {
        let sleeps = number | SLEEPS;
        let (Ok(seen) | Err(seen)) =
            self.0.number.compare_exchange(number, sleeps, Ordering::SeqCst, Ordering::SeqCst);
        if seen | SLEEPS == sleeps {
            self.0.wait(sleeps, most);
        }
    }

    /// Wakes all threads that wait, after what they wait for has changed.
    pub(crate) fn ring(&self) {
        let next = |seen: u32| Some((seen | SLEEPS).wrapping_add(1));
        let before = self.0.number.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        if before.is_ok_and(|before| before & SLEEPS != 0) {
            self.0.wake_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn it_waits_unless_it_has_rung() {
        let (bell, start) = (Bell::default(), std::time::Instant::now());
        let number = bell.number();
        bell.ring();
        bell.wait(number, None);
        bell.wait(bell.number(), Some(Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(20));
    }
}
