//! A store's maintenance thread: it gives free memory back to the system, so that frees need not, and
//! compacts the pool when that is worth it.
//!
//! Lock order: the thread holds no lock between its steps, and ends between them.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::base::error::Result;
use crate::base::mem::{Account, Arena, CHUNK_PAGES};
use crate::base::sync::{Arc, Counter, Mutex, classes};
use crate::base::thread::{join, spawn_relied_on, touch_stack};
use crate::store::designs::StorePool;
use crate::zsmalloc::{Budget, Effort};

use super::StoreBuilder;

/// The interval of checks whether compaction is worth it.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The interval of compaction steps while it is worth it; each step moves its share of the rate.
const STEP_EVERY: Duration = Duration::from_millis(50);
/// Chunks that may be held beyond those that all pages would fill, before compaction is worth it.
const SPARE_CHUNKS: u64 = 4;

/// A store's maintenance thread. Dropping this ends it.
pub(super) struct Maintenance {
    name: String,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    pool: Arc<StorePool>,
    arena: Arc<Arena>,
    /// The percentage of the pool's pages that compaction must be able to free before it begins; 0 for never.
    threshold_percent: Counter,
    rate_bytes_per_s: Counter,
    ends: Counter,
}

impl Maintenance {
    pub(super) fn new(builder: &StoreBuilder, pool: Arc<StorePool>, arena: Arc<Arena>) -> Self {
        let shared = Arc::new(Shared {
            pool,
            arena,
            threshold_percent: Counter::new(builder.compact_threshold_percent),
            rate_bytes_per_s: Counter::new(builder.compact_rate_bytes),
            ends: Counter::new(0),
        });
        let thread = Mutex::new(&classes::POLICY, None);
        Maintenance { name: format!("uzram-{}", builder.name), shared, thread }
    }

    pub(super) fn begin(&self) -> Result<()> {
        // Without a releaser, frees give memory back themselves.
        let died = |shared: &mut Arc<Shared>, _: &str| shared.arena.set_releaser(None);
        self.shared.ends.set(0);
        let thread = spawn_relied_on(&self.name, Arc::clone(&self.shared), |shared| shared.run(), died)?;
        self.shared.arena.set_releaser(Some(thread.thread().clone()));
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    pub(super) fn end(&self) {
        self.shared.arena.set_releaser(None);
        self.shared.ends.set(1);
        let thread = self.thread.lock().take();
        thread.into_iter().for_each(join);
    }

    pub(super) fn set_threshold_percent(&self, percent: u64) {
        self.shared.threshold_percent.set(percent);
        // The thread may be parked without a timeout.
        self.thread.lock().iter().for_each(|thread| thread.thread().unpark());
    }

    pub(super) fn set_rate_bytes_per_s(&self, bytes: u64) {
        self.shared.rate_bytes_per_s.set(bytes);
    }
}

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn run(&self) {
        if self.arena.has_reserve() {
            // Writers may wait for a lock that this thread holds: it must not take page faults.
            touch_stack();
        }
        let mut wait = Some(LOOK_EVERY);
        let mut last_step = Instant::now();
        loop {
            match wait {
                Some(wait) => std::thread::park_timeout(wait),
                None => std::thread::park(),
            }
            if self.ends.get() != 0 {
                return;
            }
            self.arena.release_surplus();
            let percent = self.threshold_percent.get();
            let since = last_step.elapsed();
            if percent == 0 {
                // With a reserve it polls: frees report free chunks only, not what keeps chunks from being
                // free.
                wait = self.arena.has_reserve().then_some(LOOK_EVERY);
            } else if wait.is_none_or(|wait| since >= wait) {
                last_step = Instant::now();
                wait = Some(if self.step(percent, since) { STEP_EVERY } else { LOOK_EVERY });
            }
        }
    }

    /// Compacts for the time `since` the last step, if that is worth it. Returns whether to go on.
    fn step(&self, percent: u64, since: Duration) -> bool {
        if !self.is_worth_it(percent) {
            return false;
        }
        let rate = self.rate_bytes_per_s.get() as f64;
        let mut budget = Budget::bytes((rate * since.min(LOOK_EVERY).as_secs_f64()) as u64);
        self.pool.compact(Effort::Zspages, &mut budget);
        // An unspent budget means that there is nothing more to move now, whatever the counts say.
        budget.is_spent()
    }

    fn is_worth_it(&self, percent: u64) -> bool {
        let used_pages = self.pool.pages_used();
        let beyond = |pages: u64, of: u64| pages * 100 > of * percent;
        let all_pages = used_pages + self.arena.used_pages(Account::Slab);
        let chunk_pages = u64::from(CHUNK_PAGES);
        let held = (self.arena.chunks_in_use() * chunk_pages).saturating_sub(SPARE_CHUNKS * chunk_pages);
        beyond(self.pool.freeable_pages(), used_pages) || beyond(held.saturating_sub(all_pages), all_pages)
    }
}
