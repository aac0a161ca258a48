//! How much memory a pager uses, and who waits for more.
//!
//! Used are the pages in memory as they are, compressed memory, and what the tables take for each page that
//! was ever touched. Above the high watermark threads that fault take cold pages from the program, and wake
//! the evictor, which stores those that were taken before. If no thread faults, it takes pages itself, until
//! memory is below the low watermark. A fault that would come near the limit waits for the evictor, unless
//! that found nothing that can leave: then memory grows beyond the limit, as nothing may be lost. What is
//! left up to the limit is for the compressed memory that the evictor needs before the pages that it
//! compresses are free.

use std::time::{Duration, Instant};

use uzram::lru::NODE_BYTES;
use uzram::store::Store;
use uzram::sync::Counter;
use uzram::units::PAGE_SIZE;
use uzram::zsmalloc::CHAIN_SIZES;

use crate::MOST_PAGES;
use crate::bell::Bell;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Futex, Ordering};

/// Bytes of tables for a page: its slot in the store, its state, and where it waits.
const TABLE_BYTES: u64 = 16 + 1 + 4;
/// The share of the limit that is free at the high watermark, and the least and the most pages: a thread
/// brings about as many while the evictor waits for a busy CPU. At the low watermark it is twice as much.
const FREE_SHARE: u64 = 64;
const LEAST_FREE_PAGES: u64 = 64;
const MOST_FREE_PAGES: u64 = 1024;
/// The share of what is free at the high watermark that faults leave to the evictor, and the least pages: two
/// zspages.
const EVICTOR_SHARE: u64 = 4;
const LEAST_EVICTOR_PAGES: u64 = 2 * ZSPAGE_PAGES;
/// The pages by which compressed memory grows for one page at most.
const ZSPAGE_PAGES: u64 = *CHAIN_SIZES.end() as u64;
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
    /// Nobody waits for room: the process forks.
    is_held: AtomicBool,
    /// Threads wait even if nothing can leave: the process is about to end.
    is_hard: AtomicBool,
    /// The evictor found nothing to evict, or no room for it, at its last attempt.
    is_stuck: AtomicBool,
    /// The most pages that counted at once, as far as was looked.
    most_used_pages: AtomicU64,
    evictor: Bell,
    /// Changes when memory was freed.
    freed: Futex,
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
            is_held: AtomicBool::new(false),
            is_hard: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            most_used_pages: AtomicU64::new(0),
            evictor: Bell::new(),
            freed: Futex::new(0),
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

    /// Returns the pages that count against the limit.
    pub(crate) fn used_pages(&self, store: &Store) -> u64 {
        self.resident_pages.get() + self.stored_pages(store)
    }

    /// Returns the pages of compressed memory and tables.
    fn stored_pages(&self, store: &Store) -> u64 {
        store.charged_pages() + self.touched_pages.get() * self.table_bytes / PAGE_SIZE as u64
    }

    pub(crate) fn most_used_pages(&self, store: &Store) -> u64 {
        let resident = self.resident_pages.get();
        let used = resident + self.stored_pages(store);
        // Faults look at it once each: next to none writes. Pages that moved in between were counted twice,
        // or not at all.
        if used > self.most_used_pages.load(Ordering::Relaxed) && self.resident_pages.get() == resident {
            self.most_used_pages.fetch_max(used, Ordering::Relaxed);
        }
        self.most_used_pages.load(Ordering::Relaxed)
    }

    /// Returns the limit, and the pages that are free at the high watermark.
    fn limit_and_free(&self) -> (u64, u64) {
        let limit = self.limit_pages.get();
        (limit, (limit / FREE_SHARE).clamp(LEAST_FREE_PAGES, MOST_FREE_PAGES))
    }

    /// Returns the pages up to the limit that faults leave to the evictor.
    fn evictor_pages(free: u64) -> u64 {
        (free / EVICTOR_SHARE).max(LEAST_EVICTOR_PAGES)
    }

    /// Returns how many pages leave at once, at most. Before they are gone, what they take compressed must
    /// have room in what faults leave: half of that is for a zspage that has just begun, for tables, and for
    /// threads that fault at the same time.
    pub(crate) fn batch_pages(&self) -> usize {
        let (_, free) = self.limit_and_free();
        ((Self::evictor_pages(free) - ZSPAGE_PAGES) / 2).clamp(1, MOST_PAGES as u64) as usize
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
        self.used_pages(store) >= limit - free / 2
    }

    /// Returns whether a fault may bring a page: the rest up to the limit is the evictor's.
    fn fits_page(&self, store: &Store) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages(store) < limit - Self::evictor_pages(free)
    }

    /// Waits until there is room for a page, or none can be made.
    pub(crate) fn wait_for_page(&self, store: &Store, on_wait: impl FnOnce()) {
        let is_over = || self.fits_page(store) || self.gives_up() || self.is_held();
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
            self.freed.wait(freed, Some(WAIT));
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn wake_evictor(&self) {
        self.evictor.ring();
    }

    /// Has the evictor wait until it is woken, or for so long.
    pub(crate) fn rest(&self, most: Option<Duration>) {
        self.evictor.wait(most);
    }

    /// Returns whether nothing can leave, so that memory grows beyond the limit.
    pub(crate) fn gives_up(&self) -> bool {
        self.is_stuck.load(Ordering::Relaxed) && !self.is_hard.load(Ordering::Relaxed)
    }

    /// Has memory not grow beyond the limit though nothing can leave: whoever sets this ends the process
    /// then.
    pub(crate) fn set_hard(&self) {
        self.is_hard.store(true, Ordering::Relaxed);
    }

    /// Returns whether memory is at the limit, or faults wait for what cannot be had.
    pub(crate) fn is_exceeded(&self, store: &Store) -> bool {
        match self.is_hard.load(Ordering::Relaxed) {
            true => !self.fits_page(store),
            false => self.used_pages(store) >= self.limit_pages.get(),
        }
    }

    pub(crate) fn is_held(&self) -> bool {
        self.is_held.load(Ordering::SeqCst)
    }

    /// Has nobody wait for room, or ends that.
    pub(crate) fn hold(&self, hold: bool) {
        self.is_held.store(hold, Ordering::SeqCst);
        self.freed.fetch_add(1, Ordering::SeqCst);
        self.freed.wake_all();
    }

    /// Begins anew in a child, in which no thread waits.
    pub(crate) fn begin_in_child(&self) {
        self.evictor.reset();
        self.waiters.store(0, Ordering::Relaxed);
        self.is_stuck.store(false, Ordering::Relaxed);
    }

    /// Notes that a page came into memory, and whether that was its first touch.
    pub(crate) fn came(&self, is_new: bool) {
        self.resident_pages.add(1);
        if is_new {
            self.touched_pages.add(1);
        }
    }

    /// Notes that pages left memory, and whether their contents are gone.
    pub(crate) fn left(&self, pages: usize, is_gone: bool) {
        self.resident_pages.sub(pages as u64);
        if is_gone {
            self.forgotten(pages);
        }
    }

    /// Notes that the contents of pages outside memory are gone.
    pub(crate) fn forgotten(&self, pages: usize) {
        self.touched_pages.sub(pages as u64);
    }

    /// Notes whether pages could be taken or evicted, and wakes those that wait.
    pub(crate) fn made(&self, any: bool) {
        self.is_stuck.store(!any, Ordering::Relaxed);
        self.freed.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.freed.wake_all();
        }
    }
}
