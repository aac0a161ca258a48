//! Warms up the threads that serve requests before swap depends on them: each touches all memory that it will ever use.
//!
//! There are as many files as threads, for writes of the longest request. Each write waits in its thread for the
//! others, so that every thread gets one: the write fills the thread's request buffer, and the thread touches all other
//! memory that it needs. A separate process writes to the files, as a process that waits for itself in a system call
//! cannot be killed.

use std::hint::black_box;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The most stack that a thread uses; compressors use the most.
const STACK_BYTES: usize = 256 << 10;
/// How long threads wait for the others.
const PATIENCE: Duration = Duration::from_secs(2);

/// Makes the threads wait for each other.
pub(super) struct WarmUp {
    threads: usize,
    arrived: Mutex<usize>,
    all_arrived: Condvar,
}

impl WarmUp {
    pub fn new(threads: usize) -> Self {
        WarmUp { threads, arrived: Mutex::new(0), all_arrived: Condvar::new() }
    }

    /// Touches the thread's stack and waits for the others; returns whether all arrived.
    pub fn arrive(&self) -> bool {
        touch_stack();
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        *arrived += 1;
        if arrived.is_multiple_of(self.threads) {
            self.all_arrived.notify_all();
            return true;
        }
        let round = *arrived / self.threads;
        let waits = |arrived: &mut usize| *arrived / self.threads == round;
        let waited = self.all_arrived.wait_timeout_while(arrived, PATIENCE, waits);
        let (mut arrived, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() && *arrived / self.threads == round {
            *arrived -= 1;
            return false;
        }
        true
    }
}

/// Touches the stack that this thread may use.
#[inline(never)]
pub(super) fn touch_stack() {
    let mut stack = [0u8; STACK_BYTES];
    black_box(&mut stack);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_arrive_or_none() {
        let warm_up = WarmUp::new(3);
        for _ in 0..2 {
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| warm_up.arrive())).collect();
                assert!(threads.into_iter().all(|thread| thread.join().unwrap_or(false)));
            });
        }
        assert!(!warm_up.arrive(), "the others never come");
        assert_eq!(*warm_up.arrived.lock().unwrap_or_else(PoisonError::into_inner), 6);
    }
}
