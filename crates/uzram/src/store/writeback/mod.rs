//! Pages that leave memory for a backing device, and come back.

mod ahead;
mod allowance;
mod clean;
mod device;
pub(super) mod extents;
pub(super) mod log;
mod object;
mod read;
pub(super) mod sealed;
mod state;
mod writer;

use std::fmt;
use std::ops::Range;

use crate::backing::Tiers;
use crate::base::counters::per_cpu_counters;
use crate::base::cpu::relax;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::named::named;
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, PageNo};
use crate::base::work::{Unit, Work};

use super::recompress::Cursor;
use super::slot::Tried;
use super::{Candidates, Store};
pub(super) use device::BackingDevice;
pub use state::BackingState;
pub(super) use writer::Pass;

/// The layout of pages on a backing device. Parses from and prints as `packed` or `blocks`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WritebackLayout {
    /// Compressed objects one after another, in extents that are written in large transfers.
    #[default]
    Packed,
    /// The kernel's layout: each page in its own block of 4 KiB.
    Blocks,
}

impl WritebackLayout {
    /// All layouts.
    pub const ALL: [WritebackLayout; 2] = [WritebackLayout::Packed, WritebackLayout::Blocks];

    /// Returns the name used in settings.
    pub const fn name(self) -> &'static str {
        match self {
            WritebackLayout::Packed => "packed",
            WritebackLayout::Blocks => "blocks",
        }
    }

    /// Returns the default number of writes in flight: a few MiB of packed extents, or the kernel's 32
    /// blocks.
    pub(crate) const fn default_batch(self) -> u64 {
        match self {
            WritebackLayout::Packed => 4,
            WritebackLayout::Blocks => 32,
        }
    }
}

named!(WritebackLayout, "'{}' is no layout of a backing device: {}");

/// The backing device that a store's cold pages are written back to.
#[derive(Clone)]
pub struct BackingOptions {
    /// The device, or several.
    pub backing: Arc<Tiers>,
    /// The layout of pages on it.
    pub layout: WritebackLayout,
    /// Whether pages are written compressed. With the layout `Packed` they always are.
    pub compressed: bool,
}

impl BackingOptions {
    /// Uses `backing`, packed.
    pub fn packed(backing: impl Into<Arc<Tiers>>) -> Self {
        BackingOptions { backing: backing.into(), layout: WritebackLayout::Packed, compressed: true }
    }
}

impl fmt::Debug for BackingOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BackingOptions { backing, layout, compressed } = self;
        write!(f, "BackingOptions({} bytes, {layout}, compressed: {compressed})", backing.len_bytes())
    }
}

/// The pages that [`Store::write_back`] selects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writeback {
    /// The kind of pages.
    pub candidates: Candidates,
    /// The ranges to select from, in any order; empty for all pages.
    pub pages: Vec<Range<u64>>,
}

/// How much may be written to a backing device: the kernel's `writeback_limit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WritebackLimit {
    /// Whether the limit is in effect.
    pub enabled: bool,
    /// What may still be written, in units of 4 KiB.
    pub left: u64,
}

per_cpu_counters! {
    /// Statistics of a store's backing device.
    pub struct BackingStats {
        /// The size of the device.
        len_bytes,
        /// Bytes of the extents in use, dead objects included; cleaning frees the space of those.
        extent_bytes,
    };

    /// The counters, not per CPU: counting costs little compared to a transfer.
    pub(super) struct BackingCounts;

    /// Bytes of the device that pages take, headers and padding included.
    held_bytes,
    /// Pages on the device and not in memory.
    pages,
    /// Pages that left memory.
    pages_written_back,
    /// Bytes of memory that the objects of these pages took.
    object_bytes,
    /// Pages that returned to memory.
    pages_returned,
    /// Pages that stayed in memory because they were used, overwritten or discarded while they were being
    /// written.
    pages_kept,
    /// Reads of the device for reads of pages.
    reads,
    /// Bytes read, by reads of pages and by cleaning.
    read_bytes,
    /// Pages that were read from bytes that had been read ahead.
    pages_read_ahead,
    /// Bytes written.
    written_bytes,
    /// Bytes of objects moved by cleaning; part of the bytes written.
    cleaned_bytes,
    /// Failed reads from the device.
    failed_reads,
    /// Of these, reads of what a store on other machines no longer has.
    lost_reads,
    /// Failed writes to the device.
    failed_writes,
    /// Pages read back damaged: their reads fail.
    corrupted,
}

/// The maximum number of writes in flight to a backing device.
pub const MAX_WRITEBACK_BATCH: u64 = 128;
/// Pages written back before another thread gets a turn: a few MiB.
const LEAST_TURN: usize = 2048;
/// How many pages ahead objects are prefetched.
const AHEAD: usize = 8;
/// How often the slot of a busy page is tried.
const TRIES: usize = 100;

impl Writeback {
    /// Selects all pages of a range.
    pub fn of(pages: Range<u64>) -> Self {
        Writeback { candidates: Candidates::default(), pages: std::iter::once(pages).collect() }
    }
}

/// Returns the ranges cut to the first `end` pages, sorted and without overlaps.
fn in_order(ranges: &[Range<u64>], end: u64) -> Vec<Range<u64>> {
    let mut ranges: Vec<_> = ranges.iter().map(|pages| pages.start..pages.end.min(end)).collect();
    ranges.sort_unstable_by_key(|pages| pages.start);
    let mut next = 0;
    for pages in &mut ranges {
        pages.start = pages.start.max(next);
        next = next.max(pages.end);
    }
    ranges.retain(|pages| !pages.is_empty());
    ranges
}

impl Store {
    /// Writes pages to the backing device, and returns the number that left memory: the largest first, if not
    /// all may be written or have room, otherwise in the order of their numbers. Busy pages stay.
    /// Fails as [`Store::write_back_interruptible`].
    pub fn write_back(&self, what: &Writeback) -> Result<u64> {
        self.write_back_interruptible(what, &Work::uninterruptible(Unit::Pages))
    }

    /// As [`Store::write_back`], until `work` is interrupted.
    ///
    /// # Errors
    /// `Unsupported` without a backing device; `NoSpace` when it is full; `Io` when [`WritebackLimit`] or the
    /// day's budget is used up; the device's last error, after all other pages were tried; `Interrupted`,
    /// after writes in flight ended.
    pub fn write_back_interruptible(&self, what: &Writeback, work: &Work<'_>) -> Result<u64> {
        let backing = self.backing.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "there is no backing device").with_setting("backing_dev")
        })?;
        let pages = match &what.pages[..] {
            [] => std::iter::once(0..self.pages()).collect(),
            some => in_order(some, self.pages()),
        };
        let (mut written, mut failure) = (0, None);
        let mut next = Some(Cursor::FIRST);
        while let Some(from) = next {
            let (mut candidates, count);
            (candidates, count, next) = self.largest(&pages, |peek| what.candidates.has(peek), from, work)?;
            work.expect(count);
            // What can be written is written in order, so that pages that are read together are together.
            if self.may_leave(backing, &candidates) {
                candidates.sort_unstable();
            }
            let mut at = 0;
            while at < candidates.len() {
                let (mut pass, first) = (Pass::begin(self, backing), at);
                let refusal = loop {
                    self.prefetch_object(|ahead| candidates.get(at + ahead).copied());
                    let added = self.add_if(&mut pass, candidates[at], what.candidates);
                    at += 1;
                    let refusal = added.err().filter(|error| error.kind() != ErrorKind::Corrupt);
                    let refusal = refusal.or(work.step().err());
                    let has_had_turn = at - first >= LEAST_TURN && pass.writer.is_contended();
                    if refusal.is_some() || at == candidates.len() || has_had_turn {
                        break refusal;
                    }
                };
                let outcome = pass.end();
                written += outcome.written;
                if let Some(error) = refusal {
                    return Err(error);
                }
                failure = outcome.error.or(failure);
                // Let a waiting thread have its turn.
                relax();
            }
        }
        failure.map_or(Ok(written), Err)
    }

    /// Returns whether all these pages may be written back, and have room without cleaning.
    fn may_leave(&self, backing: &BackingDevice, pages: &[PageNo]) -> bool {
        let (log, allowance) = (&backing.log, &backing.allowance);
        let len_of =
            |page: &PageNo| if log.compressed { self.slots.peek(*page).len_bytes() } else { PAGE_SIZE };
        let taken_bytes = || pages.iter().map(|page| log.footprint(len_of(page))).sum::<usize>();
        // Parts of extents stay unused.
        let usable_bytes = log.table.free_beyond(0) as usize * log.table.extent_bytes / 8 * 7;
        !allowance.limit().enabled && allowance.budget_left_bytes().is_none() && taken_bytes() <= usable_bytes
    }

    /// Prefetches slots, LRU nodes and objects of the next pages. `page(n)` returns the page `n` ahead.
    #[inline]
    pub(super) fn prefetch_object(&self, page: impl Fn(usize) -> Option<PageNo>) {
        if let Some(page) = page(2 * AHEAD) {
            self.slots.prefetch(page);
        }
        if let Some(page) = page(AHEAD) {
            self.prefetch_held(page);
            self.lru.iter().for_each(|lru| lru.prefetch(page.0));
        }
    }

    fn add_if(&self, pass: &mut Pass<'_>, page: PageNo, candidates: Candidates) -> Result<()> {
        pass.make_room()?;
        for _ in 0..TRIES {
            match self.slots.try_lock(page) {
                Tried::Locked(slot) if candidates.has(slot.peek()) => return pass.add(slot, page),
                Tried::Locked(_) | Tried::Empty => break,
                Tried::Busy => relax(),
            }
        }
        Ok(())
    }

    /// Returns the writeback limit.
    pub fn writeback_limit(&self) -> WritebackLimit {
        self.backing.as_ref().map(|backing| backing.allowance.limit()).unwrap_or_default()
    }

    /// Changes the writeback limit, atomically with respect to writes. Without a backing device it has no
    /// effect.
    pub fn change_writeback_limit(&self, change: impl FnOnce(&mut WritebackLimit)) {
        match &self.backing {
            Some(backing) => {
                backing.allowance.change_limit(change);
                // What is left the allowance itself keeps.
                let limit = backing.allowance.limit();
                self.keep_setting(|kept| kept.writeback_limit = limit);
            }
            None => self.keep_setting(|kept| change(&mut kept.writeback_limit)),
        }
    }

    /// Sets how many writes may be in flight, from 1 to [`MAX_WRITEBACK_BATCH`].
    pub fn set_writeback_batch(&self, writes: u64) {
        let writes = writes.clamp(1, MAX_WRITEBACK_BATCH);
        if let Some(backing) = &self.backing {
            backing.batch.set(writes);
        }
        self.keep_setting(|kept| kept.writeback_batch = Some(writes));
    }

    /// Discards what is on a backing device that keeps extents as objects, before the store is given up for
    /// ever: pages there are lost. Waits for a thread that writes pages back, and some seconds until they are
    /// gone.
    pub fn erase_backing(&self) {
        if let Some(backing) = self.backing.as_ref().filter(|backing| backing.log.table.written_once) {
            let _turn = backing.writer.lock();
            backing.log.table.discard_all();
            backing.log.backing.end();
        }
    }

    /// Returns how the backing device is; `None` without one.
    pub fn backing_state(&self) -> Option<BackingState> {
        let backing = self.backing.as_ref()?;
        let state = BackingState::with(&backing.log.backing, &backing.log.failures);
        let is_failing = matches!(state, BackingState::Failing(_));
        Some(if !is_failing && backing.log.table.is_full() { BackingState::Full } else { state })
    }

    pub(super) fn is_backing_full(&self) -> bool {
        self.backing.as_ref().is_some_and(|backing| backing.log.table.is_full())
    }

    /// Returns the number of pages that were on the backing device and no longer are, modulo 2^64: if it is
    /// full, no more pages leave until this changes.
    pub(super) fn gone_pages(&self) -> u64 {
        let counts = self.backing.as_ref().map(|backing| &backing.log.counts);
        counts.map_or(0, |counts| counts.pages_written_back.get().wrapping_sub(counts.pages.get()))
    }

    /// Returns the statistics of the backing device; all 0 without one.
    pub fn backing_stats(&self) -> BackingStats {
        let Some(backing) = &self.backing else { return BackingStats::default() };
        BackingStats {
            extent_bytes: backing.log.table.used_bytes(),
            len_bytes: backing.log.table.len_bytes(),
            ..BackingCounts::sum([&*backing.log.counts])
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ranges_come_in_order_and_each_page_once() {
        assert_eq!(in_order(&[5..9, 0..2, 7..8, 1..3, 3..3, 8..20, 30..40], 12), [0..2, 2..3, 5..9, 9..12]);
        assert_eq!(in_order(&[], 12), []);
    }
}
