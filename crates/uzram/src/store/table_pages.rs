//! Which pages of the slot table are in memory. Those in which no slot was ever locked are passed over without being
//! touched, and those whose slots all hold nothing again go back to the system.
//!
//! A page of the table is the host's, of 256 slots where that has 4096 bytes. Its state:
//!
//! ```text
//!            a slot of it is locked                  all its slots are closed
//!  ABSENT ---------------------------> PRESENT ---------------------------------> LEAVING
//!    ^                                    ^          the system refused to take it    |
//!    |                                    +-------------------------------------------+
//!    +------------------------- the system took it -----------------------------------+
//! ```
//!
//! - Whoever has locked a slot sees to it that its page is PRESENT before he changes anything ([`TablePages::touch`]).
//!   So the slots of a page that is not PRESENT hold nothing, and nobody has to look at them.
//! - A page leaves while all its slots are *closed*: locked, and holding nothing. It leaves with these locks in it,
//!   and comes back as zeros, which are free locks. Who takes one of them finds the page LEAVING or ABSENT, as it was
//!   made that before. While it is LEAVING he waits: until then other CPUs may see the page that was, and would not
//!   see what he writes.
//! - Whoever locks a slot of a page that has left brings it back, though it may change nothing: a read of a hole that
//!   met a closed slot, say. Such a page is PRESENT and empty, and counted, until the next discard in it. It is not
//!   looked for, as readers would have to ask after each hole, and each costs a page of the host at most.
//! - Who waited for a closed slot cannot be known from the word any more; so all who wait are woken.
//!
//! A device with a reserve has all pages PRESENT from the start, and none leaves.
//!
//! Lock order: slot, slot table. Closing a slot does not wait.

use std::ops::Range;

use crate::base::error::Result;
use crate::base::mem::Table;
use crate::base::sync::{AtomicU32, Counter, Mutex, Ordering, Stamp, classes};

/// The slots of a page hold nothing.
const ABSENT: u32 = 0;
/// They may hold something.
const PRESENT: u32 = 1;
/// The page is on its way to the system.
const LEAVING: u32 = 2;

/// Pages of a device whose slots' pages are looked at together, if none was ever present: 2 MiB of slots.
const GROUP_SHIFT: u32 = 17;

/// See the [module's documentation](self).
pub(super) struct TablePages {
    slots: u64,
    /// A page has so many slots, as a power of two.
    page_shift: u32,
    /// Of each group of slots whether a page was ever present. Only then are the states of its pages looked at, which
    /// takes memory, too.
    groups: Box<[Stamp]>,
    states: Table<AtomicU32>,
    present: Counter,
    /// Held while a page is LEAVING.
    leaving: Mutex<()>,
    never_leave: bool,
}

/// Slots one after another, of one page or, if they are not present, one group.
pub(super) struct Span {
    pub(super) slots: Range<u64>,
    /// If not, all of them hold nothing.
    pub(super) is_present: bool,
}

impl TablePages {
    /// The pages of a table of so many slots, all of them absent.
    pub(super) fn new(slots: u64, slots_per_page: u64) -> Result<Self> {
        debug_assert!(slots_per_page.is_power_of_two(), "as the host's pages are, and slots");
        Ok(TablePages {
            slots,
            page_shift: slots_per_page.trailing_zeros(),
            groups: (0..slots.div_ceil(1 << GROUP_SHIFT)).map(|_| Stamp::default()).collect(),
            states: Table::new(slots.div_ceil(slots_per_page) as usize)?,
            present: Counter::new(0),
            leaving: Mutex::new(&classes::SLOT_TABLE, ()),
            never_leave: false,
        })
    }

    /// Makes all pages present, for good.
    pub(super) fn populate(&mut self) -> Result<()> {
        self.states.populate()?;
        self.groups.iter().for_each(|group| group.set(1));
        (0..self.states.len()).for_each(|page| self.states[page].store(PRESENT, Ordering::Relaxed));
        self.present.set(self.states.len() as u64);
        self.never_leave = true;
        Ok(())
    }

    /// How many are in memory.
    pub(super) fn present(&self) -> u64 {
        self.present.get()
    }

    pub(super) fn max_bytes(&self) -> usize {
        self.states.max_bytes() + size_of_val(&*self.groups)
    }

    #[cfg(not(loom))]
    pub(super) fn resident_bytes(&self) -> usize {
        self.states.resident_bytes() + size_of_val(&*self.groups)
    }

    #[inline]
    fn state_of(&self, slot: u64) -> &AtomicU32 {
        &self.states[(slot >> self.page_shift) as usize]
    }

    /// Whether `slot` may hold something. If not, it held nothing at some time during the call.
    #[inline]
    pub(super) fn is_present(&self, slot: u64) -> bool {
        self.groups[(slot >> GROUP_SHIFT) as usize].get() != 0
            && self.state_of(slot).load(Ordering::Acquire) == PRESENT
    }

    /// The caller has locked `slot`, and may change it after this.
    #[inline]
    pub(super) fn touch(&self, slot: u64) {
        // The first lock in a group is also the first touch of its states, which takes memory for them.
        if self.state_of(slot).load(Ordering::Acquire) != PRESENT {
            self.bring(slot);
        }
    }

    #[cold]
    fn bring(&self, slot: u64) {
        let state = self.state_of(slot);
        if state.load(Ordering::Acquire) == LEAVING {
            drop(self.leaving.lock());
        }
        // It does not leave again: a slot of it is locked, and not closed.
        self.groups[(slot >> GROUP_SHIFT) as usize].set(1);
        if state.compare_exchange(ABSENT, PRESENT, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.present.add(1);
        }
    }

    /// `slots` in spans.
    ///
    /// # Panics
    /// Beyond the end.
    pub(super) fn spans(&self, slots: Range<u64>) -> impl Iterator<Item = Span> {
        assert!(slots.end <= self.slots, "slot {} of {}", slots.end, self.slots);
        let mut at = slots.start;
        std::iter::from_fn(move || {
            if at >= slots.end {
                return None;
            }
            let group = at >> GROUP_SHIFT;
            let is_known = self.groups[group as usize].get() != 0;
            let end = if is_known {
                ((at >> self.page_shift) + 1) << self.page_shift
            } else {
                (group + 1) << GROUP_SHIFT
            };
            let span = at..end.min(slots.end);
            at = span.end;
            let is_present = is_known && self.state_of(span.start).load(Ordering::Acquire) == PRESENT;
            Some(Span { slots: span, is_present })
        })
    }

    /// The page that `slot` is in: its number, and its slots.
    pub(super) fn page_of(&self, slot: u64) -> (usize, Range<u64>) {
        let page = slot >> self.page_shift;
        (page as usize, page << self.page_shift..self.slots.min((page + 1) << self.page_shift))
    }

    /// Has `page` leave, if it is present and all its slots can be closed: `close` closes them or leaves them as they
    /// are, `release` gives the memory back and says whether the system took it. Returns what `release` did; none if
    /// it was not called.
    pub(super) fn leave(
        &self,
        page: usize,
        close: impl FnOnce() -> bool,
        release: impl FnOnce() -> bool,
    ) -> Option<bool> {
        if self.never_leave {
            return None;
        }
        let _leaving = self.leaving.lock();
        let state = &self.states[page];
        if state.load(Ordering::Acquire) != PRESENT || !close() {
            return None;
        }
        state.store(LEAVING, Ordering::Release);
        let is_released = release();
        if is_released {
            self.present.sub(1);
        }
        state.store(if is_released { ABSENT } else { PRESENT }, Ordering::Release);
        Some(is_released)
    }
}
