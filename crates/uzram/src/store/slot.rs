//! The slot table: what each page holds, in 16 bytes.
//!
//! ```text
//!  0   lock    [ locked | waiters | same | zero | … | length 0..=4096 ]     (see BitLock)
//!  4   -       room for the time of the last access
//!  8   what    [ checksum u32 | handle u32 ], or the word that fills the page
//! ```
//!
//! A slot whose lock word is 0 is a page that holds nothing; seeing that takes no lock, and makes
//! no memory of the table resident. `zero` is set beside `same` where the word is 0, so that the lock
//! word alone says in which state a page is ([`Slots::state`]). A length of 4096 is a page stored as
//! it is. The lock protects `what`, which is atomic only for [`Slots::peek_handle`].

use crate::base::cpu::prefetch;
use crate::base::error::Result;
use crate::base::mem::{Entry, Table};
use crate::base::sync::{Access, AtomicU64, BitGuard, BitLock, Ordering, WaitTable};
use crate::base::units::PAGE_SIZE;

const SAME: u32 = 1 << 29;
const ZERO: u32 = 1 << 28;
const LEN_MASK: u32 = (1 << 13) - 1;
const _: () = assert!((SAME | ZERO | LEN_MASK) & !BitLock::VALUE_MASK == 0 && PAGE_SIZE <= LEN_MASK as usize);

/// Places to sleep for those who wait for a slot: so many that two busy slots rarely share one.
const WAIT_BUCKETS: usize = if cfg!(feature = "loom") { 1 } else { 64 };

#[derive(Default)]
struct Slot {
    lock: BitLock,
    what: AtomicU64,
    /// Of `what`, for loom.
    access: Access,
}

#[cfg(not(feature = "loom"))]
const _: () = assert!(size_of::<Slot>() == 16);

// SAFETY: numbers, all zero by default.
unsafe impl Entry for Slot {}

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// Nothing: it reads as zeros.
    Empty,
    /// The same word all over.
    Same(u64),
    /// An object in the pool.
    Stored {
        /// Its handle.
        handle: u32,
        /// Its length, 1..=4096; 4096 for a huge page, which is stored as it is.
        len: u16,
        /// Of the page, where the device keeps checksums; else 0.
        checksum: u32,
    },
}

/// In which state a page is: how its contents are kept, not what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// It holds nothing, being never written or discarded since: it reads as zeros.
    Hole,
    /// It was written and is all zeros; like every page of one word it takes no pool memory.
    Zero,
    /// One word all over, other than 0.
    Same,
    /// Compressed.
    Compressed,
    /// Stored as it is, because it does not compress.
    Huge,
}

impl PageState {
    /// Whether a page in this state reads as zeros.
    pub const fn is_zeros(self) -> bool {
        matches!(self, PageState::Hole | PageState::Zero)
    }
}

/// The slots of a device.
pub(super) struct Slots {
    table: Table<Slot>,
    waiters: WaitTable,
}

/// One slot, locked.
pub(super) struct SlotGuard<'a> {
    lock: BitGuard<'a>,
    slot: &'a Slot,
}

impl Slots {
    pub(super) fn new(pages: u64) -> Result<Self> {
        Ok(Slots { table: Table::new(pages as usize)?, waiters: WaitTable::new(WAIT_BUCKETS) })
    }

    pub(super) fn pages(&self) -> u64 {
        self.table.len() as u64
    }

    pub(super) fn max_bytes(&self) -> usize {
        self.table.max_bytes()
    }

    #[cfg(not(feature = "loom"))]
    pub(super) fn resident_bytes(&self) -> usize {
        self.table.resident_bytes()
    }

    /// Waits for the slot of `page`.
    #[inline]
    pub(super) fn lock(&self, page: u64) -> SlotGuard<'_> {
        let slot = &self.table[page as usize];
        SlotGuard { lock: slot.lock.lock(&self.waiters, page as usize), slot }
    }

    /// The slot of `page`, if nobody has it.
    pub(super) fn try_lock(&self, page: u64) -> Option<SlotGuard<'_>> {
        let slot = &self.table[page as usize];
        let lock = slot.lock.try_lock(&self.waiters, page as usize)?;
        Some(SlotGuard { lock, slot })
    }

    /// Whether `page` holds nothing and nobody is changing that.
    #[inline]
    pub(super) fn is_empty(&self, page: u64) -> bool {
        self.table[page as usize].lock.is_free_and_zero()
    }

    /// The state of `page`, without waiting for its lock: one that it was in while this was asked.
    #[inline]
    pub(super) fn state(&self, page: u64) -> PageState {
        match self.table[page as usize].lock.peek() {
            0 => PageState::Hole,
            flags if flags & ZERO != 0 => PageState::Zero,
            flags if flags & SAME != 0 => PageState::Same,
            flags if flags & LEN_MASK == PAGE_SIZE as u32 => PageState::Huge,
            _ => PageState::Compressed,
        }
    }

    /// Brings the slot of `page` nearer, for a [`Slots::lock`] soon.
    #[inline]
    pub(super) fn prefetch(&self, page: u64) {
        prefetch(&raw const self.table[page as usize]);
    }

    /// The handle that `page` holds, or any other number: for hints.
    #[inline]
    pub(super) fn peek_handle(&self, page: u64) -> u32 {
        self.table[page as usize].what.load(Ordering::Relaxed) as u32
    }
}

impl SlotGuard<'_> {
    #[inline]
    pub(super) fn contents(&self) -> Contents {
        let flags = self.lock.value();
        if flags == 0 {
            return Contents::Empty;
        }
        self.slot.access.read();
        let what = self.slot.what.load(Ordering::Relaxed);
        if flags & SAME != 0 {
            return Contents::Same(what);
        }
        Contents::Stored {
            handle: what as u32,
            len: (flags & LEN_MASK) as u16,
            checksum: (what >> u32::BITS) as u32,
        }
    }

    /// Replaces what the page holds and answers what it held. The old object, if any, is the
    /// caller's to free once the lock is let go.
    #[inline]
    pub(super) fn replace(&mut self, new: Contents) -> Contents {
        let old = self.contents();
        let (flags, what) = match new {
            Contents::Empty => (0, 0),
            Contents::Same(0) => (SAME | ZERO, 0),
            Contents::Same(word) => (SAME, word),
            Contents::Stored { handle, len, checksum } => {
                (u32::from(len), u64::from(checksum) << u32::BITS | u64::from(handle))
            }
        };
        self.slot.access.write();
        self.slot.what.store(what, Ordering::Relaxed);
        self.lock.set(flags);
        old
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn slots_keep_what_they_hold() {
        let slots = Slots::new(3).expect("memory");
        let stored = |len| Contents::Stored { handle: 7, len, checksum: u32::MAX };
        let all = [Contents::Same(0), Contents::Same(u64::MAX), stored(1), stored(4096), Contents::Empty];
        use PageState::*;
        let (mut before, mut state_before) = (Contents::Empty, Hole);
        for (contents, state) in std::iter::zip(all, [Zero, Same, Compressed, Huge, Hole]) {
            let mut slot = slots.lock(1);
            assert_eq!(slot.replace(contents), before);
            assert_eq!(slots.state(1), state_before, "the new state is not published yet");
            drop(slot);
            assert_eq!(slots.lock(1).contents(), contents);
            assert_eq!((slots.is_empty(1), slots.state(1)), (contents == Contents::Empty, state));
            (before, state_before) = (contents, state);
        }
        for page in [0, 2] {
            assert_eq!(slots.lock(page).contents(), Contents::Empty);
        }
    }
}
