//! A quantity that a server's clients share: bytes of memory, or a number of tasks.
//!
//! A caller takes a [`Share`] and returns it by dropping it. Nothing waits: if too little is left, taking fails, and
//! the caller falls back to less.
//!
//! Locks: none; one atomic number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The total, and what is left of it.
pub(crate) struct Budget {
    total: usize,
    left: AtomicUsize,
}

/// A part of a budget, returned on drop.
pub(crate) struct Share {
    budget: Arc<Budget>,
    amount: usize,
}

impl Budget {
    /// Makes a budget of which nothing is taken.
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Budget { total, left: AtomicUsize::new(total) })
    }

    /// Returns the total, taken or not.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Takes a share; `None` when less is left.
    pub fn take(self: &Arc<Self>, amount: usize) -> Option<Share> {
        self.take_leaving(amount, 0)
    }

    /// Takes a share; `None` when less than `rest` would be left then.
    pub fn take_leaving(self: &Arc<Self>, amount: usize, rest: usize) -> Option<Share> {
        let without = |left: usize| left.checked_sub(amount).filter(|left| *left >= rest);
        // Relaxed: only the number is shared, and orders no other memory accesses.
        self.left.fetch_update(Relaxed, Relaxed, without).ok()?;
        Some(Share { budget: Arc::clone(self), amount })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.amount, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn no_more_is_taken_than_there_is() {
        let budget = Budget::new(10);
        assert!(budget.take(11).is_none() && budget.take(usize::MAX).is_none());
        let all = budget.take(10).unwrap();
        assert!(budget.take(1).is_none() && budget.take(0).is_some());
        drop(all);
        assert!(budget.take_leaving(5, 6).is_none());
        let half = budget.take_leaving(5, 5).unwrap();
        assert!(budget.take_leaving(1, 5).is_none() && budget.take(5).is_some());
        drop(half);
        assert_eq!((budget.left.load(Relaxed), budget.total()), (10, 10));
    }

    #[test]
    fn threads_share_it_and_leave_all_of_it() {
        let budget = Budget::new(100);
        std::thread::scope(|scope| {
            for thread in 1..5 {
                let budget = &budget;
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..10_000 {
                        held.extend(budget.take(thread * 7));
                        assert!(held.len() * thread * 7 <= 100);
                        if round % 3 == 0 {
                            held.clear();
                        }
                    }
                });
            }
        });
        assert_eq!(budget.left.load(Relaxed), 100);
    }
}
