//! Deferred frees: a free only puts a value on a page of its CPU, and a thread passes it to a callback later,
//! which frees whatever belongs to it.
//!
//! The third version of "mm/zsmalloc: reduce zs_free() latency on swap release path" (W. Hao, May 2026);
//! `docs/internals/lock-designs.md` tells how it works.
//!
//! Lock order: the lock of the thread that frees, a CPU's page, the full pages. Callbacks run under the first
//! one only, or under none.

use std::thread::{self, Thread};
use std::time::Duration;

use crate::base::cpu::PerCpu;
use crate::base::sync::{Mutex, classes};

/// How long the thread waits for a full page before it frees what is on the others.
const LINGER: Duration = Duration::from_millis(2);
const PAGE_BYTES: usize = if cfg!(loom) { 8 } else { 4096 };

/// See the [module's documentation](self).
pub struct DeferredFrees<T> {
    pages: PerCpu<Mutex<Vec<T>>>,
    full: Mutex<FullPages<T>>,
    /// Held by the thread that frees, which exchanges its empty page for one to free.
    freeing: Mutex<Vec<T>>,
}

struct FullPages<T> {
    full: Vec<Vec<T>>,
    spare: Vec<Vec<T>>,
    /// Values that the thread that frees has taken.
    taken: usize,
    freer: Option<Thread>,
}

impl<T: Send> DeferredFrees<T> {
    /// Values of a page.
    pub const PAGE_VALUES: usize = PAGE_BYTES / size_of::<T>();

    /// Makes a page for each CPU, and `spare` others.
    pub fn new(spare: usize) -> Self {
        let page = || Vec::with_capacity(Self::PAGE_VALUES);
        let spare = (0..spare).map(|_| page()).collect::<Vec<_>>();
        let full = Vec::with_capacity(spare.len());
        DeferredFrees {
            pages: PerCpu::new(|_| Mutex::new(&classes::ZS_DEFERRED, page())),
            full: Mutex::new(&classes::ZS_DEFERRED_FULL, FullPages { full, spare, taken: 0, freer: None }),
            freeing: Mutex::new(&classes::ZS_FREEING, page()),
        }
    }

    /// Has a value freed later by [`DeferredFrees::run`], or frees it now if there is no room.
    #[inline]
    pub fn defer(&self, value: T, free: impl Fn(T)) {
        let mut page = self.pages.local().lock();
        if page.len() == Self::PAGE_VALUES && !self.exchange(&mut page) {
            drop(page);
            return free(value);
        }
        page.push(value);
    }

    /// Exchanges a full page for a spare one, if any, and wakes the thread that frees; returns whether it
    /// did.
    #[cold]
    fn exchange(&self, page: &mut Vec<T>) -> bool {
        let mut pages = self.full.lock();
        let Some(spare) = pages.spare.pop() else { return false };
        pages.full.push(std::mem::replace(page, spare));
        pages.freer.iter().for_each(Thread::unpark);
        true
    }

    /// Frees the values of a full page by `free`, or of the CPUs' pages if none is full.
    fn free_some(&self, free: &impl Fn(T)) {
        let mut own = self.freeing.lock();
        let mut pages = self.full.lock();
        if let Some(full) = pages.full.pop() {
            pages.taken = full.len();
            let empty = std::mem::replace(&mut *own, full);
            pages.spare.push(empty);
            drop(pages);
            own.drain(..).for_each(free);
            self.full.lock().taken = 0;
            return;
        }
        drop(pages);
        for page in self.pages.iter() {
            let mut page = page.lock();
            self.full.lock().taken = page.len();
            std::mem::swap(&mut *own, &mut page);
            drop(page);
            own.drain(..).for_each(free);
        }
        self.full.lock().taken = 0;
    }

    /// Frees values on this thread as they come, as long as `still_wanted`, then those that wait. Unpark the
    /// thread when `still_wanted` has changed. One thread at a time does this.
    pub fn run(&self, still_wanted: impl Fn() -> bool, free: impl Fn(T)) {
        self.full.lock().freer = Some(thread::current());
        while still_wanted() {
            let is_idle = self.full.lock().full.is_empty();
            if is_idle {
                thread::park_timeout(LINGER);
            }
            self.free_some(&free);
        }
        self.full.lock().freer = None;
        self.flush(free);
    }

    /// Frees all values that wait. Those that come meanwhile may be left.
    pub fn flush(&self, free: impl Fn(T)) {
        let full = self.full.lock().full.len();
        for _ in 0..=full {
            self.free_some(&free);
        }
    }

    /// Returns the number of values that wait or are being freed.
    pub fn waiting(&self) -> usize {
        let on_pages: usize = self.pages.iter().map(|page| page.lock().len()).sum();
        let pages = self.full.lock();
        on_pages + pages.full.iter().map(Vec::len).sum::<usize>() + pages.taken
    }
}
