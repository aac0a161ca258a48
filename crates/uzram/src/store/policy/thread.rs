//! The policy's thread: when pages are reclaimed.

use std::time::{Duration, Instant};

use crate::base::error::Result;
use crate::base::sync::Arc;
use crate::base::thread::{join, spawn_relied_on, touch_stack};
use crate::store::Store;

use super::parked::Compressor;
use super::reclaim::Reclaimed;
use super::watermarks::{ReclaimPolicy, Stuck, used_pages};

/// The shortest and the longest interval of scans for old pages, in seconds.
const LOOK_AFTER: [u64; 2] = [1, 60];
/// Scans within the age at which a page is recompressed or written back.
const LOOKS: u64 = 16;
/// When no page can be reclaimed, the thread rests for this multiple of the time that it took to find out,
/// within these bounds: a device that stalls and then fails may recover long before four times its stall.
/// Writers are refused for [`LEAST_REST`] only; then the next one wakes the thread.
const REST_FACTOR: u32 = 4;
const LEAST_REST: Duration = Duration::from_millis(100);
const MOST_REST: Duration = Duration::from_secs(1);
/// The interval of checks whether extents on other machines are in danger.
const RESCUE_EVERY: Duration = Duration::from_secs(5);
const SHORTEST_REST: Duration = Duration::from_millis(1);

/// The thread that carries out a store's policy. Dropping this ends it.
pub struct PolicyThread {
    store: Arc<Store>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl PolicyThread {
    /// Starts the thread. Fails with `NoMemory` when the system gives no thread.
    pub fn start(name: &str, store: &Arc<Store>) -> Result<Self> {
        let died = |store: &mut Arc<Store>, why: &str| store.watermarks.thread_died(why);
        let name = format!("uzram-{name}-policy");
        // An earlier one may have ended.
        store.watermarks.state.lock().ends = false;
        let thread =
            spawn_relied_on(&name, Arc::clone(store), |store| store.reclaim_until_told_to_end(), died)?;
        store.watermarks.state.lock().thread = Some(thread.thread().clone());
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
    fn reclaim_until_told_to_end(self: &Arc<Self>) {
        if self.arena.has_reserve() {
            // Writers may wait for a lock that this thread holds: it must not take page faults.
            touch_stack();
        }
        let watermarks = &self.watermarks;
        let (mut last_look, mut last_rescue, mut failing) = (Instant::now(), Instant::now(), None);
        // Now, and not when memory is short.
        let mut compressor = self.compressor(&watermarks.policy());
        while !watermarks.ends() {
            let policy = watermarks.policy();
            let first = [policy.recompress_after_s, policy.writeback_after_s];
            let after_s = first.into_iter().filter(|after_s| *after_s > 0).min().map(u64::from);
            let every = after_s
                .map(|after_s| Duration::from_secs((after_s / LOOKS).clamp(LOOK_AFTER[0], LOOK_AFTER[1])));
            let is_due = every.is_some_and(|every| last_look.elapsed() >= every);
            let is_rescue_due = last_rescue.elapsed() >= RESCUE_EVERY && self.must_rescue();
            let is_urgent = watermarks.is_urgent(&self.arena);
            failing = failing.filter(|_| is_urgent);
            if is_urgent {
                watermarks.is_awake.set(1);
                watermarks.decisions.wakeups.add(1);
                self.reclaim_or_rest(&mut failing);
            } else if is_due {
                if self.look_for_old(&policy, &mut compressor) {
                    last_look = Instant::now();
                }
            } else if is_rescue_due {
                self.rescue(|| !watermarks.ends() && !watermarks.is_urgent(&self.arena));
                last_rescue = Instant::now();
            } else {
                watermarks.is_awake.set(0);
                // A writer that does not see this yet made its change before; the check below sees it.
                if !watermarks.is_urgent(&self.arena) {
                    let look = every.map(|every| every.saturating_sub(last_look.elapsed()));
                    match look.into_iter().chain(self.may_rescue().then_some(RESCUE_EVERY)).min() {
                        Some(rest) => std::thread::park_timeout(rest),
                        None => std::thread::park(),
                    }
                }
            }
        }
    }

    fn compressor(self: &Arc<Self>, policy: &ReclaimPolicy) -> Option<Compressor> {
        if policy.recompress_after_s == 0 || !self.can_recompress() {
            return None;
        }
        let started = Compressor::start(self);
        self.watermarks.decisions.failures.add(u64::from(started.is_err()));
        started.ok()
    }

    /// Recompresses or writes back old pages. Returns whether it finished before more urgent work came up.
    fn look_for_old(self: &Arc<Self>, policy: &ReclaimPolicy, compressor: &mut Option<Compressor>) -> bool {
        self.watermarks.decisions.looks.add(1);
        if compressor.is_none() {
            *compressor = self.compressor(policy);
        }
        let (after_s, percent) = (policy.recompress_after_s, policy.recompress_cpu_percent);
        let recompress = |compressor: &mut Compressor| {
            after_s == 0 || self.recompress_parked(after_s, percent, compressor)
        };
        compressor.as_mut().is_none_or(recompress) && self.write_back_old(policy.writeback_after_s)
    }

    /// Returns how long writers wait for the backing device while it fails.
    fn gone_after(&self) -> Duration {
        self.backing.as_ref().map_or(Duration::ZERO, |backing| backing.log.backing.gone_after())
    }

    /// Reclaims pages, or rests if none can be. `failing` is the time since which the backing device fails.
    fn reclaim_or_rest(&self, failing: &mut Option<Instant>) {
        let began = Instant::now();
        let held = || (self.gone_pages(), used_pages(&self.arena));
        let before = held();
        let reclaimed = match self.reclaim() {
            // The first scan may only have cleared the pages' use marks.
            Reclaimed::None => self.reclaim(),
            reclaimed => reclaimed,
        };
        let since = *failing.get_or_insert(began);
        let is_failing = reclaimed == Reclaimed::Failed;
        *failing = failing.filter(|_| is_failing);
        let (rest, is_stuck) = match reclaimed {
            Reclaimed::Some => (Duration::ZERO, false),
            Reclaimed::NotYet => (SHORTEST_REST, false),
            Reclaimed::Failed if since.elapsed() < self.gone_after() => (LEAST_REST, false),
            Reclaimed::Failed | Reclaimed::None => {
                let rest = (began.elapsed() * REST_FACTOR).clamp(LEAST_REST, MOST_REST);
                // A writer may have reached the limit before, and not have retried yet.
                (rest, is_failing || !self.has_reclaimed_enough())
            }
        };
        if !is_failing || is_stuck {
            let stuck = || Stuck { until: Instant::now() + LEAST_REST, gone_pages: before.0 };
            self.watermarks.notify_waiters(is_stuck.then(stuck));
        }
        self.watermarks.decisions.stuck.add(u64::from(is_stuck));
        if !rest.is_zero() {
            std::thread::park_timeout(rest);
        }
        // While the device is full, nothing can be reclaimed until a page on it is gone.
        let is_over =
            || held() != before || self.watermarks.is_awaited() || !self.watermarks.is_urgent(&self.arena);
        let mut last_rescue = began;
        while reclaimed == Reclaimed::None && self.is_backing_full() && !is_over() {
            if last_rescue.elapsed() >= RESCUE_EVERY && self.must_rescue() {
                self.rescue(|| !is_over());
                last_rescue = Instant::now();
            }
            std::thread::park_timeout(MOST_REST);
        }
    }
}
