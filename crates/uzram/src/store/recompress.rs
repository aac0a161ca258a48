//! Recompression of pages, by algorithms that are slower and compress better.
//!
//! The rules are the kernel's. The largest objects come first, by buckets of 64 bytes. A page is tried with
//! the algorithms of higher priority than the one that compressed it, one after another, until its object
//! falls into a smaller size class. A page that the last algorithm does not make smaller is marked as
//! incompressible, and skipped until it is written again. Only reads and writes of the page being
//! recompressed wait for it.
//!
//! Lock order: a page's slot is locked while it is decoded, encoded and stored, as for a write of a part of
//! it.

use std::ops::{Range, RangeInclusive};
use std::slice;

use crate::base::error::Result;
use crate::base::mem::Gfp;
use crate::base::units::{PAGE_SIZE, PageNo};
use crate::base::work::{Unit, Work};
use crate::stream::Streams;

use super::slot::{Contents, Peek, SlotGuard};
use super::stream::Stream;
use super::{MAX_RECOMPRESSION, Store};

const BUCKET_BYTES: usize = 64;
const BUCKETS: usize = PAGE_SIZE / BUCKET_BYTES + 1;
/// Candidates collected at a time: 4 MiB of page numbers.
const CANDIDATES: usize = 1 << 20;

/// Which pages are selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidates {
    /// Only pages marked as idle.
    pub idle: bool,
    /// Only pages stored uncompressed.
    pub huge: bool,
    /// Only pages that no algorithm makes smaller.
    pub incompressible: bool,
}

/// The parameters of [`Store::recompress`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recompression {
    /// Which pages.
    pub candidates: Candidates,
    /// Objects smaller than this are skipped, and recompressed objects must be smaller than this; 0 for no
    /// threshold.
    pub threshold_bytes: usize,
    /// The maximum number of pages tried.
    pub max_pages: u64,
    /// The algorithms that may be tried.
    pub priorities: RangeInclusive<u8>,
}

impl Default for Recompression {
    /// All pages, with all algorithms.
    fn default() -> Self {
        Recompression {
            candidates: Candidates::default(),
            threshold_bytes: 0,
            max_pages: u64::MAX,
            priorities: 1..=MAX_RECOMPRESSION as u8,
        }
    }
}

impl Candidates {
    pub(super) fn has(self, peek: Peek) -> bool {
        peek.is_stored()
            && (!self.idle || peek.is_idle())
            && (!self.huge || peek.is_huge())
            && (!self.incompressible || peek.is_incompressible())
    }
}

impl Recompression {
    pub(super) fn may_win(&self, peek: Peek) -> bool {
        self.candidates.has(peek)
            && !peek.is_incompressible()
            && peek.priority() < *self.priorities.end()
            && peek.len_bytes() >= self.threshold_bytes.max(1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recompressed {
    /// There was no algorithm to try.
    Untried,
    /// No algorithm made an object of a smaller size class.
    NotSmaller,
    /// The length of the smaller object in bytes, and its algorithm.
    Smaller { len: usize, priority: u8 },
}

/// A position among the candidates, which are ordered by bucket, largest first, and then by page.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    bucket: usize,
    /// The first page of that bucket.
    page: u64,
}

impl Cursor {
    pub(super) const FIRST: Cursor = Cursor { bucket: BUCKETS - 1, page: 0 };

    fn is_before(self, bucket: usize, page: u64) -> bool {
        bucket < self.bucket || bucket == self.bucket && page >= self.page
    }
}

fn bucket_of(peek: Peek) -> usize {
    peek.len_bytes() / BUCKET_BYTES
}

impl Store {
    /// Recompresses pages, and returns the number that became smaller.
    /// Fails as [`Store::recompress_interruptible`].
    pub fn recompress(&self, what: &Recompression) -> Result<u64> {
        self.recompress_interruptible(what, &Work::uninterruptible(Unit::Pages))
    }

    /// As [`Store::recompress`], until `work` is interrupted.
    ///
    /// # Errors
    /// The first error of reading or storing a page, which keeps its old contents; or `Interrupted`. Pages
    /// already recompressed stay so.
    pub fn recompress_interruptible(&self, what: &Recompression, work: &Work<'_>) -> Result<u64> {
        let what = &self.within_algorithms(what);
        let (mut recompressed, mut left) = (0, what.max_pages);
        let all = 0..self.pages();
        let mut next = Some(Cursor::FIRST);
        while let Some(from) = next.filter(|_| left > 0) {
            let (candidates, count);
            (candidates, count, next) =
                self.largest(slice::from_ref(&all), |peek| what.may_win(peek), from, work)?;
            work.expect(count.min(left));
            for page in candidates {
                if left == 0 {
                    break;
                }
                let (tried, slot) = self.recompress_locked(self.slots.lock(page), page, what)?;
                left -= u64::from(tried);
                recompressed += u64::from(slot.is_none());
                drop(slot);
                work.step()?;
            }
        }
        Ok(recompressed)
    }

    /// Collects candidates among `pages`, which are sorted, from the position `from` on, largest first, whole
    /// buckets up to [`CANDIDATES`]. Returns them, the number of all candidates from `from` on, and the
    /// position to continue from.
    pub(super) fn largest(
        &self,
        pages: &[Range<u64>],
        is_wanted: impl Fn(Peek) -> bool,
        from: Cursor,
        work: &Work<'_>,
    ) -> Result<(Vec<PageNo>, u64, Option<Cursor>)> {
        let candidates = || {
            let touched = pages.iter().flat_map(|pages| self.slots.touched(pages.clone()));
            let peeks = work.while_wanted(touched).map(|page| (page, self.slots.peek(page)));
            peeks.filter(|(page, peek)| is_wanted(*peek) && from.is_before(bucket_of(*peek), page.number()))
        };
        let mut counts = [0usize; BUCKETS];
        candidates().for_each(|(_, peek)| counts[bucket_of(peek)] += 1);
        let all = counts.iter().map(|count| *count as u64).sum();
        let (mut last, mut count) = (from.bucket, counts[from.bucket]);
        while last > 0 && count + counts[last - 1] <= CANDIDATES {
            last -= 1;
            count += counts[last];
        }
        let mut found: Vec<(usize, PageNo)> = Vec::with_capacity(count.min(CANDIDATES));
        let buckets = candidates().map(|(page, peek)| (bucket_of(peek), page));
        found.extend(buckets.filter(|(bucket, _)| *bucket >= last).take(CANDIDATES));
        work.check()?;
        let next = match found.last() {
            // A single bucket has more than fit; its pages were found in order.
            Some((bucket, page)) if count > CANDIDATES => {
                Some(Cursor { bucket: *bucket, page: page.number() + 1 })
            }
            _ => last.checked_sub(1).map(|bucket| Cursor { bucket, page: 0 }),
        };
        found.sort_unstable_by_key(|(bucket, page)| (std::cmp::Reverse(*bucket), *page));
        Ok((found.into_iter().map(|(_, page)| page).collect(), all, next))
    }

    /// Recompresses a page, whose slot is locked, if it still is a candidate. Returns whether it was tried,
    /// and the slot if the page did not become smaller.
    pub(super) fn recompress_locked<'a>(
        &self,
        slot: SlotGuard<'a>,
        page: PageNo,
        what: &Recompression,
    ) -> Result<(bool, Option<SlotGuard<'a>>)> {
        if !what.may_win(slot.peek()) {
            return Ok((false, Some(slot)));
        }
        let mut contents = [0; PAGE_SIZE];
        self.read_locked(&slot, page, &mut contents)?;
        let mut lent = None;
        let tried = self.first_smaller(slot.peek(), what, |priority| {
            let codec = self.codec_of(priority)?;
            // Not two at a time.
            lent = None;
            let Stream { encoder, compressed, .. } = &mut **lent.insert(codec.streams.lend());
            Some(encoder.encode(&contents, compressed))
        });
        let object = |len: usize| lent.as_ref().map_or(&[][..], |stream| &stream.compressed[..len]);
        let slot = self.finish_recompression(slot, page, tried, object, what)?;
        Ok((tried != Recompressed::Untried, slot))
    }

    /// Tries algorithms of higher priority than that of the page `old`, until one makes an object of a
    /// smaller size class. `encode` compresses the page with the algorithm of a priority, if there is one.
    pub(super) fn first_smaller(
        &self,
        old: Peek,
        what: &Recompression,
        mut encode: impl FnMut(u8) -> Option<Option<usize>>,
    ) -> Recompressed {
        let old_class_bytes = self.pool.class_bytes(old.len_bytes());
        let is_wanted = |len: usize| {
            len < self.pool.huge_threshold()
                && self.pool.class_bytes(len) < old_class_bytes
                && (what.threshold_bytes == 0 || len < what.threshold_bytes)
        };
        let mut outcome = Recompressed::Untried;
        for priority in (*what.priorities.start()).max(old.priority() + 1)..=*what.priorities.end() {
            let Some(len) = encode(priority) else { continue };
            if let Some(len) = len.filter(|len| is_wanted(*len)) {
                return Recompressed::Smaller { len, priority };
            }
            outcome = Recompressed::NotSmaller;
        }
        outcome
    }

    /// Publishes the smaller object that a page has become, or marks the page; neither is a use of the page.
    /// `object` returns the bytes of an object of a length. Returns the slot if the page did not become
    /// smaller.
    pub(super) fn finish_recompression<'a, 'o>(
        &self,
        mut slot: SlotGuard<'a>,
        page: PageNo,
        outcome: Recompressed,
        object: impl FnOnce(usize) -> &'o [u8],
        what: &Recompression,
    ) -> Result<Option<SlotGuard<'a>>> {
        slot.set_idle(false);
        let Contents::Stored { checksum, .. } = slot.contents() else { return Ok(Some(slot)) };
        if let Recompressed::Smaller { len, priority } = outcome {
            let handle = self.pool.store(object(len), page.0, Gfp::MayWait)?;
            let new = Contents::Stored { handle, len: len as u16, checksum, priority };
            let old = self.publish(&mut slot, new);
            self.counters.local().pages_recompressed.add(1);
            drop(slot);
            self.free(old);
            return Ok(None);
        }
        let has_tried_all = *what.priorities.end() >= self.last_priority();
        if outcome == Recompressed::NotSmaller && has_tried_all && what.threshold_bytes == 0 {
            slot.set_incompressible();
        }
        Ok(Some(slot))
    }

    /// Returns `what` with its priorities limited to those that have an algorithm.
    pub(super) fn within_algorithms(&self, what: &Recompression) -> Recompression {
        let last = (*what.priorities.end()).min(self.last_priority());
        Recompression { priorities: *what.priorities.start()..=last, ..what.clone() }
    }

    /// Returns whether the store has a recompression algorithm.
    pub fn can_recompress(&self) -> bool {
        self.last_priority() > 0
    }

    /// Returns the length from which on an object is not used and its page is stored uncompressed.
    pub fn huge_threshold(&self) -> usize {
        self.pool.huge_threshold()
    }

    /// Returns the highest priority that has an algorithm; 0 if none has.
    fn last_priority(&self) -> u8 {
        let last = self.recompression.iter().rposition(Option::is_some);
        last.map_or(0, |at| at as u8 + 1)
    }
}
