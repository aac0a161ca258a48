//! Pages that leave memory for a backing device, and come back.
//!
//! - `object.rs`: what stands before an object's bytes, and what vouches for them
//! - `log.rs`: the device's space: extents, and the objects that live in them
//! - `writer.rs`: pages on their way out
//! - `clean.rs`: extents whose objects have mostly died are made free
//! - `read.rs`: pages that are read from there, and those of them that come back
//! - `allowance.rs`: how much may be written

mod allowance;
mod clean;
mod log;
mod object;
mod read;
mod writer;

use std::fmt;
use std::ops::Range;

use crate::backing::Backing;
use crate::base::counters::per_cpu_counters;
use crate::base::cpu::relax;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::named::named;
use crate::base::sync::Arc;
use crate::base::units::PageNo;
use crate::base::work::{Unit, Work};

use super::recompress::Cursor;
use super::slot::Tried;
use super::{Candidates, Store};
pub(super) use writer::{BackingDevice, Pass};

/// How pages lie on a backing device. Reads and prints as `packed` or `blocks`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WritebackLayout {
    /// Compressed objects one after another, in extents that are written at once.
    #[default]
    Packed,
    /// The kernel's: each page in a block of 4 KiB of its own.
    Blocks,
}

impl WritebackLayout {
    /// All of them.
    pub const ALL: [WritebackLayout; 2] = [WritebackLayout::Packed, WritebackLayout::Blocks];

    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            WritebackLayout::Packed => "packed",
            WritebackLayout::Blocks => "blocks",
        }
    }

    /// Writes to the device in flight at a time, unless told otherwise: of packed extents some MiB, of blocks the
    /// kernel's 32.
    pub(crate) const fn default_batch(self) -> u64 {
        match self {
            WritebackLayout::Packed => 4,
            WritebackLayout::Blocks => 32,
        }
    }
}

named!(WritebackLayout, "'{}' is no layout of a backing device: {}");

/// Where a store's cold pages go.
#[derive(Clone)]
pub struct BackingOptions {
    /// The bytes.
    pub backing: Arc<dyn Backing>,
    /// How pages lie there.
    pub layout: WritebackLayout,
    /// Whether pages are written as they are compressed. Packed ones always are.
    pub compressed: bool,
}

impl fmt::Debug for BackingOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BackingOptions { backing, layout, compressed } = self;
        write!(f, "BackingOptions({} bytes, {layout}, compressed: {compressed})", backing.len_bytes())
    }
}

/// Which pages [`Store::write_back`] takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writeback {
    /// Of what kind.
    pub candidates: Candidates,
    /// Of these, in any order; none for all.
    pub pages: Vec<Range<u64>>,
}

/// How much may be written to a backing device: the kernel's `writeback_limit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WritebackLimit {
    /// Whether it counts.
    pub enabled: bool,
    /// What is left, in units of 4 KiB.
    pub left: u64,
}

per_cpu_counters! {
    /// What a store's backing device holds and was asked for.
    pub struct BackingStats {
        /// Bytes of its extents that hold any of them: those of dead objects among them are free once they are cleaned.
        extent_bytes,
        /// How large the device is.
        len_bytes,
    };

    /// The counters, one of each for all CPUs: counting is little beside a transfer.
    pub(super) struct BackingCounts;

    /// Pages that are there and not in memory.
    pages,
    /// Bytes of the device that they take, with what is lost around them.
    held_bytes,
    /// Bytes read, for reads of pages and to clean.
    read_bytes,
    /// Reads of the device for reads of pages.
    reads,
    /// Bytes written.
    written_bytes,
    /// Of these, those of objects that had been there before.
    cleaned_bytes,
    /// Pages that left memory.
    pages_written_back,
    /// Bytes of memory that their objects took.
    object_bytes,
    /// Pages that came back to memory.
    pages_returned,
    /// Pages that were used, overwritten or discarded while they were being written, and stayed.
    pages_kept,
    /// Writes of the device that failed.
    failed_writes,
    /// Reads of the device that failed.
    failed_reads,
    /// Pages that came back damaged: their reads fail.
    corrupted,
}

/// The most writes to a backing device that may be in flight.
pub const MAX_WRITEBACK_BATCH: u64 = 128;
/// Pages that are written back before somebody else has a turn: some MiB.
const LEAST_TURN: usize = 2048;
/// So many pages ahead their memory is asked for.
const AHEAD: usize = 8;
/// How often a page is asked for that somebody is busy with.
const TRIES: usize = 100;

impl Writeback {
    /// All pages of a range.
    pub fn of(pages: Range<u64>) -> Self {
        Writeback { candidates: Candidates::default(), pages: vec_of(pages) }
    }
}

fn vec_of(pages: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(pages).collect()
}

/// Ranges of the first `end` pages, by page, each page once.
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
    /// Writes pages to the backing device, the largest first, and returns the number that left memory. Those that somebody
    /// is busy with stay.
    ///
    /// # Errors
    /// As [`Store::write_back_interruptible`].
    pub fn write_back(&self, what: &Writeback) -> Result<u64> {
        self.write_back_interruptible(what, &Work::uninterruptible(Unit::Pages))
    }

    /// The same, as long as the work is wanted.
    ///
    /// # Errors
    /// `Unsupported` without a backing device; `NoSpace` when it is full; `Io` when [`WritebackLimit`] is spent, and
    /// the last error of the device, after which it has gone on; `Interrupted`, once what was begun is written.
    pub fn write_back_interruptible(&self, what: &Writeback, work: &Work<'_>) -> Result<u64> {
        let backing = self.backing.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "there is no backing device").with_setting("backing_dev")
        })?;
        let pages = match &what.pages[..] {
            [] => vec_of(0..self.pages()),
            some => in_order(some, self.pages()),
        };
        let (mut written, mut failure) = (0, None);
        let mut next = Some(Cursor::FIRST);
        while let Some(from) = next {
            let (candidates, count);
            (candidates, count, next) = self.largest(&pages, |peek| what.candidates.has(peek), from, work)?;
            work.expect(count);
            let mut at = 0;
            while at < candidates.len() {
                let (mut pass, first) = (Pass::begin(self, backing), at);
                let refusal = loop {
                    self.prefetch_object(|ahead| candidates.get(at + ahead).copied());
                    let added = self.add_if(&mut pass, candidates[at], what.candidates);
                    at += 1;
                    let refusal = added.err().filter(|error| error.kind() != ErrorKind::Corrupt);
                    let refusal = refusal.or(work.step().err());
                    let has_had_turn = at - first >= LEAST_TURN && pass.is_awaited();
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
                // Who waits has a turn.
                relax();
            }
        }
        failure.map_or(Ok(written), Err)
    }

    /// Prefetches slots, LRU nodes and objects of pages to come, which are cold. `page` returns the one so many ahead.
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

    /// Starts to bring the object of a page, if it has one, into the cache.
    #[inline]
    pub(super) fn prefetch_held(&self, page: PageNo) {
        if let Some(handle) = self.slots.peek_handle(page) {
            self.pool.prefetch(handle);
        }
    }

    /// Adds a page to a pass if it still is one of the candidates.
    fn add_if(&self, pass: &mut Pass<'_>, page: PageNo, candidates: Candidates) -> Result<()> {
        pass.make_room()?;
        for _ in 0..TRIES {
            match self.slots.try_lock(page) {
                Tried::Locked(slot) if candidates.has(slot.peek()) => return pass.add(slot, page),
                Tried::Locked(_) | Tried::Empty => break,
                // Whoever holds it has a turn.
                Tried::Busy => relax(),
            }
        }
        Ok(())
    }

    /// What may still be written.
    pub fn writeback_limit(&self) -> WritebackLimit {
        self.backing.as_ref().map(|backing| backing.allowance.limit()).unwrap_or_default()
    }

    /// Changes what may still be written, and nothing is written meanwhile. Without a backing device there is nothing to
    /// change.
    pub fn change_writeback_limit(&self, change: impl FnOnce(&mut WritebackLimit)) {
        if let Some(backing) = &self.backing {
            backing.allowance.change_limit(change);
        }
    }

    /// Sets how many writes may be in flight at a time, from 1 to [`MAX_WRITEBACK_BATCH`].
    pub fn set_writeback_batch(&self, writes: u64) {
        if let Some(backing) = &self.backing {
            backing.batch.set(writes.clamp(1, MAX_WRITEBACK_BATCH));
        }
    }

    /// What the backing device holds and was asked for; all 0 without one.
    pub fn backing_stats(&self) -> BackingStats {
        let Some(backing) = &self.backing else { return BackingStats::default() };
        BackingStats {
            extent_bytes: backing.log.used_bytes(),
            len_bytes: backing.log.len_bytes(),
            ..BackingCounts::sum([&backing.log.counts])
        }
    }
}

impl BackingDevice {
    /// Sets how many bytes may be written a day; 0 for any.
    pub(super) fn set_budget_bytes(&self, bytes: u64) {
        self.allowance.set_budget_bytes(bytes);
    }

    /// How many of them are left, if there is a budget.
    pub(super) fn budget_left_bytes(&self) -> Option<u64> {
        self.allowance.budget_left_bytes()
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
