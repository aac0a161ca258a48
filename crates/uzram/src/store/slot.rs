//! The slot table: what each page holds, in 16 bytes.
//!
//! ```text
//!  0   lock    [ locked | waiters | same | huge | … | length 0..=4096 ]     (see BitLock)
//!  4   accessed_s   seconds of the coarse monotonic clock at the last read or write
//!  8   what         a handle and a checksum, or the word that fills the page
//! ```
//!
//! A slot of zeros is a page that was never written. `lock` protects `what` and its own lower
//! bits; `what` is atomic only for [`Slots::peek`]. `accessed_s` only informs.

use crate::base::cpu::prefetch;
use crate::base::error::Result;
use crate::base::mem::{Entry, Table};
use crate::base::sync::{AtomicU32, BitGuard, BitLock, Ordering, WaitTable};
use crate::zsmalloc::Handle;

const SAME: u32 = 1 << 29;
const HUGE: u32 = 1 << 28;
const LEN_MASK: u32 = (1 << 13) - 1;
const _: () = assert!((SAME | HUGE | LEN_MASK) & !BitLock::VALUE_MASK == 0);

/// Places to sleep for those who wait for a slot: so many that two busy slots rarely share one.
const WAIT_BUCKETS: usize = if cfg!(feature = "loom") { 1 } else { 64 };

#[derive(Default)]
struct Slot {
    lock: BitLock,
    accessed_s: AtomicU32,
    what: [AtomicU32; 2],
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
        handle: Handle,
        /// Its length; 4096 and `huge` for a page as it is.
        len: u16,
        huge: bool,
        /// Of the page, where the device keeps checksums; else 0.
        checksum: u32,
    },
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

    /// Brings the slot of `page` nearer, for a [`Slots::lock`] soon.
    #[inline]
    pub(super) fn prefetch(&self, page: u64) {
        prefetch(&raw const self.table[page as usize]);
    }

    /// The object that `page` probably holds, for bringing it nearer.
    #[inline]
    pub(super) fn peek(&self, page: u64) -> Option<Handle> {
        let slot = &self.table[page as usize];
        let flags = slot.lock.peek();
        let stored = flags != 0 && flags & SAME == 0;
        stored.then(|| Handle::from_bits(slot.what[0].load(Ordering::Relaxed)))
    }

    /// Notes that `page` was used at `now_s`.
    #[inline]
    pub(super) fn touch(&self, page: u64, now_s: u32) {
        let accessed_s = &self.table[page as usize].accessed_s;
        if accessed_s.load(Ordering::Relaxed) != now_s {
            accessed_s.store(now_s, Ordering::Relaxed);
        }
    }

    /// When `page` was last used.
    pub(super) fn accessed_s(&self, page: u64) -> u32 {
        self.table[page as usize].accessed_s.load(Ordering::Relaxed)
    }
}

impl SlotGuard<'_> {
    #[inline]
    pub(super) fn contents(&self) -> Contents {
        let flags = self.lock.value();
        if flags == 0 {
            return Contents::Empty;
        }
        let what = self.slot.what.each_ref().map(|half| half.load(Ordering::Relaxed));
        if flags & SAME != 0 {
            return Contents::Same(u64::from(what[1]) << 32 | u64::from(what[0]));
        }
        Contents::Stored {
            handle: Handle::from_bits(what[0]),
            len: (flags & LEN_MASK) as u16,
            huge: flags & HUGE != 0,
            checksum: what[1],
        }
    }

    /// Replaces what the page holds and answers what it held. The old object, if any, is the
    /// caller's to free once the lock is let go.
    #[inline]
    pub(super) fn replace(&mut self, new: Contents) -> Contents {
        let old = self.contents();
        let (flags, what) = match new {
            Contents::Empty => (0, [0; 2]),
            Contents::Same(word) => (SAME, [word as u32, (word >> 32) as u32]),
            Contents::Stored { handle, len, huge, checksum } => {
                (u32::from(len) | if huge { HUGE } else { 0 }, [handle.to_bits(), checksum])
            }
        };
        self.slot.what.iter().zip(what).for_each(|(slot, half)| slot.store(half, Ordering::Relaxed));
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
        let stored =
            |huge, len| Contents::Stored { handle: Handle::from_bits(7), len, huge, checksum: u32::MAX };
        let all = [
            Contents::Same(0),
            Contents::Same(u64::MAX),
            stored(false, 1),
            stored(true, 4096),
            Contents::Empty,
        ];
        let mut before = Contents::Empty;
        for contents in all {
            assert_eq!(slots.lock(1).replace(contents), before);
            assert_eq!(slots.lock(1).contents(), contents);
            before = contents;
        }
        for page in [0, 2] {
            assert_eq!(slots.lock(page).contents(), Contents::Empty);
        }
    }
}
