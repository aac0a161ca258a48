//! How much memory a pager uses, and who waits for more.
//!
//! Used are the pages in memory as they are, compressed memory, and what the tables take for each page that was ever touched.
//! Above the high watermark threads that fault take cold pages from the program, and wake the evictor, which stores those
//! that were taken before. If no thread faults, it takes pages itself, until memory is below the low watermark. A fault that
//! would exceed the limit waits for the evictor, unless that found nothing that can leave: then memory grows beyond the
//! limit, as nothing may be lost.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rustix::thread::futex;
use uzram::lru::NODE_BYTES;
use uzram::store::Store;
use uzram::sync::Counter;
use uzram::units::PAGE_SIZE;

/// Bytes of tables for a page: its slot in the store, its state, and where it waits.
const TABLE_BYTES: u64 = 16 + 1 + 4;
/// The share of the limit that is free at the high watermark, and the most pages: a thread brings about as many while the evictor
/// waits for a busy CPU. At the low watermark it is twice as much.
const FREE_SHARE: u64 = 64;
const MOST_FREE_PAGES: u64 = 1024;
/// How long a fault waits for room, in parts: then it goes on.
const MOST_WAIT: Duration = Duration::from_secs(2);
const WAIT: Duration = Duration::from_millis(20);

pub(crate) struct Room {
    limit_pages: Counter,
    /// Bytes of all tables for a page.
    table_bytes: u64,
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
    /// Returns the room of a pager that has so many LRUs, which have a node for each page.
    pub(crate) fn new(limit_pages: u64, lrus: u64) -> Room {
        Room {
            limit_pages: Counter::new(limit_pages),
            table_bytes: TABLE_BYTES + lrus * NODE_BYTES as u64,
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
        let tables = self.touched_pages.get() * self.table_bytes / PAGE_SIZE as u64;
        self.resident_pages.get() + store.charged_pages() + tables
    }

    /// Returns the limit, and the pages that are free at the high watermark.
    fn limit_and_free(&self) -> (u64, u64) {
        let limit = self.limit_pages.get();
        (limit, (limit / FREE_SHARE).min(MOST_FREE_PAGES))
    }

    /// Returns whether there is room for so many pages below the high watermark.
    pub(crate) fn has(&self, pages: usize, store: &Store) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages(store) + pages as u64 <= limit - free
    }

    pub(crate) fn is_half_free(&self, store: &Store) -> bool {
        2 * self.used_pages(store) <= self.limit_pages.get()
    }

    pub(crate) fn is_above_low(&self, store: &Store) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages(store) > limit - 2 * free
    }

    /// Returns whether the limit is nearer than the high watermark.
    pub(crate) fn is_urgent(&self, store: &Store) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages(store) > limit - free / 2
    }

    /// Waits until there is room for so many pages below the limit, or none can be made.
    pub(crate) fn wait_for(&self, pages: usize, store: &Store, on_wait: impl FnOnce()) {
        let is_over = || {
            self.used_pages(store) + pages as u64 <= self.limit_pages.get()
                || self.is_stuck.load(Ordering::Relaxed)
        };
        if is_over() {
            return;
        }
        on_wait();
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let end = Instant::now() + MOST_WAIT;
        while Instant::now() < end {
            let freed = self.freed.load(Ordering::SeqCst);
            if is_over() {
                break;
            }
            self.wake_evictor();
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: WAIT.as_nanos() as _ };
            let _ = futex::wait(&self.freed, futex::Flags::PRIVATE, freed, Some(&timeout));
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

    /// Notes whether units could be taken or evicted, and wakes those that wait.
    pub(crate) fn made(&self, any: bool) {
        self.is_stuck.store(!any, Ordering::Relaxed);
        self.freed.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.freed, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }
}
