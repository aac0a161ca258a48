//! Tracks which pages of the slot table are in memory. Pages in which no slot was ever locked are skipped
//! without being touched, and pages whose slots are all empty again go back to the system.
//!
//! A page of the table is one of the host's pages: 256 slots if that has 4096 bytes. Its state:
//!
//! ```text
//!            a slot of it is locked                  all its slots are closed
//!  ABSENT ---------------------------> PRESENT ---------------------------------> LEAVING
//!    ^                                    ^          the system refused to take it    |
//!    |                                    +-------------------------------------------+
//!    +------------------------- the system took it -----------------------------------+
//! ```
//!
//! - A thread that has locked a slot makes its page PRESENT before it changes anything
//!   ([`TablePages::touch`]). The slots of a page that is not PRESENT therefore hold nothing, and are not
//!   looked at.
//! - A page leaves while all its slots are *closed*: locked and empty. It leaves with these locks in it, and
//!   comes back as zeros, which are free locks. A thread that takes one of them finds the page LEAVING or
//!   ABSENT, because that state was set before. While the page is LEAVING the thread waits: other CPUs may
//!   still see the old page, and would not see what it writes.
//! - A thread that locks a slot of a page that has left brings the page back, even if it changes nothing: a
//!   read of a hole that met a closed slot, for instance. Such a page is PRESENT, empty and counted until the
//!   next discard in it. It is not searched for: readers would have to check after each hole, and it costs
//!   one page of the host at most.
//! - The lock word no longer tells which threads wait for a closed slot, so all waiters are woken.
//!
//! A device with a reserve has all pages PRESENT from the start, and none leaves.
//!
//! Lock order: slot, slot table. Closing a slot does not wait.

use std::ops::Range;

use crate::base::error::Result;
use crate::base::mem::Table;
use crate::base::sync::{AtomicU32, Counter, Mutex, Ordering, Stamp, classes};

const ABSENT: u32 = 0;
const PRESENT: u32 = 1;
const LEAVING: u32 = 2;

/// The size of a group, as a power of two: slots that are skipped together while none of their pages was ever
/// present (2 MiB of slots).
const GROUP_SHIFT: u32 = 17;

pub(super) struct TablePages {
    slots: u64,
    /// Slots of a page, as a power of two.
    page_shift: u32,
    /// For each group of slots, whether one of its pages was ever present. Only then are the states of its
    /// pages read, because reading them faults in memory.
    groups: Box<[Stamp]>,
    states: Table<AtomicU32>,
    present: Counter,
    /// Held while a page is LEAVING.
    leaving: Mutex<()>,
    never_leave: bool,
}

/// Consecutive slots of one page or, if they are not present, of one group.
pub(super) struct Span {
    pub(super) slots: Range<u64>,
    /// False if none of the slots holds anything.
    pub(super) is_present: bool,
}

impl TablePages {
    pub(super) fn new(slots: u64, slots_per_page: u64) -> Result<Self> {
        debug_assert!(slots_per_page.is_power_of_two(), "the sizes of the host's pages and of slots are");
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

    /// Makes all pages present; none leaves again.
    pub(super) fn populate(&mut self) -> Result<()> {
        self.states.populate()?;
        self.groups.iter().for_each(|group| group.set(1));
        (0..self.states.len()).for_each(|page| self.states[page].store(PRESENT, Ordering::Relaxed));
        self.present.set(self.states.len() as u64);
        self.never_leave = true;
        Ok(())
    }

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

    /// Returns whether `slot` may hold something. If not, it held nothing at some time during the call.
    #[inline]
    pub(super) fn is_present(&self, slot: u64) -> bool {
        self.groups[(slot >> GROUP_SHIFT) as usize].get() != 0
            && self.state_of(slot).load(Ordering::Acquire) == PRESENT
    }

    /// Makes the page of `slot` present. The caller has locked `slot`, and may change it after this.
    #[inline]
    pub(super) fn touch(&self, slot: u64) {
        // The first lock in a group also touches its states first, which faults in their memory.
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
        // The page cannot leave again: the caller's slot is locked, and not closed.
        self.groups[(slot >> GROUP_SHIFT) as usize].set(1);
        if state.compare_exchange(ABSENT, PRESENT, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.present.add(1);
        }
    }

    /// Returns `slots` cut into spans.
    ///
    /// # Panics
    /// If `slots` goes beyond the end.
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

    pub(super) fn page_of(&self, slot: u64) -> (usize, Range<u64>) {
        let page = slot >> self.page_shift;
        (page as usize, page << self.page_shift..self.slots.min((page + 1) << self.page_shift))
    }

    /// Gives `page` back to the system, if it is present and all its slots can be closed. `close` closes all
    /// of them or none and returns which; `release` gives the memory back and returns whether the system took
    /// it. Returns the result of `release`; `None` if it was not called.
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
