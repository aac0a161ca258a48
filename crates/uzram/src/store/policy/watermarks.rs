//! The watermarks of a store's policy. The policy's thread is woken above the high watermark, and writers
//! wait for it at the limit.
//!
//! Lock: `policy`, a leaf.

use std::time::Instant;

use crate::base::mem::{Account, Arena};
use crate::base::named::named;
use crate::base::sync::{Condvar, Counter, Mutex, classes};
use crate::store::designs::StorePool;

#[inline]
pub(super) fn used_pages(arena: &Arena) -> u64 {
    arena.used_pages(Account::Pool) + arena.used_pages(Account::Slab)
}

/// Returns the pages of the pool and its metadata that would be left if the pool were packed.
pub(super) fn needed_pages(arena: &Arena, pool: &StorePool) -> u64 {
    used_pages(arena).saturating_sub(pool.freeable_pages())
}

/// The order in which pages are reclaimed. Parses from and prints as `pages` or `zspages`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReclaimOrder {
    /// The coldest pages, wherever their objects lie.
    #[default]
    Pages,
    /// All pages whose objects are in the coldest zspage, which frees its memory at once.
    Zspages,
}

impl ReclaimOrder {
    /// All orders.
    pub const ALL: [ReclaimOrder; 2] = [ReclaimOrder::Pages, ReclaimOrder::Zspages];

    /// Returns the name used in settings.
    pub const fn name(self) -> &'static str {
        match self {
            ReclaimOrder::Pages => "pages",
            ReclaimOrder::Zspages => "zspages",
        }
    }
}

named!(ReclaimOrder, "'{}' is no order to reclaim in: {}");

/// A store's reclaim policy. It has effect only with a backing device or a recompression algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimPolicy {
    /// The high watermark: reclaim starts when the pool and its metadata exceed this percentage, 1 to 100, of
    /// the limit less the reserve.
    pub high_percent: u64,
    /// The low watermark: reclaim ends below this percentage, 0 to `high_percent`.
    pub low_percent: u64,
    /// Pages not used for this many seconds are recompressed; 0 for never.
    pub recompress_after_s: u32,
    /// The most CPU time that this recompression takes, in percent of one CPU, 1 to 100; 0 for no bound.
    pub recompress_cpu_percent: u64,
    /// Pages not used for this many seconds are written back; 0 for never.
    pub writeback_after_s: u32,
    /// The maximum bytes written to the backing device in a day; 0 for no budget.
    pub writeback_budget_bytes: u64,
    /// The order in which pages are reclaimed; fixed when the store is built.
    pub order: ReclaimOrder,
}

impl ReclaimPolicy {
    /// The default.
    pub const DEFAULT: ReclaimPolicy = ReclaimPolicy {
        high_percent: 95,
        low_percent: 90,
        recompress_after_s: 0,
        recompress_cpu_percent: 2,
        writeback_after_s: 0,
        writeback_budget_bytes: 0,
        order: ReclaimOrder::Pages,
    };
}

impl Default for ReclaimPolicy {
    fn default() -> Self {
        ReclaimPolicy::DEFAULT
    }
}

pub(in crate::store) struct Watermarks {
    pub(super) settings: Mutex<ReclaimPolicy>,
    /// The thread is woken when the pool has more pages than this; `u64::MAX` for never.
    pub(super) high_pages: Counter,
    pub(super) low_pages: Counter,
    /// Not 0 while the thread runs, or was just woken.
    pub(in crate::store) is_awake: Counter,
    pub(super) state: Mutex<State>,
    /// Writers at the limit wait for this.
    pub(super) freed: Condvar,
    pub(in crate::store) decisions: Decisions,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) thread: Option<std::thread::Thread>,
    pub(super) ends: bool,
    died: Option<String>,
    /// Writers that wait and were not notified yet.
    pub(super) waiting: u64,
    /// Times that the thread has freed memory, or has found that it cannot.
    rounds: u64,
    /// Set if the last reclaim freed nothing: then writers do not wake the thread.
    stuck: Option<Stuck>,
}

/// A reclaim that freed nothing. It counts until a time has passed, or a page is gone from the backing
/// device, where that leaves room.
#[derive(Clone, Copy)]
pub(in crate::store) struct Stuck {
    pub(super) until: Instant,
    pub(super) gone_pages: u64,
}

impl State {
    fn is_stuck(&self, now: Instant, gone_pages: u64) -> bool {
        self.stuck.is_some_and(|stuck| now < stuck.until && gone_pages == stuck.gone_pages)
    }
}

macro_rules! decisions {
    ($($name:ident,)*) => {
        /// Counts of the policy's decisions. Not per CPU: a decision costs more than to count it.
        #[derive(Debug, Default)]
        pub(in crate::store) struct Decisions {
            $(pub(in crate::store) $name: Counter,)*
        }

        impl Decisions {
            pub(super) fn named(&self) -> [(&'static str, u64); [$(stringify!($name)),*].len()] {
                [$((stringify!($name), self.$name.get())),*]
            }
        }
    };
}

decisions! {
    wakeups, looked_at, recompressed, not_smaller, written_back, kept, busy, packed_pages, looks,
    old_recompressed, recompress_cpu_us, old_written_back, writers_waited, writers_waited_ms, writers_refused,
    stuck, failures,
}

impl Watermarks {
    /// Creates watermarks that are never reached; [`Watermarks::update`] sets them.
    pub(in crate::store) fn new(policy: ReclaimPolicy) -> Self {
        Watermarks {
            settings: Mutex::new(&classes::POLICY, policy),
            high_pages: Counter::new(u64::MAX),
            low_pages: Counter::new(u64::MAX),
            is_awake: Counter::new(0),
            state: Mutex::new(&classes::POLICY, State::default()),
            freed: Condvar::new(),
            decisions: Decisions::default(),
        }
    }

    pub(in crate::store) fn update(&self, arena: &Arena, can_reclaim: bool) {
        let policy = *self.settings.lock();
        let mark = |percent: u64| match arena.limit_but_reserve_pages() {
            0 => u64::MAX,
            pages => (u128::from(pages) * u128::from(percent) / 100) as u64,
        };
        self.low_pages.set(mark(policy.low_percent));
        self.high_pages.set(if can_reclaim { mark(policy.high_percent) } else { u64::MAX });
    }

    pub(in crate::store) fn has_room(&self, arena: &Arena, pool: &StorePool) -> bool {
        needed_pages(arena, pool) < self.low_pages.get()
    }

    #[inline]
    fn is_above_high(&self, arena: &Arena, lacks_reserve: impl Fn(&Arena) -> bool) -> bool {
        let high_pages = self.high_pages.get();
        used_pages(arena) > high_pages || (high_pages < u64::MAX && lacks_reserve(arena))
    }

    #[inline]
    pub(in crate::store) fn wake_if_high(&self, arena: &Arena) {
        if self.is_above_high(arena, Arena::may_lack_reserve) && self.is_awake.get() == 0 {
            self.wake();
        }
    }

    #[cold]
    pub(super) fn wake(&self) {
        self.is_awake.set(1);
        let thread = self.state.lock().thread.clone();
        thread.iter().for_each(std::thread::Thread::unpark);
    }

    /// Returns whether the last reclaim, a moment ago, freed nothing.
    pub(in crate::store) fn is_stuck(&self, gone_pages: u64) -> bool {
        self.state.lock().is_stuck(Instant::now(), gone_pages)
    }

    /// Wakes the thread for writers that need room. Returns false if there is none, or it freed nothing
    /// lately.
    fn wake_for_writer(&self, state: &State, now: Instant, gone_pages: u64) -> bool {
        let can_free = !state.ends && !state.is_stuck(now, gone_pages);
        let Some(thread) = state.thread.as_ref().filter(|_| can_free) else { return false };
        self.is_awake.set(1);
        thread.unpark();
        true
    }

    /// Waits until the thread has freed memory, or cannot, or `until`. Returns whether it freed any.
    pub(in crate::store) fn wait_for_reclaim(&self, until: Instant, gone_pages: u64) -> bool {
        let began = Instant::now();
        let mut state = self.state.lock();
        if !self.wake_for_writer(&state, began, gone_pages) {
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
        let was_freed = was_told && state.stuck.is_none();
        drop(state);
        self.decisions.writers_waited.add(1);
        self.decisions.writers_waited_ms.add((now - began).as_millis() as u64);
        was_freed
    }

    /// Wakes the thread to reclaim pages for writers that do not wait.
    pub(in crate::store) fn request_reclaim(&self, gone_pages: u64) {
        let mut state = self.state.lock();
        if self.wake_for_writer(&state, Instant::now(), gone_pages) {
            state.waiting = state.waiting.max(1);
        }
    }

    /// Wakes the waiting writers: memory was freed, or none can be for the time being.
    pub(in crate::store) fn notify_waiters(&self, stuck: Option<Stuck>) {
        let mut state = self.state.lock();
        state.rounds += 1;
        state.stuck = stuck;
        // Reset the count now: no more must be reclaimed for woken writers, however late they run.
        let was_awaited = std::mem::take(&mut state.waiting) > 0;
        drop(state);
        if was_awaited {
            self.freed.notify_all();
        }
    }

    pub(super) fn thread_died(&self, why: &str) {
        let mut state = self.state.lock();
        (state.thread, state.ends, state.died) = (None, true, Some(why.to_owned()));
        drop(state);
        self.freed.notify_all();
    }

    pub(in crate::store) fn why_died(&self) -> Option<String> {
        self.state.lock().died.clone()
    }

    /// Sets the policy except its order, which the pool was built for.
    pub(super) fn set_policy(&self, policy: ReclaimPolicy) {
        let mut settings = self.settings.lock();
        *settings = ReclaimPolicy { order: settings.order, ..policy };
    }

    pub(super) fn policy(&self) -> ReclaimPolicy {
        *self.settings.lock()
    }

    pub(in crate::store) fn is_urgent(&self, arena: &Arena) -> bool {
        if self.is_above_high(arena, Arena::lacks_reserve) {
            return true;
        }
        self.is_awaited()
    }

    pub(super) fn is_awaited(&self) -> bool {
        let state = self.state.lock();
        state.waiting > 0 || state.ends
    }

    pub(super) fn ends(&self) -> bool {
        self.state.lock().ends
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::backing::MOST_WAIT;

    /// With a thread, which is this one.
    fn watermarks() -> Watermarks {
        let watermarks = Watermarks::new(ReclaimPolicy::default());
        watermarks.state.lock().thread = Some(std::thread::current());
        watermarks
    }

    fn wait(watermarks: &Watermarks) -> bool {
        watermarks.wait_for_reclaim(Instant::now() + MOST_WAIT, 0)
    }

    /// Calls `meanwhile` while a writer waits. Returns whether the writer was told that memory was freed.
    fn is_freed(watermarks: &Watermarks, meanwhile: impl FnOnce()) -> bool {
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| wait(watermarks));
            while watermarks.state.lock().waiting == 0 {
                std::thread::yield_now();
            }
            meanwhile();
            writer.join().expect("no panic")
        })
    }

    #[test]
    fn a_writer_that_was_told_is_not_waited_for() {
        let watermarks = watermarks();
        let stuck = Stuck { until: Instant::now() + MOST_WAIT, gone_pages: 0 };
        for stuck in [None, Some(stuck)] {
            watermarks.state.lock().stuck = None;
            let is_freed = is_freed(&watermarks, || {
                watermarks.notify_waiters(stuck);
                assert_eq!(watermarks.state.lock().waiting, 0);
            });
            assert_eq!((is_freed, watermarks.state.lock().waiting), (stuck.is_none(), 0));
        }
        assert!(watermarks.is_stuck(0));
        assert!(!watermarks.is_stuck(1), "a page that is gone leaves room");
    }

    #[test]
    fn nobody_waits_for_a_thread_that_died() {
        let (watermarks, began) = (watermarks(), Instant::now());
        assert!(!is_freed(&watermarks, || watermarks.thread_died("it was a test")));
        assert!(!wait(&watermarks));
        assert!(began.elapsed() < MOST_WAIT / 2);
        assert_eq!(watermarks.why_died().as_deref(), Some("it was a test"));
    }

    #[test]
    fn a_writer_waits_no_longer_than_it_is_to() {
        let none = Watermarks::new(ReclaimPolicy::default());
        assert!(!wait(&none), "there is no thread to wait for");
        let (watermarks, until) = (watermarks(), Instant::now() + Duration::from_millis(20));
        assert!(!watermarks.wait_for_reclaim(until, 0), "nobody frees anything");
        assert_eq!(watermarks.state.lock().waiting, 0);
        assert_eq!(watermarks.decisions.writers_waited.get(), 1);
    }
}
