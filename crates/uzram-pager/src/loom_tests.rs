//! The protocol of a page's state: programs that touch it, evictors, and a thread that empties it.
//!
//! The contents are two numbers: what a program sees, 0 if the page is trapped, and what the store has.
//! Moving them is not atomic with the state, as it is not in the pager.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use crate::state::{Place, State, Touched};

/// One page. Contents are counted from 1, so that 0 stands for a trapped page.
#[derive(Default)]
struct Page {
    state: State,
    memory: AtomicU64,
    store: AtomicU64,
    /// What waits to leave, and whether the page is there, or being opened from there.
    shelf: AtomicU64,
    slot: AtomicU64,
}

impl Page {
    /// Has the page there, as `Core::fault` of a thread that waits.
    fn fault(&self) {
        loop {
            match self.state.touch() {
                Touched::Load { stored } => return self.load(stored),
                Touched::Open { .. } => return self.reopen(),
                Touched::In => return,
                Touched::Busy => thread::yield_now(),
                Touched::Lost => panic!("nothing is lost here"),
            }
        }
    }

    /// As `Core::reopen`.
    fn reopen(&self) {
        let contents = self.shelf.swap(0, Ordering::Relaxed);
        assert_ne!(contents, 0, "nothing is on the shelf");
        assert_eq!(self.memory.swap(contents, Ordering::AcqRel), 0, "the page was open");
        self.slot.store(0, Ordering::Release);
        self.state.end(Place::In, false);
    }

    fn load(&self, stored: bool) {
        let contents = if stored { self.store.swap(0, Ordering::Relaxed) } else { 1 };
        assert_ne!(contents, 0, "the store has nothing");
        assert_eq!(self.memory.swap(contents, Ordering::AcqRel), 0, "the page was open");
        self.state.end(Place::In, false);
    }

    /// As `Core::evict`.
    fn evict(&self, place: Place) {
        if self.state.start_leave().is_none() {
            return;
        }
        let contents = self.memory.swap(0, Ordering::AcqRel);
        assert_ne!(contents, 0, "the page was not there");
        if place == Place::Out {
            assert_eq!(self.store.swap(contents, Ordering::Relaxed), 0, "the store has it already");
        }
        self.end(place);
    }

    /// As `Core::end`.
    fn end(&self, place: Place) {
        if self.state.end(place, false) {
            match self.state.touch() {
                Touched::Load { stored } => self.load(stored),
                Touched::Open { .. } => self.reopen(),
                _ => {}
            }
        }
    }

    /// As `Core::take_cold` and, for the page that waits, `Core::evict_oldest`.
    fn evict_later(&self) {
        if self.state.start_leave().is_some() {
            let contents = self.memory.swap(0, Ordering::AcqRel);
            assert_ne!(contents, 0, "the page was not there");
            assert_eq!(self.shelf.swap(contents, Ordering::Relaxed), 0, "another is on the shelf");
            self.slot.store(1, Ordering::Release);
            self.end(Place::Waiting);
        }
        if self.state.start_last().is_none() {
            while self.slot.load(Ordering::Acquire) == 1 && self.state.get().place() == Place::Loading {
                thread::yield_now();
            }
            // The shelf is released.
            self.shelf.store(0, Ordering::Relaxed);
        } else {
            let contents = self.shelf.swap(0, Ordering::Relaxed);
            assert_ne!(contents, 0, "nothing is on the shelf");
            assert_eq!(self.store.swap(contents, Ordering::Relaxed), 0, "the store has it already");
            self.end(Place::Out);
        }
    }

    /// Adds one to the contents, as a program does: it touches the page until that is there.
    fn add_one(&self) {
        loop {
            match self.memory.load(Ordering::Acquire) {
                0 => self.fault(),
                seen => {
                    let added =
                        self.memory.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed);
                    if added.is_ok() {
                        return;
                    }
                }
            }
        }
    }

    /// Returns the contents when nobody moves the page.
    fn contents(&self) -> u64 {
        match self.state.get().place() {
            Place::In => self.memory.load(Ordering::Relaxed),
            Place::Out => self.store.load(Ordering::Relaxed),
            Place::Waiting => self.shelf.load(Ordering::Relaxed),
            Place::New => 1,
            place => panic!("nobody ends {place:?}"),
        }
    }
}

fn run(threads: &[fn(&Page)]) -> Arc<Page> {
    let page = Arc::new(Page::default());
    let spawned: Vec<_> = threads[1..]
        .iter()
        .map(|thread| {
            let (page, thread) = (Arc::clone(&page), *thread);
            thread::spawn(move || thread(&page))
        })
        .collect();
    threads[0](&page);
    spawned.into_iter().for_each(|thread| thread.join().expect("no panic"));
    page
}

fn check(threads: [fn(&Page); 3], least: u64, most: u64) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let contents = run(&threads).contents();
        assert!((least..=most).contains(&contents), "{contents}");
    });
}

#[test]
fn loom_a_touch_and_an_eviction_lose_nothing() {
    check([|page| page.add_one(), |page| page.add_one(), |page| page.evict(Place::Out)], 3, 3);
}

#[test]
fn loom_evictors_do_not_meet() {
    let evict_twice: fn(&Page) = |page| {
        page.evict(Place::Out);
        page.evict(Place::Out);
    };
    check([|page| page.add_one(), evict_twice, |page| page.evict(Place::Out)], 2, 2);
}

#[test]
fn loom_a_page_that_waits_leaves_or_is_opened() {
    check([|page| page.add_one(), |page| page.add_one(), Page::evict_later], 3, 3);
    check([|page| page.add_one(), |page| page.evict(Place::Out), Page::evict_later], 2, 2);
}

/// What was written before the page is emptied may be gone, and nothing else.
#[test]
fn loom_a_page_that_is_emptied_is_zeros_or_what_came_after() {
    let empty: fn(&Page) = |page| {
        page.evict(Place::New);
        if page.state.start_discard(Place::Out).is_some() {
            page.store.store(0, Ordering::Relaxed);
            page.end(Place::New);
        }
        if page.state.start_discard(Place::Waiting).is_some() {
            page.slot.store(0, Ordering::Release);
            page.shelf.store(0, Ordering::Relaxed);
            page.end(Place::New);
        }
    };
    check([|page| page.add_one(), empty, |page| page.evict(Place::Out)], 1, 2);
    check([|page| page.add_one(), empty, Page::evict_later], 1, 2);
}

/// A pinned page is in memory as soon as its pinner has seen it there.
#[test]
fn loom_a_pinned_page_stays() {
    let pin: fn(&Page) = |page| {
        page.state.pin(true);
        while page.state.get().place() != Place::In {
            page.fault();
        }
        for _ in 0..2 {
            assert_ne!(page.memory.load(Ordering::Acquire), 0, "it left");
        }
        page.state.pin(false);
    };
    check([pin, |page| page.evict(Place::Out), |page| page.add_one()], 2, 2);
}

/// A page is closed by one thread, when no other moves it.
#[test]
fn loom_a_closed_unit_is_gone() {
    loom::model(|| {
        let page = Arc::new(Page::default());
        page.fault();
        let evictor = {
            let page = Arc::clone(&page);
            thread::spawn(move || page.evict(Place::Out))
        };
        let was = loop {
            match page.state.close() {
                Some(was) => break was.place(),
                None => thread::yield_now(),
            }
        };
        evictor.join().expect("no panic");
        assert!(matches!(was, Place::In | Place::Out), "{was:?}");
        assert_eq!(page.state.touch(), Touched::Lost);
        assert!(page.state.start_leave().is_none() && page.state.start_load().is_none());
    });
}
