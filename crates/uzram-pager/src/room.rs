//! How much memory a pager uses, and who waits for more.
//!
//! Used are the pages in memory as they are, compressed memory, and what the tables take for each page that was ever touched.
//! Above the high watermark the evictor is woken, and evicts until memory is below the low one. A fault that would exceed the
//! limit waits for the evictor, unless that found nothing that can leave: then memory grows beyond the limit, as nothing may
//! be lost.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::Thread;
use std::time::Duration;

use rustix::thread::futex;
use uzram::lru::NODE_BYTES;
use uzram::store::Store;
use uzram::sync::Counter;
use uzram::units::PAGE_SIZE;

/// Bytes of tables for a page: its slot in the store, a node in each LRU, its state, and where it waits.
const TABLE_BYTES: u64 = 16 + 2 * NODE_BYTES as u64 + 1 + 4;
/// The shares of the limit that are free at the high and at the low watermark.
const HIGH_SHARE: u64 = 64;
const LOW_SHARE: u64 = 32;
/// How long a fault waits for room, in parts: then it goes on.
const WAITS: usize = 100;
const WAIT: Duration = Duration::from_millis(20);

pub(crate) struct Room {
    limit_pages: Counter,
    resident_pages: Counter,
    /// Pages that hold anything, in memory or not.
    touched_pages: Counter,
    /// The evictor found nothing to evict, or no room for it, at its last attempt.
    is_stuck: AtomicBool,
    evictor: OnceLock<Thread>,
    /// Changes when memory was freed.
    freed: AtomicU32,
    waiters: AtomicU32,
}

impl Room {
    pub(crate) fn new(limit_pages: u64) -> Room {
        Room {
            limit_pages: Counter::new(limit_pages),
            resident_pages: Counter::new(0),
            touched_pages: Counter::new(0),
            is_stuck: AtomicBool::new(false),
            evictor: OnceLock::new(),
            freed: AtomicU32::new(0),
            waiters: AtomicU32::new(0),
        }
    }

    pub(crate) fn limit_pages(&self) -> u64 {
        self.limit_pages.get()
    }

    pub(crate) fn resident_pages(&self) -> u64 {
        self.resident_pages.get()
    }

    pub(crate) fn set_limit_pages(&self, pages: u64) {
        self.limit_pages.set(pages);
        if self.resident_pages() > pages {
            self.wake_evictor();
        }
    }

    /// Says which thread is to be woken to evict.
    pub(crate) fn set_evictor(&self, thread: Thread) {
        let _ = self.evictor.set(thread);
    }

    /// Returns the pages that count against the limit.
    pub(crate) fn used_pages(&self, store: &Store) -> u64 {
        let tables = self.touched_pages.get() * TABLE_BYTES / PAGE_SIZE as u64;
        self.resident_pages.get() + store.charged_pages() + tables
    }

    /// Returns whether there is room for so many pages below the high watermark.
    pub(crate) fn has(&self, pages: usize, store: &Store) -> bool {
        let limit = self.limit_pages.get();
        self.used_pages(store) + pages as u64 <= limit - limit / HIGH_SHARE
    }

    pub(crate) fn is_above_low(&self, store: &Store) -> bool {
        let limit = self.limit_pages.get();
        self.used_pages(store) > limit - limit / LOW_SHARE
    }

    /// Waits until there is room for so many pages below the limit, or none can be made.
    pub(crate) fn wait_for(&self, pages: usize, store: &Store, on_wait: impl FnOnce()) {
        if self.has(pages, store) {
            return;
        }
        self.wake_evictor();
        let is_over = || {
            self.used_pages(store) + pages as u64 <= self.limit_pages.get()
                || self.is_stuck.load(Ordering::Relaxed)
        };
        if is_over() {
            return;
        }
        on_wait();
        self.waiters.fetch_add(1, Ordering::SeqCst);
        for _ in 0..WAITS {
            let freed = self.freed.load(Ordering::SeqCst);
            if is_over() {
                break;
            }
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: WAIT.as_nanos() as _ };
            let _ = futex::wait(&self.freed, futex::Flags::PRIVATE, freed, Some(&timeout));
            self.wake_evictor();
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn wake_evictor(&self) {
        self.evictor.get().into_iter().for_each(Thread::unpark);
    }

    /// Notes that units came into memory, and whether that was their first touch.
    pub(crate) fn came(&self, pages: usize, is_new: bool) {
        self.resident_pages.add(pages as u64);
        if is_new {
            self.touched_pages.add(pages as u64);
        }
    }

    /// Notes that units left memory, and whether their contents are gone.
    pub(crate) fn left(&self, pages: usize, is_gone: bool) {
        self.resident_pages.sub(pages as u64);
        if is_gone {
            self.forgotten(pages);
        }
    }

    /// Notes that the contents of units outside memory are gone.
    pub(crate) fn forgotten(&self, pages: usize) {
        self.touched_pages.sub(pages as u64);
    }

    /// Notes whether units could be evicted, and wakes those that wait.
    pub(crate) fn made(&self, any: bool) {
        self.is_stuck.store(!any, Ordering::Relaxed);
        self.freed.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.freed, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }
}
