//! The protocol of a page's state: programs that touch it, evictors, and a thread that empties it; and the
//! evictor's bell.
//!
//! The contents are two numbers: what a program sees, 0 if the page is trapped, and what the store has.
//! Moving them is not atomic with the state, as it is not in the pager.

use std::ops::RangeInclusive;

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, RwLock};
use loom::thread;

use crate::bell::Bell;
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
    /// The memory map, whose lock is held by who takes the page, and alone by who changes the map.
    map: RwLock<()>,
    /// 1 if the map is changing: the page cannot be opened once.
    changes: AtomicU64,
    /// 1 if the program was told of by the kernel: it goes on, and empties the page.
    is_told: AtomicU64,
}

impl Page {
    /// Has the page there, as `Core::fault` of a thread that waits.
    fn fault(&self) {
        loop {
            match self.state.touch() {
                Touched::Load { stored, .. } => return self.load(stored),
                Touched::Open { .. } => return self.reopen(),
                Touched::In => return self.look(),
                Touched::Busy => thread::yield_now(),
                Touched::Lost => panic!("nothing is lost here"),
            }
        }
    }

    /// As `Core::reopen`, of a thread that does not wait.
    fn reopen(&self) {
        if self.changes.swap(0, Ordering::Relaxed) == 1 {
            return self.end(Place::Waiting);
        }
        self.place(self.shelf.swap(0, Ordering::Relaxed));
        self.slot.store(0, Ordering::Release);
        self.end(Place::In);
    }

    /// As `Core::look`: nobody empties the page without a word here, so that it is there.
    fn look(&self) {
        if self.state.start(Place::In, Place::Loading).is_some() {
            assert_ne!(self.memory.load(Ordering::Acquire), 0, "it left");
            self.end(Place::In);
        }
    }

    fn load(&self, stored: bool) {
        self.place(if stored { self.store.swap(0, Ordering::Relaxed) } else { 1 });
        self.end(Place::In);
    }

    fn place(&self, contents: u64) {
        assert_ne!(contents, 0, "nothing is there");
        assert_eq!(self.memory.swap(contents, Ordering::AcqRel), 0, "the page was open");
    }

    /// As `Core::take`: returns what was in memory, if it may leave.
    fn take(&self) -> Option<u64> {
        let _map = self.map.read().expect("no panic");
        self.state.start(Place::In, Place::Leaving)?;
        let contents = self.memory.swap(0, Ordering::AcqRel);
        assert_ne!(contents, 0, "the page was not there");
        Some(contents)
    }

    /// As `Core::page_out`, and `Core::discard_open`.
    fn evict(&self, place: Place) {
        let Some(contents) = self.take() else { return };
        if place == Place::Out {
            assert_eq!(self.store.swap(contents, Ordering::Relaxed), 0, "the store has it already");
        }
        self.end(place);
    }

    /// As `Core::end_quietly`: whoever waits looks again.
    fn end(&self, place: Place) {
        if self.state.end(place, false).is_none() {
            self.empty(place);
            self.end_given_back();
        }
    }

    fn end_given_back(&self) {
        while self.state.end(Place::New, true).is_none() {}
    }

    /// As `Core::empty`: what is in memory, the program empties.
    fn empty(&self, was: Place) {
        match was {
            Place::Out => self.store.store(0, Ordering::Relaxed),
            Place::Waiting => {
                self.slot.store(0, Ordering::Release);
                self.shelf.store(0, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// Empties the page, if it is at this place. Returns whether it was.
    fn discard(&self, place: Place) -> bool {
        let is_there = self.state.start(place, Place::Loading).is_some();
        if is_there {
            self.empty(place);
            self.end_given_back();
        }
        is_there
    }

    /// As `Core::removed`.
    fn give_back(&self) {
        let _map = self.map.write().expect("no panic");
        loop {
            let is_done = match self.state.get().place() {
                Place::New => self.state.give_back(),
                Place::Loading | Place::Leaving => self.state.discard_later(),
                place => self.discard(place),
            };
            if is_done {
                return;
            }
        }
    }

    fn remove(&self) {
        self.give_back();
        self.memory.store(0, Ordering::Release);
    }

    /// As `Core::note_present`.
    fn note_present(&self) {
        if self.memory.load(Ordering::Acquire) != 0 && self.state.start_present(false) {
            self.end(Place::In);
        }
    }

    /// As `Core::take_cold` and, for the page that waits, `Core::evict_oldest`.
    fn evict_later(&self) {
        if let Some(contents) = self.take() {
            assert_eq!(self.shelf.swap(contents, Ordering::Relaxed), 0, "another is on the shelf");
            self.slot.store(1, Ordering::Release);
            self.end(Place::Waiting);
        }
        let mut started = self.state.start(Place::Waiting, Place::Leaving);
        while started.is_none() && self.slot.load(Ordering::Acquire) == 1 {
            thread::yield_now();
            started = self.state.start(Place::Waiting, Place::Leaving);
        }
        // The shelf is released.
        let contents = self.shelf.swap(0, Ordering::Relaxed);
        if started.is_some() {
            assert_ne!(contents, 0, "nothing is on the shelf");
            assert_eq!(self.store.swap(contents, Ordering::Relaxed), 0, "the store has it already");
            self.end(Place::Out);
        }
    }

    /// Adds one to the contents, as a program does: it touches the page until that is there.
    fn add_one(&self) {
        let one_more = |seen| (seen > 0).then_some(seen + 1);
        while self.memory.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
            self.fault();
        }
    }

    /// Returns the contents when nobody moves the page. They are in one place alone.
    fn contents(&self) -> u64 {
        let held = [&self.memory, &self.store, &self.shelf].map(|place| place.load(Ordering::Relaxed));
        let contents = match self.state.get().place() {
            Place::In => held[0],
            Place::Out => held[1],
            Place::Waiting => held[2],
            Place::New => 0,
            place => panic!("nobody ends {place:?}"),
        };
        assert_eq!(contents, held.iter().sum(), "{held:?}");
        contents.max(1)
    }
}

const EVICT: fn(&Page) = |page| page.evict(Place::Out);
const ADD_ONE: fn(&Page) = Page::add_one;
const EVICT_LATER: fn(&Page) = Page::evict_later;

/// Runs threads with so many preemptions, and checks the contents then.
fn check<const N: usize>(preemptions: usize, threads: [fn(&Page); N], wanted: RangeInclusive<u64>) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let page = Arc::new(Page::default());
        let spawn = |thread: &fn(&Page)| {
            let (page, thread) = (Arc::clone(&page), *thread);
            thread::spawn(move || thread(&page))
        };
        let spawned: Vec<_> = threads[1..].iter().map(spawn).collect();
        threads[0](&page);
        spawned.into_iter().for_each(|thread| thread.join().expect("no panic"));
        let contents = page.contents();
        assert!(wanted.contains(&contents), "{contents}");
    });
}

#[test]
fn loom_touches_and_evictions_lose_nothing() {
    let evict_twice: fn(&Page) = |page| {
        page.evict(Place::Out);
        page.evict(Place::Out);
    };
    check(2, [ADD_ONE, ADD_ONE, EVICT], 3..=3);
    check(2, [ADD_ONE, evict_twice, EVICT], 2..=2);
    check(2, [ADD_ONE, ADD_ONE, EVICT_LATER], 3..=3);
    check(2, [ADD_ONE, EVICT, EVICT_LATER], 2..=2);
}

#[test]
fn loom_a_page_that_cannot_be_opened_yet_is_not_lost() {
    let touch_twice: fn(&Page) = |page| {
        page.add_one();
        page.changes.store(1, Ordering::Relaxed);
        page.add_one();
    };
    // It is touched, looked at, not opened, and looked at again.
    check(4, [touch_twice, EVICT_LATER], 3..=3);
}

/// What was written before the page is emptied may be gone, and nothing else.
#[test]
fn loom_a_page_that_is_emptied_is_zeros_or_what_came_after() {
    let empty: fn(&Page) = |page| {
        page.evict(Place::New);
        page.discard(Place::Out);
        page.discard(Place::Waiting);
    };
    check(2, [ADD_ONE, empty, EVICT], 1..=2);
    check(2, [ADD_ONE, empty, EVICT_LATER], 1..=2);
}

/// A pinned page is in memory as soon as its pinner has seen it there.
#[test]
fn loom_a_pinned_page_stays() {
    let pin: fn(&Page) = |page| {
        page.state.pin(true);
        while page.state.get().place() != Place::In {
            page.fault();
        }
        assert_ne!(page.memory.load(Ordering::Acquire), 0, "it left");
        page.state.pin(false);
    };
    check(2, [pin, EVICT, ADD_ONE], 2..=2);
}

/// What the program has emptied itself is freed by whoever has the page, and nothing of it stays. One thread
/// brings pages, and reads what the program empties.
#[test]
fn loom_what_is_removed_is_freed_by_the_owner() {
    let reader: fn(&Page) = |page| {
        page.add_one();
        page.remove();
        page.add_one();
    };
    check(2, [reader, EVICT], 2..=2);
    check(2, [reader, EVICT_LATER], 2..=2);
}

/// What is in memory may be emptied long after that was told, and is not taken until then: it would come
/// back. What is there and was not given back is found.
#[test]
fn loom_what_was_given_back_is_not_taken_before_it_is_emptied() {
    let reader: fn(&Page) = |page| {
        page.memory.store(2, Ordering::Release);
        page.note_present();
        assert_ne!(page.state.get().place(), Place::New, "it was not found");
        page.give_back();
        page.is_told.store(1, Ordering::Release);
        page.note_present();
    };
    let discarder: fn(&Page) = |page| {
        while page.is_told.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        page.memory.store(0, Ordering::Release);
    };
    check(3, [reader, discarder, EVICT], 1..=1);
    check(3, [reader, discarder, EVICT_LATER], 1..=1);
}

/// A ring is seen by who waits, or has read the number, with all that was written before it.
#[test]
fn loom_a_ring_is_never_lost() {
    loom::model(|| {
        let shared = Arc::new((Bell::default(), AtomicU64::new(0)));
        let rings = Arc::clone(&shared);
        let ringer = thread::spawn(move || {
            for nth in 1..=2 {
                rings.1.store(nth, Ordering::Relaxed);
                rings.0.ring();
            }
        });
        loop {
            let number = shared.0.number();
            if shared.1.load(Ordering::Relaxed) == 2 {
                break;
            }
            shared.0.wait(number, None);
        }
        ringer.join().expect("no panic");
    });
}
