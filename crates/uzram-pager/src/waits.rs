//! Threads that wait for a page that another thread is loading or evicting.
//!
//! A futex for each of some groups of pages. A waiter reads the group's number, then tells the page's owner
//! that it waits, and sleeps for as long as the number stays; the owner changes it. The number comes first:
//! between the other two, the owner may have ended, and the next one, who was not told, begun.

use crate::sync::{Futex, Ordering};

const GROUPS: usize = 64;

pub(crate) struct Waits([Futex; GROUPS]);

impl Waits {
    pub(crate) fn new() -> Waits {
        Waits(std::array::from_fn(|_| Futex::new(0)))
    }

    fn group(&self, page: u64) -> &Futex {
        &self.0[page as usize % GROUPS]
    }

    /// Returns the number of the page's group, for [`Waits::wait`].
    pub(crate) fn number(&self, page: u64) -> u32 {
        self.group(page).load(Ordering::SeqCst)
    }

    /// Sleeps until [`Waits::wake`] is called for the page, or another one of its group, unless it was since
    /// the group had this number.
    pub(crate) fn wait(&self, page: u64, number: u32) {
        // Interrupted, or changed already: the caller looks again.
        self.group(page).wait(number, None);
    }

    /// Wakes the threads that wait for the page, after its state has changed.
    pub(crate) fn wake(&self, page: u64) {
        let group = self.group(page);
        group.fetch_add(1, Ordering::SeqCst);
        group.wake_all();
    }
}
