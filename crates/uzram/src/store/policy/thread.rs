//! When pages leave: the thread that carries out a store's policy.

use std::time::{Duration, Instant};

use crate::base::error::Result;
use crate::base::sync::Arc;
use crate::base::thread::{join, spawn_relied_on, touch_stack};
use crate::store::Store;

use super::reclaim::Reclaimed;

/// How often it is looked for pages that were not used for long, at most and at least.
const LOOK_AFTER: [u64; 2] = [1, 60];
/// Looks in the time after which a page is to leave.
const LOOKS: u64 = 16;
/// When nothing can leave, the thread rests for so many times as it took to find that out, within these bounds. A
/// device that stalls and then fails may be well again long before four times its stall. Writers are refused for
/// [`LEAST_REST`] only; then the next one wakes the thread.
const REST_FACTOR: u32 = 4;
const LEAST_REST: Duration = Duration::from_millis(100);
const MOST_REST: Duration = Duration::from_secs(1);
/// A backing device that fails for so long is taken for one that is gone: writers no longer wait for it.
const MOST_FAILING: Duration = Duration::from_secs(2);
/// When pages are in use that are to leave.
const SHORTEST_REST: Duration = Duration::from_millis(1);

/// The thread that carries out a store's policy. Dropped, it ends.
pub struct PolicyThread {
    store: Arc<Store>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl PolicyThread {
    /// Starts it.
    ///
    /// # Errors
    /// `NoMemory` when the system gives no thread.
    pub fn start(name: &str, store: &Arc<Store>) -> Result<Self> {
        let died = |store: &mut Arc<Store>, why: &str| store.watermarks.thread_died(why);
        let name = format!("uzram-{name}-policy");
        let thread =
            spawn_relied_on(&name, Arc::clone(store), |store| store.reclaim_until_told_to_end(), died)?;
        let mut state = store.watermarks.state.lock();
        (state.thread, state.ends) = (Some(thread.thread().clone()), false);
        drop(state);
        Ok(PolicyThread { store: Arc::clone(store), thread: Some(thread) })
    }
}

impl Drop for PolicyThread {
    fn drop(&mut self) {
        let mut state = self.store.watermarks.state.lock();
        (state.thread, state.ends) = (None, true);
        drop(state);
        self.store.watermarks.freed.notify_all();
        self.thread.take().into_iter().for_each(join);
    }
}

impl Store {
    /// What the thread does until it is to end.
    fn reclaim_until_told_to_end(&self) {
        if self.arena.has_reserve() {
            // Writers may wait for a lock that it has.
            touch_stack();
        }
        let watermarks = &self.watermarks;
        let (mut last_look, mut failing) = (Instant::now(), None);
        while !watermarks.ends() {
            let policy = watermarks.policy();
            let first = [policy.recompress_after_s, policy.writeback_after_s];
            let after_s = first.into_iter().filter(|after_s| *after_s > 0).min().map(u64::from);
            let every = after_s
                .map(|after_s| Duration::from_secs((after_s / LOOKS).clamp(LOOK_AFTER[0], LOOK_AFTER[1])));
            let is_due = every.is_some_and(|every| last_look.elapsed() >= every);
            let is_urgent = watermarks.is_urgent(&self.arena);
            failing = failing.filter(|_| is_urgent);
            if is_urgent {
                watermarks.is_awake.set(1);
                watermarks.decisions.wakeups.add(1);
                self.reclaim_or_rest(&mut failing);
            } else if is_due {
                if self.look_for_old(&policy) {
                    last_look = Instant::now();
                }
            } else {
                watermarks.is_awake.set(0);
                // Who does not see that yet has changed something before, which is seen here.
                match every {
                    _ if watermarks.is_urgent(&self.arena) => {}
                    Some(every) => std::thread::park_timeout(every.saturating_sub(last_look.elapsed())),
                    None => std::thread::park(),
                }
            }
        }
    }

    /// Reclaims pages, or rests where none can be. `failing` is since when the backing device fails.
    fn reclaim_or_rest(&self, failing: &mut Option<Instant>) {
        let began = Instant::now();
        let reclaimed = match self.reclaim() {
            // Pages that were all marked as used the first time are not the second.
            Reclaimed::None => self.reclaim(),
            reclaimed => reclaimed,
        };
        let since = *failing.get_or_insert(began);
        let is_failing = reclaimed == Reclaimed::Failed;
        *failing = failing.filter(|_| is_failing);
        let (rest, is_stuck) = match reclaimed {
            Reclaimed::Some => (Duration::ZERO, false),
            Reclaimed::NotYet => (SHORTEST_REST, false),
            Reclaimed::Failed if since.elapsed() < MOST_FAILING => (LEAST_REST, false),
            // A writer met the limit before, and has not noticed yet.
            Reclaimed::None if self.has_reclaimed_enough() => (SHORTEST_REST, false),
            Reclaimed::Failed | Reclaimed::None => {
                ((began.elapsed() * REST_FACTOR).clamp(LEAST_REST, MOST_REST), true)
            }
        };
        if !is_failing || is_stuck {
            self.watermarks.notify_waiters(is_stuck.then(|| Instant::now() + LEAST_REST));
        }
        self.watermarks.decisions.stuck.add(u64::from(is_stuck));
        if !rest.is_zero() {
            std::thread::park_timeout(rest);
        }
    }
}
