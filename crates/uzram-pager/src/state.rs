//! The state of each page of memory, one atomic byte.
//!
//! ```text
//!   7..6     5        4        3        2..0
//! [ access | wanted | pinned | copied | place ]
//! ```
//!
//! The place says where the contents are, and who may change that:
//!
//! ```text
//!            load                    evict
//!  New ─┐                                        ┌─> Out
//!       ├─> Loading ──> In ──> Leaving ──────────┤
//!  Out ─┘       │       ^       ^  │             └─> New (discarded)
//!   ^           │       └───────┼──┤
//!   │           │               │  └─> Waiting ──> Loading (touched: opened again)
//!   │           │               └──────── │ (not touched for a while)
//!   │           └─> Bad (cannot be read)     all but Loading, Leaving ──> Gone ──> New (unmapped)
//!   └── a load that failed and may be tried again
//! ```
//!
//! `Loading` and `Leaving` belong to the thread that made them; all others wait for it. A thread that is
//! trapped meanwhile sets *wanted*. The owner sees the bit when it ends the state, by an exchange: it wakes
//! the threads that wait, and if the page has left, it loads it again at once.
//!
//! - *copied*: the store still has the contents that the page was loaded with. The program may have changed
//!   them since.
//! - *pinned*: the page is not evicted. Set when the pin is in the region's list, and cleared under the lock
//!   of that.
//! - *access*: how the program says that it will touch the page ([`Access`]).

use crate::sync::{AtomicU8, Ordering};

/// Where a page's contents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Place {
    /// Nowhere: it reads as zeros. Not in memory.
    New = 0,
    /// In memory.
    In = 1,
    /// In the store.
    Out = 2,
    /// On the way into memory.
    Loading = 3,
    /// On the way out of memory: the program cannot touch it any more.
    Leaving = 4,
    /// In the store, which cannot read them.
    Bad = 5,
    /// Nowhere: the memory is being unmapped.
    Gone = 6,
    /// In memory, and trapped: it is to leave unless it is touched.
    Waiting = 7,
}

const PLACE: u8 = 7;
const COPIED: u8 = 1 << 3;
const PINNED: u8 = 1 << 4;
const WANTED: u8 = 1 << 5;
const ACCESS_SHIFT: u32 = 6;
const ACCESS: u8 = 3 << ACCESS_SHIFT;
/// What a page keeps wherever it goes.
const KEPT: u8 = PINNED | ACCESS;

/// In what order a program is going to touch memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Access {
    /// Not known: neighbours come along as far as faults come in order.
    #[default]
    Normal = 0,
    /// In no order: no neighbours come along.
    Random = 1,
    /// In order: as many neighbours as possible come along.
    Sequential = 2,
}

/// A value of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u8);

impl Seen {
    pub(crate) fn place(self) -> Place {
        match self.0 & PLACE {
            0 => Place::New,
            1 => Place::In,
            2 => Place::Out,
            3 => Place::Loading,
            4 => Place::Leaving,
            5 => Place::Bad,
            6 => Place::Gone,
            _ => Place::Waiting,
        }
    }

    /// Returns the value of a page whose owner takes it to another place. Whether the store has a copy is
    /// said when it is there.
    fn going(self, to: Place) -> u8 {
        to as u8 | self.0 & KEPT
    }

    pub(crate) fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    pub(crate) fn access(self) -> Access {
        match self.0 >> ACCESS_SHIFT {
            1 => Access::Random,
            2 => Access::Sequential,
            _ => Access::Normal,
        }
    }

    pub(crate) fn is_pinned(self) -> bool {
        self.0 & PINNED != 0
    }
}

/// What a trapped touch finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touched {
    /// The caller is to load the page: it owns the state `Loading` now. Says whether the store has contents.
    Load { stored: bool },
    /// The caller is to open the page, which is in memory: it owns the state `Loading` now. Says whether the
    /// store has a copy.
    Open { copied: bool },
    /// It is in memory already.
    In,
    /// Another thread owns the state and was told that the page is wanted.
    Busy,
    /// There is nothing to load.
    Lost,
}

/// The state of one page.
#[derive(Default)]
pub(crate) struct State(AtomicU8);

// SAFETY: a zeroed atomic integer is its default, the place `New`; dropping one does nothing.
#[cfg(not(loom))]
unsafe impl uzram::mem::Entry for State {}

impl State {
    pub(crate) fn get(&self) -> Seen {
        Seen(self.0.load(Ordering::Acquire))
    }

    /// Changes the state by `change` until that gives `None`; returns the old value of a change that was
    /// made.
    fn update(&self, mut change: impl FnMut(Seen) -> Option<u8>) -> Option<Seen> {
        let mut seen = self.get();
        loop {
            let new = change(seen)?;
            match self.0.compare_exchange_weak(seen.0, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(seen),
                Err(now) => seen = Seen(now),
            }
        }
    }

    /// Notes that the page was touched while it was not in memory.
    pub(crate) fn touch(&self) -> Touched {
        let mut touched = Touched::Lost;
        self.update(|seen| {
            let (new, what) = match seen.place() {
                Place::New => (Some(seen.going(Place::Loading)), Touched::Load { stored: false }),
                Place::Out => (Some(seen.going(Place::Loading)), Touched::Load { stored: true }),
                Place::Waiting => {
                    (Some(seen.going(Place::Loading)), Touched::Open { copied: seen.is_copied() })
                }
                Place::In => (None, Touched::In),
                Place::Loading | Place::Leaving if seen.0 & WANTED != 0 => (None, Touched::Busy),
                Place::Loading | Place::Leaving => (Some(seen.0 | WANTED), Touched::Busy),
                Place::Bad | Place::Gone => (None, Touched::Lost),
            };
            touched = what;
            new
        });
        touched
    }

    /// Makes the caller the owner of a page that `may` go there, to `Loading` or `Leaving`; returns its state
    /// of before.
    fn start(&self, to: Place, may: impl Fn(Seen) -> bool) -> Option<Seen> {
        self.update(|seen| may(seen).then(|| seen.going(to)))
    }

    /// Starts to load the page, if it is not in memory and no other thread is at it; returns whether the
    /// store has contents.
    pub(crate) fn start_load(&self) -> Option<bool> {
        let old = self.start(Place::Loading, |seen| matches!(seen.place(), Place::New | Place::Out));
        old.map(|old| old.place() == Place::Out)
    }

    /// Starts to look whether a page in memory is there; returns whether the store has a copy. The caller
    /// ends the state.
    pub(crate) fn start_look(&self) -> Option<bool> {
        self.start(Place::Loading, |seen| seen.place() == Place::In).map(Seen::is_copied)
    }

    /// Starts to take the page out of memory, if it is there and not pinned; returns whether the store has a
    /// copy.
    pub(crate) fn start_leave(&self) -> Option<bool> {
        let may_leave = |seen: Seen| seen.place() == Place::In && !seen.is_pinned();
        self.start(Place::Leaving, may_leave).map(Seen::is_copied)
    }

    /// Starts to have a page leave that waits for that; returns whether the store has a copy.
    pub(crate) fn start_last(&self) -> Option<bool> {
        self.start(Place::Leaving, |seen| seen.place() == Place::Waiting).map(Seen::is_copied)
    }

    /// Starts to empty a page, if it is in this place; returns whether the store has a copy. It belongs to
    /// the caller then.
    pub(crate) fn start_discard(&self, place: Place) -> Option<bool> {
        self.start(Place::Loading, |seen| seen.place() == place).map(Seen::is_copied)
    }

    /// Has the owner of a page in this place wake this thread; returns false if it is not there.
    pub(crate) fn want(&self, place: Place) -> bool {
        self.update(|seen| (seen.place() == place).then_some(seen.0 | WANTED)).is_some()
    }

    /// Ends the state `Loading` or `Leaving`, which the caller owns. Returns whether the page was wanted
    /// meanwhile.
    pub(crate) fn end(&self, place: Place, copied: bool) -> bool {
        let new = |seen: Seen| Some(seen.going(place) | if copied { COPIED } else { 0 });
        self.update(new).is_some_and(|old| old.0 & WANTED != 0)
    }

    /// Sets how the page is going to be touched.
    pub(crate) fn set_access(&self, access: Access) {
        self.update(|seen| Some(seen.0 & !ACCESS | (access as u8) << ACCESS_SHIFT));
    }

    /// Sets whether the page is pinned.
    pub(crate) fn pin(&self, pinned: bool) {
        self.update(|seen| Some(if pinned { seen.0 | PINNED } else { seen.0 & !PINNED }));
    }

    /// Takes the page away for good, unless a thread owns it; returns its state of before.
    pub(crate) fn close(&self) -> Option<Seen> {
        let close = |seen: Seen| {
            let is_owned = matches!(seen.place(), Place::Loading | Place::Leaving);
            (!is_owned).then_some(Place::Gone as u8)
        };
        self.update(close)
    }

    /// Makes a closed page new. One that is new already is not written: the table's pages take memory when
    /// they are.
    pub(crate) fn reopen(&self) {
        if self.0.load(Ordering::Relaxed) != Place::New as u8 {
            self.0.store(Place::New as u8, Ordering::Release);
        }
    }
}
