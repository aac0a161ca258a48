//! Threads that wait for a unit that another thread is loading or evicting.
//!
//! A futex for each of some groups of units. A waiter reads the group's number, looks at the unit again, and sleeps for as
//! long as the number stays; a waker changes it.

use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};

const GROUPS: usize = 64;

pub(crate) struct Waits([AtomicU32; GROUPS]);

impl Waits {
    pub(crate) fn new() -> Waits {
        Waits([const { AtomicU32::new(0) }; GROUPS])
    }

    fn group(&self, unit: u64) -> &AtomicU32 {
        &self.0[unit as usize % GROUPS]
    }

    /// Sleeps until [`Waits::wake`] is called for the unit, or another one of its group, unless `is_over` by now.
    pub(crate) fn wait(&self, unit: u64, is_over: impl Fn() -> bool) {
        let group = self.group(unit);
        let number = group.load(Ordering::SeqCst);
        if !is_over() {
            // Interrupted, or changed already: the caller looks again.
            let _ = futex::wait(group, futex::Flags::PRIVATE, number, None);
        }
    }

    /// Wakes the threads that wait for the unit, after its state has changed.
    pub(crate) fn wake(&self, unit: u64) {
        let group = self.group(unit);
        group.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(group, futex::Flags::PRIVATE, u32::MAX >> 1);
    }
}
