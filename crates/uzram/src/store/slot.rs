//! The slot table: what each page holds, in 16 bytes.
//!
//! ```text
//!  0   lock    [ locked | waiters | same | zero | idle | incompressible | backed | lost | writing 8 | …
//!               | priority | length 0..=4096 ]
//!  4   used    time of the page's last use, in seconds
//!  8   what    [ checksum u32 | handle u32 ], or the page's word, or a place on the backing device
//! ```
//!
//! A lock word of 0 means that the page holds nothing; seeing that takes no lock. Pages of the table that
//! hold no used slot take no memory and are skipped (`table_pages.rs`). `zero` is set with `same` if the word
//! is 0, so that the lock word alone gives the state of a page ([`Slots::state`]). A length of 4096 means an
//! uncompressed page; the priority says which of the store's algorithms compressed it. `writing` is the
//! number of the write to the backing device that the page is part of; it is reset to 0 when the page is used
//! or changed. The lock protects `what`, which is atomic only for [`Slots::peek_handle`].

use std::ops::Range;

use crate::base::clock::uptime_s;
use crate::base::cpu::prefetch;
use crate::base::error::Result;
use crate::base::mem::{Entry, Region, Table};
use crate::base::sync::{Ordering, WaitTable, WideGuard, WideLock, fence};
use crate::base::units::{PAGE_SIZE, PageNo};

use super::table_pages::{Span, TablePages};

const SAME: u32 = 1 << 29;
const ZERO: u32 = 1 << 28;
const IDLE: u32 = 1 << 27;
const INCOMPRESSIBLE: u32 = 1 << 26;
const BACKED: u32 = 1 << 25;
const LOST: u32 = 1 << 24;
const WRITING_SHIFT: u32 = 16;
const WRITING_MASK: u32 = 0xff << WRITING_SHIFT;
const PRIORITY_SHIFT: u32 = 13;
const PRIORITY_MASK: u32 = 3 << PRIORITY_SHIFT;
const LEN_MASK: u32 = (1 << PRIORITY_SHIFT) - 1;
const FLAGS: u32 =
    SAME | ZERO | IDLE | INCOMPRESSIBLE | BACKED | LOST | WRITING_MASK | PRIORITY_MASK | LEN_MASK;
const _: () = assert!(FLAGS & !WideLock::BITS_MASK == 0 && PAGE_SIZE <= LEN_MASK as usize);

/// Buckets of the wait table: enough that two contended slots rarely share one.
const WAIT_BUCKETS: usize = if cfg!(loom) { 1 } else { 64 };

/// The lock, the time of the last use in seconds of [`crate::base::clock`], and `what`.
#[derive(Default)]
struct Slot(WideLock);

#[cfg(not(loom))]
pub(super) const SLOT_BYTES: usize = 16;
#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == SLOT_BYTES);

// SAFETY: numbers, all zero by default.
unsafe impl Entry for Slot {
    #[cfg(loom)]
    fn clear(&self) {
        self.0.clear();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// Nothing: it reads as zeros.
    Empty,
    Same(u64),
    Stored {
        handle: u32,
        /// Its length, 1..=4096; 4096 for a huge page, which is stored uncompressed.
        len: u16,
        /// The page's checksum, where the store keeps checksums; else 0.
        checksum: u32,
        priority: u8,
    },
    Backed(Backed),
    /// Contents that were found damaged: reads fail until the page is written.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Backed {
    /// Its offset on the device, in bytes.
    pub(super) place: u64,
    pub(super) len: u16,
    pub(super) priority: u8,
}

/// The flags of a slot, read without its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peek(u32);

impl Peek {
    #[inline]
    fn state(self) -> PageState {
        match self.0 {
            0 => PageState::Hole,
            flags if flags & ZERO != 0 => PageState::Zero,
            _ if self.is_same() => PageState::Same,
            _ if self.is_backed() => PageState::Backed,
            flags if flags & LOST != 0 => PageState::Lost,
            _ if self.is_huge() => PageState::Huge,
            _ => PageState::Compressed,
        }
    }

    /// Returns whether the page holds an object of the pool.
    pub(super) fn is_stored(self) -> bool {
        self.is_object() && !self.is_backed()
    }

    /// Returns whether the page holds an object, in the pool or on the backing device.
    #[inline]
    pub(super) fn is_object(self) -> bool {
        self.0 & LEN_MASK != 0
    }

    #[inline]
    pub(super) fn is_backed(self) -> bool {
        self.0 & BACKED != 0
    }

    pub(super) fn is_same(self) -> bool {
        self.0 & SAME != 0
    }

    /// Returns the length of the page's object; 4096 if it is uncompressed.
    pub(super) fn len_bytes(self) -> usize {
        (self.0 & LEN_MASK) as usize
    }

    pub(super) fn is_huge(self) -> bool {
        self.len_bytes() == PAGE_SIZE
    }

    pub(super) fn is_idle(self) -> bool {
        self.0 & IDLE != 0
    }

    pub(super) fn is_incompressible(self) -> bool {
        self.0 & INCOMPRESSIBLE != 0
    }

    pub(super) fn priority(self) -> u8 {
        ((self.0 & PRIORITY_MASK) >> PRIORITY_SHIFT) as u8
    }
}

#[inline]
fn contents_of(flags: u32, what: u64) -> Contents {
    if flags & SAME != 0 {
        return Contents::Same(what);
    }
    let (len, priority) = ((flags & LEN_MASK) as u16, Peek(flags).priority());
    if flags & BACKED != 0 {
        return Contents::Backed(Backed { place: what, len, priority });
    }
    if flags & LOST != 0 {
        return Contents::Lost;
    }
    Contents::Stored { handle: what as u32, len, checksum: (what >> u32::BITS) as u32, priority }
}

/// Returns whether a slot can have these flags, not 0, and this word.
#[cfg(not(loom))]
fn is_sound(flags: u32, what: u64) -> bool {
    let has_only = |allowed: u32| flags & !allowed == 0;
    let has_len = (1..=PAGE_SIZE as u32).contains(&(flags & LEN_MASK));
    if flags & SAME != 0 {
        return has_only(SAME | ZERO) && (flags & ZERO != 0) == (what == 0);
    }
    if flags & LOST != 0 {
        return has_only(LOST);
    }
    if flags & BACKED != 0 {
        return has_len && has_only(BACKED | PRIORITY_MASK | LEN_MASK);
    }
    has_len && has_only(IDLE | INCOMPRESSIBLE | WRITING_MASK | PRIORITY_MASK | LEN_MASK)
}

/// The state of a page: how its contents are stored, not what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Never written, or discarded since: it holds nothing and reads as zeros.
    Hole,
    /// Written with all zeros; takes no pool memory, like every same-filled page.
    Zero,
    /// One repeated word other than 0.
    Same,
    /// Compressed.
    Compressed,
    /// Stored uncompressed, because it does not compress well enough.
    Huge,
    /// On the backing device, and not in memory.
    Backed,
    /// Found damaged when the store was attached: reads fail until the page is written.
    Lost,
}

impl PageState {
    /// Returns whether a page in this state reads as zeros.
    pub const fn is_zeros(self) -> bool {
        matches!(self, PageState::Hole | PageState::Zero)
    }
}

pub(super) struct Slots {
    table: Table<Slot>,
    table_pages: TablePages,
    waiters: WaitTable,
}

pub(super) struct SlotGuard<'a>(WideGuard<'a>);

pub(super) enum Tried<'a> {
    Locked(SlotGuard<'a>),
    Busy,
    /// The page holds nothing: its slot is not in memory.
    Empty,
}

impl<'a> Tried<'a> {
    pub(super) fn locked(self) -> Option<SlotGuard<'a>> {
        match self {
            Tried::Locked(slot) => Some(slot),
            Tried::Busy | Tried::Empty => None,
        }
    }
}

impl Slots {
    #[cfg(test)]
    pub(super) fn new(pages: u64) -> Result<Self> {
        Slots::new_in(None, pages)
    }

    /// Makes the slots of `pages` pages: empty in private memory, in a region as another process left them.
    pub(super) fn new_in(region: Option<&Region>, pages: u64) -> Result<Self> {
        let table = Table::<Slot>::new_in(region, pages as usize)?;
        let table_pages = TablePages::new(pages, table.entries_per_page() as u64)?;
        Ok(Slots { table, table_pages, waiters: WaitTable::new(WAIT_BUCKETS) })
    }

    pub(super) fn pages(&self) -> u64 {
        self.table.len() as u64
    }

    /// Brings all slots into memory, where they stay.
    pub(super) fn populate(&mut self) -> Result<()> {
        self.table.populate()?;
        self.table_pages.populate()
    }

    pub(super) fn max_bytes(&self) -> usize {
        self.table.max_bytes() + self.table_pages.max_bytes()
    }

    #[cfg(not(loom))]
    pub(super) fn resident_bytes(&self) -> usize {
        let page_bytes = self.table.entries_per_page() * SLOT_BYTES;
        self.table_pages.present() as usize * page_bytes + self.table_pages.resident_bytes()
    }

    /// Returns the table's resident bytes as the system counts them, to check [`Slots::resident_bytes`].
    #[cfg(all(test, not(loom)))]
    pub(super) fn table_memory_bytes(&self) -> usize {
        self.table.resident_bytes()
    }

    #[cfg(test)]
    pub(super) fn table_pages(&self) -> u64 {
        self.table_pages.present()
    }

    #[inline]
    pub(super) fn lock(&self, page: PageNo) -> SlotGuard<'_> {
        let slot = self.table[page.index()].0.lock(&self.waiters, page.index());
        self.table_pages.touch(page.number());
        SlotGuard(slot)
    }

    /// Locks the slot of `page` without waiting, unless the page is known to hold nothing.
    pub(super) fn try_lock(&self, page: PageNo) -> Tried<'_> {
        if !self.table_pages.is_present(page.number()) {
            return Tried::Empty;
        }
        let slot = self.table[page.index()].0.try_lock(&self.waiters, page.index());
        let Some(slot) = slot else { return Tried::Busy };
        self.table_pages.touch(page.number());
        Tried::Locked(SlotGuard(slot))
    }

    /// Returns those of `pages` that may hold something. The untouched parts of a disk cost nothing.
    pub(super) fn touched(&self, pages: Range<u64>) -> impl Iterator<Item = PageNo> {
        let spans = self.table_pages.spans(pages).filter(|span| span.is_present);
        spans.flat_map(|span| span.slots.map(PageNo::from_number))
    }

    /// Calls `discard` for those of `pages` that hold something, and gives back what is empty of the table.
    pub(super) fn discard(&self, pages: Range<u64>, mut discard: impl FnMut(PageNo)) {
        for span in self.table_pages.spans(pages).filter(|span| span.is_present) {
            let slots = span.slots.clone().map(PageNo::from_number);
            slots.filter(|page| !self.is_free_and_zero(*page)).for_each(&mut discard);
            self.release_if_empty(span.slots.end - 1);
        }
    }

    fn release_if_empty(&self, page: u64) {
        // SAFETY: `TablePages::leave` calls this while all slots of the table's page are closed, so that no
        // other thread changes a slot before it finds the slot's lock free.
        self.release_if_empty_by(page, |table_page| unsafe { self.table.release_page(table_page) });
    }

    pub(super) fn release_if_empty_by(&self, page: u64, release: impl FnOnce(usize) -> bool) {
        let (table_page, slots) = self.table_pages.page_of(page);
        // If two threads empty the last slots of a page at the same time, one sees what the other did.
        fence(Ordering::SeqCst);
        // Check the slots after `page` first: sequential discards have not reached those yet.
        let mut others = (page..slots.end).chain(slots.start..page);
        if !others.all(|page| self.table[page as usize].0.peek_bits() == 0) {
            return;
        }
        let slots = slots.start as usize..slots.end as usize;
        let close = || {
            let closed = slots.clone().take_while(|slot| self.table[*slot].0.close()).count();
            let are_all = closed == slots.len();
            if !are_all {
                self.reopen(slots.start..slots.start + closed);
            }
            are_all
        };
        match self.table_pages.leave(table_page, close, || release(table_page)) {
            Some(true) => self.waiters.wake_all(),
            Some(false) => self.reopen(slots),
            None => {}
        }
    }

    fn reopen(&self, slots: Range<usize>) {
        slots.for_each(|slot| self.table[slot].0.reopen(&self.waiters, slot));
    }

    /// Returns whether `page` holds nothing and no thread is changing that.
    #[inline]
    pub(super) fn is_empty(&self, page: PageNo) -> bool {
        !self.table_pages.is_present(page.number()) || self.is_free_and_zero(page)
    }

    #[inline]
    fn is_free_and_zero(&self, page: PageNo) -> bool {
        self.table[page.index()].0.is_free_and_zero()
    }

    /// Returns a state that `page` was in during the call. Takes no lock.
    #[inline]
    pub(super) fn state(&self, page: PageNo) -> PageState {
        if self.table_pages.is_present(page.number()) { self.peek(page).state() } else { PageState::Hole }
    }

    /// Returns the number of consecutive pages, from the first of `pages` on, in a state for which
    /// `is_wanted` is true. Takes no lock: the state of each page is one that it was in during the call.
    pub(super) fn run(&self, pages: Range<u64>, is_wanted: impl Fn(PageState) -> bool) -> u64 {
        let mut run = 0;
        for Span { slots, is_present } in self.table_pages.spans(pages) {
            let len = slots.end - slots.start;
            let wanted = if is_present {
                let slots = slots.map(PageNo::from_number);
                slots.take_while(|page| is_wanted(self.peek(*page).state())).count() as u64
            } else if is_wanted(PageState::Hole) {
                len
            } else {
                0
            };
            run += wanted;
            if wanted < len {
                break;
            }
        }
        run
    }

    #[cfg(not(loom))]
    pub(super) fn region_bytes(pages: u64) -> u64 {
        Table::<Slot>::bytes_of(pages as usize)
    }

    /// Returns the ranges of the table's pages that are in memory. Call [`Slots::adopt`] for each slot of
    /// each of these pages, then [`Slots::end_adoption_of`] for the page.
    #[cfg(not(loom))]
    pub(super) fn resident_ranges(&self) -> Result<Vec<Range<usize>>> {
        let (mut ranges, per_page) = (Vec::new(), self.table.entries_per_page());
        self.table
            .for_each_resident(|slots| ranges.push(slots.start / per_page..slots.end.div_ceil(per_page)))?;
        Ok(ranges)
    }

    #[cfg(not(loom))]
    pub(super) fn of_table_page(&self, table_page: usize) -> Range<u64> {
        let per_page = self.table.entries_per_page() as u64;
        let first = table_page as u64 * per_page;
        first..self.pages().min(first + per_page)
    }

    /// Returns the contents of the slot of `page` that another process left. Frees its lock, whose holder has
    /// ended, and resets `writing`, as that write has ended too. A slot in an impossible state becomes lost.
    #[cfg(not(loom))]
    pub(super) fn adopt(&self, page: PageNo) -> Contents {
        let slot = &self.table[page.index()].0;
        let (flags, what) = (slot.peek_bits(), slot.peek_data());
        if flags == 0 && what == 0 {
            slot.reset(0);
            return Contents::Empty;
        }
        if flags == 0 || flags & !FLAGS != 0 || !is_sound(flags, what) {
            slot.reset(LOST);
            return Contents::Lost;
        }
        slot.reset(flags & !WRITING_MASK);
        contents_of(flags, what)
    }

    /// Marks the contents of `page` as damaged. No other thread uses the slots yet.
    #[cfg(not(loom))]
    pub(super) fn lose(&self, page: PageNo) {
        self.table[page.index()].0.reset(LOST);
    }

    /// Ends the adoption of a page of the table; gives it back to the system unless it `holds_something`.
    #[cfg(not(loom))]
    pub(super) fn end_adoption_of(&self, table_page: usize, holds_something: bool) {
        if holds_something {
            self.table_pages.touch(self.of_table_page(table_page).start);
        } else {
            // SAFETY: no other thread uses the slots yet.
            unsafe { self.table.release_page(table_page) };
        }
    }

    #[inline]
    pub(super) fn prefetch(&self, page: PageNo) {
        prefetch(&raw const self.table[page.index()]);
    }

    /// Returns the flags of `page`, one of [`Slots::touched`]. Takes no lock.
    #[inline]
    pub(super) fn peek(&self, page: PageNo) -> Peek {
        Peek(self.table[page.index()].0.peek_bits())
    }

    /// Returns the time of the last use of `page`, in seconds of the system's uptime; 0 for never.
    pub(super) fn used_s(&self, page: PageNo) -> u32 {
        self.table[page.index()].0.stamp()
    }

    /// Returns the handle that `page` holds, or any other number: a hint. Returns `None` if the slot is not
    /// in memory, because reading it would fault it in.
    #[inline]
    pub(super) fn peek_handle(&self, page: PageNo) -> Option<u32> {
        let is_present = self.table_pages.is_present(page.number());
        is_present.then(|| self.table[page.index()].0.peek_data() as u32)
    }
}

impl SlotGuard<'_> {
    #[inline]
    pub(super) fn contents(&self) -> Contents {
        match self.0.bits() {
            0 => Contents::Empty,
            flags => contents_of(flags, self.0.data()),
        }
    }

    pub(super) fn peek(&self) -> Peek {
        Peek(self.0.bits())
    }

    /// Marks the page as used now: it is not idle, and stays in memory if it is being written back.
    #[inline]
    pub(super) fn touch(&mut self) {
        self.0.set_stamp(uptime_s());
        self.0.set_bits(self.0.bits() & !(IDLE | WRITING_MASK));
    }

    /// Sets the number of the write that the page is part of, 1..=255, until the page is used or changed.
    pub(super) fn set_writing(&mut self, number: u8) {
        self.0.set_bits(self.0.bits() & !WRITING_MASK | u32::from(number) << WRITING_SHIFT);
    }

    /// Returns the number of the write that the page is part of; 0 if it was used or changed since.
    pub(super) fn writing(&self) -> u8 {
        ((self.0.bits() & WRITING_MASK) >> WRITING_SHIFT) as u8
    }

    /// Sets or clears the page's idle mark, if it holds an object of the pool.
    #[inline]
    pub(super) fn set_idle(&mut self, idle: bool) {
        let flags = self.0.bits();
        let idle = if idle && self.peek().is_stored() { IDLE } else { 0 };
        self.0.set_bits(flags & !IDLE | idle);
    }

    pub(super) fn set_incompressible(&mut self) {
        if self.peek().is_stored() {
            self.0.set_bits(self.0.bits() | INCOMPRESSIBLE);
        }
    }

    /// Replaces the contents; the caller frees the old object once the slot is unlocked.
    #[inline]
    pub(super) fn replace(&mut self, new: Contents) -> Contents {
        let old = self.contents();
        let (flags, what) = match new {
            Contents::Empty => (0, 0),
            Contents::Same(0) => (SAME | ZERO, 0),
            Contents::Same(word) => (SAME, word),
            Contents::Stored { handle, len, checksum, priority } => {
                let flags = u32::from(len) | u32::from(priority) << PRIORITY_SHIFT;
                (flags, u64::from(checksum) << u32::BITS | u64::from(handle))
            }
            Contents::Backed(Backed { place, len, priority }) => {
                (BACKED | u32::from(len) | u32::from(priority) << PRIORITY_SHIFT, place)
            }
            Contents::Lost => (LOST, 0),
        };
        self.0.set_data(what);
        self.0.set_bits(flags);
        old
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_keep_what_they_hold() {
        let slots = Slots::new(3).expect("memory");
        let stored = |len| Contents::Stored { handle: 7, len, checksum: u32::MAX, priority: 2 };
        let backed = Contents::Backed(Backed { place: u64::MAX, len: 4096, priority: 3 });
        let all =
            [Contents::Same(0), Contents::Same(u64::MAX), stored(1), stored(4096), backed, Contents::Empty];
        use PageState as S;
        let (mut before, mut state_before) = (Contents::Empty, S::Hole);
        let states = [S::Zero, S::Same, S::Compressed, S::Huge, S::Backed, S::Hole];
        for (contents, state) in std::iter::zip(all, states) {
            let mut slot = slots.lock(PageNo(1));
            assert_eq!(slot.replace(contents), before);
            assert_eq!(slots.state(PageNo(1)), state_before, "the new state is not published yet");
            drop(slot);
            assert_eq!(slots.lock(PageNo(1)).contents(), contents);
            assert_eq!(
                (slots.is_empty(PageNo(1)), slots.state(PageNo(1))),
                (contents == Contents::Empty, state)
            );
            (before, state_before) = (contents, state);
        }
        for page in [0, 2] {
            assert_eq!(slots.lock(PageNo::from_number(page)).contents(), Contents::Empty);
        }
    }

    #[test]
    fn a_slot_that_is_not_in_memory_is_not_busy() {
        let slots = Slots::new(3).expect("memory");
        assert!(matches!(slots.try_lock(PageNo(1)), Tried::Empty));
        let held = slots.lock(PageNo(1));
        assert!(matches!(slots.try_lock(PageNo(1)), Tried::Busy));
        assert!(matches!(slots.try_lock(PageNo(2)), Tried::Locked(_)), "it is in memory beside the other");
        drop(held);
        assert!(slots.try_lock(PageNo(1)).locked().is_some());
    }

    #[test]
    fn a_write_back_is_forgotten_when_the_page_is_used_or_changed() {
        let slots = Slots::new(1).expect("memory");
        let stored = |handle| Contents::Stored { handle, len: 4096, checksum: 0, priority: 3 };
        let mut slot = slots.lock(PageNo(0));
        slot.replace(stored(1));
        slot.set_writing(255);
        slot.set_idle(true);
        slot.set_incompressible();
        assert_eq!((slot.writing(), slot.contents()), (255, stored(1)));
        slot.touch();
        assert_eq!((slot.writing(), slot.contents()), (0, stored(1)));
        assert!(slot.peek().is_incompressible() && !slot.peek().is_idle());
        slot.set_writing(1);
        slot.replace(stored(1));
        assert_eq!(slot.writing(), 0);
    }
}
