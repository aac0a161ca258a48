//! The marks of a store's policy, and who waits for its thread: it is woken above the high mark, and writers wait for
//! it at the limit.
//!
//! Lock: `policy`, a leaf.

use std::time::{Duration, Instant};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::Arena;
use crate::base::sync::{Condvar, Counter, Mutex, classes};
use crate::store::{Store, Wait};
use crate::zsmalloc::AnyPool;

use super::{Policy, needed_pages, used_pages};

/// How long a writer waits at the limit, at most, before it fails.
const MOST_WAIT: Duration = Duration::from_secs(20);

/// What the policy is now, who waits for it, and what it did.
pub(in crate::store) struct Keeper {
    pub(super) settings: Mutex<Policy>,
    /// Pages of the pool from which on the thread is woken; `u64::MAX` for never.
    pub(super) high_pages: Counter,
    pub(super) low_pages: Counter,
    /// Not 0 while the thread is at work, or about to be.
    pub(in crate::store) is_awake: Counter,
    pub(super) state: Mutex<State>,
    /// Writers wait for it at the limit.
    pub(super) freed: Condvar,
    pub(super) decisions: Decisions,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) thread: Option<std::thread::Thread>,
    pub(super) ends: bool,
    /// Why the thread has ended, if nobody told it to.
    died: Option<String>,
    /// Writers that wait and were told nothing yet.
    pub(super) waiting: u64,
    /// Times that the thread has freed something, or has found that it can not.
    rounds: u64,
    /// Nothing could leave, the last time; until then no writer has it tried again.
    stuck_until: Option<Instant>,
}

impl State {
    fn is_stuck(&self, now: Instant) -> bool {
        self.stuck_until.is_some_and(|until| now < until)
    }
}

/// What was decided, and how often.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    pub(super) wakeups: Counter,
    pub(super) looked_at: Counter,
    pub(super) recompressed: Counter,
    pub(super) not_smaller: Counter,
    pub(super) written_back: Counter,
    pub(super) kept: Counter,
    pub(super) busy: Counter,
    pub(super) packed_pages: Counter,
    pub(super) looks: Counter,
    pub(super) old_recompressed: Counter,
    pub(super) old_written_back: Counter,
    pub(super) writers_waited: Counter,
    pub(super) writers_waited_ms: Counter,
    pub(super) writers_refused: Counter,
    pub(super) stuck: Counter,
    pub(super) failures: Counter,
}

impl Keeper {
    /// Without marks: nothing leaves.
    pub(in crate::store) fn new(policy: Policy) -> Self {
        Keeper {
            settings: Mutex::new(&classes::POLICY, policy),
            high_pages: Counter::new(u64::MAX),
            low_pages: Counter::new(u64::MAX),
            is_awake: Counter::new(0),
            state: Mutex::new(&classes::POLICY, State::default()),
            freed: Condvar::new(),
            decisions: Decisions::default(),
        }
    }

    /// Computes the marks anew.
    pub(in crate::store) fn set_marks(&self, arena: &Arena, can_relieve: bool) {
        let policy = *self.settings.lock();
        let mark = |percent: u64| match arena.limit_but_reserve_pages() {
            0 => u64::MAX,
            pages => (u128::from(pages) * u128::from(percent) / 100) as u64,
        };
        self.low_pages.set(mark(policy.low_percent));
        self.high_pages.set(if can_relieve { mark(policy.high_percent) } else { u64::MAX });
    }

    /// Whether there is room for pages that come back.
    pub(in crate::store) fn has_room(&self, arena: &Arena, pool: &AnyPool) -> bool {
        needed_pages(arena, pool) < self.low_pages.get()
    }

    /// Whether more is in memory than is to be, by marks or, as `lacks_reserve` says, for the reserve.
    #[inline]
    fn is_too_much(&self, arena: &Arena, lacks_reserve: impl Fn(&Arena) -> bool) -> bool {
        let high_pages = self.high_pages.get();
        used_pages(arena) > high_pages || (high_pages < u64::MAX && lacks_reserve(arena))
    }

    /// Wakes the thread if there is something to do. The pool may just have grown.
    #[inline]
    pub(in crate::store) fn look(&self, arena: &Arena) {
        if self.is_too_much(arena, Arena::may_lack_reserve) && self.is_awake.get() == 0 {
            self.wake();
        }
    }

    #[cold]
    pub(super) fn wake(&self) {
        self.is_awake.set(1);
        let thread = self.state.lock().thread.clone();
        thread.iter().for_each(std::thread::Thread::unpark);
    }

    /// Whether nothing could leave, a moment ago.
    fn is_stuck(&self) -> bool {
        self.state.lock().is_stuck(Instant::now())
    }

    /// Wakes the thread for writers that need room; answers whether it can help.
    fn call(&self, state: &State, now: Instant) -> bool {
        let Some(thread) = state.thread.as_ref().filter(|_| !state.ends && !state.is_stuck(now)) else {
            return false;
        };
        self.is_awake.set(1);
        thread.unpark();
        true
    }

    /// Waits until something was freed; answers whether it was.
    pub(super) fn wait(&self, until: Instant) -> bool {
        let began = Instant::now();
        let mut state = self.state.lock();
        if !self.call(&state, began) {
            return false;
        }
        let seen = state.rounds;
        state.waiting += 1;
        let mut now = began;
        while state.rounds == seen && !state.ends && now < until {
            state = state.wait_for(&self.freed, until - now);
            now = Instant::now();
        }
        let was_told = state.rounds != seen;
        state.waiting -= u64::from(!was_told);
        let was_freed = was_told && state.stuck_until.is_none();
        drop(state);
        self.decisions.writers_waited.add(1);
        self.decisions.writers_waited_ms.add((now - began).as_millis() as u64);
        was_freed
    }

    /// Has something freed for writers that do not wait.
    fn ask(&self) {
        let mut state = self.state.lock();
        if self.call(&state, Instant::now()) {
            state.waiting = state.waiting.max(1);
        }
    }

    /// Tells the writers that wait that something was freed, or that nothing can be, until then.
    pub(in crate::store) fn tell(&self, stuck_until: Option<Instant>) {
        let mut state = self.state.lock();
        state.rounds += 1;
        state.stuck_until = stuck_until;
        // Some may not run for a while, and nothing more is to leave for them.
        let was_awaited = std::mem::take(&mut state.waiting) > 0;
        drop(state);
        if was_awaited {
            self.freed.notify_all();
        }
    }

    /// The thread has ended without being told to: nobody is to wait for it.
    pub(super) fn died(&self, why: &str) {
        let mut state = self.state.lock();
        (state.thread, state.ends, state.died) = (None, true, Some(why.to_owned()));
        drop(state);
        self.freed.notify_all();
    }

    /// Why the thread has ended, if nobody told it to.
    pub(super) fn why_died(&self) -> Option<String> {
        self.state.lock().died.clone()
    }

    /// Another policy, but for the order in which pages leave: the pool keeps one or the other.
    pub(super) fn set_policy(&self, policy: Policy) {
        let mut settings = self.settings.lock();
        *settings = Policy { reclaim: settings.reclaim, ..policy };
    }

    /// The policy now.
    pub(super) fn policy(&self) -> Policy {
        *self.settings.lock()
    }

    /// Whether pages are to leave now, or the thread is to end.
    pub(in crate::store) fn is_urgent(&self, arena: &Arena) -> bool {
        if self.is_too_much(arena, Arena::lacks_reserve) {
            return true;
        }
        let state = self.state.lock();
        state.waiting > 0 || state.ends
    }

    pub(super) fn ends(&self) -> bool {
        self.state.lock().ends
    }
}

impl Store {
    /// Does `work`, and again after waiting for memory as long as it meets the limit and pages can leave.
    #[inline]
    pub(in crate::store) fn with_room<R>(
        &self,
        wait: Wait,
        mut work: impl FnMut() -> Result<R>,
    ) -> Result<R> {
        match work() {
            Err(error) if error.kind() == ErrorKind::NoSpace && self.can_relieve() => {
                self.once_there_is_room(error, wait, work)
            }
            done => done,
        }
    }

    #[cold]
    fn once_there_is_room<R>(
        &self,
        mut error: Error,
        wait: Wait,
        mut work: impl FnMut() -> Result<R>,
    ) -> Result<R> {
        if self.arena.has_reserve() {
            // It never waits for memory; pages leave for the next one.
            self.keeper.ask();
            self.keeper.decisions.writers_refused.add(1);
            return Err(error);
        }
        if wait == Wait::No && !self.keeper.is_stuck() {
            let what = "the memory limit is reached, and pages can leave";
            return Err(Error::new(ErrorKind::WouldBlock, what));
        }
        let until = Instant::now() + MOST_WAIT;
        while wait == Wait::Yes && self.keeper.wait(until) && Instant::now() < until {
            match work() {
                Err(again) if again.kind() == ErrorKind::NoSpace => error = again,
                done => return done,
            }
        }
        self.keeper.decisions.writers_refused.add(1);
        match self.keeper.why_died() {
            None => Err(error),
            Some(why) => {
                let what = format!("{error}; no page leaves any more: {why}. Reset the device to go on");
                Err(Error::new(error.kind(), what).with_setting("mem_limit"))
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Nothing more leaves for writers that were told already, however late they run.
    #[test]
    fn a_writer_that_was_told_is_not_waited_for() {
        let keeper = Keeper::new(Policy::default());
        keeper.state.lock().thread = Some(std::thread::current());
        for stuck_until in [None, Some(Instant::now() + MOST_WAIT)] {
            keeper.state.lock().stuck_until = None;
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| keeper.wait(Instant::now() + MOST_WAIT));
                while keeper.state.lock().waiting == 0 {
                    std::thread::yield_now();
                }
                keeper.tell(stuck_until);
                assert_eq!(keeper.state.lock().waiting, 0);
                let was_freed = writer.join().expect("no panic");
                assert_eq!(was_freed, stuck_until.is_none());
            });
            assert_eq!(keeper.state.lock().waiting, 0);
        }
    }

    /// A writer that waits is let go when the thread dies, and those that come later do not wait.
    #[test]
    fn nobody_waits_for_a_thread_that_died() {
        let keeper = Keeper::new(Policy::default());
        keeper.state.lock().thread = Some(std::thread::current());
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| keeper.wait(Instant::now() + MOST_WAIT));
            while keeper.state.lock().waiting == 0 {
                std::thread::yield_now();
            }
            let began = Instant::now();
            keeper.died("it was a test");
            assert!(!writer.join().expect("no panic"));
            assert!(!keeper.wait(Instant::now() + MOST_WAIT));
            assert!(began.elapsed() < MOST_WAIT / 2);
        });
        assert_eq!(keeper.why_died().as_deref(), Some("it was a test"));
    }

    #[test]
    fn a_writer_waits_no_longer_than_it_is_to() {
        let keeper = Keeper::new(Policy::default());
        assert!(!keeper.wait(Instant::now() + MOST_WAIT), "there is no thread to wait for");
        keeper.state.lock().thread = Some(std::thread::current());
        assert!(!keeper.wait(Instant::now() + Duration::from_millis(20)), "nobody frees anything");
        assert_eq!(keeper.state.lock().waiting, 0);
        assert_eq!(keeper.decisions.writers_waited.get(), 1);
    }
}
