//! What exists while a lock is held: the check of the lock order in debug builds, and the record of the hold.

use super::class::LockClass;
#[cfg(all(debug_assertions, not(loom)))]
use super::class::classes;
use super::stats::{LastCpu, LockMode};
#[cfg(feature = "lock-stats")]
use super::stats::{Recorded, wait_for};

/// Exists while a lock of its class is held: checks the lock order (debug builds) and records the hold
/// (feature `lock-stats`); otherwise empty.
pub(super) struct Hold {
    #[cfg(any(debug_assertions, feature = "lock-stats"))]
    class: &'static LockClass,
    #[cfg(feature = "lock-stats")]
    recorded: Recorded,
}

#[cfg(not(any(debug_assertions, feature = "lock-stats")))]
const _: () = assert!(size_of::<Hold>() == 0);

impl Hold {
    /// Takes the lock: by `try_take` if that succeeds at once, else by `wait`. The class must come
    /// after all classes that the thread holds already.
    pub(super) fn take<G>(
        class: &'static LockClass,
        last: &LastCpu,
        mode: LockMode,
        try_take: impl FnOnce() -> Option<G>,
        wait: impl FnOnce() -> G,
    ) -> (G, Hold) {
        order::check(class);
        #[cfg(feature = "lock-stats")]
        let guard = try_take().unwrap_or_else(|| wait_for(class, last, mode, wait));
        #[cfg(not(feature = "lock-stats"))]
        let guard = {
            let _ = try_take;
            wait()
        };
        (guard, Hold::new(class, last, mode))
    }

    /// For a lock that was taken without waiting: the lock order does not apply.
    pub(super) fn new(class: &'static LockClass, last: &LastCpu, mode: LockMode) -> Self {
        order::push(class);
        let _ = (last, mode);
        Hold {
            #[cfg(any(debug_assertions, feature = "lock-stats"))]
            class,
            #[cfg(feature = "lock-stats")]
            recorded: Recorded::start(last, mode),
        }
    }

    /// For a lock that is released while its holder waits for a condition.
    #[inline]
    pub(super) fn pause(&mut self) {
        #[cfg(feature = "lock-stats")]
        self.recorded.end(self.class);
    }

    /// For a lock that its holder has taken again after [`Hold::pause`].
    #[inline]
    pub(super) fn resume(&mut self, last: &LastCpu) {
        #[cfg(feature = "lock-stats")]
        self.recorded.restart(last);
        let _ = last;
    }
}

#[cfg(any(debug_assertions, feature = "lock-stats"))]
impl Drop for Hold {
    fn drop(&mut self) {
        order::pop(self.class);
        #[cfg(feature = "lock-stats")]
        self.recorded.end(self.class);
    }
}

// loom runs its threads as coroutines of one thread, so a thread-local list would mix them up.
#[cfg(all(debug_assertions, not(loom)))]
pub(super) mod order {
    use super::{LockClass, classes};
    use std::cell::Cell;

    thread_local! {
        // How many locks of each rank this thread holds.
        static HELD: [Cell<u8>; classes::ALL.len()] = const { [const { Cell::new(0) }; classes::ALL.len()] };
    }

    fn change(class: &LockClass, by: i8) {
        if class.rank != classes::PROGRAM.rank {
            HELD.with(|held| held[class.rank].update(|count| count.wrapping_add_signed(by)));
        }
    }

    pub(super) fn push(class: &LockClass) {
        change(class, 1);
    }

    pub(super) fn pop(class: &LockClass) {
        change(class, -1);
    }

    /// Panics if the thread may not wait for a lock of `class` now.
    pub(in crate::base::sync) fn check(class: &LockClass) {
        HELD.with(|held| {
            let first = class.rank + usize::from(class.several);
            if let Some(rank) = held[first..].iter().position(|count| count.get() > 0) {
                let holder = classes::ALL[first + rank].name;
                panic!("lock order: waiting for '{}' while holding '{holder}'", class.name);
            }
        });
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
pub(super) mod order {
    use super::LockClass;
    pub(in crate::base::sync) fn check(_: &LockClass) {}
    pub(super) fn push(_: &LockClass) {}
    #[cfg(any(debug_assertions, feature = "lock-stats"))]
    pub(super) fn pop(_: &LockClass) {}
}
