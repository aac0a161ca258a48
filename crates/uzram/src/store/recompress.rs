//! Pages that are compressed again, by an algorithm that makes them smaller and takes longer.
//!
//! The rules are the kernel's: those that take most come first, by buckets of 64 bytes; a page is tried with the
//! algorithms of higher priority than the one that compressed it, one after another, until an object falls into a
//! smaller size class; one that the last of them does not make smaller is marked, and left alone until it is
//! written again. Nobody waits: reads and writes of other pages go on, those of the page itself when it is done.
//!
//! Lock order: a page's slot is locked while it is decoded, encoded and stored, as for a write of a part of it.

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

/// The width of a bucket of candidates.
const BUCKET_BYTES: usize = 64;
const BUCKETS: usize = PAGE_SIZE / BUCKET_BYTES + 1;
/// Candidates that are remembered at a time: 4 MiB of page numbers.
const CANDIDATES: usize = 1 << 20;

/// Which pages are looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidates {
    /// Only those that are marked as idle.
    pub idle: bool,
    /// Only those that are stored as they are.
    pub huge: bool,
    /// Only those that no algorithm makes smaller.
    pub incompressible: bool,
}

/// What is to be done by [`Store::recompress`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recompression {
    /// Which pages.
    pub candidates: Candidates,
    /// Pages of less, in bytes, are small enough, and others are to become less; 0 for any.
    pub threshold_bytes: usize,
    /// The most pages that are tried.
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

/// A place among the candidates, which come by bucket, the largest first, and then by page.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    bucket: usize,
    /// The first page of that bucket.
    page: u64,
}

impl Cursor {
    /// Before all of them.
    pub(super) const FIRST: Cursor = Cursor { bucket: BUCKETS - 1, page: 0 };

    fn is_before(self, bucket: usize, page: u64) -> bool {
        bucket < self.bucket || bucket == self.bucket && page >= self.page
    }
}

fn bucket_of(peek: Peek) -> usize {
    peek.len_bytes() / BUCKET_BYTES
}

impl Store {
    /// Compresses pages again, and returns the number that became smaller.
    ///
    /// # Errors
    /// As [`Store::recompress_interruptible`].
    pub fn recompress(&self, what: &Recompression) -> Result<u64> {
        self.recompress_interruptible(what, &Work::uninterruptible(Unit::Pages))
    }

    /// The same, as long as the work is wanted.
    ///
    /// # Errors
    /// The first that kept it from storing or reading a page, which keeps its old contents, or `Interrupted`; what was
    /// done before stays done.
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
                let (tried, smaller) = self.recompress_page(page, what)?;
                left -= u64::from(tried);
                recompressed += u64::from(smaller);
                work.step()?;
            }
        }
        Ok(recompressed)
    }

    /// Candidates among `pages`, which are in order, from a place on, the largest first, as many buckets of them as are
    /// remembered at a time; how many there are, with those that come later; and from where it goes on.
    ///
    /// # Errors
    /// `Interrupted`.
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
            // A bucket of more: the pages were in order.
            Some((bucket, page)) if count > CANDIDATES => {
                Some(Cursor { bucket: *bucket, page: page.number() + 1 })
            }
            _ => last.checked_sub(1).map(|bucket| Cursor { bucket, page: 0 }),
        };
        found.sort_unstable_by_key(|(bucket, page)| (std::cmp::Reverse(*bucket), *page));
        Ok((found.into_iter().map(|(_, page)| page).collect(), all, next))
    }

    /// Compresses a page again if it still may win by it: whether that was tried, and whether it became smaller.
    pub(super) fn recompress_page(&self, page: PageNo, what: &Recompression) -> Result<(bool, bool)> {
        let (tried, slot) = self.recompress_locked(self.slots.lock(page), page, what)?;
        Ok((tried, slot.is_none()))
    }

    /// Compresses a page again whose slot is locked, if it still may win by it: whether that was tried, and the
    /// slot if it did not become smaller.
    pub(super) fn recompress_locked<'a>(
        &self,
        mut slot: SlotGuard<'a>,
        page: PageNo,
        what: &Recompression,
    ) -> Result<(bool, Option<SlotGuard<'a>>)> {
        let Contents::Stored { checksum, .. } = slot.contents() else { return Ok((false, Some(slot))) };
        if !what.may_win(slot.peek()) {
            return Ok((false, Some(slot)));
        }
        let mut contents = [0; PAGE_SIZE];
        self.read_locked(&slot, page, &mut contents)?;
        // It was looked at.
        slot.set_idle(false);
        let old_class_bytes = self.pool.class_bytes(slot.peek().len_bytes());
        let first = (*what.priorities.start()).max(slot.peek().priority() + 1);
        let is_wanted = |len: usize| {
            self.pool.class_bytes(len) < old_class_bytes
                && (what.threshold_bytes == 0 || len < what.threshold_bytes)
        };
        let mut tried = false;
        for priority in first..=*what.priorities.end() {
            let Some(codec) = self.codec_of(priority) else { continue };
            tried = true;
            let mut stream = codec.streams.lend();
            let Stream { encoder, compressed, .. } = &mut *stream;
            let len = encoder.encode(&contents, compressed);
            if let Some(len) = len.filter(|len| *len < self.pool.huge_threshold() && is_wanted(*len)) {
                let handle = self.pool.store(&compressed[..len], page.0, Gfp::MayWait)?;
                drop(stream);
                let new = Contents::Stored { handle, len: len as u16, checksum, priority };
                self.replace_smaller(slot, new);
                return Ok((true, None));
            }
        }
        let has_tried_all = *what.priorities.end() >= self.last_priority();
        if tried && has_tried_all && what.threshold_bytes == 0 {
            slot.set_incompressible();
        }
        Ok((tried, Some(slot)))
    }

    /// Publishes a smaller object of the same page. That is no use of it: the LRU is not told.
    fn replace_smaller(&self, mut slot: SlotGuard<'_>, new: Contents) {
        let old = self.publish(&mut slot, new);
        self.counters.local().pages_recompressed.add(1);
        drop(slot);
        self.free(old);
    }

    /// The same, but for priorities that there is no algorithm of: a page of the last one can win nothing.
    pub(super) fn within_algorithms(&self, what: &Recompression) -> Recompression {
        let last = (*what.priorities.end()).min(self.last_priority());
        Recompression { priorities: *what.priorities.start()..=last, ..what.clone() }
    }

    /// Whether there is an algorithm for it.
    pub fn can_recompress(&self) -> bool {
        self.last_priority() > 0
    }

    /// Pages whose objects would take as many bytes or more are stored as they are.
    pub fn huge_threshold(&self) -> usize {
        self.pool.huge_threshold()
    }

    /// The highest priority that there is an algorithm of.
    fn last_priority(&self) -> u8 {
        let last = self.recompression.iter().rposition(Option::is_some);
        last.map_or(0, |at| at as u8 + 1)
    }
}
