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
//!   │           └─> Bad (cannot be read)  └─> New (discarded)
//!   └── a load that failed and may be tried again
//! ```
//!
//! `Loading` and `Leaving` belong to the thread that made them; all others wait for it. A thread that is
//! trapped meanwhile sets *wanted*. The owner sees the bit when it ends the state, by an exchange, and has
//! the threads that wait go on: they touch the page again.
//!
//! - *copied*: the store still has the contents that the page was loaded with. The program may have changed
//!   them since. Of a page that has an owner, the same bit says *discarded*: its contents are not needed any
//!   more, and the owner frees them. Of a new page it says *given back*: what is in memory there, if anything,
//!   is about to be emptied by a thread of the program, and is not taken.
//! - *pinned*: the page is not evicted.
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
    /// In memory, and trapped: it is to leave unless it is touched.
    Waiting = 6,
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
            _ => Place::Waiting,
        }
    }

    /// Returns the value on the way to another place. Whether the store has a copy is said when it is there.
    fn going(self, to: Place) -> u8 {
        to as u8 | self.0 & KEPT
    }

    /// Returns whether the store has a copy; of a page that has an owner, whether it is discarded; of a new
    /// one, whether it was given back.
    pub(crate) fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    pub(crate) fn is_owned(self) -> bool {
        matches!(self.place(), Place::Loading | Place::Leaving)
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
    /// The caller is to load the page, which it owns now.
    Load {
        stored: bool,
        given_back: bool,
    },
    /// The caller is to open the page, which is in memory, and which it owns now.
    Open {
        copied: bool,
    },
    In,
    /// Another thread owns it, and was told that it is wanted.
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

    /// Changes the state, unless `change` gives `None`. Returns the old value of a change that was made.
    fn update(&self, mut change: impl FnMut(Seen) -> Option<u8>) -> Option<Seen> {
        let change = |seen| change(Seen(seen));
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).ok().map(Seen)
    }

    /// Notes that the page was touched while it was not in memory.
    pub(crate) fn touch(&self) -> Touched {
        let mut touched = Touched::Lost;
        self.update(|seen| {
            touched = match seen.place() {
                Place::New => Touched::Load { stored: false, given_back: seen.is_copied() },
                Place::Out => Touched::Load { stored: true, given_back: false },
                Place::Waiting => Touched::Open { copied: seen.is_copied() },
                Place::In => Touched::In,
                Place::Loading | Place::Leaving => Touched::Busy,
                Place::Bad => Touched::Lost,
            };
            match touched {
                Touched::Load { .. } | Touched::Open { .. } => Some(seen.going(Place::Loading)),
                Touched::Busy if seen.0 & WANTED == 0 => Some(seen.0 | WANTED),
                _ => None,
            }
        });
        touched
    }

    /// Takes the page from a place, if it is there, to `Loading` or `Leaving`: it belongs to the caller then.
    /// Returns [`Seen::is_copied`]. What is pinned does not begin to leave.
    pub(crate) fn start(&self, from: Place, to: Place) -> Option<bool> {
        let stays = |seen: Seen| seen.is_pinned() && (from, to) == (Place::In, Place::Leaving);
        let may = |seen: Seen| seen.place() == from && !stays(seen);
        self.update(|seen| may(seen).then(|| seen.going(to))).map(Seen::is_copied)
    }

    /// Takes a new page that is in memory to `Loading`, unless it was given back; `anyway`, even so.
    pub(crate) fn start_present(&self, anyway: bool) -> bool {
        let may = |seen: Seen| seen.place() == Place::New && (anyway || !seen.is_copied());
        self.update(|seen| may(seen).then(|| seen.going(Place::Loading))).is_some()
    }

    /// Starts to load the page, if it is to be loaded. Returns whether the store has contents.
    pub(crate) fn start_load(&self) -> Option<bool> {
        let may = |seen: Seen| matches!(seen.place(), Place::New | Place::Out);
        let old = self.update(|seen| may(seen).then(|| seen.going(Place::Loading)));
        old.map(|old| old.place() == Place::Out)
    }

    /// Has the owner of a page in this place wake this thread; returns false if it is not there.
    pub(crate) fn want(&self, place: Place) -> bool {
        self.update(|seen| (seen.place() == place).then_some(seen.0 | WANTED)).is_some()
    }

    /// Notes that a new page was given back; returns false if it is not new.
    pub(crate) fn give_back(&self) -> bool {
        self.update(|seen| (seen.place() == Place::New).then_some(seen.0 | COPIED)).is_some()
    }

    /// Has the owner of a page free its contents when it ends its state; returns false if none owns it.
    pub(crate) fn discard_later(&self) -> bool {
        self.update(|seen| seen.is_owned().then_some(seen.0 | COPIED)).is_some()
    }

    /// Ends the state of a page that the caller owns. Returns whether threads wait for it; `None` if its
    /// contents are not needed any more: then the caller still owns it, and frees what it has of them.
    pub(crate) fn end(&self, place: Place, copied: bool) -> Option<bool> {
        let copied = if copied { COPIED } else { 0 };
        let end = |seen: Seen| if seen.is_copied() { seen.0 & !COPIED } else { seen.going(place) | copied };
        let old = self.update(|seen| Some(end(seen)))?;
        (!old.is_copied()).then_some(old.0 & WANTED != 0)
    }

    pub(crate) fn set_access(&self, access: Access) {
        self.update(|seen| Some(seen.0 & !ACCESS | (access as u8) << ACCESS_SHIFT));
    }

    pub(crate) fn pin(&self, pinned: bool) {
        self.update(|seen| Some(if pinned { seen.0 | PINNED } else { seen.0 & !PINNED }));
    }

    /// Forgets what was said of a page that nobody has any more. The table takes memory when it is written.
    pub(crate) fn reset(&self) {
        if self.0.load(Ordering::Relaxed) != Place::New as u8 {
            self.0.store(Place::New as u8, Ordering::Release);
        }
    }
}
