//! How much memory a pager uses, and who waits for more.
//!
//! Used are the pages in memory as they are, compressed memory, and what the tables take for each page that
//! was ever touched. Above the high watermark pages leave, until memory is below the low one. A fault that
//! would come near the limit waits for that, unless nothing can leave: then memory grows beyond the limit, as
//! nothing may be lost. The rest is for compressed memory that the evictor needs before pages are free.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use uzram::Result;
use uzram::lru::NODE_BYTES;
use uzram::store::Store;
use uzram::sync::{Arc, Counter};
use uzram::units::PAGE_SIZE;
use uzram::zsmalloc::CHAIN_SIZES;

use crate::MOST_PAGES;
use crate::bell::Bell;
use crate::system::new_eventfd;

/// Bytes of tables for a page: its slot in the store, its state, where it waits, and its node of the LRU.
const TABLE_BYTES: u64 = 16 + 1 + 4 + NODE_BYTES as u64;
/// The share of the limit that is free at the high watermark, and the least and the most pages: a thread
/// brings about as many while the evictor waits for a busy CPU. At the low watermark it is twice as much.
const FREE_SHARE: u64 = 64;
const LEAST_FREE_PAGES: u64 = 64;
const MOST_FREE_PAGES: u64 = 1024;
/// The share of that which faults leave to the evictor, and the least pages: two zspages.
const EVICTOR_SHARE: u64 = 4;
const LEAST_EVICTOR_PAGES: u64 = 2 * ZSPAGE_PAGES;
/// The pages by which compressed memory grows for one page at most.
const ZSPAGE_PAGES: u64 = *CHAIN_SIZES.end() as u64;
/// How long a fault waits for room, in parts: then it goes on.
pub(crate) const MOST_WAIT: Duration = Duration::from_secs(2);
pub(crate) const WAIT: Duration = Duration::from_millis(20);

pub(crate) struct Room {
    store: Arc<Store>,
    pub(crate) limit_pages: Counter,
    pub(crate) resident_pages: Counter,
    /// Pages that lie on a shelf, and in the program's memory again.
    pub(crate) twice_pages: Counter,
    /// Pages of a program that are about to be managed: there is to be room for them then.
    pub(crate) expected_pages: Counter,
    /// Pages that hold anything, in memory or not.
    pub(crate) touched_pages: Counter,
    /// Threads wait even if nothing can leave: the process is about to end.
    is_hard: AtomicBool,
    /// The evictor found nothing to evict, or no room for it, at its last attempt.
    is_stuck: AtomicBool,
    /// The most pages that counted at once, as far as was looked.
    most_used_pages: Counter,
    /// Wakes the evictor.
    pub(crate) evictor: Bell,
    /// Rings when memory was freed.
    freed: Bell,
    /// How many touches wait that a thread has read, and what wakes that: an eventfd(2).
    pub(crate) touches: AtomicU32,
    pub(crate) reader: OwnedFd,
}

impl Room {
    /// Errors: `NoMemory`.
    pub(crate) fn new(limit_pages: u64, store: Arc<Store>) -> Result<Room> {
        Ok(Room {
            store,
            limit_pages: Counter::new(limit_pages),
            resident_pages: Counter::new(0),
            twice_pages: Counter::new(0),
            expected_pages: Counter::new(0),
            touched_pages: Counter::new(0),
            is_hard: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            most_used_pages: Counter::new(0),
            evictor: Bell::default(),
            freed: Bell::default(),
            touches: AtomicU32::new(0),
            reader: new_eventfd()?,
        })
    }

    pub(crate) fn used_pages(&self) -> u64 {
        self.resident_pages.get() + self.other_pages()
    }

    /// Returns the pages of compressed memory and tables, of shelves, and those that are expected.
    fn other_pages(&self) -> u64 {
        let tables = self.touched_pages.get() * TABLE_BYTES / PAGE_SIZE as u64;
        self.store.charged_pages() + tables + self.twice_pages.get() + self.expected_pages.get()
    }

    pub(crate) fn most_used_pages(&self) -> u64 {
        let resident = self.resident_pages.get();
        let used = resident + self.other_pages();
        // Pages that moved in between were counted twice, or not at all.
        if self.resident_pages.get() == resident {
            self.most_used_pages.raise(used);
        }
        self.most_used_pages.get()
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
    pub(crate) fn has(&self, pages: usize) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages() + pages as u64 <= limit - free
    }

    pub(crate) fn is_half_free(&self) -> bool {
        2 * self.used_pages() <= self.limit_pages.get()
    }

    pub(crate) fn is_above_low(&self) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages() > limit - 2 * free
    }

    /// Returns whether the limit is nearer than the high watermark.
    pub(crate) fn is_urgent(&self) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages() >= limit - free / 2
    }

    /// Returns whether a fault may bring a page: the rest up to the limit is the evictor's.
    fn fits_page(&self) -> bool {
        let (limit, free) = self.limit_and_free();
        self.used_pages() < limit - Self::evictor_pages(free)
    }

    /// Returns whether a fault may bring a page now: there is room, or none can be made.
    pub(crate) fn may_bring(&self) -> bool {
        self.fits_page() || self.gives_up()
    }

    /// Waits until a fault may bring a page, but not for ever.
    pub(crate) fn wait_for_page(&self) {
        let end = Instant::now() + MOST_WAIT;
        while Instant::now() < end {
            let number = self.freed.number();
            if self.may_bring() {
                return;
            }
            self.evictor.ring();
            self.freed.wait(number, Some(WAIT));
        }
    }

    /// Returns whether nothing can leave, so that memory grows beyond the limit.
    pub(crate) fn gives_up(&self) -> bool {
        self.is_stuck.load(Ordering::Relaxed) && !self.is_hard.load(Ordering::Relaxed)
    }

    /// Has memory not grow beyond the limit though nothing can leave: the caller ends the process then.
    pub(crate) fn set_hard(&self) {
        self.is_hard.store(true, Ordering::Relaxed);
    }

    /// Returns whether memory is at the limit, or faults wait for what cannot be had.
    pub(crate) fn is_exceeded(&self) -> bool {
        match self.is_hard.load(Ordering::Relaxed) {
            true => !self.fits_page(),
            false => self.used_pages() >= self.limit_pages.get(),
        }
    }

    /// Notes whether pages could be taken or evicted, and wakes those that wait.
    pub(crate) fn made(&self, any: bool) {
        self.is_stuck.store(!any, Ordering::Relaxed);
        self.freed.ring();
        if self.touches.load(Ordering::SeqCst) > 0 {
            self.wake_reader();
        }
    }

    pub(crate) fn wake_reader(&self) {
        // It fails only if it has been woken for long.
        let _ = rustix::io::write(&self.reader, &1u64.to_ne_bytes());
    }
}
